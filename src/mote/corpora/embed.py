"""`mote embed`: a corpus to embeddings, shard by shard, on any engine."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mote.corpora.encoder import Encoder
from mote.corpora.engines import Job, read_column, read_shard, run
from mote.corpora.options import EmbedOptions
from mote.corpora.record import open_record
from mote.corpora.texts import read_texts, write_texts
from mote.files import read_json

RECORD = "manifest.json"

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
    with closing(Encoder(str(model), chosen)) as encoder, open_record(folder, RECORD) as record:
        texts_file = folder / ".texts.arrow"  # beside the shards, where the workers of a cluster find it
        try:
            texts, digest = write_texts(texts_file, read_texts(files, chosen))
            counted = {"rows": len(texts), "sha256": digest}
            record.start(
                {"command": "embed", "model": encoder.identity, "texts": counted, **chosen.own()}, chosen.overwrite
            )
            job = Job(texts, folder, chosen.task, chosen.prompt, chosen.dtype, chosen.shard_size)
            missing = [number for number in range(len(job)) if not record.is_finished(job.file(number).name)]
            record.update(source=encoder.source, complete=not missing)
            for shard in run(job, missing, encoder):
                record.update(dimension=shard.dimension)
                record.add(job.file(shard.number).name, rows=shard.rows)
            record.update(complete=True)
        finally:
            texts_file.unlink(missing_ok=True)
    logger.info("All %s texts are embedded in %s", f"{len(texts):,}", folder)
    return folder


def read_embeddings(folder: str | Path) -> tuple[list[str], Iterator[np.ndarray]]:
    """Read embeddings that `embed_corpus` wrote.

    Args:
        folder: The folder.

    Returns:
        The ids, in the order of the corpus, and an iterator over the embeddings of one shard after another, each
        (rows, dimension) in float32.

    Raises:
        FileNotFoundError: If there are no embeddings.
        ValueError: If they are incomplete.
    """
    folder = Path(folder)
    manifest = read_json(folder / RECORD)
    if not manifest["complete"]:
        raise ValueError(f"The embeddings in {folder} are incomplete: run the same command again to resume")
    files = [folder / name for name in manifest["files"]]
    ids = [name for file in files for name in read_column(file, "id").to_pylist()]
    return ids, map(read_shard, files)
