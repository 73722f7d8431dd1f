"""Ranking of documents for queries: by a model's vectors (dense, sparse or hybrid) with exact search, or by BM25.

The results do not depend on how the work is split: scores are computed pair by pair in float64, and documents with
equal scores are ordered by their position in the corpus.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mote.corpora.pairs import Pairs

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SHARD = 2**18
"""Documents searched at once: 400 MB with 384 dimensions."""
SPARE = 32
"""Documents requested beyond those needed, so that one search is nearly always enough."""


class Scorer(Protocol):
    """Scores documents for queries; both are given by their indices.

    Attributes:
        floor: Score that a document must exceed to be found at all.
    """

    floor: float

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the documents with the highest scores.

        Args:
            queries: Indices of queries, [Q].
            count: Number of documents per query, at most the size of the corpus.

        Returns:
            Their indices and scores, the best first, [Q, count] each; -1 and -inf where a scorer finds no more.
        """

    def score(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Score pairs of a query and a document, [N] each; returns [N], float64."""


class EmbeddingScorer:
    """Inner products of embeddings, all of them computed, with FAISS.

    Args:
        queries: Embeddings, [Q, D], possibly memory-mapped.
        documents: Embeddings, [N, D], possibly memory-mapped.
        shard: Documents searched at once.
    """

    floor = -np.inf

    def __init__(self, queries: np.ndarray, documents: np.ndarray, shard: int = SHARD) -> None:
        self.queries = queries
        self.documents = documents
        self.shard = shard
        parts = (documents[start : start + shard] for start in range(0, len(documents), shard))
        self.longest = max(float(np.linalg.norm(part, axis=1).max()) for part in parts)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Scorer`."""
        return self._nearest(queries, count, count + SPARE)

    def _nearest(self, queries: np.ndarray, count: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """Search in float32 for more documents than needed, until no other document can be among the best."""
        import faiss

        vectors = np.ascontiguousarray(self.queries[queries], dtype=np.float32)
        found, left_out = [], np.full(len(queries), -np.inf)  # the highest float32 score of any document left out
        for start in range(0, len(self.documents), self.shard):
            part = np.ascontiguousarray(self.documents[start : start + self.shard], dtype=np.float32)
            scores, places = faiss.knn(vectors, part, min(wanted, len(part)), metric=faiss.METRIC_INNER_PRODUCT)
            found.append(start + places)
            if wanted < len(part):
                left_out = np.maximum(left_out, scores[:, -1])
        places = np.concatenate(found, axis=1).astype(np.int64)
        rows = np.repeat(queries, places.shape[1])
        places, scores = _best(places, self.score(rows, places.ravel()).reshape(places.shape), count)
        # Rounding error of the sum of D products in float32.
        error = vectors.shape[1] * np.finfo(np.float32).eps * np.linalg.norm(vectors, axis=1) * self.longest
        unsure = scores[:, -1] <= left_out + error
        if unsure.any():
            places[unsure], scores[unsure] = self._nearest(queries[unsure], count, 2 * wanted)
        return places, scores

    def score(self, queries: np.ndarray, documents: np.ndarray, block: int = 2**16) -> np.ndarray:
        """See `Scorer`."""
        scores = np.empty(len(queries))
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            left, right = self.queries[queries[part]], self.documents[documents[part]]
            scores[part] = np.einsum("nd,nd->n", left.astype(np.float64), right.astype(np.float64))
        return scores


class SparseScorer:
    """Inner products of sparse or hybrid vectors, all of them computed, in memory.

    Args:
        queries: Vectors, [Q, V], or of a hybrid model [Q, V + H].
        documents: Vectors, [N, V] or [N, V + H].
        vocabulary: V; the columns after it are the dense part.
    """

    def __init__(self, queries: "csr_matrix", documents: "csr_matrix", vocabulary: int) -> None:
        def split(vectors: "csr_matrix") -> tuple["csr_matrix", np.ndarray]:
            vectors = vectors.astype(np.float64)
            return vectors[:, :vocabulary], vectors[:, vocabulary:].toarray()

        self.queries, self.documents = split(queries), split(documents)
        self.floor = -np.inf if self.queries[1].shape[1] else 0.0
        self.columns = self.documents[0].T.tocsr()  # [V, N]: the documents of each token

    def nearest(self, queries: np.ndarray, count: int, block: int = 64) -> tuple[np.ndarray, np.ndarray]:
        """See `Scorer`. Documents that share no token with the query are only found by hybrid vectors."""
        places, scores = np.full((len(queries), count), -1), np.full((len(queries), count), -np.inf)
        hybrid = self.queries[1].shape[1] > 0
        for start in range(0, len(queries), block):
            rows = queries[start : start + block]
            of_all = (self.queries[0][rows] @ self.columns).toarray()
            if hybrid:
                of_all += self.queries[1][rows] @ self.documents[1].T
            for row, (query, of_row) in enumerate(zip(rows, of_all, strict=True), start=start):
                found = _reaching(of_row, np.flatnonzero(of_row > self.floor), count)
                best, of_best = _best(found[None], self.score(np.full(len(found), query), found)[None], count)
                places[row, : best.size], scores[row, : best.size] = best[0], of_best[0]
        return places, scores

    def score(self, queries: np.ndarray, documents: np.ndarray, block: int = 2**14) -> np.ndarray:
        """See `Scorer`."""
        scores = np.empty(len(queries))
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            (left, left_dense), (right, right_dense) = (
                (of_side[0][places[part]], of_side[1][places[part]])
                for of_side, places in ((self.queries, queries), (self.documents, documents))
            )
            scores[part] = left.multiply(right).sum(axis=1).A1 + np.einsum("nd,nd->n", left_dense, right_dense)
        return scores


class BM25Scorer:
    """BM25 (k1 0.9, b 0.4) over lower-cased words without English stop words, with bm25s.

    Args:
        queries: Texts.
        documents: Texts.
    """

    floor = 0.0

    def __init__(self, queries: Sequence[str], documents: Sequence[str]) -> None:
        import bm25s

        def tokenize(texts: Sequence[str]) -> list[list[str]]:
            return bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)

        self.queries = tokenize(queries)
        self.index: Any = bm25s.BM25(k1=0.9, b=0.4)
        self.count = len(documents)
        words = tokenize(documents)
        self.has_words = any(words)  # bm25s cannot index texts without any
        if self.has_words:
            self.index.index(words, show_progress=False)

    def _scores(self, query: int) -> np.ndarray:
        """Scores of all documents, [N]."""
        tokens = self.queries[query]
        return self.index.get_scores(tokens).astype(np.float64) if tokens and self.has_words else np.zeros(self.count)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Scorer`. Documents without a word of the query are not found."""
        places, scores = np.full((len(queries), count), -1), np.full((len(queries), count), -np.inf)
        for row, query in enumerate(queries.tolist()):
            of_all = self._scores(query)
            found = _reaching(of_all, np.flatnonzero(of_all > self.floor), count)
            best, of_best = _best(found[None], of_all[found][None], count)
            places[row, : best.size], scores[row, : best.size] = best[0], of_best[0]
        return places, scores

    def score(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """See `Scorer`."""
        scores = np.empty(len(queries))
        order = np.argsort(queries, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(queries[order])) + 1):
            if len(rows):
                scores[rows] = self._scores(int(queries[rows[0]]))[documents[rows]]
        return scores


def _reaching(scores: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Keep the indices that reach the score at the last rank, up to rounding; `_best` breaks ties."""
    if len(places) <= count:
        return places
    last = -np.partition(-scores[places], count - 1)[count - 1]
    return places[scores[places] >= last - 1e-9 * abs(last)]


def _best(places: np.ndarray, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keep the `count` highest scores of each row; among equal ones, the lowest index comes first."""
    order = np.lexsort((places, -scores), axis=1)[:, :count]
    return np.take_along_axis(places, order, axis=1), np.take_along_axis(scores, order, axis=1)


def nearest_unknown(
    pairs: Pairs, scorer: Scorer, rows: np.ndarray, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Find, for each row, the documents with the highest scores that are not known to answer its query.

    Args:
        pairs: The dataset.
        scorer: The teacher, over `pairs.queries` and `pairs.documents`.
        rows: Indices of rows, [R].
        count: Maximum number of documents per row.

    Yields:
        Their indices and scores, the best first.
    """
    queries, of_row = np.unique(pairs.anchors[rows], return_inverse=True)
    # Each query requests as many more documents as it has known ones. Queries with many known ones are searched
    # separately, so that the others do not request as many.
    more = np.array([1 << len(pairs.known[query]).bit_length() for query in queries.tolist()])
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for extra in np.unique(more).tolist():
        members = np.flatnonzero(more == extra)
        nearest = scorer.nearest(queries[members], min(count + extra, len(pairs.documents)))
        for member, places, scores in zip(members.tolist(), *nearest, strict=True):
            known = pairs.known[queries[member]]
            kept = [rank for rank, place in enumerate(places.tolist()) if place >= 0 and place not in known][:count]
            found[member] = places[kept], scores[kept]
    return (found[member] for member in of_row.tolist())
