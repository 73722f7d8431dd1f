"""The texts of a corpus, in order, with their ids and tasks: read once, and memory-mapped from then on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mote.corpora.options import EmbedOptions
from mote.data.columns import LABEL, STRING, check_value
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSource
from mote.files import replaced

if TYPE_CHECKING:
    from datasets import Dataset

TEXT_COLUMNS = ("text", "sentence", "document", "passage", "content", "query", "question")
TITLE = "title"
ID_COLUMNS = ("_id", "id")

_BATCH = 1000  # rows that are written at once; two such batches are in memory


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
        id_column = id_of_first or next((column for column in ID_COLUMNS if column in row), None)
        name = number if id_column is None else check_value(row, id_column, LABEL)
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
