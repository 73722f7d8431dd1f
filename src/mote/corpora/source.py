"""The texts of a corpus, in order: rows of files and of datasets on the Hub, with their ids and tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mote.corpora.folder import sha256
from mote.data.columns import check_string, no_column
from mote.data.rows import Row, count_rows, find_datasets, load_from_hub, numbered, read_file
from mote.data.settings import DatasetSource

TEXT_COLUMNS = ("text", "sentence", "document", "passage", "content", "query", "question")
TITLE = "title"
ID_COLUMNS = ("_id", "id")


class Document(NamedTuple):
    """A text of a corpus.

    Attributes:
        where: Location, `file:line`.
        id: Document id.
        text: The text.
        task: Task, if there is a column for it.
    """

    where: str
    id: str
    text: str
    task: str | None = None


class CorpusColumns(NamedTuple):
    """Columns of a corpus.

    Attributes:
        texts: Columns whose texts are joined by a space.
        id: Column of ids; None: the number of the row, from 0.
        task: Column of tasks, if there is one.
    """

    texts: tuple[str, ...]
    id: str | None
    task: str | None

    def document(self, row: Row, number: int) -> Document:
        """Take a document from a row.

        Raises:
            ValueError: If the row is invalid, or a value is missing or of another type.
        """
        try:
            if row.fault:
                raise ValueError(row.fault)
            text = " ".join(self._texts(row.content)) if len(self.texts) > 1 else _value(row.content, self.texts[0])
            name = _number(row.content, number) if self.id is None else _id(row.content, self.id)
            task = None if self.task is None else _value(row.content, self.task)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from None
        return Document(row.where, name, text, task)

    def _texts(self, content: dict[str, Any]) -> Iterator[str]:
        for column in self.texts:
            text = (content.get(column) or "") if column == TITLE else _value(content, column)
            if check_string(text, column):
                yield text


def _value(content: dict[str, Any], column: str) -> str:
    if column not in content:
        raise ValueError(no_column(column, content))
    if content[column] is None:
        raise ValueError(f"{column!r} is null")
    return check_string(content[column], column)


def _id(content: dict[str, Any], column: str) -> str:
    value = content.get(column)
    return str(value) if type(value) is int else _value(content, column)


def _number(content: dict[str, Any], number: int) -> str:
    if named := [column for column in ID_COLUMNS if column in content]:
        raise ValueError(f"there is a column {named[0]!r}, which the first row of the corpus lacks: all rows or none")
    return str(number)


@dataclass(frozen=True)
class Part:
    """A file of a corpus, or a dataset on the Hub.

    Attributes:
        name: Name of the part.
        settings: The settings by which it was found.
        file: The file; None for a dataset on the Hub.
        rows: Number of rows.
        sha256: Hash of the file; of a dataset the fingerprint by which `datasets` knows it.
    """

    name: str
    settings: DatasetSource
    file: Path | None
    rows: int = 0
    sha256: str = ""

    def counted(self) -> "Part":
        """Return the part with its number of rows and its hash."""
        if self.file is None:
            dataset = load_from_hub(self.settings)
            return replace(self, rows=len(dataset), sha256=dataset._fingerprint)
        return replace(self, rows=count_rows(self.file), sha256=sha256(self.file))

    def read(self, start: int = 0) -> Iterator[Row]:
        """Read from a given row on."""
        if self.file is not None:
            return read_file(self.file, start)
        return numbered(self.name, load_from_hub(self.settings).skip(start), start)


@dataclass(frozen=True)
class Corpus:
    """Texts in files or on the Hub.

    Attributes:
        parts: Its files and datasets, in order.
        columns: Its columns.
    """

    parts: tuple[Part, ...]
    columns: CorpusColumns

    def counted(self) -> "Corpus":
        """Count its rows, and hash its files.

        Raises:
            ValueError: If a file is damaged, or there are no rows.
        """
        corpus = replace(self, parts=tuple(part.counted() for part in self.parts))
        if not len(corpus):
            raise ValueError(f"{', '.join(part.name for part in self.parts)}: the corpus has no rows")
        return corpus

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    def read(self, start: int = 0) -> Iterator[Document]:
        """Read from a given row on; needs `counted`.

        Raises:
            ValueError: At an invalid row.
        """
        number = start
        for part in self.parts:
            left = max(0, part.rows - start)  # a file may have grown since
            for row in islice(part.read(start), left) if left else ():
                yield self.columns.document(row, number)
                number += 1
            start = max(0, start - part.rows)


class Reader:
    """Reads ranges of a corpus, without starting over if a range follows the previous one."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.rows: Iterator[Document] = iter(())
        self.position: int | None = None

    def read(self, start: int, stop: int) -> list[Document]:
        """Read the rows from `start` to `stop`.

        Raises:
            ValueError: If a row is invalid, or the files have fewer rows than they had.
        """
        if self.position is None or start < self.position:
            self.rows, self.position = self.corpus.read(start), start
        documents = list(islice(self.rows, start - self.position, stop - self.position))
        if len(documents) != stop - start:
            raise ValueError("The files of the corpus changed while they were being read: start over")
        self.position = stop
        return documents


def find_corpus(
    files: Sequence[str],
    *,
    split: str = "train",
    subset: str | None = None,
    text_columns: Sequence[str] = (),
    id_column: str | None = None,
    task_column: str | None = None,
) -> Corpus:
    """Find a corpus, and check the first row of each of its parts.

    Args:
        files: Files, patterns, folders with files for the split, and `hub:user/name`.
        split: Split of folders and datasets on the Hub.
        subset: Configuration of a dataset on the Hub.
        text_columns: Columns whose texts are joined by a space. Default: the one with a usual name, with `title` in
            front of `text`.
        id_column: Column of ids. Default: `_id` or `id`, else the number of the row, from 0.
        task_column: Column of tasks.

    Raises:
        FileNotFoundError: If there is no such file or dataset.
        ValueError: If a column is missing, or it is unclear which column holds the texts.
    """
    here = Path.cwd()
    parts = tuple(
        Part(location.name if file is None else file.name, location.settings, file)
        for word in files
        for location in find_datasets(DatasetSource(path=word, split=split, subset=subset), here)
        for file in location.files or (None,)
    )
    columns = None
    for part in parts:
        first = next(part.read(), None)
        if first is None:
            continue
        if columns is None:
            names = tuple(text_columns) or _usual_texts(first)
            ids = (column for column in ID_COLUMNS if column in first.content)
            columns = CorpusColumns(names, id_column or next(ids, None), task_column)
        columns.document(first, 0)
    if columns is None:
        raise ValueError(f"{', '.join(files)}: the corpus has no rows")
    return Corpus(parts, columns)


def _usual_texts(first: Row) -> tuple[str, ...]:
    if first.fault:
        raise ValueError(f"{first.where}: {first.fault}")
    present = [column for column in TEXT_COLUMNS if column in first.content]
    if "text" in present:
        return (TITLE, "text")  # exporters leave out empty titles, maybe that of the first row
    if len(present) != 1:
        found = ", ".join(map(repr, first.content)) or "none"
        raise ValueError(f"{first.where}: which column holds the texts? Name it with --text-column; there are {found}")
    return (present[0],)
