"""What the paper states, as far as it is known here, and how each statement is measured on our scores.

Source: Romero et al., "Beyond instruction-conditioning, MoTE: Mixture of Task Experts for Multi-task Embedding Models",
Findings of ACL 2025, arXiv 2506.17781. The gains are from its abstract; +1.33, +0.41 and the place of Expert Averaging
from Tables 5, 4 and 7. Absolute scores of its tables are not repeated: they are of another model and other data.
"""

from dataclasses import dataclass

ALL = "all"


@dataclass(frozen=True)
class Claim:
    """One statement: how much better one variant is than another, over a group of datasets.

    Attributes:
        better: The variant that the paper finds better.
        other: What it is compared with.
        over: Task type (mteb's), or `all`.
        gain: The paper's difference of the mean scores, x 100; none where it is not known.
        relative_to: Variant above which the gains of both are put in proportion, if the paper does so.
        relative: The paper's proportion, as in 0.59 for "59 % higher gain".
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
        title: What it shows.
        variants: Its columns.
        reference: The column above which gains are stated.
        types: Task types of its rows; none: all.
        claims: What the paper concludes.
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


# What the paper does not ask: whether the learning rate decides.
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
