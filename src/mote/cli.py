"""The command `mote`: every verb is one call of the library."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import typer

from mote.reporting import console_logging

# Libraries are imported by the commands that need them: torch takes seconds, which `mote --help` need not.

logger = logging.getLogger(__name__)
# The tables of rich_markup_mode cut the names of options off in narrow terminals.
app = typer.Typer(name="mote", pretty_exceptions_enable=False, rich_markup_mode=None)
experts_app = typer.Typer(rich_markup_mode=None, help="List, add, extract, merge, remove and rename experts.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name. Default: those of the process, whose last command this is: once it is
            done, signals end the process without a word.

    Returns:
        The exit status: 0; 1 after an error and 2 after a usage error, which are printed in one line; 130 or 143 after
        SIGINT or SIGTERM.
    """
    if "_MOTE_COMPLETE" in os.environ:  # the shell asks for completions
        app(prog_name="mote")
    root = logging.getLogger("mote")
    level = root.level
    console = console_logging()
    received: list[int] = []
    try:
        with _terminable(received, last=argv is None):
            return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {str(interrupt) or 'nothing was left behind'}\n")
        return 128 + (received[0] if received else signal.SIGINT)
    finally:
        root.removeHandler(console)
        root.setLevel(level)


def _run(argv: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("mote", list(argv)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:  # of the command line itself
        place = getattr(getattr(error, "ctx", None), "command_path", "mote")
        _print_error(f"{error.format_message()} (see `{place} --help`)")
        return error.exit_code
    except BrokenPipeError:  # whoever read the output has gone, as in `mote experts list SRC | head -1`
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
    """Treat SIGTERM as an interrupt, so that what was begun is cleaned up."""

    def interrupt(number: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: do not interrupt the cleanup
        received.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone may do this
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if last else before)
        if last:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Name the extra that lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OSError(
            f'{error.name} is not installed, which this command needs: pip install "mote-embeddings[{name}]"'
        ) from error


# Types of options ----------------------------------------------------------------------------------------------------


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r}: expected NAME=VALUE")
    return name, value


def _layers(text: str) -> str | list[int]:
    if text in ("every", "every_other"):
        return text
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected 'every', 'every_other', or indices with commas as in 1,3,5"
        ) from None


def _weights(words: Sequence[str], option: str, default: float | None = None) -> dict[str, float]:
    """Read NAME=NUMBER, each name once; a word without a number has the default, a bare number the name ""."""
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


_SRC = "folder, or Hub id (user/name)"
Mote = Annotated[str, typer.Argument(metavar="SRC", help=f"MoTE: {_SRC}.")]
Expert = Annotated[str, typer.Argument(metavar="NAME", help="Expert name.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"Each a {_SRC}, or LABEL=MODEL.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where to write.")]
OutOrInPlace = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Where to write. Default, with --overwrite: SRC itself.")
]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit on the Hub.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model that is there.")]
MaxShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file.")]
Push = Annotated[bool, typer.Option("--push", help="Push the result to the Hub.")]
RepoId = Annotated[
    str | None, typer.Option(metavar="USER/NAME", help="Where to push. Default: the name of DIR, under your user.")
]
Private = Annotated[bool, typer.Option("--private", help="Make a new repository on the Hub private.")]
Instruction = Annotated[str | None, typer.Option(metavar="TEXT", help="Put in front of the new expert's texts.")]
TasksOfExpert = Annotated[list[str], typer.Option("--task", metavar="TASK", help="Further task of it; repeatable.")]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Batch size of embedding.")]
Device = Annotated[str | None, typer.Option(metavar="D", help="cpu, cuda, cuda:1, mps … Default: the best there is.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that models bring along.")]


# Commands ------------------------------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mote {version('mote-embeddings')}")
        raise typer.Exit


@app.callback()
def _mote(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="MOTE_DEBUG", help="Print debug messages, and errors with tracebacks.")
    ] = False,
) -> None:
    """Text-embedding models with task experts."""
    console_logging(debug)


@app.command()
def upcycle(
    src: Annotated[str, typer.Option(metavar="SRC", help=f"Dense text encoder: {_SRC}.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where to write. Default: the source's name with -mote.")
    ] = None,
    revision: Revision = None,
    experts: Annotated[
        list[str] | None, typer.Option("--expert", metavar="NAME", help="Repeatable. Default: the paper's four.")
    ] = None,
    layers: Annotated[
        Any,
        typer.Option(
            parser=_layers,
            metavar="LAYERS",
            help="Layers with experts: every, every_other (the 2nd, 4th, …), or indices from 0, as in 1,3,5.",
        ),
    ] = "every",
    tasks: Annotated[
        list[Any] | None,
        typer.Option("--task", parser=_pair, metavar="NAME=EXPERT", help="Further task of an expert; repeatable."),
    ] = None,
    instructions: Annotated[
        list[Any] | None,
        typer.Option(
            "--instruction",
            parser=_pair,
            metavar="TASK=TEXT",
            help="Put in front of a task's texts; repeatable. Default: the source's prompts, then the paper's.",
        ),
    ] = None,
    default_task: Annotated[
        str | None, typer.Option(metavar="TASK", help="Task of texts without one. Default: none, an error.")
    ] = None,
    pooling: Annotated[
        Literal["mean", "cls", "last_token"] | None, typer.Option(help="Default: the source's, or mean.")
    ] = None,
    layer_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where the layers of an unknown architecture are.")
    ] = None,
    shared_modules: Annotated[
        list[str] | None,
        typer.Option("--shared-module", metavar="PATH", help="Attention of such a layer; repeatable."),
    ] = None,
    routing: Annotated[Literal["task", "token"], typer.Option(help="What picks the expert.")] = "task",
    num_experts_per_tok: Annotated[int, typer.Option(metavar="K", help="Experts per token (--routing token).")] = 2,
    norm_topk_prob: Annotated[
        bool, typer.Option(help="Scale the weights of a token's experts to sum to 1 (--routing token).")
    ] = True,
    router_aux_loss_coef: Annotated[
        float, typer.Option(metavar="F", help="Factor of the load-balancing loss (--routing token).")
    ] = 0.01,
    tokenizer: Annotated[str | None, typer.Option(metavar="SRC", help=f"A {_SRC}. Default: the source's own.")] = None,
    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="Of the weights.")] = "auto",
    max_shard_size: MaxShardSize = "5GB",
    push: Push = False,
    repo_id: RepoId = None,
    private: Private = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn a dense text encoder into a MoTE.

    Every expert starts as a copy of the dense blocks.
    """
    from mote import upcycling

    settings: dict[str, Any] = {
        "src": src,
        "out": out,
        "revision": revision,
        "experts": experts,
        "layers": layers,
        "tasks": dict(tasks or []) or None,
        "instructions": dict(instructions or []) or None,
        "default_task": default_task,
        "pooling": pooling,
        "layer_path": layer_path,
        "shared_modules": shared_modules,
        "routing": routing,
        "num_experts_per_tok": num_experts_per_tok,
        "norm_topk_prob": norm_topk_prob,
        "router_aux_loss_coef": router_aux_loss_coef,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    if dry_run:
        typer.echo(upcycling.plan_upcycling(**settings))
        typer.echo("Dry run: nothing was written.")
    else:
        upcycling.upcycle(
            **settings,
            tokenizer=tokenizer,
            push=push,
            repo_id=repo_id,
            private=private,
            overwrite=overwrite,
        )


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings over those of the recipe.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the data, print the plan, train nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again where a run has ended or was interrupted.")
    ] = False,
) -> None:
    """Train as a recipe says.

    The same command resumes an interrupted run.
    """
    from transformers.utils import logging

    with _extra("train"):
        from datasets.utils import logging as datasets_logging

        from mote.training import train as training

    for library in (logging, datasets_logging):  # one bar is enough
        library.disable_progress_bar()
    if dry_run:
        typer.echo(training.plan(recipe, overrides or []))
        typer.echo("Dry run: nothing was trained.")
    else:
        training.train(recipe, overrides or [], overwrite=overwrite)


@app.command()
def evaluate(
    models: Models,
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="Score on the test sets of a folder.")] = None,
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help='Score on a benchmark of MTEB, as in "MTEB(eng, v1)".')
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME",
            help="Test set of the folder or the benchmark, also a pattern as in 'beir/*'; without these, a task of "
            "MTEB. Repeatable.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Cut each test set of the folder down to about N texts.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that gains are over. Default: the first.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write tables, scores, a chart of gains and mteb's results.")
    ] = None,
    batch_size: BatchSize = 32,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="T", help="float32, float16 or bfloat16. Default: as stored.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Compute scores again that are there.")] = False,
) -> None:
    """Score models with MTEB.

    The same command resumes where it was interrupted.
    """
    with _extra("evaluate"):
        from mote.evaluation import evaluate as run

    evaluation = run.evaluate(
        models,
        data=data,
        benchmark=benchmark,
        tasks=tasks or (),
        limit=limit,
        reference=reference,
        out=out,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
    )
    typer.echo("\n" + evaluation.table())
    if out is not None:
        typer.echo(f"\nWrote {out}")
    if failed := evaluation.failed():
        raise ValueError(f"{len(failed)} of {len(models) * len(evaluation.types)} scores failed: {'; '.join(failed)}")


@app.command()
def analyze(
    models: Models,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Write analysis.json, analysis.md and charts.")] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="One text per line, or .jsonl. Default: 128 texts that come with MoTE."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Draw texts and pairs from the datasets of a folder.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=".jsonl with columns 'query' and 'positive'. Default: those of --data."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME", help="Task to compare; repeatable. Default: the experts' tasks."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="What was trained. Default: what the model's folder records."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="How many texts, and pairs.")] = 128,
    batch_size: BatchSize = 32,
    device: Device = None,
    seed: Seed = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show how far experts have specialised.

    By similarity between tasks, by divergence between queries and documents, and by each expert's weight change.
    """
    from transformers.utils import logging

    with _extra("evaluate"):
        from mote.analysis.analyze import analyze

    logging.disable_progress_bar()
    analysis = analyze(
        models,
        out=out,
        texts=texts,
        data=data,
        pairs=pairs,
        tasks=tasks,
        start=start,
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    typer.echo(f"\n{analysis}")


def _transform(
    src: str,
    out: str | None,
    function: Callable[..., Any],
    *args: Any,
    revision: str | None,
    max_shard_size: str,
    overwrite: bool,
    **settings: Any,
) -> None:
    from mote import WriteOptions, transform

    options = WriteOptions(max_shard_size=max_shard_size, overwrite=overwrite)
    given = {name: value for name, value in settings.items() if value not in (None, [], {})}
    transform(src, out, function, *args, revision=revision, options=options, **given)


@app.command()
def average(
    src: Mote,
    out: Out,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Average the experts into a dense model.

    It loads without the code of this package.
    """
    from mote import experts

    _transform(src, out, experts.average, revision=revision, max_shard_size=max_shard_size, overwrite=overwrite)


@app.command()
def interpolate(
    src: Mote,
    out: Out,
    weight: Annotated[
        list[str],
        typer.Option(
            metavar="W", help="0 is the expert as it is, 1 the mean. One number, or NAME=W for an expert; repeatable."
        ),
    ],
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Move experts towards their mean."""
    from mote import experts

    weights = _weights(weight, "--weight")
    if "" in weights and len(weights) > 1:
        raise typer.BadParameter("expected one number, or NAME=W for each expert", param_hint="--weight")
    chosen = weights.get("", weights)
    _transform(
        src, out, experts.interpolate, chosen, revision=revision, max_shard_size=max_shard_size, overwrite=overwrite
    )


@app.command()
def export(
    src: Mote,
    out: Out,
    expert: Annotated[str, typer.Option(metavar="NAME", help="Which expert.")],
    backend: Annotated[
        Literal["torch", "onnx", "openvino"], typer.Option(help="Write also for this runtime on CPUs.")
    ] = "torch",
    quantize: Annotated[
        Literal["int8"] | None, typer.Option(help="Precision of the runtime's model. Default: float32.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For calibration, one per line. Default: 128 that come with MoTE."),
    ] = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write one expert as a dense model.

    It loads without the code of this package.
    """
    from functools import partial

    from mote import experts
    from mote.data.texts import read_texts
    from mote.inference import runtimes

    if backend == "torch" and texts is not None:
        raise ValueError("texts are for the backends 'onnx' and 'openvino': choose one, as in `--backend openvino`")
    runtimes.require(backend, quantize)
    settings: dict[str, Any] = {}
    if backend != "torch":
        convert = partial(runtimes.convert, backend=backend, quantize=quantize, texts=read_texts(texts))
        settings = {"after": convert, "recorded": {"backend": backend, "quantize": quantize}}
    _transform(
        src,
        out,
        experts.export,
        expert,
        **settings,
        revision=revision,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    if backend != "torch":
        logger.info('mote.load_exported("%s", backend="%s").encode(texts)', out, backend)


@app.command()
def compress(
    src: Mote,
    out: Out,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Keep experts as differences of this rank from their mean.")
    ] = None,
    bits: Annotated[int | None, typer.Option(metavar="8", help="Keep the matrices of experts in 8 bits.")] = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Make experts take less memory.

    Give either --rank or --bits.
    """
    if (rank is None) == (bits is None):
        raise typer.BadParameter("expected either --rank or --bits", param_hint="--rank")
    from mote import experts

    _transform(
        src,
        out,
        experts.compress,
        rank=rank,
        bits=bits,
        revision=revision,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


@app.command()
def memory(
    src: Annotated[str, typer.Argument(metavar="SRC", help=f"MoTE or dense model: {_SRC}.")],
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a step, over all processes.")],
    length: Annotated[int, typer.Option(metavar="L", min=1, help="Tokens of each text.")],
    revision: Revision = None,
    experts: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME", help="Of the MoTE that a dense SRC would become; repeatable."),
    ] = None,
    mini_batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Mini-batch of a cached loss. Default: not cached."),
    ] = None,
    columns: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Texts in a row (a hard negative: 3).")] = 2,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations within blocks again.")
    ] = False,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="bf16 is autocast.")] = "fp32",
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of devices.")] = 1,
    sharding: Annotated[
        Literal["ddp", "fsdp2", "deepspeed-stage-1", "deepspeed-stage-2"], typer.Option(help="Of several processes.")
    ] = "ddp",
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="Kind of device.")] = "gpu",
) -> None:
    """Estimate the memory of training.

    That is what a step of contrastive training with AdamW takes on each device. Weights are not read.
    """
    from mote.training import memory

    estimate = memory.estimate_memory(
        memory.config_of(src, revision, experts),
        batch_size=batch_size,
        length=length,
        mini_batch_size=mini_batch_size,
        columns=columns,
        gradient_checkpointing=gradient_checkpointing,
        precision=precision,
        processes=processes,
        sharding=sharding,
        device=device,
    )
    typer.echo(estimate)


# Experts -------------------------------------------------------------------------------------------------------------


@experts_app.command("list")
def list_experts(src: Mote, revision: Revision = None) -> None:
    """List the experts of a MoTE."""
    from mote import experts

    typer.echo(experts.list_experts(src, revision=revision))


@experts_app.command("add")
def add_expert(
    src: Mote,
    expert: Annotated[
        str, typer.Argument(metavar="EXPERT", help=f"Extracted expert ({_SRC}), an expert of SRC to copy, or 'mean'.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new expert. Default: the extracted one's.")] = None,
    instruction: Instruction = None,
    tasks: TasksOfExpert = [],  # noqa: B006
    out: OutOrInPlace = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write a MoTE with one more expert."""
    from mote import experts
    from mote.experts.artefact import artefact_or_name

    start = artefact_or_name(expert)
    name = name or (None if isinstance(start, str) else start.name)
    if name is None:
        raise ValueError(f"The new expert, a copy of {expert!r}, needs a name of its own: give it one with `--name`")
    _transform(
        src,
        out,
        experts.add,
        name,
        start,
        instruction=instruction,
        tasks=tasks,
        revision=revision,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


@experts_app.command("extract")
def extract_expert(
    src: Mote,
    name: Expert,
    out: Out,
    revision: Revision = None,
    overwrite: Overwrite = False,
    push: Push = False,
    repo_id: RepoId = None,
    private: Private = False,
) -> None:
    """Write one expert into files of its own."""
    from mote import WriteOptions, experts

    options = WriteOptions(overwrite=overwrite, push=push, repo_id=repo_id, private=private)
    experts.extract(src, name, out, options, revision=revision)


@experts_app.command("merge")
def merge_experts(
    src: Mote,
    experts: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERT[=WEIGHT]...",
            help=f"Experts of SRC, or extracted ones ({_SRC}); weights are scaled to sum to 1.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the new expert.")],
    instruction: Instruction = None,
    tasks: TasksOfExpert = [],  # noqa: B006
    out: OutOrInPlace = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write a MoTE with one more expert, the weighted mean of others."""
    from mote import experts as verbs
    from mote.experts.artefact import artefact_or_name

    weights = {artefact_or_name(word): w for word, w in _weights(experts, "EXPERT[=WEIGHT]", default=1.0).items()}
    _transform(
        src,
        out,
        verbs.merge,
        weights,
        name,
        instruction=instruction,
        tasks=tasks,
        revision=revision,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


@experts_app.command("remove")
def remove_expert(
    src: Mote,
    name: Expert,
    tasks: Annotated[
        list[Any] | None,
        typer.Option(
            "--task",
            parser=_pair,
            metavar="TASK=EXPERT",
            help="New expert of one of its tasks; repeatable. Nothing after the = removes the task as well.",
        ),
    ] = None,
    out: OutOrInPlace = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write a MoTE with one expert less."""
    from mote import experts

    moved = {task: expert or None for task, expert in tasks or []}
    _transform(
        src,
        out,
        experts.remove,
        name,
        tasks=moved,
        revision=revision,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


@experts_app.command("rename")
def rename_expert(
    src: Mote,
    name: Expert,
    new_name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="Its new name.")],
    out: OutOrInPlace = None,
    revision: Revision = None,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write a MoTE in which an expert has another name."""
    from mote import experts

    _transform(
        src, out, experts.rename, name, new_name, revision=revision, max_shard_size=max_shard_size, overwrite=overwrite
    )


app.add_typer(experts_app, name="experts")
