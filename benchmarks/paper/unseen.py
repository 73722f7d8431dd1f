"""Tasks that no expert is trained on: which expert should serve them, by validation sets."""

from functools import partial
from statistics import mean

from benchmarks.locking import share
from benchmarks.paper.improvements import EXPERTS
from benchmarks.paper.runs import Runs
from mote.reporting import markdown_table

SEEN_TYPES = ("Retrieval", "Classification", "Clustering")
UNSEEN_TYPES = ("STS", "PairClassification", "Reranking")
WAYS = (
    *(f"unseen-by-{expert}" for expert in EXPERTS),
    "unseen-by-mean",
    "shared",
    "matching-by-search",
    "five-tasks",
    "five-tasks+matching-by-search",
)
"""Improvements that change which expert serves tasks without training data; in the paper that of classification."""
LOSS = 0.5  # largest acceptable loss of a seen type


def ways(runs: Runs) -> dict[str, dict[str, float]]:
    """Score each way on validation sets, where `mote` is the paper's: way → task type → mean over validation sets."""
    names = ("mote", *(f"mote+{way}" for way in WAYS))
    share(partial(runs.validated, name) for name in names)
    return {name: runs.validated(name) for name in names}


def best_way(scores: dict[str, dict[str, float]]) -> str:
    """Return the way that is best for unseen types, among those that cost no seen type more than `LOSS`."""
    base = scores["mote"]
    harmless = [name for name, own in scores.items() if all(own[kind] >= base[kind] - LOSS for kind in SEEN_TYPES)]
    return max(harmless, key=lambda name: mean(scores[name][kind] for kind in UNSEEN_TYPES))


def ways_table(scores: dict[str, dict[str, float]]) -> str:
    """Format the scores of all ways."""
    columns = ["on validation sets", *UNSEEN_TYPES, "mean", *SEEN_TYPES]
    rows = []
    for name, of_way in scores.items():
        unseen = [of_way[kind] for kind in UNSEEN_TYPES]
        cells = [*unseen, mean(unseen), *(of_way[kind] for kind in SEEN_TYPES)]
        rows.append([f"**{name}**" if name == best_way(scores) else name, *(f"{score:.2f}" for score in cells)])
    return markdown_table(columns, rows)
