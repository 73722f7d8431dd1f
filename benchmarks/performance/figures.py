"""What a measurement is asked, and what it tells: one `Figure` for each line of the table in docs/performance.md."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"


@dataclass(frozen=True)
class Options:
    """What all measurements share.

    Attributes:
        checkpoint: A dense checkpoint, in Sentence-Transformers' format.
        device: `cpu` or `cuda`.
        dtype: Of the weights, on a GPU.
        seconds: How long to measure one ratio.
        quick: Only show that the measurement runs: few repeats, small inputs.
        data: A folder of text sets, as in `examples/data`.
    """

    checkpoint: Path = SMALL_ENCODER
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    seconds: float = 6.0
    quick: bool = False
    data: Path = ROOT / "examples" / "data"


@dataclass(frozen=True)
class Bar:
    """One number and what it must reach.

    Attributes:
        what: Of what it is the number.
        value: As measured.
        limit: The bar.
        at_least: Whether the number must reach the bar, rather than stay below it.
    """

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the bar is reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        """As in `forward, 1 row of 16: 1.003 (≤ 1.01) holds`."""
        sign = "≥" if self.at_least else "≤"
        return f"{self.what}: {self.value:.3f} ({sign} {self.limit:g}) {'holds' if self.holds else 'MISSED'}"


@dataclass(frozen=True)
class Figure:
    """What one measurement found.

    Attributes:
        name: Of the module that measures it.
        title: One line.
        columns: Of the table.
        rows: Of the table, as text.
        bars: What had to hold.
        notes: How it was measured, and what a reader should know.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Lay it out in Markdown."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"- {line}" for line in (*self.bars, *self.notes))])


def measure(name: str, options: Options) -> Figure:
    """Measure one figure, by the module of its name. Not in `__main__`, which other processes do not import."""
    return import_module(f"benchmarks.performance.{name}").measure(options)
