"""Output for the user: tables, sizes, log lines, and the colors of charts."""

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
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

    Args:
        header: Column titles.
        rows: Cells of each row.
        align: `l` or `r` for each column. Default: the first column left, the others right.
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


def megabytes(size: int) -> str:
    """Format a number of bytes: `175.4 MB`."""
    return f"{size / 1e6:,.1f} MB"


def millions(count: int) -> str:
    """Format a number of parameters: `22.6 M`."""
    return f"{count / 1e6:,.1f} M"


def label_models(models: str | Path | Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, str]:
    """Label models for tables and charts.

    Args:
        models: One model or several, each a folder, an id on the Hub, or LABEL=MODEL; or label → model. Without a
            label, a folder is called by its name (`RUN/model` of a training run by `RUN`), or by its path as given
            where another model has this name; a model on the Hub by its id.

    Returns:
        Label → model, in order.

    Raises:
        ValueError: If two models have the same label.
    """
    if isinstance(models, Mapping):
        return {label: str(model) for label, model in models.items()}
    given: list[tuple[str, str]] = []
    for word in [str(one) for one in ([models] if isinstance(models, str | Path) else models)]:
        label, equals, model = word.partition("=")
        given.append((label, model) if equals and not Path(word).exists() else ("", word))
    names = [label or _name_of(model) for label, model in given]
    labels = [
        name if label or names.count(name) == 1 else model for name, (label, model) in zip(names, given, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise ValueError(f"Two models have the same label ({', '.join(labels)}): choose others, as in LABEL=MODEL")
    return {label: model for label, (_, model) in zip(labels, given, strict=True)}


def _name_of(model: str) -> str:
    folder = Path(model).resolve()
    if not folder.is_dir():
        return model
    return folder.parent.name if folder.name == "model" else folder.name


class ConsoleHandler(logging.Handler):
    """Log lines on the terminal: progress to stdout, warnings and errors to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the current stream, which tests and notebooks replace."""
        warned = record.levelno >= logging.WARNING
        stream = sys.stderr if warned else sys.stdout
        prefix = f"{record.levelname.lower()}: " if warned else ""
        stream.write(f"{prefix}{self.format(record)}\n")
        stream.flush()


def console_logging(level: int = logging.INFO) -> ConsoleHandler:
    """Print what the package logs, as the command line does.

    In a job of several processes (`RANK` is set) only the first prints progress; all print warnings.

    Args:
        level: Lowest level to print: `logging.DEBUG`, `INFO` or `WARNING`.

    Returns:
        The handler, to remove it from the logger `mote`. A second call returns the same one.
    """
    logger = logging.getLogger("mote")
    console = next((handler for handler in logger.handlers if isinstance(handler, ConsoleHandler)), ConsoleHandler())
    console.setLevel(logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.NOTSET)
    logger.addHandler(console)  # a logger takes a handler once
    logger.setLevel(level)
    return console
