"""What mining and filtering share: datasets one after another, a teacher's scores, a record, resuming.

The folder of a run gets a file for each dataset, under the same path as in the data folder, and `record.json`, which
names the finished ones. Until then, `.work/` holds the teacher's embeddings and the blocks of decided rows.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from mote.corpora.embed import run_job
from mote.corpora.embedder import Embedder
from mote.corpora.encoding import Model, find_model
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
from mote.corpora.sparse import SparseTeacher
from mote.corpora.store import key_of, read_embeddings, without_names
from mote.data.rows import Location, find_datasets, load_from_hub
from mote.data.settings import DatasetSource
from mote.inference.loading import is_sparse_encoder
from mote.reporting import HOW_TO_RESUME

BM25 = "bm25"
BLOCK = 4096
"""Rows per block: rows that are decided together, and survive a kill."""
SHARD = 8192
"""Texts that are embedded together, and survive a kill: minutes of work on a CPU."""
RECORD = "record.json"
CHART = "scores.png"
WORK = ".work"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The model that scores documents for queries.

    Attributes:
        model: Any Sentence-Transformers model, a folder or an id on the Hub; or `"bm25"`. Scores of sparse and hybrid
            models are dot products, scores of others cosines.
        query_task: Task of the queries: the name of a prompt of the model, or a task of a MoTE.
        document_task: Task of the documents.
        max_length: Maximum length of a text in tokens. Default: the model's.
        model_dtype: Dtype of the weights, and so of the computation. Default: the stored one.
        batch_size: Batch size for embedding.
        dimensions: Number of dimensions of the embeddings to keep. Default: all.
        device: Device, or several.
        processes: Number of processes on the CPU; with Ray, the number of workers.
        engine: `"local"`, or `"ray"` for a cluster through Ray Data.
        address: Address of a Ray cluster. Default: start a local one.
        backend: `"torch"`; for a folder written by `mote export` also `"onnx"` or `"openvino"`.
        embeddings: Folder to keep the embeddings in, for other runs with the same texts. Default: none.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Whether to run the code in the model's repository.
    """

    model: str
    query_task: str = "query"
    document_task: str = "document"
    batch_size: int = 32
    max_length: int | None = None
    model_dtype: str | None = None
    dimensions: int | None = None
    device: str | Sequence[str] | None = None
    processes: int | None = None
    engine: str = "local"
    address: str | None = None
    backend: str = "torch"
    embeddings: str | Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def find(self) -> "FoundTeacher":
        """Find the model, without loading it.

        Raises:
            FileNotFoundError: If there is none.
            OSError: If a package is not installed.
            ValueError: If a setting is invalid.
        """
        given = [each.name for each in fields(self)[1:] if getattr(self, each.name) != each.default]
        if self.model == BM25:
            if given:
                raise ValueError(f"{given[0]} is a setting of embedding, which BM25 does not do: leave it out")
            return FoundTeacher(self)
        model = find_model(
            self.model,
            revision=self.revision,
            batch_size=self.batch_size,
            max_length=self.max_length,
            model_dtype=self.model_dtype,
            dimensions=self.dimensions,
            backend=self.backend,
            trust_remote_code=self.trust_remote_code,
        )
        models = replace(model, task=self.query_task), replace(model, task=self.document_task)
        if is_sparse_encoder(self.model, model.revision):
            of_dense = {"dimensions", "processes", "engine", "address", "backend", "embeddings"}.intersection(given)
            if of_dense:
                raise ValueError(
                    f"{min(of_dense)} is a setting of dense embeddings, and {self.model} is a sparse encoder"
                )
            devices = [self.device] if self.device is None or isinstance(self.device, str) else list(self.device)
            if len(devices) != 1:
                raise ValueError(f"{self.model} is a sparse encoder, which scores on one device, got {len(devices)}")
            return FoundTeacher(self, models, sparse=SparseTeacher(*models, device=devices[0]))
        where = {name: getattr(self, name) for name in ("device", "processes", "engine", "address")}
        return FoundTeacher(self, models, Embedder(*models, **where))


class FoundTeacher:
    """A teacher that makes scorers for datasets; a context manager.

    Args:
        teacher: Settings of the teacher.
        models: The model, as it embeds queries, and as it embeds documents. None for BM25.
        embedder: Embeds the texts, if the vectors are dense.
        sparse: Embeds and scores, if the vectors are sparse or hybrid.
    """

    def __init__(
        self,
        teacher: Teacher,
        models: tuple[Model, Model] | None = None,
        embedder: Embedder | None = None,
        sparse: SparseTeacher | None = None,
    ) -> None:
        self.teacher, self.models, self.embedder, self.sparse = teacher, models, embedder, sparse

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the scores."""
        if self.models is None:
            return {"model": BM25}
        settings = {name: getattr(self.teacher, name) for name in ("query_task", "document_task", "dimensions")}
        return {"model": self.models[0].identity(), **settings}

    def scorer(self, pairs: Pairs, work: Path) -> Scorer:
        """Make the scorer of a dataset; the model is loaded if any embedding is missing, and stays loaded.

        Args:
            pairs: Texts of the dataset.
            work: Folder for embeddings, which a run resumes from.
        """
        if self.sparse is not None:
            return self.sparse.scorer(pairs, work)
        if self.models is None or self.embedder is None:
            return BM25Scorer(pairs.queries, pairs.documents)
        of_queries, of_documents = self.models
        queries = self._embed(pairs.queries, of_queries, self.embedder, work / "queries")
        return EmbeddingScorer(queries, self._embed(pairs.documents, of_documents, self.embedder, work / "documents"))

    def _embed(self, texts: list[str], model: Model, embedder: Embedder, work: Path) -> np.ndarray:
        """Embed texts [N] into normalised embeddings [N, D], memory-mapped."""
        work.mkdir(parents=True, exist_ok=True)
        file = work / "texts.parquet"
        write_whole(file, lambda path: parquet.write_table(pyarrow.table({"text": texts}), path))
        job = Job(model, find_corpus([str(file)]).counted(), work / "embeddings", "float32", SHARD)
        if self.teacher.embeddings is not None:
            job = replace(job, folder=Path(self.teacher.embeddings) / key_of(job.manifest()))
        run_job(job, embedder)
        parts = read_embeddings(job.folder)[1]
        whole = work / "normalized.npy"
        write_whole(whole, lambda path: _write_normalized(path, len(texts), parts))
        return np.load(whole, mmap_mode="r")

    def __enter__(self) -> "FoundTeacher":
        """Return itself."""
        return self

    def __exit__(self, *details: Any) -> None:
        """End the processes."""
        if self.embedder is not None:
            self.embedder.__exit__(*details)


class Run:
    """The folder of a run, while this process is its writer.

    Attributes:
        folder: The folder.
        record: Content of `record.json`. Until the first dataset is finished, `replaces` holds the record of the run
            that this one replaces.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self.record = record

    def save(self) -> None:
        """Write the record."""
        write_record(self.folder / RECORD, self.record)

    def is_finished(self, name: str) -> bool:
        """Whether a dataset is finished, and its file unchanged."""
        entry = self.record["datasets"].get(name)
        return entry is not None and is_intact(self.folder / entry["file"], entry)

    def finish(self, name: str, file: str, write: Callable[[Path], object], **details: Any) -> None:
        """Write the file of a dataset, and add it to the record."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write)
        self.record["datasets"][name] = {"file": file, "sha256": sha256(path), **details}
        self._remove_replaced()
        self.save()
        shutil.rmtree(self.work(name), ignore_errors=True)

    def _remove_replaced(self) -> None:
        """Remove the files of the run that this one replaces, and the folders that are empty then."""
        replaced = self.record.pop("replaces", None)
        if replaced is None:
            return
        (self.folder / CHART).unlink(missing_ok=True)
        ours = {entry["file"] for entry in self.record["datasets"].values()}
        for file in [entry["file"] for entry in replaced["datasets"].values() if entry["file"] not in ours]:
            (self.folder / file).unlink(missing_ok=True)
            for parent in [self.folder / parent for parent in Path(file).parents][:-1]:
                with suppress(OSError):  # not empty
                    parent.rmdir()

    def restore_replaced(self) -> None:
        """Bring back the record of the run that this one was to replace; without one, remove this one's."""
        if "replaces" in self.record:
            self.record = self.record["replaces"]
            self.save()
        else:
            (self.folder / RECORD).unlink()

    def work(self, name: str) -> Path:
        """Return the folder for what a dataset needs until it is finished."""
        return self.folder / WORK / name.replace("/", "--")


@contextmanager
def open_run(out: Path, record: dict[str, Any], overwrite: bool) -> Iterator[Run]:
    """Start or resume a run, as its only writer.

    Args:
        out: Folder of the run.
        record: Settings of the run; a run can only be resumed with the same ones.
        overwrite: Replace another run. Its files stay until the first dataset is finished.

    Raises:
        OSError: If another process is writing there.
        ValueError: If the folder holds something else, or another run.
    """
    record = json.loads(json.dumps({"format": FORMAT, **record}))
    with only_writer(out):
        found = read_record(out, RECORD, "datasets", f"a run of `mote {record['what']}`")
        remove_leftovers(out)
        ours, theirs = ({**one, "teacher": without_names(one.get("teacher"))} for one in (record, found or record))
        different = [key for key in record if ours[key] != theirs.get(key)]
        if different and not overwrite:
            raise ValueError(
                f"{out} holds another run, which differs in {', '.join(different)}: choose another folder, or replace "
                "it with --overwrite"
            )
        if found is None or overwrite:
            shutil.rmtree(out / WORK, ignore_errors=True)
            replaced = found if found and found["datasets"] else (found or {}).get("replaces")
            found = {**record, "datasets": {}, **({"replaces": replaced} if replaced else {})}
        run = Run(out, found)
        run.save()
        try:
            yield run
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what is finished is kept in {out}, and {HOW_TO_RESUME}") from None
        else:
            shutil.rmtree(out / WORK, ignore_errors=True)
        finally:
            begun = any(any((out / WORK).rglob(name)) for name in ("shard-*", "block-*"))
            if not run.record["datasets"] and not begun:
                shutil.rmtree(out / WORK, ignore_errors=True)
                run.restore_replaced()


def decide(
    work: Path, rows: int, decide_block: Callable[[np.ndarray], dict[str, np.ndarray]], label: str
) -> dict[str, np.ndarray]:
    """Decide on all rows of a dataset, block by block; finished blocks survive a kill.

    Args:
        work: Folder for the blocks.
        rows: Number of rows.
        decide_block: Indices of rows [R] → arrays [R, …] by name.
        label: Label of the progress bar.

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


def _write_normalized(path: Path, rows: int, parts: Iterable[np.ndarray]) -> None:
    """Write embeddings [R, D], normalised, one part below the other.

    The file is not memory-mapped: there, a full disk ends the process without a message.
    """
    with path.open("wb") as file:
        for number, part in enumerate(parts):
            if number == 0:
                header = {"descr": "<f4", "fortran_order": False, "shape": (rows, part.shape[1])}
                np.lib.format.write_array_header_1_0(file, header)
            lengths = np.linalg.norm(part, axis=1, keepdims=True)
            file.write(np.asarray(part / np.maximum(lengths, 1e-12), dtype="<f4").tobytes())


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its keyword arguments are arrays


def locate(datasets: Sequence[str], folder: str | Path, split: str, subset: str | None) -> list[Location[Any]]:
    """Find datasets, each by a path or pattern in a data folder, or by `hub:user/name`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If one is named twice.
    """
    settings = [DatasetSource(path=path, split=split, subset=subset) for path in datasets]
    found = [location for one in settings for location in find_datasets(one, Path(folder))]
    names = [location.name for location in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Datasets named twice: {', '.join(repeated)}")
    return found


def inputs_of(locations: Sequence[Location[Any]]) -> dict[str, list[str]]:
    """Describe datasets for the record: by hashes of their files, or their fingerprint in `datasets`."""
    return {
        each.name: [sha256(file) for file in each.files] or [load_from_hub(each.settings)._fingerprint]
        for each in locations
    }
