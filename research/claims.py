"""Claims of the paper, and how we measure each of them on our scores.

Source: Romero et al., "Beyond instruction-conditioning, MoTE: Mixture of Task Experts for Multi-task Embedding Models",
Findings of ACL 2025, arXiv 2506.17781. The gains are from its abstract; +1.33, +0.41 and the rank of Expert Averaging
from Tables 5, 4 and 7. Its absolute scores belong to another model and other data.
"""

from dataclasses import dataclass, field

ALL = "all"


@dataclass(frozen=True)
class Claim:
    """A claim that one variant is better than another over a group of datasets.

    Attributes:
        better: Variant that the paper finds better.
        other: Variant it is compared with.
        over: MTEB task type, or `all`.
        gain: Difference of mean scores in the paper, x 100; None: unknown.
        relative_to: Variant over which relative gains are computed, if the paper states any.
        relative: Relative gain in the paper: 0.59 for "59 % higher gain".
    """

    better: str
    other: str
    over: str = ALL
    gain: float | None = None
    relative_to: str | None = None
    relative: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        title: Title.
        variants: Columns.
        reference: Column over which gains are computed.
        types: Task types of the rows; empty: all.
        claims: Conclusions of the paper.
        paper: Column → the paper's scores, by task type (`SEEN` in Table 2, `UNSEEN` in Table 3, both in the other
            tables, in this order), then over all datasets.
    """

    title: str
    variants: tuple[str, ...]
    reference: str
    types: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    paper: dict[str, tuple[float, ...]] = field(default_factory=dict)


SEEN = ("Retrieval", "Classification", "Clustering")
UNSEEN = ("Reranking", "PairClassification", "STS", "Summarization")

TABLES = {
    "table2": Table(
        "Seen tasks: dense without instructions (EM), one dense model per task (SEM), with instructions (IC), MoTE",
        ("start", "em", "sem", "ic", "mote"),
        "em",
        SEEN,
        (
            Claim("ic", "em", "Retrieval", gain=3.27),
            Claim("mote", "em", "Retrieval", gain=5.21),
            Claim("mote", "ic", "Retrieval", gain=1.94, relative_to="em", relative=0.59),
            Claim("mote", "em", gain=3.23),
            Claim("mote", "ic", relative_to="em", relative=0.37),
        ),
        {
            "em": (42.31, 65.37, 42.95, 49.78),
            "sem": (33.45, 64.08, 39.11, 44.76),
            "ic": (45.58, 68.74, 43.09, 52.13),
            "mote": (47.52, 69.16, 42.89, 53.01),
        },
    ),
    "table3": Table(
        "Unseen tasks, and all tasks together",
        ("start", "em", "ic", "mote"),
        "em",
        (*UNSEEN, *SEEN),
        (
            Claim("ic", "em", gain=1.81),
            Claim("mote", "em", gain=2.60),
            Claim("mote", "ic", gain=0.79, relative_to="em", relative=0.43),
        ),
        {
            "em": (55.38, 81.52, 77.91, 32.31, 70.97),
            "ic": (53.37, 80.72, 80.02, 33.76, 71.64),
            "mote": (54.93, 81.81, 80.06, 34.32, 72.22),
        },
    ),
    "table4": Table(
        "Task-aware contrastive learning (TA-CL) or the same batches and temperature for all tasks (static)",
        ("em", "mote-static", "mote"),
        "em",
        claims=(Claim("mote", "mote-static", gain=0.41),),
        paper={
            "mote-static": (46.48, 69.00, 42.82, 54.69, 81.93, 79.70, 34.06, 58.78),
            "mote": (47.52, 69.16, 42.89, 54.93, 81.81, 80.03, 34.32, 59.19),
        },
    ),
    "table5": Table(
        "Routing by sequence (SLR, MoTE) or by token (TLR)",
        ("em", "tlr", "mote"),
        "em",
        claims=(Claim("mote", "tlr", gain=1.33),),
        paper={
            "tlr": (45.17, 67.98, 42.69, 54.40, 80.84, 78.47, 32.67, 57.86),
            "mote": (47.52, 69.16, 42.89, 54.93, 81.81, 80.06, 34.32, 59.19),
        },
    ),
    "table6": Table(
        "Experts in every block (EB) or in every other block (EOB)",
        ("em", "mote-every-other", "mote"),
        "em",
        claims=(Claim("mote", "mote-every-other"),),
        paper={
            "mote-every-other": (47.20, 69.17, 42.81, 54.91, 81.83, 79.96, 33.97, 59.07),
            "mote": (47.52, 69.16, 42.89, 54.93, 81.81, 80.06, 34.32, 59.19),
        },
    ),
    "table7": Table(
        "Expert averaging (EA): one dense model of the experts",
        ("em", "ic", "mote-average", "mote"),
        "em",
        claims=(Claim("mote-average", "ic"), Claim("mote", "mote-average")),
        paper={  # `mote` has experts in every other block there
            "ic": (45.58, 68.74, 43.09, 53.37, 80.72, 80.02, 33.76, 58.43),
            "mote-average": (46.93, 68.82, 42.70, 54.91, 81.59, 79.13, 33.38, 58.60),
            "mote": (47.20, 69.17, 42.81, 54.91, 81.83, 79.96, 33.97, 59.07),
        },
    ),
}
