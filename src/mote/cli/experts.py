"""Commands that derive a model from a MoTE, and `mote experts …`."""

import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

import mote
from mote.cli import options

logger = logging.getLogger(__name__)


def _transform(
    src: str,
    out: str | None,
    revision: str | None,
    write: "mote.WriteOptions",
    function: Callable[..., Any],
    *args: Any,
    **settings: Any,
) -> None:
    """Call `mote.transform`, without the settings that were not given."""
    given = {name: value for name, value in settings.items() if value not in (None, [], {})}
    mote.transform(src, out, function, *args, revision=revision, options=write, **given)


@options.written
def average(
    src: options.Mote,
    out: options.Out,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Average the experts into a dense model.

    It loads without the code of this package.
    """
    _transform(src, out, revision, write, mote.experts.average)


@options.written
def interpolate(
    src: options.Mote,
    out: options.Out,
    weight: Annotated[
        list[str],
        typer.Option(
            metavar="W", help="0 keeps the expert, 1 gives the mean. One number for all, or NAME=W; repeatable."
        ),
    ],
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Move experts towards their mean."""
    weights = options.weights_of(weight, "--weight")
    if "" in weights and len(weights) > 1:
        raise typer.BadParameter("expected one number, or NAME=W for each expert", param_hint="--weight")
    chosen = weights.get("", weights)
    _transform(src, out, revision, write, mote.experts.interpolate, chosen)


@options.written
def export(
    src: options.Mote,
    out: options.Out,
    expert: Annotated[str, typer.Option(metavar="NAME", help="Expert to export.")],
    format: Annotated[  # noqa: A002
        Literal["native", "published"],
        typer.Option(
            help="Keys of the config: transformers' own, or also those of the family's published config, for servers."
        ),
    ] = "native",
    backend: Annotated[
        Literal["torch", "onnx", "openvino"], typer.Option(help="CPU runtime to convert the model for as well.")
    ] = "torch",
    quantize: Annotated[
        Literal["int8"] | None, typer.Option(help="Precision of the runtime's model. Default: float32.")
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Calibration texts, one per line. Default: 128 shipped with MoTE."),
    ] = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Write one expert as a dense model.

    It loads without the code of this package.
    """
    from functools import partial

    from mote.data.texts import read_texts
    from mote.inference import runtimes

    for_conversion = read_texts(texts)
    if backend == "torch" and texts is not None:
        raise ValueError("texts are for the backends 'onnx' and 'openvino': choose one, as in `--backend openvino`")
    runtimes.require(backend, quantize)
    settings: dict[str, Any] = {"format": None if format == "native" else format}
    if backend != "torch":
        convert = partial(runtimes.convert, backend=backend, quantize=quantize, texts=for_conversion)
        settings |= {"after": convert, "recorded": {"backend": backend, "quantize": quantize}}
    _transform(src, out, revision, write, mote.experts.export, expert, **settings)
    if backend != "torch":
        logger.info('mote.load_exported("%s", backend="%s").encode(texts)', out, backend)


@options.written
def compress(
    src: options.Mote,
    out: options.Out,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Store experts as differences of this rank from their mean.")
    ] = None,
    bits: Annotated[int | None, typer.Option(metavar="8", help="Store the matrices of experts in 8 bits.")] = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Make experts take less memory.

    Give either --rank or --bits.
    """
    if (rank is None) == (bits is None):
        raise typer.BadParameter("expected either --rank or --bits", param_hint="--rank")
    _transform(src, out, revision, write, mote.experts.compress, rank=rank, bits=bits)


@options.written
def set_values(
    src: options.Mote,
    settings: Annotated[
        list[Any],
        typer.Argument(
            parser=options.pair,
            metavar="KEY=VALUE...",
            help="default_task=TASK (none: no default), route_by_text=false (an instruction in a text does not "
            "pick its expert), expert.TASK=EXPERT, instruction.TASK=TEXT, definition.TASK=TEXT, "
            "instruction_pooling=excluded or end_token=TOKEN.",
        ),
    ],
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Output folder. Default: SRC itself.")] = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Set default task, tasks of experts, instructions and routing.

    Prompts and card are updated.
    """
    from mote.experts.configuring import parse_settings

    repeated = [key for index, (key, _) in enumerate(settings) if key in dict(settings[:index])]
    if repeated:
        raise typer.BadParameter(f"{repeated[0]!r} is set twice", param_hint="KEY=VALUE...")
    mote.configure(src, out, **parse_settings(dict(settings)), revision=revision, options=write)


def list_experts(src: options.Mote, revision: options.Revision = None, as_json: options.Json = False) -> None:
    """List the experts of a MoTE."""
    experts = mote.experts.list_experts(src, revision=revision)
    typer.echo(json.dumps(experts.to_dict(), indent=2, ensure_ascii=False) if as_json else experts)


@options.written
def add_expert(
    src: options.Mote,
    expert: Annotated[
        str,
        typer.Argument(metavar="EXPERT", help=f"Expert of SRC, 'mean', or an artefact or dense model ({options.SRC})."),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new expert. Default: the extracted one's.")] = None,
    instruction: options.Instruction = None,
    tasks: options.TasksOfExpert = [],  # noqa: B006
    out: options.OutOrInPlace = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Write a MoTE with one more expert."""
    from mote.experts.artefact import ExpertArtefact
    from mote.experts.dense import opened

    start = opened(expert)
    name = name or (start.name if isinstance(start, ExpertArtefact) else None)
    if name is None:
        raise ValueError(f"The new expert, a copy of {expert!r}, needs a name of its own: give it one with `--name`")
    _transform(
        src,
        out,
        revision,
        write,
        mote.experts.add,
        name,
        start,
        instruction=instruction,
        tasks=tasks,
    )


def extract_expert(
    src: options.Mote,
    name: options.Expert,
    out: options.Out,
    revision: options.Revision = None,
    overwrite: options.Overwrite = False,
    push: options.Push = False,
    repo_id: options.RepoId = None,
    private: options.Private = False,
) -> None:
    """Write one expert into files of its own."""
    write = mote.WriteOptions(overwrite=overwrite, push=push, repo_id=repo_id, private=private)
    mote.experts.extract(src, name, out, write, revision=revision)


@options.written
def merge_experts(
    src: options.Mote,
    experts: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERT[=WEIGHT]...",
            help=f"Experts of SRC, artefacts or dense models ({options.SRC}); weights are scaled to sum to 1.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the new expert.")],
    instruction: options.Instruction = None,
    tasks: options.TasksOfExpert = [],  # noqa: B006
    out: options.OutOrInPlace = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Write a MoTE with one more expert, the weighted mean of others."""
    from mote.experts.dense import opened

    weights = {opened(word): w for word, w in options.weights_of(experts, "EXPERT[=WEIGHT]", default=1.0).items()}
    _transform(
        src,
        out,
        revision,
        write,
        mote.experts.merge,
        weights,
        name,
        instruction=instruction,
        tasks=tasks,
    )


@options.written
def remove_expert(
    src: options.Mote,
    name: options.Expert,
    tasks: Annotated[
        list[Any] | None,
        typer.Option(
            "--task",
            parser=options.pair,
            metavar="TASK=EXPERT",
            help="New expert of one of its tasks; repeatable. An empty EXPERT removes the task as well.",
        ),
    ] = None,
    out: options.OutOrInPlace = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Write a MoTE without one of its experts."""
    moved = {task: expert or None for task, expert in (options.mapping(tasks, "--task") or {}).items()}
    _transform(src, out, revision, write, mote.experts.remove, name, tasks=moved)


@options.written
def rename_expert(
    src: options.Mote,
    name: options.Expert,
    new_name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="New name.")],
    out: options.OutOrInPlace = None,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Write a MoTE with an expert renamed."""
    _transform(src, out, revision, write, mote.experts.rename, name, new_name)
