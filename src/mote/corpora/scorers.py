"""What ranks documents for queries: the embeddings of a model, exactly, or BM25.

Both give the same answer however the work is cut up: candidates are scored again, pair by pair, in float64, and those
with equal scores are ordered by their place in the corpus.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

SHARD = 2**18
"""Documents that are searched at once: 400 MB of 384 dimensions."""


class Scorer(Protocol):
    """Scores documents for queries; both are known by their places."""

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the documents with the highest scores.

        Args:
            queries: Places of queries, [Q].
            count: Documents for each, at most as many as there are.

        Returns:
            Their places and scores, the best first, [Q, count] each.
        """

    def score(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Score pairs of a query and a document, [N] each; returns [N], float64."""


class EmbeddingScorer:
    """Inner products of embeddings, all of them computed, by FAISS.

    Args:
        queries: Embeddings, [Q, D], possibly mapped from the disk.
        documents: Embeddings, [N, D], possibly mapped from the disk.
        shard: Documents that are searched at once.
    """

    def __init__(self, queries: np.ndarray, documents: np.ndarray, shard: int = SHARD) -> None:
        self.queries = queries
        self.documents = documents
        self.shard = shard

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Scorer`."""
        import faiss

        wanted = np.ascontiguousarray(self.queries[queries], dtype=np.float32)
        found = []
        for start in range(0, len(self.documents), self.shard):
            part = np.ascontiguousarray(self.documents[start : start + self.shard], dtype=np.float32)
            _, places = faiss.knn(wanted, part, min(count, len(part)), metric=faiss.METRIC_INNER_PRODUCT)
            found.append(start + places)
        places = np.concatenate(found, axis=1).astype(np.int64)
        rows = np.repeat(queries, places.shape[1])
        return _best(places, self.score(rows, places.ravel()).reshape(places.shape), count)

    def score(self, queries: np.ndarray, documents: np.ndarray, block: int = 2**16) -> np.ndarray:
        """See `Scorer`."""
        scores = np.empty(len(queries))
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            left, right = self.queries[queries[part]], self.documents[documents[part]]
            scores[part] = np.einsum("nd,nd->n", left.astype(np.float64), right.astype(np.float64))
        return scores


class BM25Scorer:
    """BM25 (k1 0.9, b 0.4) over lower-cased words without English stop words, by bm25s.

    Args:
        queries: Texts.
        documents: Texts.
    """

    def __init__(self, queries: Sequence[str], documents: Sequence[str]) -> None:
        import bm25s

        def tokenize(texts: Sequence[str]) -> list[list[str]]:
            return bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)

        self.queries = tokenize(queries)
        self.index: Any = bm25s.BM25(k1=0.9, b=0.4)
        self.index.index(tokenize(documents), show_progress=False)
        self.count = len(documents)

    def _scores(self, query: int) -> np.ndarray:
        """Scores of all documents, [N]."""
        tokens = self.queries[query]
        return self.index.get_scores(tokens).astype(np.float64) if tokens else np.zeros(self.count)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Scorer`."""
        ranked = [_best(np.arange(self.count)[None], self._scores(query)[None], count) for query in queries]
        return np.concatenate([places for places, _ in ranked]), np.concatenate([scores for _, scores in ranked])

    def score(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """See `Scorer`."""
        scores = np.empty(len(queries))
        for query in np.unique(queries):
            rows = queries == query
            scores[rows] = self._scores(query)[documents[rows]]
        return scores


def _best(places: np.ndarray, scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keep the `count` highest scores of each row, the first place first among equal ones."""
    order = np.lexsort((places, -scores), axis=1)[:, :count]
    return np.take_along_axis(places, order, axis=1), np.take_along_axis(scores, order, axis=1)
