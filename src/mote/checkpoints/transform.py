"""Verbs on disk: a MoTE is opened, changed by a function in memory, and written with a record of the change."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from mote.checkpoints.models import load_mote, load_tokenizer
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import as_words, command_line, new_step
from mote.checkpoints.reading import MoTECheckpoint, has_head, is_mote, open_mote
from mote.checkpoints.staging import refuse_source
from mote.checkpoints.tensors import require_unquantised
from mote.checkpoints.writing import Repository, require_writable

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verb:
    """Decorate a function over a model with what `transform` needs to name its verb and to describe its result.

    The function stays an ordinary function.
    """

    words: str  # on the command line, as in "experts add"
    # For the card, as in "made by adding the expert {name} to", filled in with the arguments and the result's `config`.
    made: str
    positional: tuple[str, ...] = ()  # arguments that follow the source on the command line
    options: Mapping[str, str] | None = None  # argument → option, if their names differ
    loads: str | None = None  # argument that names the only expert to load; a dense result is then this expert
    of_several: str | None = None  # instead of `made`, if there are other sources
    same_model: bool = False  # whether the result is the same model with other settings, which keeps its card

    def __call__(self, function: Function) -> Function:
        """Decorate a function."""
        function.verb = self  # type: ignore[attr-defined]
        return function


def transform(
    src: str | Path,
    out: str | Path | None,
    function: Callable[..., PreTrainedModel | None],
    /,
    *args: Any,
    revision: str | None = None,
    options: WriteOptions | None = None,
    after: Callable[[Path], dict[str, Any]] | None = None,
    recorded: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Path:
    """Apply a function to a MoTE on disk: open, check, load, call `function(model, *args, **kwargs)`, write, record.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write. None: the source itself, with `overwrite`, if the function changes the model in place.
        function: Returns a MoTE or a dense model, or None if it has changed the model in place. Functions of
            `mote.experts` are decorated with `Verb`.
        *args: Arguments of the function after the model.
        revision: Branch, tag or commit of a source on the Hub.
        options: How the result is written.
        after: Runs on the new folder before it is moved into place: adds files, returns details for `mote.json`.
        recorded: Settings of `after`, for `mote.json` and the command line there.
        **kwargs: Keyword arguments of the function.

    Returns:
        The folder.
    """
    options = options or WriteOptions()
    name = getattr(function, "__name__", type(function).__name__)
    spec = getattr(function, "verb", None) or Verb(name, f"made by `{name}` of")
    arguments = _arguments(function, args, kwargs)
    expert = arguments[spec.loads] if spec.loads else None
    source = open_mote(str(src), revision, None if expert is None else [expert])
    returned = inspect.signature(function).return_annotation
    returns_model = inspect.isclass(returned) and issubclass(returned, PreTrainedModel)
    target = _target(source, out, options, source.is_local and not returns_model)
    in_place = target.resolve() == source.folder.resolve()
    repo_id = require_writable(target, options, None if in_place else source.folder)
    others = _sources_in(arguments.values())
    if not in_place:
        for other in others:
            refuse_source(target, other.folder if isinstance(other, MoTECheckpoint) else other.file)
    tokenizer = load_tokenizer(source)
    experts = [expert] if expert is not None and source.config.routes_by_task else None
    model = load_mote(source, experts, with_head=True)
    changed = function(model, *args, **kwargs)
    result: Any = model if changed is None else changed
    require_unquantised(result)
    if has_head(source.config) and type(result) is not type(model):
        logger.info("The head for masked language modelling is dropped: the result only embeds texts")
    if changed is not None and in_place:
        refuse_source(target, source.folder)
    settings = {**arguments, **(recorded or {})}
    command = _command(spec, source, settings, {"overwrite": True} if in_place else {"out": target.resolve()})
    details = _details(spec, source, result, arguments, expert)
    repository = Repository(
        result,
        source,
        [new_step(spec.words.split()[-1], command=command, settings=settings, **details)],
        others,
        tokenizer=tokenizer,
        expert=expert,
        after=after,
        keep_card=spec.same_model or in_place,
    )
    return repository.write(target, options, repo_id)


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the function's arguments after the model, without those at their defaults."""
    signature = inspect.signature(function)
    bound = signature.bind(None, *args, **kwargs).arguments
    first = next(iter(signature.parameters))
    named = {name: value for name, value in bound.items() if name != first}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def _target(source: MoTECheckpoint, out: str | Path | None, options: WriteOptions, can_change: bool) -> Path:
    if out is not None:
        return Path(out)
    if options.overwrite and can_change:
        return source.folder
    raise ValueError(
        "Name the folder to write with `--out`"
        + (f", or use `--overwrite` to change {source.name} itself" if can_change else "")
    )


def _details(
    spec: Verb, source: MoTECheckpoint, result: PreTrainedModel, arguments: dict[str, Any], expert: str | None
) -> dict[str, Any]:
    """Describe the result in the step of `mote.json`."""
    dense = not is_mote(result.config)
    details: dict[str, Any] = {"parameters": result.num_parameters()}
    if not spec.same_model:
        template = spec.of_several if spec.of_several and _sources_in(arguments.values()) else spec.made
        made = template.format(**{name: _shown(value) for name, value in arguments.items()}, config=result.config)
        # Some verbs describe a dense result, but the experts are token-routed.
        details["made"] = made if dense or made.startswith("made ") else f"made of {made}"
    config = source.config if dense else result.config
    tasks = {name: [task for task, own in config.tasks.items() if own == name] for name in config.experts}
    return details | ({"of_mote": tasks, "expert": expert} if dense else {"experts": tasks})


def _command(spec: Verb, source: MoTECheckpoint, settings: Mapping[str, Any], place: dict[str, Any]) -> str:
    options = dict(settings)
    words = [word for name in spec.positional if name in options for word in as_words(options.pop(name))]
    named = {(spec.options or {}).get(name, name): value for name, value in options.items()}
    return command_line(*spec.words.split(), source.public_name, *words, **named, **place)


def _shown(value: Any) -> str:
    """Format an argument for the card."""
    words = as_words(value)
    return ", ".join(f"`{word}`" for word in words) if isinstance(value, Mapping | list) else words[0]


def _sources_in(values: Iterable[Any]) -> list[Any]:
    """Find other sources of a result, extracted experts, among the arguments: alone, in lists, as keys of mappings."""
    single = [one for value in values for one in (value if isinstance(value, Mapping | list | tuple) else [value])]
    return [one for one in single if hasattr(one, "provenance")]
