"""The command `mote`: every verb is one call of the library.

Each command imports the libraries that it needs: torch takes seconds, for which `mote --help` should not wait.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from cyclopts import App, CycloptsError, Group

import mote
from mote.files import expanded
from mote.reporting import console_logging

_COMPLETION = "--install-completion"


GROUPS = {
    "Every day": {
        "upcycle": ("upcycling", "sentence-transformers/all-MiniLM-L6-v2 --out minilm-mote"),
        "train": ("tutorial", "my-tasks model.source=MODEL tickets=tickets.csv faq=faq.csv"),
        "evaluate": ("evaluation", "MODEL BASELINE --data DATA"),
        "embed": ("corpora", "MODEL corpus.jsonl --task document --out VECTORS"),
        "serve": ("serving", "MOTE --port 8000"),
        "push": ("tutorial", "MOTE you/mote"),
        "export": ("export", "MOTE --expert search_query --out DENSE"),
        "set": ("routing", "MOTE --default-task search_document --overwrite"),
        "route": ("routing", "MOTE tickets=tickets.csv faq=faq.csv"),
    },
    "Experts": {
        "experts": ("experts", ""),
        "experts list": ("experts", "MOTE"),
        "experts add": ("experts", "MOTE mean --name legal --out BIGGER"),
        "experts extract": ("experts", "MOTE legal --out legal.safetensors"),
        "experts merge": ("experts", "MOTE a=0.7 b=0.3 --name both --out BIGGER"),
        "experts remove": ("experts", "MOTE legal --out SMALLER"),
        "experts rename": ("experts", "MOTE legal law --overwrite"),
        "average": ("experts", "MOTE --out DENSE"),
        "interpolate": ("experts", "MOTE --weight 0.5 --out NEARER"),
        "compress": ("compression", "MOTE --rank 16 --out SMALLER"),
        "analyze": ("analysis", "MOTE --out ANALYSIS"),
    },
    "Data and other models": {
        "mine": ("corpora", "retrieval/faq --data DATA --model MODEL --out MINED"),
        "generate": ("corpora", "corpus.jsonl --model MODEL --out DATA/retrieval/faq"),
        "filter": ("corpora", "retrieval/faq --data DATA --model MODEL --out FILTERED"),
        "pretrain": ("pretraining", "mlm data.folder=DATA model.source=MODEL output=OUT"),
        "lengthen": ("pretraining", "MODEL --length 2048 --out LONGER"),
        "memory": ("scale", "MODEL --batch-size 64 --length 256"),
        "card": ("upcycling", "MOTE"),
    },
}
"""Commands as `mote --help` shows them, each with its page in docs/ and an example, which its own help shows."""
GUIDES = {name: guide for group in GROUPS.values() for name, guide in group.items()}


class Verb(NamedTuple):
    """A command: `module:name` of its function below `mote`, its line in the help, the extra that it needs."""

    function: str
    help: str
    extra: str = ""


VERBS = {
    "upcycle": Verb("cli.verbs:upcycle", "Turn a dense text encoder into a MoTE."),
    "lengthen": Verb("lengthening:lengthen", "Give an encoder rotary positions, for longer texts."),
    "train": Verb("cli.verbs:train", "Train a model from a recipe.", "train"),
    "pretrain": Verb("cli.verbs:pretrain", "Pre-train a model on plain text, alone or with a decoder.", "train"),
    "evaluate": Verb("cli.verbs:evaluate", "Score models with MTEB.", "evaluate"),
    "analyze": Verb("cli.verbs:analyze", "Show how far experts have specialised.", "evaluate"),
    "serve": Verb("serving:serve", "Serve a MoTE over HTTP, with OpenAI's embeddings API.", "serve"),
    "embed": Verb("corpora.embed:embed_corpus", "Embed a corpus into sharded parquet files.", "corpora"),
    "mine": Verb("corpora.mining:mine_negatives", "Mine hard negatives for datasets of pairs.", "corpora"),
    "generate": Verb("corpora.generating:generate_queries", "Write queries for documents.", "corpora"),
    "filter": Verb("corpora.mining:filter_pairs", "Drop pairs that a model refutes, or rows of test sets.", "corpora"),
    "average": Verb("experts:average", "Average the experts into a dense model, or several MoTEs."),
    "interpolate": Verb("experts:interpolate", "Move experts towards their mean."),
    "export": Verb("cli.verbs:export", "Write one expert as a dense model."),
    "compress": Verb("experts:compress", "Compress experts to save memory."),
    "set": Verb("experts.configuring:configure", "Set default task, tasks of experts, instructions and routing."),
    "memory": Verb("training.memory:estimate_memory", "Estimate the memory of training."),
    "push": Verb("checkpoints.writing:push", "Push a model to the Hub, and name the repository in its card."),
    "card": Verb("checkpoints.cards:write_card", "Rewrite a model's card."),
    "route": Verb("inference.routing:train_router", "Train a router for texts of unknown task."),
    "experts list": Verb("experts:list_experts", "List the experts of a MoTE."),
    "experts add": Verb("experts:add", "Write a MoTE with one more expert.", "peft"),
    "experts extract": Verb("experts:extract", "Write one expert into files of its own."),
    "experts merge": Verb("experts:merge", "Write a MoTE with one more expert, the weighted mean of others.", "peft"),
    "experts remove": Verb("experts:remove", "Write a MoTE without one of its experts."),
    "experts rename": Verb("experts:rename", "Write a MoTE with an expert renamed."),
}


def application(words: Sequence[str]) -> App:
    """Return the app with the commands that are among the words; of all others, it knows the line in the help."""
    app = App(
        "mote",
        help="Text-embedding models with task experts. -q, anywhere: print only warnings and errors. "
        "Guide: docs/index.md.",
        help_format="plaintext",
        group_commands=Group("Options", sort_key=len(GROUPS)),
        version=lambda: f"mote {mote.__version__}",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.register_install_completion_command(_COMPLETION)
    places: dict[str, Any] = {
        name: {"group": group, "sort_key": [*GUIDES].index(name)}
        for at, (title, names) in enumerate(GROUPS.items())
        for group in [Group(title, sort_key=at)]
        for name in names
    }
    group = App("experts", help="List, add, extract, merge, remove and rename experts.", **places["experts"])
    app.command(group)
    for full_name, verb in VERBS.items():
        *of_group, name = full_name.split()
        parent, place = (group, {}) if of_group else (app, places.get(name, {}))
        if name in words or _COMPLETION in words:
            from mote.cli.build import as_command

            parent.command(as_command(verb, full_name), name=name, help_format="markdown", **place)
        else:
            parent.command(App(name, help=verb.help, **place))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process, and return the exit status.

    It is 0; 1 after an error and 2 after a usage error, which are printed in one line; 130 or 143 after a signal.
    """
    words = [*map(expanded, sys.argv[1:] if argv is None else argv)]
    console_logging(quiet="-q" in words)
    if "-q" in words or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars, too
    words = [word for word in words if word != "-q"]
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        application(words)(words, exit_on_error=False, print_error=False)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {str(interrupt) or 'no partial result was left behind'}\n")
        terminated = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    except CycloptsError as error:
        place = " ".join(["mote", *(error.command_chain or words[:1])])
        _print_error(f"{error} (see `{place} --help`)")
        return 2
    except Exception as error:
        if os.environ.get("MOTE_DEBUG", "0").lower() not in ("", "0", "false", "no"):
            traceback.print_exc()
        elif isinstance(error, ValueError | OSError | ImportError):
            _print_error(str(error))
        else:
            _print_error(f"{type(error).__name__}: {error} (`MOTE_DEBUG=1 mote …` prints the traceback)")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _print_error(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def _interrupt(number: int, _: FrameType | None) -> None:
    """Treat SIGTERM as an interrupt, so that what was started is cleaned up."""
    signal.signal(number, signal.SIG_IGN)  # one is enough: do not interrupt the cleanup
    raise KeyboardInterrupt
