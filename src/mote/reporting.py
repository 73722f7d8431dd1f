"""Output for the user: tables, sizes, progress lines, and the colors of charts."""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from rich.cells import cell_len

HOW_TO_RESUME = "the same command (without --overwrite) resumes"

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


class Report:
    """A result that an interactive Python shell shows as text, and a notebook as Markdown."""

    def to_markdown(self) -> str:
        """Format as Markdown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Show as `print` does."""
        return str(self)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def megabytes(size: int) -> str:
    """Format a number of bytes: `175.4 MB`."""
    return f"{size / 1e6:,.1f} MB"


def millions(count: int) -> str:
    """Format a number of parameters: `22.6 M`."""
    return f"{count / 1e6:,.1f} M"


def labelled_models(models: str | Path | Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, str]:
    """Return label → model, for one model, several (as in `name_models`), or such a mapping.

    Raises:
        ValueError: As `name_models`.
    """
    if isinstance(models, Mapping):
        return {label: str(model) for label, model in models.items()}
    return name_models([str(one) for one in ([models] if isinstance(models, str | Path) else models)])


def name_models(words: Sequence[str]) -> dict[str, str]:
    """Label models for tables, from words such as `MODEL` or `LABEL=MODEL`.

    Without a label, a folder is named by the shortest end of its path that is unique (the folder `RUN/model` of a
    training run by `RUN`), and a model on the Hub by its id.

    Returns:
        Label → model, in order.

    Raises:
        ValueError: If a model is given twice without a label, two have the same label, or a label has no model.
    """
    pairs = []
    for word in words:
        label, equals, model = word.partition("=")
        if not equals or Path(word).exists():
            label, model = "", word
        if not model and equals:
            raise ValueError(f"{word!r} names no model: expected MODEL or LABEL=MODEL")
        pairs.append((label, model))
    names = iter(_last_parts([model for label, model in pairs if not label]))
    named = [(label or next(names), model) for label, model in pairs]
    labels = [label for label, _ in named]
    if len(set(labels)) < len(labels):
        raise ValueError(f"Two models have the same label ({', '.join(labels)}): choose others, as in LABEL=MODEL")
    return dict(named)


def _last_parts(models: Sequence[str]) -> list[str]:
    """Name folders by the shortest ends of their paths that are unique, and other models by themselves."""
    parts = [Path(model).resolve().parts if Path(model).is_dir() else (model,) for model in models]
    for index, one in enumerate(parts):
        if one in parts[:index]:
            raise ValueError(f"{models[index]} is given twice")
    of_runs = [len(one) > 2 and one[-1] == "model" and one[:-1] not in parts for one in parts]
    parts = [one[:-1] if of_run else one for one, of_run in zip(parts, of_runs, strict=True)]
    return [
        "/".join(next(one[-n:] for n in count(1) if sum(other[-n:] == one[-n:] for other in parts) == 1))
        for one in parts
    ]


def write_together(
    writers: Mapping[Path, Callable[[Path], object]], obsolete: Iterable[Path] = (), name: str = "The results"
) -> None:
    """Write files of one folder beside their places, and move them there once all are complete.

    Args:
        writers: File → function that writes it to the path given.
        obsolete: Files of an earlier run that this one does not have, to delete.
        name: What they are, in the error message.

    Raises:
        OSError: If they cannot be written; those of an earlier run are then still there, unless moving itself failed.
    """
    folder = next(iter(writers)).parent
    writers = {file.resolve(): write for file, write in writers.items()}  # a link stays one
    parts = {file: file.with_name(f".{secrets.token_hex(4)}.part.{file.name}") for file in writers}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, part in parts.items():
            writers[file](part)
        for file, part in parts.items():
            part.replace(file)
        for file in obsolete:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{name} cannot be written to {folder}: {error}") from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)


class Console(logging.Handler):
    """Progress to stdout (or wherever `progress` says) as plain lines, warnings and errors to stderr."""

    progress: Literal["stdout", "stderr"] = "stdout"

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the current stream, which tests and notebooks replace."""
        to_stderr = record.levelno >= logging.WARNING or self.progress == "stderr"
        stream = sys.stderr if to_stderr else sys.stdout
        stream.write(self.format(record) + "\n")
        stream.flush()

    def format(self, record: logging.LogRecord) -> str:
        """Put the level's name in front of warnings and errors."""
        message = super().format(record)
        return f"{record.levelname.lower()}: {message}" if record.levelno >= logging.WARNING else message


def console_logging(level: int = logging.INFO) -> Console:
    """Print what the package logs, as the command line does.

    In a job of several processes (`RANK` is set) only the first prints progress; all print warnings.

    Args:
        level: Lowest level to print: `logging.DEBUG`, `INFO` or `WARNING`.

    Returns:
        The handler, to remove it from the logger `mote`. A second call returns the same one.
    """
    logger = logging.getLogger("mote")
    console = next((handler for handler in logger.handlers if isinstance(handler, Console)), None) or Console()
    console.setLevel(logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.NOTSET)
    logger.addHandler(console)  # a logger takes a handler once
    logger.setLevel(level)
    return console
