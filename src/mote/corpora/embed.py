"""`mote embed`: a corpus to embeddings, shard by shard, on any engine."""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from mote.corpora.encoder import Encoder
from mote.corpora.engines import Job, run
from mote.corpora.options import EmbedOptions
from mote.corpora.record import Record, open_record
from mote.corpora.shards import RECORD
from mote.corpora.texts import read_texts, write_texts

logger = logging.getLogger(__name__)


def embed_corpus(
    model: str | Path,
    files: str | Path | Sequence[str | Path],
    out: str | Path,
    options: EmbedOptions | None = None,
    **settings: Any,
) -> Path:
    """Embed the texts of a corpus.

    The same call resumes an interrupted run. Memory is bounded by two shards, whatever the size of the corpus.

    Args:
        model: Any Sentence-Transformers model: a folder, or an id on the Hub.
        files: `.jsonl`, `.jsonl.gz`, `.json.gz` and `.parquet` files, patterns, folders with files for the split, and
            `hub:user/name`.
        out: Folder for `shard-00000.parquet`, … (columns `id` and `embedding`, in the order of the corpus) and
            `manifest.json`.
        options: What to embed, and how.
        **settings: Fields of `EmbedOptions`, which replace those of `options`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the model or a file does not exist.
        OSError: If another process writes to the folder, or its disk is full.
        ValueError: If an option, a row or an embedding is invalid, or the folder holds something else.
    """
    chosen, folder = EmbedOptions(**{**dict(options or ()), **settings}), Path(out)
    files = [files] if isinstance(files, str | Path) else files
    own = {name: getattr(chosen, name) for name in ("task", "prompt", "dtype", "shard_size")}
    with closing(Encoder(str(model), chosen)) as encoder, open_record(folder, RECORD) as record:
        texts_file = folder / ".texts.arrow"  # beside the shards, where the workers of a cluster find it
        try:
            texts, digest = write_texts(texts_file, read_texts(files, chosen))
            counted = {"rows": len(texts), "sha256": digest}
            record.start({"command": "embed", "model": encoder.identity, "texts": counted, **own}, chosen.overwrite)
            embed_missing(Job(texts, folder, **own), encoder, record)
        finally:
            texts_file.unlink(missing_ok=True)
    logger.info("All %s texts are embedded in %s", f"{len(texts):,}", folder)
    return folder


def embed_missing(job: Job, encoder: Encoder, record: Record) -> None:
    """Embed the shards that are not finished, or were damaged since."""
    missing = [number for number in range(len(job)) if not record.is_finished(job.file(number).name)]
    record.update(source=encoder.source, complete=not missing)
    for shard in run(job, missing, encoder):
        record.update(dimension=shard.dimension)
        record.add(job.file(shard.number).name, rows=shard.rows)
    record.update(complete=True)
