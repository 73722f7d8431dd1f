"""Scores of documents for queries: by a model's vectors (dense, sparse or hybrid), or by BM25. All are computed."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.corpora.pairs import PairTexts

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SCORES = 2**26
"""Maximum number of scores in memory at once."""


class Ranker(NamedTuple):
    """Scores all documents of a dataset for queries.

    Attributes:
        scores: Indices of queries [Q] → scores of all documents, [Q, N].
        floor: Score that a document must exceed to be found at all.
    """

    scores: Callable[[np.ndarray], np.ndarray]
    floor: float = -np.inf


def dense_ranker(queries: np.ndarray, documents: np.ndarray) -> Ranker:
    """Rank by inner products of embeddings, [Q, D] and [N, D]."""
    return Ranker(lambda rows: queries[rows] @ documents.T)


def sparse_ranker(queries: "csr_matrix", documents: "csr_matrix", vocabulary: int) -> Ranker:
    """Rank by inner products of sparse or hybrid vectors.

    Args:
        queries: Vectors, [Q, V], or of a hybrid model [Q, V + H].
        documents: Vectors, [N, V] or [N, V + H].
        vocabulary: V; the columns after it are the dense part.
    """
    by_token = documents[:, :vocabulary].T.tocsr()
    dense = dense_ranker(queries[:, vocabulary:].toarray(), documents[:, vocabulary:].toarray())
    floor = -np.inf if queries.shape[1] > vocabulary else 0.0
    return Ranker(lambda rows: (queries[rows, :vocabulary] @ by_token).toarray() + dense.scores(rows), floor)


def bm25_ranker(queries: Sequence[str], documents: Sequence[str]) -> Ranker:
    """Rank by BM25 (k1 0.9, b 0.4) over lower-cased words without English stop words, with bm25s."""
    import bm25s

    def tokenize(texts: Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)

    of_queries, of_documents = tokenize(queries), tokenize(documents)
    index: Any = bm25s.BM25(k1=0.9, b=0.4)
    has_words = any(of_documents)  # bm25s cannot index texts without any
    if has_words:
        index.index(of_documents, show_progress=False)

    def scores(rows: np.ndarray) -> np.ndarray:
        found = np.zeros((len(rows), len(documents)), np.float32)
        for place, row in enumerate(rows.tolist()):
            if of_queries[row] and has_words:
                found[place] = index.get_scores(of_queries[row])
        return found

    return Ranker(scores, floor=0.0)


class RowScores(NamedTuple):
    """Scores for the query of a row.

    Attributes:
        row: Index of the row.
        scores: Scores of all documents, [N].
        others: The same; -inf for documents that are known to answer the query.
        positive: Score of the row's positive.
    """

    row: int
    scores: np.ndarray
    others: np.ndarray
    positive: float


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
            yield RowScores(row, scores[place], others, float(scores[place, texts.positives[row][0]]))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the highest scores, the best first; of equal ones, the lowest index."""
    places = np.arange(len(scores))
    if count < len(scores):
        places = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return places[np.argsort(-scores[places], kind="stable")[:count]]
