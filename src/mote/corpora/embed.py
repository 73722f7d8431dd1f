"""`mote embed`: a corpus to embeddings, shard by shard, on any engine.

Its texts are read once, in order, with their ids and tasks, and memory-mapped from then on.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.corpora.encoder import Encoder
from mote.corpora.engines import Job, read_shard, run
from mote.corpora.options import EmbedOptions
from mote.corpora.record import Record, open_record
from mote.data.columns import LABEL, STRING, check_value
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSource
from mote.files import read_json, replaced
from mote.inference.loading import AUTO, weight_ids

if TYPE_CHECKING:
    from datasets import Dataset

RECORD = "manifest.json"
TEXT_COLUMNS = ("text", "sentence", "document", "passage", "content", "query", "question")
TITLE = "title"
ID_COLUMNS = ("_id", "id")

_BATCH = 1000  # rows that are written at once; two such batches are in memory

logger = logging.getLogger(__name__)


def embed_corpus(
    model: str | Path,
    files: str | Path | Sequence[str | Path],
    out: str | Path,
    options: EmbedOptions | None = None,
    **settings: Any,
) -> Path:
    """Embed the texts of a corpus.

    The same call resumes an interrupted run. Memory is bounded by three shards, whatever the size of the corpus.

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
            read, task = read_texts(files, chosen), chosen.task
            if task == AUTO:
                from mote.inference.routing import open_router  # imports torch, which `--help` does not need

                task = None
                router = open_router(encoder.model, encoder.source, encoder.commit)
                read = (text._replace(task=router.tasks_of([text.text])[0]) for text in read)
            texts, digest = write_texts(texts_file, read)
            identity = {"model": encoder.identity, "texts": {"rows": len(texts), "sha256": digest}, **chosen.own()}
            record.start({"command": "embed", **identity}, chosen.overwrite)
            job = Job(texts, record.folder, task, chosen.prompt, chosen.dtype, chosen.shard_size)
            missing = [number for number in range(len(job)) if not record.is_finished(job.file(number).name)]
            weights = weight_ids(encoder.source, encoder.commit, [own or task for own in texts.unique("task")])
            record.update(source=encoder.source, weights=weights, complete=not missing)
            for number in run(job, missing, encoder):
                record.add(job.file(number).name, rows=job.rows(number), truncated=encoder.truncated)
        finally:
            texts_file.unlink(missing_ok=True)
    if truncated := sum(shard.get("truncated", 0) for shard in record.finished.values()):
        logger.warning("%s texts are longer than the model reads, and were truncated: split them", f"{truncated:,}")
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
    from pyarrow import parquet

    folder = Path(folder)
    read_json(folder / RECORD)  # an error if there is none
    record = Record(folder / RECORD)
    if not record.content.get("complete"):
        raise ValueError(f"The embeddings in {folder} are incomplete: run the same command again to resume")
    files = [folder / name for name in record.finished]
    tables = (parquet.read_table(file, columns=["id"], partitioning=None) for file in files)
    ids = [name for table in tables for name in table["id"].to_pylist()]
    return ids, map(read_shard, files)


class CorpusText(NamedTuple):
    """A text of a corpus, its id, and its task if the corpus has a column for it."""

    id: str
    text: str
    task: str | None = None


def _reader(first: dict[str, Any], options: EmbedOptions) -> Callable[..., CorpusText]:
    """Find the columns of a corpus by its first row; return what reads a row, which may have its number for an id."""
    usual = [column for column in TEXT_COLUMNS if column in first]
    if "text" in usual:
        usual = [TITLE, "text"]  # exporters leave out empty titles, maybe that of the first row
    elif len(usual) != 1 and not options.text_columns:
        present = ", ".join(map(repr, first)) or "none"
        raise ValueError(f"which column holds the texts? Name it in text_columns; there are {present}")
    id_of_first = options.id_column or next((column for column in ID_COLUMNS if column in first), None)

    def read(row: dict[str, Any], number: int) -> CorpusText:
        titled = {**row, TITLE: row.get(TITLE) or ""}
        texts = [check_value(titled, column, STRING) for column in options.text_columns or usual]
        if id_of_first is None and any(column in row for column in ID_COLUMNS):
            raise ValueError("there is an id, but the first row of the corpus has none: all rows or none")
        name = number if id_of_first is None else check_value(row, id_of_first, LABEL)
        task = None if options.task_column is None else check_value(row, options.task_column, STRING)
        return CorpusText(str(name), " ".join(filter(None, texts)), task)

    return read


def read_texts(files: Iterable[str | Path], options: EmbedOptions) -> Iterator[CorpusText]:
    """Read files, patterns, folders with files for the split, and `hub:user/name`, up to the first invalid row."""
    settings = [DatasetSource(path=str(file), split=options.split, subset=options.subset) for file in files]
    locations = [location for each in settings for location in find_datasets(each, Path.cwd())]
    reader = None
    for number, row in enumerate(row for location in locations for row in read_rows(location)):
        reader = reader or row.take(partial(_reader, options=options))
        yield row.take(partial(reader, number=number))
    if reader is None:
        raise ValueError(f"{', '.join(map(str, files))}: the corpus has no rows")


def write_texts(path: Path, texts: Iterable[CorpusText]) -> tuple["Dataset", str]:
    """Write texts to an Arrow file, from which a cluster's workers read, too; return them memory-mapped, and a hash."""
    import pyarrow
    from datasets import Dataset

    schema = pyarrow.schema(dict.fromkeys(CorpusText._fields, pyarrow.string()))
    texts, digest = iter(texts), hashlib.sha256()
    with replaced(path) as part, part.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        while batch := list(islice(texts, _BATCH)):
            for text in batch:
                digest.update(json.dumps(text).encode())
            writer.write_batch(pyarrow.record_batch(list(map(list, zip(*batch, strict=True))), schema=schema))
    return Dataset.from_file(str(path.absolute())), digest.hexdigest()
