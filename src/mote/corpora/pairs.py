"""Datasets of pairs: their rows, and their texts without repeats."""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mote.data.columns import Columns, check_row, check_string, find_columns
from mote.data.rows import Location, read_rows, require_valid


@dataclass(frozen=True)
class Pairs:
    """The texts of a dataset, each once, and which of them each row holds.

    Texts are compared ignoring case and whitespace.

    Attributes:
        queries: The anchors.
        documents: The positives, the negatives that rows already have, and all other texts of the corpus.
        anchors: Index of each row's anchor in `queries`, [R].
        positives: Index of each row's (first) positive in `documents`, [R].
        of_rows: Indices of all positives of each row.
        negatives: Indices of the negatives that each row already has.
        known: For each query, the documents that are never its negatives: its positives in any row, and its own text.
    """

    queries: list[str]
    documents: list[str]
    anchors: np.ndarray
    positives: np.ndarray
    of_rows: list[list[int]]
    negatives: list[list[int]]
    known: list[set[int]]

    @classmethod
    def of(
        cls,
        anchors: Iterable[str],
        positives: Iterable[str | Sequence[str]],
        corpus: Iterable[str] = (),
        negatives: Iterable[Sequence[str]] | None = None,
    ) -> "Pairs":
        """Collect the texts, each once.

        Args:
            anchors: Anchor of each row.
            positives: Positive of each row, or several.
            corpus: Additional documents.
            negatives: Negatives of each row. Default: none.
        """
        queries, documents = _Texts(), _Texts()
        known: list[set[int]] = []
        anchors_of_rows: list[int] = []
        of_rows: list[list[int]] = []
        for anchor, texts in zip(anchors, positives, strict=True):
            query = queries.add(anchor)
            places = [documents.add(text) for text in ([texts] if isinstance(texts, str) else texts)]
            known += [set() for _ in range(len(queries.texts) - len(known))]
            known[query].update(places)
            anchors_of_rows.append(query)
            of_rows.append(places)
        found = [[documents.add(text) for text in texts] for texts in negatives or ()]
        for text in corpus:
            if text.strip():  # trainers refuse empty negatives
                documents.add(text)
        for query, text in enumerate(queries.texts):
            if (own := documents.places.get(_normalized(text))) is not None:
                known[query].add(own)
        return cls(
            queries=queries.texts,
            documents=documents.texts,
            anchors=np.array(anchors_of_rows, dtype=np.int64),
            positives=np.array([places[0] for places in of_rows], dtype=np.int64),
            of_rows=of_rows,
            negatives=found or [[] for _ in of_rows],
            known=known,
        )

    def part(self, rows: slice) -> "Pairs":
        """Return the pairs of some rows, with only their own texts."""
        documents = self.documents
        part = Pairs.of(
            [self.queries[place] for place in self.anchors[rows].tolist()],
            [[documents[place] for place in self.of_rows[row]] for row in range(*rows.indices(len(self.anchors)))],
        )
        number = {text: place for place, text in enumerate(part.documents)}
        known = dict(zip(self.queries, self.known, strict=True))  # also from other rows of the same query
        for text, of_query in zip(part.queries, part.known, strict=True):
            of_query.update(number[documents[place]] for place in known[text] if documents[place] in number)
        return part


class _Texts:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.places: dict[str, int] = {}

    def add(self, text: str) -> int:
        place = self.places.setdefault(_normalized(text), len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class PairDataset:
    """The rows of a dataset of pairs.

    Attributes:
        name: Name of the dataset.
        rows: The rows as they were read.
        columns: What the columns mean.
        negatives: Negatives of each row.
        pairs: The texts.
    """

    name: str
    rows: list[dict[str, Any]]
    columns: Columns
    negatives: list[tuple[str, ...]]
    pairs: Pairs

    def without_negatives(self, row: int) -> dict[str, Any]:
        """Return a row without the columns of its negatives."""
        left_out = self.columns.names.get("negative", ())
        return {name: value for name, value in self.rows[row].items() if name not in left_out}


def read_pairs(location: Location[Any], corpus: Iterable[str] = ()) -> PairDataset:
    """Read a dataset of pairs into memory.

    Args:
        location: Location of the dataset.
        corpus: Additional documents.

    Raises:
        ValueError: If there are no rows, a row is invalid, or the rows are not pairs.
    """
    rows = list(require_valid(read_rows(location)))
    if not rows:
        raise ValueError(f"{location.name} has no rows")
    present = dict.fromkeys(column for row in rows for column in row.content)  # some have fewer negatives than others
    columns = find_columns(location.settings, present, location.name)
    if columns.row_type != "pairs":
        raise ValueError(f"{location.name}: expected pairs (anchor, positive), got {columns.row_type} rows")
    examples = []
    for row in rows:
        try:
            examples.append(check_row(row.content, columns))
            for column, value in row.content.items():  # of all columns: they are written again in the end
                check_string(json.dumps({column: value}, ensure_ascii=False), column)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{row.where}: {error}") from error
    negatives = [example.negatives for example in examples]
    pairs = Pairs.of(
        [example.anchor for example in examples], [example.positives for example in examples], corpus, negatives
    )
    return PairDataset(location.name, [row.content for row in rows], columns, negatives, pairs)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as compressed JSON lines; equal rows give equal files, byte for byte."""
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
