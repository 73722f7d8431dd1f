"""Hard negatives: documents that a teacher finds near a query, but that are not known to answer it.

Near-duplicates of the positive answer the query as well, so a candidate is accepted only if it scores clearly below the
positive ("positive-aware" mining, Moreira et al., "NV-Retriever", arXiv:2407.15831; Nussbaum and Duderstadt,
arXiv:2502.07972, Equation 5).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mote.corpora.pairs import Pairs
from mote.corpora.scorers import Scorer, nearest_unknown


@dataclass(frozen=True, kw_only=True)
class MiningSettings:
    """Which candidates become negatives.

    Attributes:
        negatives: Maximum number of negatives per row.
        skip: Number of top-ranked candidates to skip.
        depth: Rank up to which candidates are considered, known positives not counted.
        relative_margin: Minimum gap between positive and negative, as a fraction of the positive's score: 0.05 is the
            papers' 0.95. None: no such condition.
        absolute_margin: Minimum gap between the scores of positive and negative. None: no such condition.
        sampling: Which accepted candidates to take: the best-ranked (`top`), or random ones.
        seed: Random seed; candidates are drawn for each row independently.
    """

    negatives: int = 5
    skip: int = 0
    depth: int = 100
    relative_margin: float | None = 0.05
    absolute_margin: float | None = None
    sampling: Literal["top", "random"] = "top"
    seed: int = 42

    def __post_init__(self) -> None:
        """Raise `ValueError` at the first setting that is out of range."""
        if self.negatives < 1:
            raise ValueError(f"negatives must be at least 1, got {self.negatives}")
        if not 0 <= self.skip < self.depth:
            raise ValueError(f"skip must be from 0 to below depth ({self.depth}), got {self.skip}")
        if self.depth - self.skip < self.negatives:
            raise ValueError(
                f"{self.negatives} negatives cannot be found in {self.depth - self.skip} candidates: raise depth"
            )
        for name in ("relative_margin", "absolute_margin"):
            margin = getattr(self, name)
            if margin is not None and not 0 <= margin < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {margin}")
        if self.sampling not in ("top", "random"):
            raise ValueError(f"sampling must be 'top' or 'random', got {self.sampling!r}")

    def limit(self, positive: np.ndarray) -> np.ndarray:
        """Return the score that a negative must stay below, for the scores of positives; infinite without a margin."""
        limits = np.full(np.shape(positive), np.inf)
        if self.relative_margin is not None:
            limits = np.minimum(limits, positive - self.relative_margin * np.abs(positive))
        if self.absolute_margin is not None:
            limits = np.minimum(limits, positive - self.absolute_margin)
        return limits


@dataclass
class Mined:
    """Negatives of the rows of a dataset.

    Attributes:
        documents: Index of each negative in the corpus, [R, n]; -1 where fewer were accepted.
        scores: Scores of the negatives, [R, n]; NaN where there is none.
        positive_scores: Scores of the positives, [R].
        too_near: Number of candidates of each row that a margin excluded, [R].
    """

    documents: np.ndarray
    scores: np.ndarray
    positive_scores: np.ndarray
    too_near: np.ndarray


def mine(pairs: Pairs, scorer: Scorer, settings: MiningSettings, rows: np.ndarray) -> Mined:
    """Mine negatives for some rows of a dataset. A row's negatives do not depend on the other rows.

    Args:
        pairs: The dataset.
        scorer: The teacher, over `pairs.queries` and `pairs.documents`.
        settings: Which candidates are accepted.
        rows: Indices of rows, [R].
    """
    positive_scores = scorer.score(pairs.anchors[rows], pairs.positives[rows])
    mined = _none(positive_scores, settings.negatives)
    limits = settings.limit(positive_scores)
    for index, (places, scores) in enumerate(nearest_unknown(pairs, scorer, rows, settings.depth)):
        ranked = np.arange(settings.skip, len(places))
        accepted = ranked[scores[ranked] < limits[index]]
        mined.too_near[index] = len(ranked) - len(accepted)
        if settings.sampling == "random":
            generator = np.random.default_rng((settings.seed, int(rows[index])))
            accepted = np.sort(generator.permutation(accepted)[: settings.negatives])
        accepted = accepted[: settings.negatives]
        mined.documents[index, : len(accepted)] = places[accepted]
        mined.scores[index, : len(accepted)] = scores[accepted]
    return mined


def judge(pairs: Pairs, scorer: Scorer, settings: MiningSettings, rows: np.ndarray) -> Mined:
    """Filter the negatives that rows already have, keeping their order.

    Takes the arguments of `mine`; of the settings, only the margins count. `Mined.documents` has as many columns as the
    longest row of the dataset has negatives.
    """
    positive_scores = scorer.score(pairs.anchors[rows], pairs.positives[rows])
    mined = _none(positive_scores, max(map(len, pairs.negatives), default=0))
    given = [
        [place for place in dict.fromkeys(pairs.negatives[row]) if place not in pairs.known[pairs.anchors[row]]]
        for row in rows.tolist()
    ]
    counts = list(map(len, given))
    places = np.array([place for each in given for place in each], dtype=np.int64)
    scores = scorer.score(np.repeat(pairs.anchors[rows], counts), places)
    accepted = scores < np.repeat(settings.limit(positive_scores), counts)
    ends = np.cumsum(counts)
    for index, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
        kept = start + np.flatnonzero(accepted[start:end])
        mined.too_near[index] = end - start - len(kept)
        mined.documents[index, : len(kept)] = places[kept]
        mined.scores[index, : len(kept)] = scores[kept]
    return mined


def _none(positive_scores: np.ndarray, negatives: int) -> Mined:
    """Return empty results: rows without negatives."""
    shape = (len(positive_scores), negatives)
    return Mined(np.full(shape, -1), np.full(shape, np.nan), positive_scores, np.zeros(shape[0], dtype=np.int64))
