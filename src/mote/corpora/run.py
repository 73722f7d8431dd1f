"""What mining and filtering share: datasets one after another, a teacher's scores, a record, resuming.

The folder of a run gets a file for each dataset, at the same place as in the data folder, and `record.json`, which
names those that are finished. Until then `.work/` holds the teacher's embeddings and the blocks that are decided.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from mote.checkpoints.staging import try_lock
from mote.corpora.embed import embed_corpus
from mote.corpora.pairs import Pairs
from mote.corpora.scorers import BM25Scorer, EmbeddingScorer, Scorer
from mote.corpora.store import is_intact, read_embeddings, sha256, write_whole
from mote.data.rows import Location, find_datasets
from mote.data.settings import DatasetSettings

BM25 = "bm25"
BLOCK = 4096
"""Rows that are decided together, and kept through a kill."""
RECORD = "record.json"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What scores documents for queries.

    Attributes:
        model: Any Sentence-Transformers model, a folder or an id on the Hub; or `"bm25"`.
        query_task: Task of the queries: the name of a prompt of the model, or a task of a MoTE.
        document_task: Task of the documents.
        batch_size: Batch size of embedding.
        device: Device, or several.
        processes: Number of processes on the CPU.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Run the code in the model's repository.
    """

    model: str
    query_task: str = "query"
    document_task: str = "document"
    batch_size: int = 32
    device: str | Sequence[str] | None = None
    processes: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def identity(self) -> dict[str, Any]:
        """Return what decides on the scores."""
        return {name: getattr(self, name) for name in ("model", "query_task", "document_task", "revision")}

    def scorer(self, pairs: Pairs, work: Path) -> Scorer:
        """Score the texts of a dataset; embeddings are kept in `work`, and resumed from there."""
        if self.model == BM25:
            return BM25Scorer(pairs.queries, pairs.documents)
        return EmbeddingScorer(
            self._embed(pairs.queries, self.query_task, work / "queries"),
            self._embed(pairs.documents, self.document_task, work / "documents"),
        )

    def _embed(self, texts: list[str], task: str, folder: Path) -> np.ndarray:
        """Embed texts [N] into normalised embeddings [N, D], mapped from the disk."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "texts.parquet"
        table = pyarrow.table({"text": texts})
        write_whole(file, lambda path: parquet.write_table(table, path))
        embedded = embed_corpus(
            self.model,
            file,
            folder / "embeddings",
            task=task,
            text_columns=["text"],
            batch_size=self.batch_size,
            device=self.device,
            processes=self.processes,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )
        whole, done = None, 0
        for part in read_embeddings(embedded)[1]:
            if whole is None:
                shape = (len(texts), part.shape[1])
                whole = np.lib.format.open_memmap(folder / "normalized.npy", "w+", np.float32, shape)
            lengths = np.linalg.norm(part, axis=1, keepdims=True)
            whole[done : done + len(part)] = part / np.maximum(lengths, 1e-12)
            done += len(part)
        assert whole is not None, "a dataset has rows"
        return whole


class Run:
    """The folder of a run, while this process is its writer.

    Attributes:
        folder: The folder.
        record: Content of `record.json`.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self.record = record

    def save(self) -> None:
        """Write the record."""
        text = json.dumps(self.record, indent=1, ensure_ascii=False) + "\n"
        write_whole(self.folder / RECORD, lambda path: path.write_text(text, encoding="utf-8"))

    def is_finished(self, name: str) -> bool:
        """Whether a dataset is finished, and its file as it was written."""
        entry = self.record["datasets"].get(name)
        return entry is not None and is_intact(self.folder / entry["file"], entry)

    def finish(self, name: str, file: str, write: Callable[[Path], object], **details: Any) -> None:
        """Put the file of a dataset into its place, and enter it in the record."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
        self.record["datasets"][name] = {"file": file, "sha256": sha256(path), **details}
        self.save()
        shutil.rmtree(self.work(name), ignore_errors=True)

    def work(self, name: str) -> Path:
        """Return the folder for what a dataset needs until it is finished."""
        return self.folder / ".work" / name.replace("/", "--")


@contextmanager
def open_run(out: Path, record: dict[str, Any], overwrite: bool) -> Iterator[Run]:
    """Begin or resume a run, as its only writer.

    Args:
        out: Its folder.
        record: What was asked for; a run is resumed by the same only.
        overwrite: Replace another run.

    Raises:
        OSError: If another process is writing there.
        ValueError: If the folder holds something else, or another run.
    """
    file = out / RECORD
    if out.exists() and not file.is_file() and any(path.name not in (".work", "lock") for path in out.iterdir()):
        raise ValueError(f"{out} holds something other than a run of `mote {record['what']}`: choose another folder")
    work = out / ".work"
    work.mkdir(parents=True, exist_ok=True)
    lock = try_lock(work, ours=True)
    if lock is None:
        raise OSError(f"{out} is being written by another process: wait for it, or choose another folder")
    try:
        record = json.loads(json.dumps({"format": 1, **record}))
        found = _read(file)
        if found is not None and not overwrite:
            different = [key for key in record if found.get(key) != record[key]]
            if different:
                raise ValueError(
                    f"{out} holds another run, which differs in {', '.join(different)}: choose another folder, or "
                    "replace it with --overwrite"
                )
            run = Run(out, found)
        else:
            for entry in (found or {}).get("datasets", {}).values():
                (out / entry["file"]).unlink(missing_ok=True)
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            run = Run(out, {**record, "datasets": {}})
        run.save()
        try:
            yield run
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what is finished is kept in {out}, and the same command resumes") from None
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["datasets"], dict):
            raise TypeError("datasets")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: choose another folder, or remove it") from error
    return dict(record)


def decide(
    work: Path, rows: int, decide_block: Callable[[np.ndarray], dict[str, np.ndarray]], label: str
) -> dict[str, np.ndarray]:
    """Decide on all rows of a dataset, block by block; blocks are kept through a kill.

    Args:
        work: Folder for the blocks.
        rows: Number of rows.
        decide_block: Places of rows [R] → arrays [R, …] by name.
        label: What the progress bar says.

    Returns:
        The arrays of all rows.
    """
    work.mkdir(parents=True, exist_ok=True)
    blocks = []
    with tqdm(total=rows, desc=label, unit="row", disable=None) as bar:
        for start in range(0, rows, BLOCK):
            file, places = work / f"block-{start:09}.npz", np.arange(start, min(start + BLOCK, rows))
            if not file.is_file():
                block = decide_block(places)
                write_whole(file, lambda path, block=block: _write_arrays(path, block))  # type: ignore[misc]
            with np.load(file) as arrays:
                blocks.append(dict(arrays))
            bar.update(len(places))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its keyword arguments are arrays


def locate(datasets: Sequence[str], folder: str | Path, split: str, subset: str | None) -> list[Location[Any]]:
    """Find datasets, each by a path or pattern in a data folder, or by `hub:user/name`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If one is named twice.
    """
    settings = [DatasetSettings(path=path, split=split, subset=subset) for path in datasets]
    found = [location for one in settings for location in find_datasets(one, Path(folder))]
    names = [location.name for location in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Datasets named twice: {', '.join(repeated)}")
    return found


def inputs_of(locations: Sequence[Location[Any]]) -> dict[str, Any]:
    """Describe datasets for the record: their files by hashes."""
    return {each.name: [sha256(file) for file in each.files] or each.settings.model_dump() for each in locations}
