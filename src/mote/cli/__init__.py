"""The command `mote`: every verb is one call of the library.

Each command imports the libraries that it needs: torch takes seconds, for which `mote --help` should not wait.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Annotated, Any

import typer

import mote
from mote.cli import commands, corpora, experts
from mote.reporting import console_logging

_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # read by huggingface_hub and transformers when they are imported

# The tables of rich_markup_mode cut the names of options off in narrow terminals.
app = typer.Typer(name="mote", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
experts_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, add, extract, merge, remove and rename experts."
)


@functools.cache  # to build it takes longer than to find most mistakes in command lines
def command_tree() -> Any:
    """Return the click command that `app` describes, with those below it in `commands`."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name. Default: those of the process, which runs nothing else afterwards:
            once the command is done, signals end the process silently.

    Returns:
        The exit status: 0; 1 after an error and 2 after a usage error, which are printed in one line; 130 or 143 after
        SIGINT or SIGTERM.
    """
    if "_MOTE_COMPLETE" in os.environ:  # the shell asks for completions
        app(prog_name="mote")
    root = logging.getLogger("mote")
    level = root.level
    console = console_logging()
    bars = os.environ.get(_NO_BARS)
    received: list[int] = []
    try:
        with _terminable(received, last=argv is None):
            return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {str(interrupt) or 'no partial result was left behind'}\n")
        return 128 + (received[0] if received else signal.SIGINT)
    finally:
        root.removeHandler(console)
        root.setLevel(level)
        if bars is None:
            os.environ.pop(_NO_BARS, None)


def _run(argv: Sequence[str]) -> int:
    command = command_tree()
    try:
        with command.make_context("mote", list(argv)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:  # a usage error
        message = error.format_message()
        if message.startswith("Usage: "):  # no arguments: the help text
            typer.echo(message, err=True)
        else:
            place = getattr(getattr(error, "ctx", None), "command_path", "mote")
            _print_error(f"{message} (see `{place} --help`)")
        return error.exit_code
    except BrokenPipeError:  # the reader of the output has gone, as in `mote experts list SRC | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if logging.getLogger("mote").isEnabledFor(logging.DEBUG):
            import traceback

            traceback.print_exc()
        elif isinstance(error, ValueError | OSError):
            _print_error(str(error))
        else:
            _print_error(f"{type(error).__name__}: {error} (`mote --debug …` prints the traceback)")
        return 1
    return 0


def _print_error(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


@contextlib.contextmanager
def _terminable(received: list[int], last: bool) -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that what was started is cleaned up."""

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: do not interrupt the cleanup
        received.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, the only one that may do this
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if last else before)
        if last:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mote {mote.__version__}")
        raise typer.Exit


@app.callback()
def _mote(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", "-v", envvar="MOTE_DEBUG", help="Print debug messages, and errors with tracebacks."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")] = False,
) -> None:
    """Text-embedding models with task experts."""
    console_logging(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
    if quiet:
        os.environ.setdefault(_NO_BARS, "1")


_COMMANDS: dict[str, Callable[..., None]] = {
    "upcycle": commands.upcycle,
    "lengthen": commands.lengthen,
    "train": commands.train,
    "pretrain": commands.pretrain,
    "evaluate": commands.evaluate,
    "analyze": commands.analyze,
    "embed": corpora.embed,
    "mine": corpora.mine,
    "filter": corpora.filter_pairs,
    "average": experts.average,
    "interpolate": experts.interpolate,
    "export": experts.export,
    "compress": experts.compress,
    "set": experts.set_values,
    "memory": commands.memory,
    "card": commands.card,
}
_EXPERTS_COMMANDS: dict[str, Callable[..., None]] = {
    "list": experts.list_experts,
    "add": experts.add_expert,
    "extract": experts.extract_expert,
    "merge": experts.merge_experts,
    "remove": experts.remove_expert,
    "rename": experts.rename_expert,
}
for name, command in _COMMANDS.items():
    app.command(name)(command)
for name, command in _EXPERTS_COMMANDS.items():
    experts_app.command(name)(command)
app.add_typer(experts_app, name="experts")
