"""Claims of the paper, and how each is measured on our scores.

Source: Romero et al., "Beyond instruction-conditioning, MoTE: Mixture of Task Experts for Multi-task Embedding Models",
Findings of ACL 2025, arXiv 2506.17781. The gains are from its abstract; +1.33, +0.41 and the rank of Expert Averaging
from Tables 5, 4 and 7. Absolute scores are not repeated: they belong to another model and other data.
"""

from dataclasses import dataclass

ALL = "all"


@dataclass(frozen=True)
class Claim:
    """A claim that one variant is better than another over a group of datasets.

    Attributes:
        better: Variant that the paper finds better.
        other: Variant it is compared with.
        over: Task type of MTEB, or `all`.
        gain: Difference of mean scores in the paper, x 100; None: unknown.
        relative_to: Variant from which relative gains are computed, if the paper states any.
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
        reference: Column from which gains are computed.
        types: Task types of the rows; empty: all.
        claims: Conclusions of the paper.
    """

    title: str
    variants: tuple[str, ...]
    reference: str
    types: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()


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
            Claim("mote", "ic", relative_to="em", relative=0.37),
        ),
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
    ),
    "table4": Table(
        "Task-aware contrastive learning (TA-CL) or the same batches and temperature for all tasks (static)",
        ("em", "mote-static", "mote"),
        "em",
        claims=(Claim("mote", "mote-static", gain=0.41),),
    ),
    "table5": Table(
        "Routing by sequence (SLR, MoTE) or by token (TLR)",
        ("em", "tlr", "mote"),
        "em",
        claims=(Claim("mote", "tlr", gain=1.33),),
    ),
    "table6": Table(
        "Experts in every block (EB) or in every other block (EOB)",
        ("em", "mote-every-other", "mote"),
        "em",
        claims=(Claim("mote", "mote-every-other"),),
    ),
    "table7": Table(
        "Expert averaging (EA): one dense model of the experts",
        ("em", "ic", "mote-average", "mote"),
        "em",
        claims=(Claim("mote-average", "ic"), Claim("mote", "mote-average")),
    ),
}


# Not in the paper: how much depends on the learning rate.
RATES = Table(
    "The same variants at another learning rate",
    tuple(f"{name}{rate}" for name in ("em", "ic", "mote-every-other", "mote") for rate in ("", "-high-rate")),
    "em",
    claims=(
        Claim("mote-high-rate", "ic-high-rate"),
        Claim("mote-high-rate", "ic-high-rate", "Retrieval"),
        Claim("mote-high-rate", "mote", "Classification"),
        Claim("mote-high-rate", "mote", "Clustering"),
        Claim("mote", "mote-high-rate", "Retrieval"),
        Claim("mote", "mote-high-rate", "STS"),
    ),
)
