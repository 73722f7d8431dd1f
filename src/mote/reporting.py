"""What the user reads: tables, sizes, progress lines, and the colors of charts."""

import logging
import os
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len

# Okabe and Ito's palette, which readers with any color vision can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    """Lay out a plain-text table with a rule under its header.

    Args:
        header: Column titles.
        rows: Cells of each row, as many as there are columns.
        align: `l` or `r` for each column. Default: the first column left, the others right.
    """
    align = align or "l" + "r" * (len(header) - 1)
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell + " " * (width - cell_len(cell)) if side == "l" else " " * (width - cell_len(cell)) + cell
            for cell, width, side in zip(row, widths, align, strict=True)
        ).rstrip()
        for row in cells
    )


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    r"""Lay out a Markdown table; a `|` in a cell is written as `\|`, a line break as a space.

    Args:
        header: Column titles.
        rows: Cells of each row, as many as there are columns.
        align: `l` or `r` for each column. Default: the first column left, the others right.
    """
    align = align or "l" + "r" * (len(header) - 1)
    rule = ["---" if side == "l" else "---:" for side in align]
    lines = ([" ".join(str(cell).replace("|", r"\|").splitlines()) for cell in row] for row in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(size: int) -> str:
    """Format a number of bytes: `175.4 MB`."""
    return f"{size / 1e6:,.1f} MB"


def millions(count: int) -> str:
    """Format a number of parameters: `22.6 M`."""
    return f"{count / 1e6:,.1f} M"


class _Console(logging.Handler):
    """Progress to stdout as plain lines, warnings and errors to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the stream of the moment, which tests and notebooks replace."""
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        stream.write(self.format(record) + "\n")
        stream.flush()

    def format(self, record: logging.LogRecord) -> str:
        """Put the level's name in front of warnings and errors."""
        message = super().format(record)
        return f"{record.levelname.lower()}: {message}" if record.levelno >= logging.WARNING else message


def console_logging(debug: bool = False) -> logging.Handler:
    """Print what the package logs, as the command line does.

    In a job of several processes (`RANK` is set) only the first prints progress; all print warnings.

    Args:
        debug: Print debug messages too.

    Returns:
        The handler, to remove it from the logger `mote`. A second call returns the same one.
    """
    logger = logging.getLogger("mote")
    console = next((handler for handler in logger.handlers if isinstance(handler, _Console)), None) or _Console()
    console.setLevel(logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.NOTSET)
    logger.addHandler(console)  # a logger takes a handler once
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    return console
