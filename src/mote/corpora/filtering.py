"""Consistency filtering: a pair stays if a model finds its positive again among the other documents.

Nussbaum and Duderstadt, arXiv:2502.07972, section 4.2: within shards of a million pairs, the document must be among the
two nearest to its query (after Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training",
arXiv:2212.03533, section 3.1).
"""

import numpy as np

from mote.corpora.mining import Pairs
from mote.corpora.scorers import Scorer


def consistent(pairs: Pairs, scorer: Scorer, nearest: int, rows: np.ndarray, known: list[set[int]]) -> np.ndarray:
    """Decide which rows stay: those with fewer than `nearest` other documents that score above their positive.

    Args:
        pairs: A shard of a dataset.
        scorer: The model, over its texts.
        nearest: Number of documents among which the positive must be. Other known positives of its query do not count.
        rows: Places of rows, [R].
        known: From `pairs.known()`.

    Returns:
        True for rows that stay, [R].
    """
    anchors, positives = pairs.anchors[rows], pairs.positives[rows]
    queries, of_row = np.unique(anchors, return_inverse=True)
    most_known = max((len(known[query]) for query in queries.tolist()), default=0)
    candidates, scores = scorer.nearest(queries, min(nearest + most_known, len(pairs.documents)))
    own = scorer.score(anchors, positives)
    stays = np.empty(len(rows), dtype=bool)
    for index, query in enumerate(of_row.tolist()):
        unknown = [place not in known[queries[query]] for place in candidates[query].tolist()]
        stays[index] = (unknown & (scores[query] > own[index])).sum() < nearest
    return stays
