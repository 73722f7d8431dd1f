"""`mote embed`: a corpus to embeddings, shard by shard."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from huggingface_hub.utils import tqdm

from mote.corpora.embedder import Embedder
from mote.corpora.encoding import find_model
from mote.corpora.index import check_index, write_index
from mote.corpora.job import Job
from mote.corpora.source import find_corpus
from mote.corpora.store import DTYPES, Store, open_store, read_manifest
from mote.files import require_space
from mote.remote.configuration_mote import alternatives
from mote.reporting import HOW_TO_RESUME

logger = logging.getLogger(__name__)


def embed_corpus(
    model: str | Path,
    files: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    task: str | None = None,
    prompt: str | None = None,
    task_column: str | None = None,
    text_columns: Sequence[str] = (),
    id_column: str | None = None,
    split: str = "train",
    subset: str | None = None,
    dtype: str = "float32",
    dimensions: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    model_dtype: str | None = None,
    shard_size: int = 50_000,
    index: str | None = None,
    device: str | Sequence[str] | None = None,
    processes: int | None = None,
    engine: str = "local",
    address: str | None = None,
    backend: str = "torch",
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Path:
    """Embed the texts of a corpus.

    The same call resumes an interrupted run. Memory is bounded by two shards, whatever the size of the corpus.

    Args:
        model: Any Sentence-Transformers model: a folder, or an id on the Hub.
        files: `.jsonl`, `.jsonl.gz`, `.json.gz` and `.parquet` files, patterns, folders with files for the split, and
            `hub:user/name`.
        out: Folder for `shard-00000.parquet`, … (columns `id` and `embedding`, in the order of the corpus),
            `manifest.json` and `index.faiss`.
        task: Task of all texts: the name of a prompt, or a task of a MoTE. Default: the model's default.
        prompt: Text to put in front of every text, in place of a task.
        task_column: Column that holds the task of each row, in place of one task for all.
        text_columns: Columns whose texts are joined by a space. Default: the one with a usual name, with `title` in
            front of `text`.
        id_column: Column of ids, strings or integers. Default: `_id` or `id`, else the number of the row, from 0.
        split: Split of folders and datasets on the Hub.
        subset: Configuration of a dataset on the Hub.
        dtype: `"float32"`, `"float16"`, or `"int8"`, scaled by the ranges of the first shard's embeddings.
        dimensions: Number of dimensions to keep. Default: all.
        batch_size: Batch size.
        max_length: Maximum length of a text in tokens. Default: the model's.
        model_dtype: Dtype of the weights, and so of the computation. Default: the stored one.
        shard_size: Texts per shard.
        index: FAISS index of this factory string, such as `"Flat"`, `"HNSW32"` or `"IVF1024,Flat"`; inner product of
            normalised embeddings. Row i is the i-th text.
        device: Device, or several, each with a process of its own. Default: the best available.
        processes: Number of processes on the CPU; with Ray, the number of workers.
        engine: `"local"`, or `"ray"` for a cluster through Ray Data.
        address: Address of a Ray cluster. Default: start a local one.
        backend: `"torch"`; for a folder written by `mote export` also `"onnx"` or `"openvino"`.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Whether to run the code in the model's repository.
        overwrite: Replace other embeddings in the folder.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the model or a file does not exist.
        OSError: If a package is not installed, another process writes to the folder, or its disk is full.
        ValueError: If a setting, a row or an embedding is invalid, or the folder holds something else.
    """
    numbers = {
        "batch_size": batch_size,
        "shard_size": shard_size,
        "dimensions": dimensions,
        "processes": processes,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {dtype!r}." + alternatives(dtype, DTYPES))
    if sum(value is not None for value in (task, prompt, task_column)) > 1:
        raise ValueError("task, prompt and task_column exclude each other: give only one of them")
    folder = Path(out)
    read_manifest(folder)  # refuses anything else
    corpus = find_corpus(
        [str(file) for file in ([files] if isinstance(files, str | Path) else files)],
        split=split,
        subset=subset,
        text_columns=text_columns,
        id_column=id_column,
        task_column=task_column,
    )
    found = find_model(
        str(model),
        revision=revision,
        backend=backend,
        trust_remote_code=trust_remote_code,
        batch_size=batch_size,
        max_length=max_length,
        model_dtype=model_dtype,
        dimensions=dimensions,
        prompt=prompt,
        task=task,
    )
    where = {"device": device, "processes": processes, "engine": engine, "address": address}
    with Embedder(found, **where) as embedder:  # type: ignore[arg-type]
        dimension = found.check(embedder.encoder)
        if index is not None:
            check_index(index, dimension)
        logger.info("Counting texts …")
        run_job(Job(found, corpus.counted(), folder, dtype, shard_size), embedder, index, overwrite)
    return folder


def run_job(job: Job, embedder: Embedder, index: str | None = None, overwrite: bool = False) -> None:
    """Embed and index what a job still lacks.

    Args:
        job: The job.
        embedder: Embeds its shards; not used if none is missing.
        index: As in `embed_corpus`.
        overwrite: As in `embed_corpus`.

    Raises:
        OSError: As in `embed_corpus`.
        ValueError: As in `embed_corpus`.
    """
    with open_store(job.folder, job.manifest(), overwrite) as store:
        try:
            _embed(replace(job, ranges=store.manifest["ranges"]), store, embedder)
            if index is not None:
                write_index(store, index)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"finished shards are kept in {job.folder}, and {HOW_TO_RESUME}") from None


def _embed(job: Job, store: Store, embedder: Embedder) -> None:
    """Embed the shards that are not finished."""
    shards, rows = store.unfinished(), len(job.corpus)
    if job.dtype == "int8" and job.shard_size < min(rows, 1000):
        logger.warning(
            "The int8 ranges come from %d texts, the first shard: a larger shard would clip less", job.shard_size
        )
    if not shards:
        if not store.manifest["complete"]:  # interrupted after the last shard
            store.record(complete=True)
        logger.info("All %s texts are embedded in %s", f"{rows:,}", store.folder)
        return
    left = sum(len(range(*job.rows_of(number))) for number in shards)
    dimension = job.model.check(embedder.encoder) or 0
    require_space(store.folder, left * dimension * DTYPES[job.dtype].bit_width // 8)
    libraries = ("mote-embeddings", "torch", "transformers", "sentence-transformers")
    store.record(complete=False, versions={name: version(name) for name in libraries})
    begun, done = time.perf_counter(), rows - left
    if done:
        logger.info("%s of %s texts are already embedded", f"{done:,}", f"{rows:,}")
    with (
        tqdm(total=rows, initial=done, unit=" texts", desc="Embedding", disable=None) as bar,
        closing(embedder.embed(job, shards, bar.update)) as results,  # type: ignore[type-var]
    ):
        for finished in results:
            store.record_shard(finished.number, finished.entry, dimension=finished.dimension, ranges=finished.ranges)
            done += finished.entry["rows"]
            bar.update(max(0, done - bar.n))
            if bar.disable:
                rate = (done - rows + left) / (time.perf_counter() - begun)
                logger.info(
                    "%s of %s texts, %.0f per second, %s left",
                    f"{done:,}",
                    f"{rows:,}",
                    rate,
                    tqdm.format_interval((rows - done) / rate),
                )
    seconds = time.perf_counter() - begun
    store.record(complete=True)
    logger.info("Embedded %s texts in %.1f s (%.0f per second): %s", f"{left:,}", seconds, left / seconds, store.folder)
