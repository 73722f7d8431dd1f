"""What mining and filtering share: datasets one after another, a teacher's scores, a record, resuming.

The folder of a run gets a file for each dataset, at the same place as in the data folder, and `record.json`, which
names those that are finished. Until then `.work/` holds the teacher's embeddings and the blocks that are decided.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from mote.corpora.embed import check_devices, first_device, locally, run_job
from mote.corpora.encoding import Devices, Model, find_model
from mote.corpora.folder import (
    FORMAT,
    is_intact,
    only_writer,
    read_record,
    remove_leftovers,
    sha256,
    write_record,
    write_whole,
)
from mote.corpora.job import Job
from mote.corpora.pairs import Pairs
from mote.corpora.scorers import BM25Scorer, EmbeddingScorer, Scorer
from mote.corpora.source import find_corpus
from mote.corpora.store import read_embeddings
from mote.data.rows import Location, find_datasets, load_from_hub
from mote.data.settings import DatasetSettings

BM25 = "bm25"
BLOCK = 4096
"""Rows that are decided together, and kept through a kill."""
SHARD = 50_000
"""Texts that are embedded together, and kept through a kill."""
RECORD = "record.json"
CHART = "scores.png"
WORK = ".work"


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

    def find(self) -> Model | None:
        """Find the model, without loading it; None for BM25.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a device does not exist.
        """
        if self.model == BM25:
            return None
        check_devices(self.device, self.processes)
        trusted = {"trust_remote_code": self.trust_remote_code}
        return find_model(self.model, revision=self.revision, batch_size=self.batch_size, **trusted)

    def identity(self, model: Model | None) -> dict[str, Any]:
        """Return what decides on the scores, for the model that `find` has found."""
        if model is None:
            return {"model": BM25}
        return {"model": model.identity(), "query_task": self.query_task, "document_task": self.document_task}

    @contextmanager
    def scorers(self, model: Model | None) -> Iterator[Callable[[Pairs, Path], Scorer]]:
        """Make scorers of datasets, each of its texts and a folder where embeddings are kept, and resumed from.

        The model is loaded for the first dataset, and stays for all.

        Args:
            model: From `find`.
        """
        if model is None:
            yield lambda pairs, _: BM25Scorer(pairs.queries, pairs.documents)
            return
        tasks = {name: replace(model, task=getattr(self, f"{name}_task")) for name in ("query", "document")}
        names = check_devices(self.device, self.processes)
        with ExitStack() as closing:

            @cache
            def load() -> Devices:
                encoder = model.load(first_device(names))
                for one in tasks.values():
                    one.check(encoder)
                return closing.enter_context(Devices(encoder, names))

            def scorer(pairs: Pairs, work: Path) -> Scorer:
                queries = _embed(pairs.queries, tasks["query"], load(), work / "queries")
                return EmbeddingScorer(queries, _embed(pairs.documents, tasks["document"], load(), work / "documents"))

            yield scorer


def _embed(texts: list[str], model: Model, devices: Devices, folder: Path) -> np.ndarray:
    """Embed texts [N] into normalised embeddings [N, D], mapped from the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "texts.parquet"
    write_whole(file, lambda path: parquet.write_table(pyarrow.table({"text": texts}), path))
    job = Job(model, find_corpus([str(file)]).counted(), folder / "embeddings", "float32", SHARD)
    run_job(job, locally(devices), model.check(devices.encoder))
    whole, done = None, 0
    for part in read_embeddings(job.folder)[1]:
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
        write_record(self.folder / RECORD, self.record)

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
        return self.folder / WORK / name.replace("/", "--")


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
    record = json.loads(json.dumps({"format": FORMAT, **record}))
    with only_writer(out):
        found = read_record(out, RECORD, "datasets", f"a run of `mote {record['what']}`")
        remove_leftovers(out)
        different = [key for key in record if found is not None and found.get(key) != record[key]]
        if different and not overwrite:
            raise ValueError(
                f"{out} holds another run, which differs in {', '.join(different)}: choose another folder, or replace "
                "it with --overwrite"
            )
        if found is None or overwrite:
            for entry in (found or {}).get("datasets", {}).values():
                (out / entry["file"]).unlink(missing_ok=True)
            (out / CHART).unlink(missing_ok=True)
            shutil.rmtree(out / WORK, ignore_errors=True)
            found = {**record, "datasets": {}}
        run = Run(out, found)
        run.save()
        try:
            yield run
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what is finished is kept in {out}, and the same command resumes") from None
        else:
            shutil.rmtree(out / WORK, ignore_errors=True)
        finally:
            if not run.record["datasets"] and not (out / WORK).exists():  # nothing was begun
                (out / RECORD).unlink()


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


def inputs_of(locations: Sequence[Location[Any]]) -> dict[str, list[str]]:
    """Describe datasets for the record: by hashes of their files, or the fingerprint that `datasets` knows them by."""
    return {
        each.name: [sha256(file) for file in each.files] or [load_from_hub(each.settings)._fingerprint]
        for each in locations
    }
