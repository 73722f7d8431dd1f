"""Datasets of pairs: their rows, their texts without repeats, and scores of all documents for queries.

Scores are those of a model's vectors (dense, sparse or hybrid), or of BM25.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.data.columns import ROW_TYPES, Columns, Example, RowType, check_row, find_columns
from mote.data.ranking import Ranker, normalized
from mote.data.rows import Location, read_rows

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SCORES = 2**26
"""Maximum number of scores in memory at once."""


@dataclass(frozen=True)
class PairTexts:
    """The texts of a dataset, each once (ignoring case and white space), and which of them each row holds."""

    queries: list[str]  # the anchors
    documents: list[str]  # the positives, and all other texts of the corpus
    anchors: np.ndarray  # index of each row's anchor in `queries`, [R]
    positives: list[list[int]]  # indices of each row's positives in `documents`; the first one is scored
    known: list[set[int]]  # for each query, what is never its negative: its positives in any row, and its own text

    @classmethod
    def of(cls, anchors: Sequence[str], positives: Sequence[Sequence[str]], corpus: Iterable[str] = ()) -> "PairTexts":
        """Collect the texts of rows, and further documents, each once."""
        queries, query_of = _each_once(anchors)
        # Trainers refuse empty negatives.
        documents, document_of = _each_once([*chain(*positives), *filter(str.strip, corpus)])
        of_anchors = [query_of[normalized(anchor)] for anchor in anchors]
        of_positives = [[document_of[normalized(text)] for text in texts] for texts in positives]
        known = [{document_of[text]} if text in document_of else set[int]() for text in query_of]
        for query, places in zip(of_anchors, of_positives, strict=True):
            known[query].update(places)
        return cls(queries, documents, np.array(of_anchors, dtype=np.int64), of_positives, known)

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


def _each_once(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return the first of equal texts, and the index of each normalized text among them."""
    first: dict[str, str] = {}
    for text in texts:
        first.setdefault(normalized(text), text)
    return [*first.values()], {text: number for number, text in enumerate(first)}


@dataclass(frozen=True)
class PairDataset:
    """The rows of a dataset as they were read, whether they have negatives, and its texts."""

    rows: list[dict[str, Any]]
    has_negatives: bool
    texts: PairTexts


def read_pairs(location: Location[Any], corpus: Iterable[str] = ()) -> PairDataset:
    """Read a dataset of pairs into memory, with further documents from a corpus."""
    rows, examples, columns = read_all(location, ("pairs",))
    texts = PairTexts.of([each.anchor for each in examples], [each.positives for each in examples], corpus)
    return PairDataset(rows, "negative" in columns.names, texts)


def read_all(
    location: Location[Any], expected: Iterable[RowType] = tuple(ROW_TYPES)
) -> tuple[list[dict[str, Any]], list[Example], Columns]:
    """Read a dataset into memory: its rows as they are, their texts, and its columns; any invalid row is an error."""
    rows = list(read_rows(location))
    present = {column for row in rows for column in row.take(set)}  # some have fewer negatives than others
    columns = find_columns(location.settings, present, location.name, expected)

    def take(row: dict[str, Any]) -> Example:
        _as_line(row)  # it is written again in the end
        return check_row(row, columns)

    return [row.content for row in rows], [row.take(take) for row in rows], columns


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as compressed JSON lines; equal rows give equal files, byte for byte."""
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.writelines(map(_as_line, rows))


def _as_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def dense_ranker(queries: np.ndarray, documents: np.ndarray) -> Ranker:
    """Rank by inner products of embeddings, [Q, D] and [N, D]."""
    return Ranker(lambda rows: queries[rows] @ documents.T)


def sparse_ranker(queries: "csr_matrix", documents: "csr_matrix", vocabulary: int) -> Ranker:
    """Rank by inner products of vectors, [Q, V] and [N, V]; those of hybrid models have a dense part after V."""
    by_token = documents[:, :vocabulary].T.tocsr()
    dense = dense_ranker(queries[:, vocabulary:].toarray(), documents[:, vocabulary:].toarray())
    floor = -np.inf if queries.shape[1] > vocabulary else 0.0
    return Ranker(lambda rows: (queries[rows, :vocabulary] @ by_token).toarray() + dense.scores(rows), floor)


class RowScores(NamedTuple):
    """Scores for the query of a row."""

    row: int
    positive: float
    others: np.ndarray  # of all documents, [N]; -inf for those that are known to answer the query


def score_rows(texts: PairTexts, ranker: Ranker, rows: np.ndarray) -> Iterator[RowScores]:
    """Score all documents for the queries of some rows, [R]."""
    step = max(1, SCORES // len(texts.documents))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        queries, of_rows = np.unique(texts.anchors[part], return_inverse=True)
        scores = ranker.scores(queries)
        for row, place in zip(part.tolist(), of_rows.tolist(), strict=True):
            others = scores[place].copy()
            others[list(texts.known[queries[place]])] = -np.inf
            yield RowScores(row, float(scores[place, texts.positives[row][0]]), others)
