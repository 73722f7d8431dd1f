"""Which texts are equal, and which documents score highest for a query."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


def normalized(text: str) -> str:
    """Return a text without differences of case and white space."""
    return " ".join(text.casefold().split())


class Ranker(NamedTuple):
    """Scores all documents of a dataset for queries."""

    scores: Callable[[np.ndarray], np.ndarray]  # indices of queries [Q] → scores of all documents, [Q, N]
    floor: float = -np.inf  # score that a document must exceed to be found at all


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


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the highest scores, the best first; of equal ones, the lowest index."""
    places = np.arange(len(scores))
    if count < len(scores):
        places = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return places[np.argsort(-scores[places], kind="stable")[:count]]
