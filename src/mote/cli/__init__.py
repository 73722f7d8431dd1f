"""The command `mote`: every verb is one call of the library.

Each command imports the libraries that it needs: torch takes seconds, for which `mote --help` should not wait.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

import mote
from mote.reporting import console_logging

_COMPLETION = "--install-completion"


@dataclass
class Verb:
    """A command.

    Attributes:
        function: `module:name` of its function, below `mote`.
        help: Its line in `mote --help`.
        extra: Extra of the package that it needs.
        fixed: Parameters of the function that are not on the command line, and their values.
    """

    function: str
    help: str
    extra: str = ""
    fixed: dict[str, str] = field(default_factory=dict)


VERBS = {
    "upcycle": Verb("cli.verbs:upcycle", "Turn a dense text encoder into a MoTE."),
    "lengthen": Verb(
        "lengthening:lengthen", "Replace an encoder's learned positions by rotary ones, for longer texts."
    ),
    "train": Verb(
        "cli.verbs:run_recipe",
        "Train a model from a recipe.",
        "train",
        fixed={"function": "mote.training.train:train", "plan": "mote.training.train:plan"},
    ),
    "pretrain": Verb(
        "cli.verbs:run_recipe",
        "Pre-train a model on plain text: masked language modelling, alone or with a decoder (CoT-MAE).",
        "train",
        fixed={"function": "mote.training.pretraining:pretrain", "plan": "mote.training.pretraining:plan_pretraining"},
    ),
    "evaluate": Verb("cli.verbs:evaluate", "Score models with MTEB.", "evaluate"),
    "analyze": Verb("cli.verbs:analyze", "Show how far experts have specialised.", "evaluate"),
    "embed": Verb("corpora.embed:embed_corpus", "Embed a corpus into sharded parquet files.", "corpora"),
    "mine": Verb("corpora.mining:mine_negatives", "Mine hard negatives for datasets of pairs.", "corpora"),
    "filter": Verb("corpora.filtering:filter_pairs", "Drop the pairs that a model does not confirm.", "corpora"),
    "average": Verb("experts:average", "Average the experts into a dense model."),
    "interpolate": Verb("experts:interpolate", "Move experts towards their mean."),
    "export": Verb("cli.verbs:export", "Write one expert as a dense model."),
    "compress": Verb("experts:compress", "Make experts take less memory."),
    "set": Verb("experts.configuring:configure", "Set default task, tasks of experts, instructions and routing."),
    "memory": Verb("training.memory:estimate_memory", "Estimate the memory of training."),
    "card": Verb("checkpoints.cards:write_card", "Rewrite a model's card."),
    "experts list": Verb("experts:list_experts", "List the experts of a MoTE."),
    "experts add": Verb("cli.verbs:add_expert", "Write a MoTE with one more expert."),
    "experts extract": Verb("experts:extract", "Write one expert into files of its own."),
    "experts merge": Verb("cli.verbs:merge_experts", "Write a MoTE with one more expert, the weighted mean of others."),
    "experts remove": Verb("experts:remove", "Write a MoTE without one of its experts."),
    "experts rename": Verb("experts:rename", "Write a MoTE with an expert renamed."),
}


def application(words: Sequence[str]) -> App:
    """Return the app with the commands that are among the words; of all others, it knows the line in the help.

    torch and transformers take seconds to import, for which `mote --help` should not wait.
    """
    app = App("mote", help="Text-embedding models with task experts.", help_format="plaintext")
    app.version = lambda: f"mote {mote.__version__}"
    app.result_action = "return_value"
    app.suppress_keyboard_interrupt = app.meta.suppress_keyboard_interrupt = False
    app.meta.default(partial(_launch, app))
    app.register_install_completion_command(_COMPLETION)
    group = App("experts", help="List, add, extract, merge, remove and rename experts.")
    app.command(group)
    for name, verb in VERBS.items():
        *of_group, name = name.split()
        parent = group if of_group else app
        if name in words or _COMPLETION in words:
            from mote.cli.build import as_command

            parent.command(as_command(verb), name=name, help_format="markdown")
        else:
            parent.command(_not_run, name=name, help=verb.help)
    return app


def _launch(
    app: App,
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[
        bool, Parameter(name=["--debug", "-v"], env_var="MOTE_DEBUG", negative=(), show_default=False)
    ] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), show_default=False)] = False,
) -> None:
    """Run a command.

    Args:
        app: The app.
        words: The command, and its arguments.
        debug: Print debug messages, and errors with tracebacks.
        quiet: Print only results, warnings and errors.
    """
    console_logging(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
    if quiet:
        # Read by huggingface_hub and transformers when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app(words, exit_on_error=False, print_error=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name. Default: those of the process.

    Returns:
        The exit status: 0; 1 after an error and 2 after a usage error, which are printed in one line; 130 or 143 after
        SIGINT or SIGTERM.
    """
    logger = logging.getLogger("mote")
    level, console = logger.level, console_logging()
    received: list[int] = []
    try:
        with _terminable(received):
            return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {str(interrupt) or 'no partial result was left behind'}\n")
        return 128 + (received[0] if received else signal.SIGINT)
    finally:
        logger.removeHandler(console)
        logger.setLevel(level)


def _run(argv: Sequence[str]) -> int:
    try:
        application(argv).meta(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        place = " ".join(["mote", *(error.command_chain or argv[:1])])
        _print_error(f"{error} (see `{place} --help`)")
        return 2
    except BrokenPipeError:  # the reader of the output has gone, as in `mote experts list SRC | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if logging.getLogger("mote").isEnabledFor(logging.DEBUG):
            import traceback

            traceback.print_exc()
        elif isinstance(error, ValueError | OSError | ImportError):
            _print_error(str(error))
        else:
            _print_error(f"{type(error).__name__}: {error} (`mote --debug …` prints the traceback)")
        return 1
    return 0


def _print_error(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


@contextlib.contextmanager
def _terminable(received: list[int]) -> Iterator[None]:
    """Treat SIGTERM as an interrupt, so that what was started is cleaned up."""

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: do not interrupt the cleanup
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _not_run() -> None:
    """Stand for a command that is not on the command line."""
