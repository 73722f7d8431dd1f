"""`mote embed`: a corpus to embeddings, shard by shard, on any engine."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm

from mote.corpora.cluster import embed_on_ray
from mote.corpora.encoder import Encoder
from mote.corpora.index import build_index, new_index
from mote.corpora.job import Job, embed_shards
from mote.corpora.options import EmbedOptions
from mote.corpora.record import Record, locked_folder, open_record
from mote.corpora.shards import RECORD, shard_name
from mote.corpora.texts import read_texts, write_texts

logger = logging.getLogger(__name__)


def embed_corpus(model: str | Path, files: str | Path | Sequence[str | Path], out: str | Path, **options: Any) -> Path:
    """Embed the texts of a corpus.

    The same call resumes an interrupted run. Memory is bounded by two shards, whatever the size of the corpus.

    Args:
        model: Any Sentence-Transformers model: a folder, or an id on the Hub.
        files: `.jsonl`, `.jsonl.gz`, `.json.gz` and `.parquet` files, patterns, folders with files for the split, and
            `hub:user/name`.
        out: Folder for `shard-00000.parquet`, … (columns `id` and `embedding`, in the order of the corpus),
            `manifest.json` and `index.faiss`.
        **options: Fields of `EmbedOptions`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the model or a file does not exist.
        OSError: If another process writes to the folder, or its disk is full.
        ValueError: If an option, a row or an embedding is invalid, or the folder holds something else.
    """
    chosen, folder = EmbedOptions(**options), Path(out)
    files = [files] if isinstance(files, str | Path) else files
    with closing(Encoder(str(model), chosen)) as encoder, locked_folder(folder, RECORD) as record_file:
        texts_file = folder / ".texts.arrow"  # beside the shards, where the workers of a cluster find it
        try:
            texts, digest = write_texts(texts_file, read_texts(files, chosen))
            job = Job(texts, digest, folder, chosen.task, chosen.prompt, chosen.dtype, chosen.shard_size)
            with open_record(record_file, job.identity(encoder), chosen.overwrite) as record:
                if chosen.index is not None and not record.finished:  # an unknown index is an error before any work
                    new_index(chosen.index, chosen.dimensions or encoder.model.get_embedding_dimension())
                embed_missing(job, encoder, record)
                if chosen.index is not None:
                    build_index(record, chosen.index)
        finally:
            texts_file.unlink(missing_ok=True)
    logger.info("All %s texts are embedded in %s", f"{len(texts):,}", folder)
    return folder


def embed_missing(job: Job, encoder: Encoder, record: Record) -> None:
    """Embed the shards that are not finished, or were damaged since."""
    rows, numbers = len(job.texts), range(-(-len(job.texts) // job.shard_size))
    missing = [number for number in numbers if not record.is_finished(shard_name(number))]
    if missing:
        for task in {job.task, *job.texts.unique("task")}:
            encoder.arguments(task, job.prompt)
        libraries = ("mote-embeddings", "torch", "transformers", "sentence-transformers")
        record.update(complete=False, versions={name: version(name) for name in libraries})
        left = sum(min(job.shard_size, rows - number * job.shard_size) for number in missing)
        _embed_shards(replace(job, ranges=record.content.get("ranges")), missing, encoder, record, rows - left)
    record.update(complete=True)


def _embed_shards(job: Job, missing: Sequence[int], encoder: Encoder, record: Record, done: int) -> None:
    engine = embed_on_ray if encoder.options.engine == "ray" else embed_shards
    begun, before, rows = time.perf_counter(), done, len(job.texts)
    with (
        tqdm(total=rows, initial=done, unit=" texts", desc="Embedding", disable=None) as bar,
        closing(engine(job, missing, encoder, bar.update)) as shards,  # type: ignore[type-var]
    ):
        for shard in shards:
            record.update(dimension=shard.dimension, ranges=shard.ranges)
            record.add(shard_name(shard.number), rows=shard.rows)
            done += shard.rows
            bar.update(max(0, done - bar.n))
            if bar.disable:
                seconds = time.perf_counter() - begun
                logger.info("%s", bar.format_meter(done, rows, seconds, unit=" texts", initial=before, ncols=0))
