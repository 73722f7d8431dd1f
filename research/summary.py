"""The tables of docs/results.md: one comparison a row, from the stored scores of any scale."""

from collections.abc import Mapping
from dataclasses import dataclass

from mote.reporting import table as markdown_table
from research.claims import ALL, SEEN, Claim, Table
from research.scores import Scores
from research.tables import cell, compared, datasets_of, p_value


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        label: What is compared.
        scale: Scale of the stored scores.
        better: Variant that is expected to be better.
        other: Variant that it is compared with.
        over: Task type; `all`; or `seen`, the types of the tasks that are trained on.
        paper: The paper's gain.
    """

    label: str
    scale: str
    better: str
    other: str
    over: str = ALL
    paper: float | None = None


_CPU = "five-tasks+homogeneous+distilled+mined+labels-twice"
_CPU_MOTE = "five-tasks+matching-by-search+homogeneous+distilled+mined+labels-twice"
_LARGE = "five-tasks+homogeneous+distilled+labels-twice"
_LARGE_MOTE = "five-tasks+matching-by-search+homogeneous+distilled+labels-twice"
_CHOSEN = "to-mean-0.25+unseen-near-start+search-to-start-0.25"
SUMMARIES: dict[str, tuple[Row, ...]] = {
    "best": (
        Row("first", "medium-bf16", f"mote+{_CPU_MOTE}+{_CHOSEN}", f"ic+{_CPU}+to-start-0.25"),
        Row("again, on a GPU", "medium-gpu", f"mote+{_CPU_MOTE}+{_CHOSEN}", f"ic+{_CPU}"),
        Row(
            "over twice the steps",
            "medium-gpu",
            f"mote+{_CPU_MOTE}+{_CHOSEN}",
            f"ic+{_CPU}+two-epochs+to-start-0.25",
        ),
        Row(
            "three times the rows",
            "large-gpu",
            f"mote+{_LARGE_MOTE}+{_CHOSEN}+to-start-0.25",
            f"ic+{_LARGE}+to-start-0.25",
        ),
        Row(
            "last: parts moved one by one",
            "medium-cpu",
            f"mote+{_CPU_MOTE}+own-moves-and-shared+summaries-distilled",
            f"ic+{_CPU}+epochs-1.1+to-start-0.25",
        ),
        Row(
            "over three dense models",
            "medium-cpu",
            f"mote+{_CPU_MOTE}+own-moves-and-shared+summaries-distilled",
            f"sem+{_LARGE_MOTE}",
        ),
        Row(
            "three dense models, more rows",
            "large-gpu",
            f"mote+{_LARGE_MOTE}+{_CHOSEN}+to-start-0.25",
            f"sem+{_LARGE_MOTE}",
        ),
    ),
    "paper": (
        Row("over dense", "medium-gpu", "mote", "em", paper=2.60),
        Row("over dense with instructions", "medium-gpu", "mote", "ic", paper=0.79),
        Row("over dense, retrieval", "medium-gpu", "mote", "em", "Retrieval", paper=5.21),
        Row("over dense, clustering", "medium-gpu", "mote", "em", "Clustering"),
        Row("over dense, STS", "medium-gpu", "mote", "em", "STS"),
        Row("from a finished embedder", "medium-embedder", "mote", "em"),
        Row("class labels", "medium-labels", "mote", "em"),
        Row("labels, trained tasks", "medium-labels", "mote", "em", "seen"),
        Row("labels, trained tasks, over instructions", "medium-labels", "mote", "ic", "seen"),
    ),
    "parts": (
        Row("task-aware batches over static ones", "medium-bf16", "mote", "mote-static", paper=0.41),
        Row("from a finished embedder", "small", "mote", "mote-static", paper=0.41),
        Row("routing by text over by token", "medium", "mote", "tlr", paper=1.33),
        Row("from a finished embedder", "small", "mote", "tlr", paper=1.33),
        Row("experts in every over every other block", "medium-bf16", "mote", "mote-every-other"),
        Row("experts over their average", "medium-bf16", "mote", "mote-average"),
        Row("STS by the expert for documents", "medium-bf16", "mote+unseen-by-search_document", "mote"),
    ),
}


def summary_table(rows: tuple[Row, ...], of_scales: Mapping[str, Scores]) -> str:
    """Format comparisons, by the seeds and datasets that both variants have."""
    lines = []
    for row in rows:
        names = (row.better, row.other)
        types = {ALL: (), "seen": SEEN}.get(row.over, (row.over,))
        scores = of_scales[row.scale].with_common_seeds(*names)
        datasets = datasets_of(scores, types, names)
        found = compared(Claim(*names), Table("", names, row.other, types), scores)
        over_seeds = "" if found.over_seeds is None else p_value(found.over_seeds)
        lines.append(
            [
                row.label,
                *(f"{cell(scores, name, datasets).mean:.2f}" for name in names),
                f"{found.tests.gain:+.2f}",
                "" if row.paper is None else f"{row.paper:+.2f}",
                p_value(found.tests.paired_t),
                over_seeds,
                str(len(scores.seeds[row.better])),
            ]
        )
    columns = ["", "MoTE", "other", "gain", "paper", "p, sets", "p, seeds", "seeds"]
    keep = [place for place, _ in enumerate(columns) if place == 0 or any(line[place] for line in lines)]
    shown = [[line[place] for place in keep] for line in lines]
    return markdown_table([columns[place] for place in keep], shown)
