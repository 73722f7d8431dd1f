"""Types of options and arguments that commands share, and how their values are parsed."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

import mote
from mote.reporting import console_logging


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Raise an error that names the missing extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OSError(
            f'{error.name} is not installed, which this command needs: pip install -e ".[{name}]" in a clone, else '
            f'pip install "mote-embeddings[{name}]"'
        ) from error


def pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r}: expected NAME=VALUE")
    return name, value


def mapping(pairs: list[tuple[str, str]] | None, option: str) -> dict[str, str] | None:
    """Return the values of an option that is repeated with pairs; None: it was not given.

    Raises:
        typer.BadParameter: If it names something twice.
    """
    names = [name for name, _ in pairs or []]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise typer.BadParameter(f"{', '.join(map(repr, twice))} is given twice: leave one out", param_hint=option)
    return dict(pairs) if pairs else None


def layers_of(text: str) -> str | list[int]:
    """Parse every, every_other, or indices as in 1,3,5."""
    if text in ("every", "every_other"):
        return text
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected 'every', 'every_other', or indices with commas as in 1,3,5"
        ) from None


def weights_of(words: Sequence[str], option: str, default: float | None = None) -> dict[str, float]:
    """Parse NAME=NUMBER, each name once; a missing number is the default, a missing name "" (empty)."""
    weights: dict[str, float] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        try:
            name, weight = (word, default) if default is not None and not equals else (name, float(number))
            if name in weights or (equals and not name):
                raise ValueError
        except ValueError:
            raise typer.BadParameter(f"{word!r}: expected NAME=NUMBER, each name once", param_hint=option) from None
        weights[name] = weight
    return weights


def _progress_to_stderr(wanted: bool) -> bool:
    if wanted:
        console_logging(logging.getLogger("mote").level).progress = "stderr"
    return wanted


SRC = "folder or Hub id (user/name)"
Mote = Annotated[str, typer.Argument(metavar="SRC", help=f"MoTE: {SRC}.")]
Expert = Annotated[str, typer.Argument(metavar="NAME", help="Expert name.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"Models, each a {SRC}, or LABEL=MODEL.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Output folder.")]
OutOrInPlace = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Output folder. Default, with --overwrite: SRC itself.")
]
Recipe = Annotated[str, typer.Argument(help="Recipe: a file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings that override those of the recipe.")
]
PlanOfRun = Annotated[bool, typer.Option("--dry-run", help="Read the data, print the plan, train nothing.")]
StartAgain = Annotated[bool, typer.Option("--overwrite", help="Discard a finished or interrupted run and start over.")]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit on the Hub.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")]
MaxShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a weight file.")]
Push = Annotated[bool, typer.Option("--push", help="Push the result to the Hub.")]
RepoId = Annotated[
    str | None,
    typer.Option(metavar="USER/NAME", help="Repository on the Hub. Default: the name of DIR, under your user."),
]
Private = Annotated[bool, typer.Option("--private", help="Make a new repository on the Hub private.")]
Instruction = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Instruction in front of the new expert's texts.")
]
Template = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help=r"Instruction around {definition}. Default: Instruct: {definition}\nQuery:"),
]
TasksOfExpert = Annotated[
    list[str], typer.Option("--task", metavar="TASK", help="Additional task of the expert; repeatable.")
]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Batch size for embedding.")]
Device = Annotated[str | None, typer.Option(metavar="D", help="cpu, cuda, cuda:1, mps … Default: the best available.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
Json = Annotated[
    bool, typer.Option("--json", callback=_progress_to_stderr, help="Print JSON. Progress goes to stderr.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the models' repositories.")]


_WRITE: dict[str, tuple[Any, Any]] = {
    "max_shard_size": (MaxShardSize, "5GB"),
    "push": (Push, False),
    "repo_id": (RepoId, None),
    "private": (Private, False),
    "overwrite": (Overwrite, False),
}


def written(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for writing a result to a command, which gets them as one argument `write: mote.WriteOptions`."""
    signature = inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "write"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _WRITE.items()
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        write = mote.WriteOptions(**{name: arguments.pop(name) for name in _WRITE})
        command(**arguments, write=write)

    run.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return run
