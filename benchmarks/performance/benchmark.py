"""Options and result of a benchmark; each module of this folder that has a `measure` function is one."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from mote.reporting import table as markdown_table

ROOT = Path(__file__).parents[2]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"


@dataclass(frozen=True)
class Options:
    """Options of all benchmarks.

    Attributes:
        checkpoint: Dense checkpoint in Sentence-Transformers' format.
        seconds: Measuring time per ratio.
        quick: Few repeats and small inputs, to check that the benchmark runs.
        data: Data folder, such as `examples/data`.
    """

    checkpoint: Path = SMALL_ENCODER
    seconds: float = 6.0
    quick: bool = False
    data: Path = ROOT / "examples" / "data"


@dataclass(frozen=True)
class Target:
    """A measured value and its limit.

    Attributes:
        what: Name of the measure.
        value: Measured value.
        limit: Highest allowed value, or the lowest with `at_least`.
        at_least: Whether higher is better.
    """

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        """Format as `forward, 1 x 16: 1.003 (≤ 1.01), met`."""
        sign = "≥" if self.at_least else "≤"
        value = f"{self.value:.3f}" if self.value >= 0.001 else f"{self.value:.2g}"
        return f"{self.what}: {value} ({sign} {self.limit:g}), {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True)
class Benchmark:
    """Results of one benchmark.

    Attributes:
        name: Name of its module.
        title: Heading.
        columns: Column titles.
        rows: Cells of the table.
        targets: Targets, met or missed.
        notes: Notes on how it was measured.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Format as Markdown."""
        lines = [f"- {line}" for line in (*self.targets, *self.notes)]
        return "\n".join([f"### {self.title}", "", markdown_table(self.columns, self.rows), "", *lines])


def measure(name: str, options: Options) -> Benchmark:
    """Run a benchmark by its name. Defined here because spawned processes cannot import `__main__`."""
    return import_module(f"benchmarks.performance.{name}").measure(options)
