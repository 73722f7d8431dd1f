"""Datasets of pairs: their rows, and their texts without repeats."""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mote.data.columns import Example, check_row, find_columns
from mote.data.rows import Location, read_rows


@dataclass(frozen=True)
class PairTexts:
    """The texts of a dataset, each once, and which of them each row holds.

    Texts are compared ignoring case and whitespace.

    Attributes:
        queries: The anchors.
        documents: The positives, and all other texts of the corpus.
        anchors: Index of each row's anchor in `queries`, [R].
        positives: Indices of each row's positives in `documents`; the first one is scored.
        known: For each query, the documents that are never its negatives: its positives in any row, and its own text.
    """

    queries: list[str]
    documents: list[str]
    anchors: np.ndarray
    positives: list[list[int]]
    known: list[set[int]]

    @classmethod
    def of(cls, anchors: Sequence[str], positives: Sequence[Sequence[str]], corpus: Iterable[str] = ()) -> "PairTexts":
        """Collect the texts of rows, and further documents, each once."""
        queries, documents = _UniqueTexts(), _UniqueTexts()
        of_anchors = [queries.add(anchor) for anchor in anchors]
        of_positives = [[documents.add(text) for text in texts] for texts in positives]
        for text in corpus:
            if text.strip():  # trainers refuse empty negatives
                documents.add(text)
        own = (documents.places.get(_normalized(query)) for query in queries.texts)
        known: list[set[int]] = [set() if place is None else {place} for place in own]
        for query, places in zip(of_anchors, of_positives, strict=True):
            known[query].update(places)
        return cls(
            queries=queries.texts,
            documents=documents.texts,
            anchors=np.array(of_anchors, dtype=np.int64),
            positives=of_positives,
            known=known,
        )

    def part(self, rows: slice) -> "PairTexts":
        """Return the pairs of some rows, with only their own anchors and positives."""
        queries, anchors = np.unique(self.anchors[rows], return_inverse=True)
        positives = self.positives[rows]
        places = {place: number for number, place in enumerate(sorted({place for row in positives for place in row}))}
        return PairTexts(
            queries=[self.queries[query] for query in queries.tolist()],
            documents=[self.documents[place] for place in places],
            anchors=anchors,
            positives=[[places[place] for place in row] for row in positives],
            known=[{places[place] for place in self.known[query] if place in places} for query in queries.tolist()],
        )


class _UniqueTexts:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.places: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Add a text unless it is there; return its index."""
        place = self.places.setdefault(_normalized(text), len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class PairDataset:
    """The rows of a dataset as they were read, whether they have negatives, and its texts."""

    name: str
    rows: list[dict[str, Any]]
    has_negatives: bool
    texts: PairTexts


def read_pairs(location: Location[Any], corpus: Iterable[str] = ()) -> PairDataset:
    """Read a dataset of pairs into memory, with further documents from a corpus.

    Raises:
        ValueError: If a row is invalid, or the rows are not pairs.
    """
    rows = list(read_rows(location))
    present = {column for row in rows for column in row.take(set)}  # some have fewer negatives than others
    columns = find_columns(location.settings, present, location.name, ("pairs",))

    def take(row: dict[str, Any]) -> Example:
        _as_line(row)  # it is written again in the end
        return check_row(row, columns)

    examples = [row.take(take) for row in rows]
    texts = PairTexts.of([each.anchor for each in examples], [each.positives for each in examples], corpus)
    return PairDataset(location.name, [row.content for row in rows], "negative" in columns.names, texts)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as compressed JSON lines; equal rows give equal files, byte for byte."""
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.writelines(map(_as_line, rows))


def _as_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
