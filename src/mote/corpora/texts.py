"""The texts of a corpus, in order, with their ids and tasks: read once, and memory-mapped from then on."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Columns:
    """Columns of a corpus; without `id`, texts are numbered from 0."""

    texts: list[str]
    id: str | None
    task: str | None

    def take(self, row: dict[str, Any], number: int) -> CorpusText:
        """Take the text of a row."""
        texts = [
            check_value({TITLE: row.get(TITLE) or ""} if column == TITLE else row, column, STRING)
            for column in self.texts
        ]
        if self.id is None and any(column in row for column in ID_COLUMNS):
            raise ValueError("there is an id, but the first row of the corpus has none: all rows or none")
        name = str(number) if self.id is None else str(check_value(row, self.id, LABEL))
        task = None if self.task is None else check_value(row, self.task, STRING)
        return CorpusText(name, " ".join(filter(None, texts)), task)


def _columns_of(first: dict[str, Any], options: EmbedOptions) -> _Columns:
    """Find the columns of a corpus by its first row."""
    usual = [column for column in TEXT_COLUMNS if column in first]
    if "text" in usual:
        usual = [TITLE, "text"]  # exporters leave out empty titles, maybe that of the first row
    elif len(usual) != 1 and not options.text_columns:
        present = ", ".join(map(repr, first)) or "none"
        raise ValueError(f"which column holds the texts? Name it in text_columns; there are {present}")
    texts = options.text_columns or usual
    ids = (column for column in ID_COLUMNS if column in first)
    return _Columns(texts, options.id_column or next(ids, None), options.task_column)


def read_texts(files: Iterable[str | Path], options: EmbedOptions) -> Iterator[CorpusText]:
    """Read files, patterns, folders with files for the split, and `hub:user/name`.

    Raises:
        FileNotFoundError: If there is no such file or dataset.
        ValueError: At an invalid row, with its location; or if it is unclear which column holds the texts.
    """
    settings = [DatasetSource(path=str(file), split=options.split, subset=options.subset) for file in files]
    locations = [location for each in settings for location in find_datasets(each, Path.cwd())]
    columns = None
    for number, row in enumerate(row for location in locations for row in read_rows(location)):
        columns = columns or row.take(partial(_columns_of, options=options))
        yield row.take(partial(columns.take, number=number))
    if columns is None:
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
