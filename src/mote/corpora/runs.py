"""What mining and filtering have in common: the teacher, datasets one after another, blocks of rows, resuming.

The folder of a run gets a file for each dataset, under the same path as in the data folder. Until a dataset is
finished, `.work/` holds the teacher's embeddings and the blocks of rows.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mote.corpora.embed import CorpusText, write_texts
from mote.corpora.encoder import Encoder
from mote.corpora.engines import Job, read_shard, run
from mote.corpora.options import PairOptions
from mote.corpora.pairs import PairTexts, dense_ranker, sparse_ranker, write_rows
from mote.corpora.record import open_record
from mote.data.ranking import Ranker, bm25_ranker
from mote.data.rows import Location, find_datasets, load_from_hub
from mote.data.settings import DatasetSource
from mote.files import replaced, sha256_of
from mote.hub import commit_of
from mote.inference.loading import is_sparse_encoder
from mote.reporting import table

BM25 = "bm25"
BLOCK = 4096
"""Rows that are finished together, and survive a kill."""

Details = dict[str, Any]
Process = Callable[[Location[Any], Path, Callable[[PairTexts, Path], Ranker]], tuple[Iterable[dict[str, Any]], Details]]

logger = logging.getLogger(__name__)


def run_datasets(
    datasets: Sequence[str], out: str | Path, model: str, options: PairOptions, identity: Details, process: Process
) -> Path:
    """Process datasets of pairs, and pairs of `hub:user/name`, one after another, those that are not finished.

    Beside model (or `bm25`) and datasets, the identity determines the results. `process` is given a dataset, a folder
    for what it needs until it is finished, and a function that makes a ranker for texts; it returns rows to write, and
    details for the record.
    """
    entries = [DatasetSource(path=path, split=options.split, subset=options.subset) for path in datasets]
    found = [location for entry in entries for location in find_datasets(entry, options.data)]
    locations = list({location.name: location for location in found}.values())
    content = {
        each.name: [sha256_of(file) for file in each.files] or [load_from_hub(each.settings)._fingerprint]
        for each in locations
    }
    identity = {"model": BM25, **identity, "datasets": content}
    encoder = None
    if model != BM25:
        encoder = Encoder(model, options, is_sparse_encoder(model, commit_of(model, options.revision)))
        identity |= {"model": encoder.identity, "tasks": [options.query_task, options.document_task]}

    def make_ranker(texts: PairTexts, work: Path) -> Ranker:
        if encoder is None:
            return bm25_ranker(texts.queries, texts.documents)
        return _ranker(texts, encoder, options, work)

    with nullcontext() if encoder is None else closing(encoder), open_record(Path(out), "record.json") as record:
        record.start(identity, options.overwrite)
        record.update(source=model)
        for location in locations:
            name, work = f"{location.name}/{options.split}.jsonl.gz", record.work / location.name.replace("/", "--")
            if not record.is_finished(name):
                rows, details = process(location, work, make_ranker)
                with replaced(record.folder / name) as unfinished:
                    write_rows(unfinished, rows)
                record.add(name, dataset=location.name, **details)
                shutil.rmtree(work, ignore_errors=True)
    logger.info("\n%s", _report([*record.finished.values()]))
    return record.folder


def _report(entries: Sequence[Details]) -> str:
    """Lay out the numbers of each dataset, one line each."""
    columns = [key for key in entries[0] if key not in ("sha256", "dataset", "test_sets")]
    rows = [[each["dataset"], *("" if each[key] is None else f"{each[key]:,}" for key in columns)] for each in entries]
    return table(["dataset", *(key.replace("_", " ") for key in columns)], rows)


def map_blocks(
    work: Path, rows: int, compute: Callable[[np.ndarray], dict[str, np.ndarray]], label: str, size: int | None = None
) -> dict[str, np.ndarray]:
    """Compute arrays by name for all rows of a dataset, block by block; finished blocks survive a kill."""
    blocks, size = [], size or BLOCK
    with tqdm(total=rows, desc=label, unit=" rows", disable=None) as bar:
        for start in range(0, rows, size):
            file, part = work / f"block-{start:09}.npz", np.arange(start, min(start + size, rows))
            if not file.is_file():
                with replaced(file) as unfinished:
                    np.savez(unfinished, **compute(part))  # type: ignore[arg-type]  # its keyword arguments are arrays
            with np.load(file) as arrays:
                blocks.append(dict(arrays))
            bar.update(len(part))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _ranker(texts: PairTexts, encoder: Encoder, options: PairOptions, work: Path) -> Ranker:
    """Make a ranker; the model is loaded if any embedding is missing, and stays loaded."""
    folder = options.embeddings or work
    queries = _embed(texts.queries, encoder, options.query_task, work, folder)
    documents = _embed(texts.documents, encoder, options.document_task, work, folder)
    if not encoder.sparse:
        return dense_ranker(queries, documents)
    hybrid = type(encoder.model[-1]).__name__ == "HybridPooling"
    return sparse_ranker(queries, documents, encoder.model[0].config.vocab_size if hybrid else queries.shape[1])


def _embed(texts: Sequence[str], encoder: Encoder, task: str, work: Path, folder: Path) -> Any:
    """Embed texts, [N, D], normalised if the vectors are dense; shards in the folder are used again."""
    rows = (CorpusText(str(number), text) for number, text in enumerate(texts))
    dataset, digest = write_texts(work / "texts.arrow", rows)
    key = json.dumps([encoder.identity, task, digest], sort_keys=True)
    job = Job(dataset, folder / hashlib.sha256(key.encode()).hexdigest()[:16], task, sparse=encoder.sparse)
    missing = [number for number in range(len(job)) if not job.file(number).is_file()]
    for _ in run(job, missing, encoder):
        pass
    shards = (read_shard(job.file(number)) for number in range(len(job)))
    if encoder.sparse:
        from scipy.sparse import vstack

        return vstack(list(shards), format="csr")
    embeddings = np.empty((0, 0))
    for number, part in enumerate(shards):
        if number == 0:
            embeddings = np.empty((len(texts), part.shape[1]), np.float32)
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        embeddings[number * job.shard_size :][: len(part)] = part / np.maximum(lengths, 1e-12)
    return embeddings
