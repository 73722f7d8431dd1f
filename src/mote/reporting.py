"""Output for the user: tables, sizes, log lines, and the colors of charts."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

HOW_TO_RESUME = "the same command (without --overwrite) resumes"

# Okabe and Ito's palette, which readers with any color vision can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    """Lay out a Markdown table whose columns line up, so that it also reads well in a terminal.

    `align` has `l` or `r` for each column. Default: the first column left, the others right.
    """
    align = align or "l" + "r" * (len(header) - 1)
    grid = Table(box=box.MARKDOWN)
    for title, side in zip(header, align, strict=True):
        grid.add_column(_cell(title), justify="left" if side == "l" else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(_cell, row))
    output = StringIO()
    Console(file=output, width=10**6, color_system=None).print(grid)
    lines = [line.rstrip() for line in output.getvalue().strip().splitlines()]
    # rich leaves the alignment out of the rule under the header
    rules = zip(lines[1].strip("|").split("|"), align, strict=True)
    lines[1] = f"|{'|'.join(rule[:-1] + ':' if side == 'r' else rule for rule, side in rules)}|"
    return "\n".join(lines)


def _cell(content: object) -> Text:
    return Text(" ".join(str(content).splitlines()).replace("|", r"\|"))


class Report:
    """A result that an interactive Python shell shows as `print` does, and a notebook as Markdown."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)

    def failed(self) -> list[str]:
        """Each failure in one line; the command then has a status of 1."""
        return []


def megabytes(size: int) -> str:
    """Format a number of bytes: `175.4 MB`."""
    return f"{size / 1e6:,.1f} MB"


def millions(count: int) -> str:
    """Format a number of parameters: `22.6 M`."""
    return f"{count / 1e6:,.1f} M"


def label_models(models: str | Path | Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, str]:
    """Return label → model for tables and charts, from models of which some may be given as LABEL=MODEL.

    Others are called by their id on the Hub or the name of their folder, `RUN/model` of a training run by `RUN`.
    """
    if isinstance(models, Mapping):
        return {label: str(model) for label, model in models.items()}
    named: dict[str, str] = {}
    for word in map(str, [models] if isinstance(models, str | Path) else models):
        label, equals, model = word.partition("=")
        if not equals or Path(word).exists():
            label, model = "", word
        label = label or _name_of(model)
        if label in named:
            raise ValueError(f"Two models have the label {label!r}: give one another, as in LABEL=MODEL")
        named[label] = model
    return named


def _name_of(model: str) -> str:
    folder = Path(model).resolve()
    if not folder.is_dir():
        return model
    return folder.parent.name if folder.name == "model" else folder.name


class ConsoleHandler(logging.Handler):
    """Log lines on the terminal: progress to stdout, warnings to stderr, as these are when a line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        warned = record.levelno >= logging.WARNING
        stream = sys.stderr if warned else sys.stdout
        prefix = f"{record.levelname.lower()}: " if warned else ""
        stream.write(f"{prefix}{self.format(record)}\n")
        stream.flush()


def console_logging(quiet: bool = False) -> None:
    """Print what the package logs, as the command line does; `quiet`: only warnings.

    In a job of several processes (`RANK` is set) only the first prints progress; all print warnings.
    """
    logger = logging.getLogger("mote")
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    if not logging.root.handlers and logging.lastResort is not None:
        # Or else a library's first `logging.warning(…)` would add a handler that prints our lines, too.
        logging.lastResort.addFilter(lambda record: record.name.partition(".")[0] != "mote")
        logging.root.addHandler(logging.lastResort)
    logger.setLevel(logging.WARNING if quiet or os.environ.get("RANK", "0") != "0" else logging.INFO)


@contextmanager
def quieted(*names: str, level: int) -> Iterator[None]:
    """Silence what some packages log below a level."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in levels:
            logger.setLevel(level)
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)
