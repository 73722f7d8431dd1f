"""What mining and filtering have in common: the teacher, datasets one after another, blocks of rows, resuming.

The folder of a run gets a file for each dataset, under the same path as in the data folder. Until a dataset is
finished, `.work/` holds the teacher's embeddings and the blocks of rows.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from mote.corpora.embed import embed_missing
from mote.corpora.encoder import Encoder
from mote.corpora.job import Job
from mote.corpora.options import PairOptions, refuse_conflicts
from mote.corpora.pairs import PairTexts, write_rows
from mote.corpora.ranking import Ranker, bm25_ranker, dense_ranker, sparse_ranker
from mote.corpora.record import locked_folder, open_record, without_names
from mote.corpora.shards import RECORD, read_embeddings
from mote.corpora.texts import CorpusText, write_texts
from mote.data.rows import Location, find_datasets, load_from_hub
from mote.data.settings import DatasetSource
from mote.files import replaced, sha256_of
from mote.hub import commit_of
from mote.inference.loading import is_sparse_encoder

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

BM25 = "bm25"
BLOCK = 4096
"""Rows that are finished together, and survive a kill."""
SHARD = 8192
"""Texts that are embedded together, and survive a kill: minutes of work on a CPU."""

Details = dict[str, Any]
Process = Callable[[Location[Any], Path, Callable[[PairTexts, Path], Ranker]], tuple[Iterable[dict[str, Any]], Details]]


def run_datasets(
    datasets: Sequence[str], out: str | Path, model: str, options: PairOptions, identity: Details, process: Process
) -> dict[str, Details]:
    """Process datasets of pairs one after another, those that are not finished.

    Args:
        datasets: Paths and patterns in the data folder, or `hub:user/name`.
        out: Folder of the run.
        model: Model that ranks documents, or `bm25`.
        options: Options of the run.
        identity: The command, and what determines the results beside model and datasets.
        process: Processes a dataset, given its location, a folder for what it needs until it is finished, and a
            function that makes a ranker for texts; returns rows to write, and details for the record.

    Returns:
        Dataset → its entry in the record.
    """
    locations = locate(datasets, options)
    encoder = None if model == BM25 else _find_encoder(model, options)
    identity = {"model": BM25, **identity, "datasets": {each.name: _content_of(each) for each in locations}}
    if encoder is not None:
        identity |= {"model": encoder.identity, "tasks": [options.query_task, options.document_task]}

    def make_ranker(texts: PairTexts, work: Path) -> Ranker:
        if encoder is None:
            return bm25_ranker(texts.queries, texts.documents)
        return _ranker(texts, encoder, options, work)

    with (
        nullcontext() if encoder is None else closing(encoder),
        locked_folder(Path(out), "record.json") as file,
        open_record(file, identity, options.overwrite) as record,
    ):
        for location in locations:
            name, work = f"{location.name}/{options.split}.jsonl.gz", record.work / location.name.replace("/", "--")
            if not record.is_finished(name):
                rows, details = process(location, work, make_ranker)
                with replaced(record.folder / name) as unfinished:
                    write_rows(unfinished, rows)
                record.add(name, dataset=location.name, **details)
                shutil.rmtree(work, ignore_errors=True)
        return {entry["dataset"]: entry for entry in record.finished.values()}


def locate(datasets: Sequence[str], options: PairOptions) -> list[Location[Any]]:
    """Find datasets, each by a path or pattern in the data folder, or by `hub:user/name`; each may be named once."""
    entries = [DatasetSource(path=path, split=options.split, subset=options.subset) for path in datasets]
    locations = [location for entry in entries for location in find_datasets(entry, options.data)]
    names = [location.name for location in locations]
    refuse_conflicts({f"{name} is named twice": names.count(name) > 1 for name in names})
    return locations


def _content_of(location: Location[Any]) -> list[str]:
    """Return the hashes of a dataset's files, or its fingerprint in `datasets`."""
    return [sha256_of(file) for file in location.files] or [load_from_hub(location.settings)._fingerprint]


def map_blocks(
    work: Path, rows: int, compute: Callable[[np.ndarray], dict[str, np.ndarray]], label: str
) -> dict[str, np.ndarray]:
    """Compute arrays by name for all rows of a dataset, block by block; finished blocks survive a kill."""
    blocks = []
    with tqdm(total=rows, desc=label, unit=" rows", disable=None) as bar:
        for start in range(0, rows, BLOCK):
            file, part = work / f"block-{start:09}.npz", np.arange(start, min(start + BLOCK, rows))
            if not file.is_file():
                with replaced(file) as unfinished:
                    np.savez(unfinished, **compute(part))  # type: ignore[arg-type]  # its keyword arguments are arrays
            with np.load(file) as arrays:
                blocks.append(dict(arrays))
            bar.update(len(part))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


# The teacher ---------------------------------------------------------------------------------------------------------


def _find_encoder(model: str, options: PairOptions) -> Encoder:
    """Find a model; of a sparse encoder, refuse options that have no effect on it."""
    sparse = is_sparse_encoder(model, commit_of(model, options.revision))
    defaults, dense_only = PairOptions(), ("dimensions", "processes", "engine", "backend", "embeddings")
    unfit = [name for name in dense_only if getattr(options, name) != getattr(defaults, name)]
    message = f"{model} is a sparse encoder: it runs on one device with PyTorch, and has no {', '.join(dense_only)}"
    refuse_conflicts({message: sparse and (bool(unfit) or len(options.devices) > 1)})
    return Encoder(model, options, sparse)


def _ranker(texts: PairTexts, encoder: Encoder, options: PairOptions, work: Path) -> Ranker:
    """Make a ranker; the model is loaded if any embedding is missing, and stays loaded."""
    embed: Any = _embed_sparse if encoder.sparse else _embed
    queries = embed(texts.queries, encoder, options.query_task, work / "queries", options.embeddings)
    documents = embed(texts.documents, encoder, options.document_task, work / "documents", options.embeddings)
    if not encoder.sparse:
        return dense_ranker(queries, documents)
    hybrid = type(encoder.model[-1]).__name__ == "HybridPooling"
    return sparse_ranker(queries, documents, encoder.model[0].config.vocab_size if hybrid else queries.shape[1])


def _embed(texts: Sequence[str], encoder: Encoder, task: str, work: Path, kept: Path | None) -> np.ndarray:
    """Embed texts [N] into normalised embeddings [N, D], in memory."""
    rows = (CorpusText(str(number), text) for number, text in enumerate(texts))
    dataset, digest = write_texts(work / "texts.arrow", rows)
    job = Job(dataset, digest, work / "embeddings", task, shard_size=SHARD)
    identity = job.identity(encoder)
    if kept is not None:
        key = json.dumps(without_names(identity), sort_keys=True)
        job = replace(job, folder=kept / hashlib.sha256(key.encode()).hexdigest()[:16])
    with locked_folder(job.folder, RECORD) as file, open_record(file, identity, overwrite=False) as record:
        embed_missing(job, encoder, record)
        embeddings = np.empty((len(texts), record.content["dimension"]), np.float32)
    for number, part in enumerate(read_embeddings(job.folder)[1]):
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        embeddings[number * SHARD :][: len(part)] = part / np.maximum(lengths, 1e-12)
    return embeddings


def _embed_sparse(texts: Sequence[str], encoder: Encoder, task: str, work: Path, _: Path | None) -> "csr_matrix":
    """Embed texts, [N, V] or [N, V + H]."""
    from scipy.sparse import load_npz, save_npz, vstack

    shards = []
    with tqdm(total=len(texts), desc=work.name, unit=" texts", disable=None) as bar:
        for start in range(0, len(texts), SHARD):
            file, part = work / f"shard-{start:09}.npz", texts[start : start + SHARD]
            if not file.is_file():
                with replaced(file) as unfinished:
                    save_npz(unfinished, encoder.encode_sparse(part, task))
            shards.append(load_npz(file))
            bar.update(len(part))
    return vstack(shards, format="csr")
