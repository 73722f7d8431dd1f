"""Exact search in a corpus by hybrid scores: FAISS for the dense vectors, a sparse matrix for the sparse ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from sentence_transformers import SparseEncoder
    from torch import Tensor

BLOCK = 64
"""Queries whose scores with the whole corpus are in memory at once."""


class HybridIndex:
    """The vectors of a corpus: a FAISS index of the dense ones [N, H], a sparse matrix of the sparse ones [N, V].

    Results equal those of scoring every document: FAISS finds the documents with the best dense scores, the matrix
    gives all sparse scores, and a document is excluded only if its sparse score plus the best dense score that it can
    have is too low.

    Args:
        model: A hybrid model, `SparseEncoder(path, trust_remote_code=True)`.
    """

    def __init__(self, model: "SparseEncoder") -> None:
        import faiss
        from scipy.sparse import csr_matrix

        first: Any = model[0]
        self.model = model
        self.vocabulary: int = first.config.vocab_size
        self.dense = faiss.IndexFlatIP(first.config.hidden_size)
        self.sparse: csr_matrix = csr_matrix((0, self.vocabulary), dtype=np.float32)

    def __len__(self) -> int:
        return int(self.dense.ntotal)

    def add(self, documents: Sequence[str], batch_size: int = 32) -> None:
        """Embed documents, each in one pass, and add them; they are numbered after those added earlier."""
        from scipy.sparse import vstack

        if not documents:
            return
        dense, sparse = self._embed("document", documents, batch_size)
        self.dense.add(dense)
        self.sparse = vstack([self.sparse, sparse], format="csr")

    def search(
        self, queries: Sequence[str], top_k: int = 10, weight: float | None = None, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the documents with the highest scores, dense score + weight · sparse score.

        Args:
            queries: Queries.
            top_k: Number of documents per query.
            weight: Weight of the sparse score; 0 searches by dense vectors alone. Default: the model's.
            batch_size: Batch size for embedding.

        Returns:
            Scores [Q, K] and numbers of documents [Q, K], best first; K is `top_k`, or the corpus size if smaller.
        """
        last: Any = self.model[-1]
        weight = last.weight if weight is None else weight
        count = min(top_k, len(self))
        if not queries or not count:
            return np.zeros((len(queries), count), np.float32), np.zeros((len(queries), count), np.int64)
        dense, sparse = self._embed("query", queries, batch_size)
        found = []
        for begin in range(0, len(queries), BLOCK):
            rows = slice(begin, begin + BLOCK)
            found += self._search_block(dense[rows], sparse[rows], count, weight)
        scores, numbers = zip(*found, strict=True)
        return np.stack(scores), np.stack(numbers)

    def _search_block(
        self, dense: np.ndarray, sparse: "csr_matrix", count: int, weight: float
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        nearest = min(len(self), max(100, 10 * count))
        best, seen = self.dense.search(dense, nearest)
        of_sparse = weight * (sparse @ self.sparse.T).toarray()  # [q, N]
        results = []
        for query, best_dense, numbers, others in zip(dense, best, seen, of_sparse, strict=True):
            known = np.sort(best_dense + others[numbers])[-count]  # a lower bound of the last result's score
            bound = best_dense[-1] + 1e-4 * abs(best_dense[-1])  # highest dense score of a document not listed by FAISS
            candidates = np.union1d(numbers, np.flatnonzero(bound + others >= known))
            scores = self.dense.reconstruct_batch(candidates) @ query + others[candidates]
            order = np.lexsort((candidates, -scores))[:count]
            results.append((scores[order].astype(np.float32), candidates[order]))
        return results

    def _embed(self, side: str, texts: Sequence[str], batch_size: int) -> tuple[np.ndarray, "csr_matrix"]:
        """Embed texts as queries or documents: dense vectors, and sparse ones without their weight."""
        encode = self.model.encode_query if side == "query" else self.model.encode_document
        settings: dict[str, Any] = {"retrieval": "hybrid", "weight": 1.0, "batch_size": batch_size}
        whole = rows_of(encode(list(texts), show_progress_bar=False, save_to_cpu=True, **settings))
        return whole[:, self.vocabulary :].toarray(), whole[:, : self.vocabulary]


def rows_of(vectors: "Tensor") -> "csr_matrix":
    """Turn the sparse tensor of an encoder, [N, V], into a SciPy matrix in float32."""
    from scipy.sparse import csr_matrix

    vectors = vectors.coalesce()
    return csr_matrix((vectors.values().float().numpy(), vectors.indices().numpy()), shape=tuple(vectors.shape))
