"""Makes commands from functions: from their signatures, docstrings, and the classes of settings that they take."""

import contextlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import CycloptsError, Parameter, Token
from pydantic import ValidationError

import mote
from mote.checkpoints.options import WriteOptions
from mote.cli import Verb
from mote.reporting import console_logging
from mote.settings import Settings, descriptions, documented, error_messages

REQUIRED = inspect.Parameter.empty
PAIRS = "NAME=VALUE"
WEIGHTS = "NUMBER|NAME=NUMBER"
NUMBERS = "NAME|N,N,…"
NOT_ON_THE_COMMAND_LINE = ("model", "peft")
TYPES = {"MoTEModel": Any, "PeftSettings": Any}
"""Names in annotations that modules import for type checkers alone."""


class EditOptions(WriteOptions):
    """Where a changed MoTE goes.

    Attributes:
        out: Output folder. Default, with `--overwrite`: SRC itself.
        revision: Branch, tag or commit of SRC on the Hub.
    """

    out: str | None = None
    revision: str | None = None


class ResultOptions(EditOptions):
    """Where a model made from a MoTE goes.

    Attributes:
        out: Output folder.
    """

    out: str


def as_command(verb: Verb) -> Callable[..., Any]:
    """Return a function with a signature that cyclopts turns into a command.

    Positional parameters are arguments; those after `*`, and `out`, are options. A class of settings becomes an option
    for each of its fields. What is not given on the command line is left to the function.
    """
    function = resolve_name(f"mote.{verb.function}")
    function = on_disk(function) if verb.on_disk else function
    parts, parameters = _parameters(function)
    if verb.settings:
        _, others = _parameters(resolve_name(f"mote.{verb.settings}"))
        parameters |= {name: one for name, one in others.items() if name not in (*parameters, *NOT_ON_THE_COMMAND_LINE)}
    parameters = {name: parameter for name, parameter in parameters.items() if name not in verb.fixed}
    if verb.report:
        parameters["json"] = _declared("json", bool, False, "Print JSON. Progress goes to stderr.")
    signature = inspect.Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))

    def command(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given = {name: _read(value, parameters[name]) for name, value in given.items()}
        as_json = given.pop("json", False)
        if as_json:
            console_logging(logging.getLogger("mote").level).progress = "stderr"
        for name, kind in parts.items():
            given[name] = _checked(kind, {field: given.pop(field) for field in kind.model_fields if field in given})
        with needs(verb.extra):
            result = function(**given, **verb.fixed)
        if verb.report:
            show(_json_of(result) if as_json else result)
            failed = result.failed() if hasattr(result, "failed") else None
            if failed:
                raise ValueError(f"{len(failed)} scores failed: {'; '.join(failed)}")

    command.__signature__ = signature  # type: ignore[attr-defined]
    _, *details = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0].split("\n\n")
    command.__doc__ = "\n\n".join([verb.help, *details])
    return command


def on_disk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `mote.experts` over a model in memory as one over a MoTE on disk."""
    model, *others = inspect.signature(function).parameters.values()
    hints = get_type_hints(function, localns=TYPES)
    options = EditOptions if hints["return"] is type(None) else ResultOptions

    def apply(src: str, options: EditOptions, **arguments: Any) -> None:
        transform(src, options, function, **arguments)

    arguments = [other for other in others if other.name in function.verb.positional]  # type: ignore[attr-defined]
    named = [other.replace(kind=other.KEYWORD_ONLY) for other in others if other not in arguments]
    named.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY))
    apply.__signature__ = inspect.Signature([model.replace(name="src"), *arguments, *named])  # type: ignore[attr-defined]
    apply.__annotations__ = {**hints, "src": str, "options": options}
    described = function.__doc__ or ""
    apply.__doc__ = re.sub(rf" {model.name}: .*", " src: A MoTE: a folder, or an id on the Hub.", described)
    return apply


def transform(src: str, options: EditOptions, function: Callable[..., Any], *args: Any, **settings: Any) -> None:
    """Call `mote.transform`, without the settings that were not given."""
    given = {name: value for name, value in settings.items() if value not in (None, [], {})}
    mote.transform(src, options.out, function, *args, revision=options.revision, options=options, **given)


def _json_of(result: Any) -> str:
    if hasattr(result, "to_json"):
        return str(result.to_json()).rstrip()
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False)


def show(result: Any) -> None:
    """Print a result."""
    sys.stdout.write(f"{result}\n")


def without_bars() -> None:
    """Turn off the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Name the extra if a library is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise OSError(
            f'{error.name} is not installed, which this command needs: pip install -e ".[{extra}]" in a clone, else '
            f'pip install "mote-embeddings[{extra}]"'
        ) from error


def _checked(settings: type[Settings], given: dict[str, Any]) -> Settings:
    try:
        return settings(**given)
    except ValidationError as error:
        faults = [f"{_flag(key.partition('.')[0])}: {text}" if key else text for key, text in error_messages(error)]
        raise CycloptsError(msg="; ".join(faults)) from error


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, type[Settings]], dict[str, inspect.Parameter]]:
    """Return the classes of settings that a function takes, and the parameters of the command."""
    hints, texts = get_type_hints(function, localns=TYPES), documented(function, "Args")
    parts: dict[str, type[Settings]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        classes = [one for one in _members(hints[name]) if inspect.isclass(one) and issubclass(one, Settings)]
        if classes:
            parts[name], described = classes[0], descriptions(classes[0])
            for field_name, field in classes[0].model_fields.items():
                default = REQUIRED if field.is_required() else field.default
                parameters[field_name] = _declared(field_name, field.annotation, default, described[field_name])
        elif parameter.kind is not parameter.VAR_KEYWORD:
            is_argument = parameter.kind is not parameter.KEYWORD_ONLY and name != "out"
            parameters[name] = _declared(name, hints[name], parameter.default, texts[name], is_argument)
    return parts, parameters


def _declared(name: str, annotation: Any, default: Any, text: str, is_argument: bool = False) -> inspect.Parameter:
    """Declare an option or argument; lists and mappings are repeated in the singular: `--expert a --task a=b`."""
    kind, more = _type(annotation)
    shown = not is_argument and isinstance(default, str | int | float) and not isinstance(default, bool)
    if not is_argument:
        flag = _flag(name)
        if bool in _members(annotation) and default is not False:
            more["negative"] = f"--no-{flag.removeprefix('--')}"
        more["name"] = flag.removesuffix("s") if get_origin(kind) is list and not flag.endswith("us") else flag
    place: Any = inspect.Parameter.POSITIONAL_ONLY if is_argument else inspect.Parameter.KEYWORD_ONLY
    if is_argument and get_origin(kind) is list:
        # Options may stand among the arguments.
        more["required"] = default is REQUIRED
        place, kind, default = inspect.Parameter.VAR_POSITIONAL, get_args(kind)[0], REQUIRED
    elif default is not REQUIRED:
        # What a library takes for an empty list or None is not shown, nor are flags.
        default = default if shown or kind is bool else None
        kind = kind | None
    read = Parameter(help=text, show_default=shown, **more)
    return inspect.Parameter(name, place, annotation=Annotated.__class_getitem__((kind, read)), default=default)  # type: ignore[attr-defined]


def _type(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """Return what the command line reads for a type, and how."""
    members = [*_members(annotation)]
    origins = [get_origin(member) or member for member in members]
    more: dict[str, Any] = {"negative": ()}
    if dict in origins or (Mapping in origins and str not in origins):
        return list[str], {**more, "metavar": WEIGHTS if float in members else PAIRS}
    if list[int] in members:
        return str, {**more, "metavar": NUMBERS}
    if Path in members:
        return str, more
    if list in origins or Sequence in origins:
        items = next(get_args(one)[0] for one in members if get_origin(one) in (list, Sequence))
        return (list[items] if get_origin(items) is Literal else list[str]), more  # type: ignore[valid-type]
    kind = next((one for one in members if one in (bool, int, float) or get_origin(one) is Literal), str)
    return kind, {**more, **({"converter": _integer} if kind is int else {})}


def _members(annotation: Any) -> Iterator[Any]:
    """Find the members of a union but None, or else the type itself."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not type(None):
        yield annotation


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _integer(_: Any, tokens: Sequence[Token]) -> int:
    """Read an integer; cyclopts would round 1.5."""
    return int(tokens[0].value)


def _read(value: Any, parameter: inspect.Parameter) -> Any:
    """Turn what was given for a mapping or a list of numbers into one."""
    read: Parameter = get_args(parameter.annotation)[1]
    if read.metavar == NUMBERS:
        words = value.split(",")
        return [int(word) for word in words] if all(word.removeprefix("-").isdigit() for word in words) else value
    if read.metavar == WEIGHTS:
        numbers = weights(value)
        if "" in numbers and len(numbers) > 1:
            raise CycloptsError(msg=f"{_flag(parameter.name)}: expected one number, or NAME=NUMBER for each name")
        return numbers.get("", numbers)
    # None at all: `--no-instructions`.
    return (pairs(value) or False) if read.metavar == PAIRS else value


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or name in found:
            raise CycloptsError(msg=f"{word!r}: expected NAME=VALUE, each name once")
        found[name] = value
    return found


def weights(words: Sequence[str], default: float | None = None) -> dict[str, float]:
    """Read NAME=NUMBER, each name once; in a word without `=`, the default makes it a name, else it is a number."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        try:
            name, weight = (word, default) if default is not None and not equals else (name, float(number))
            if name in found or (equals and not name):
                raise ValueError
        except ValueError:
            raise CycloptsError(msg=f"{word!r}: expected NAME=NUMBER, each name once") from None
        found[name] = weight
    return found
