"""Makes commands from functions: from their signatures, docstrings, and the classes of settings that they take."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import CycloptsError, Parameter, Token
from pydantic import SkipValidation, ValidationError

import mote
from mote.checkpoints.options import WriteOptions
from mote.cli import Verb
from mote.integrations import extra
from mote.reporting import Report
from mote.settings import Settings, descriptions, documented, error_messages

REQUIRED = inspect.Parameter.empty
TYPES = {"MoTEModel": Any}
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


# Commands ------------------------------------------------------------------------------------------------------------


def as_command(verb: Verb) -> Callable[..., Any]:
    """Return a function with a signature that cyclopts turns into a command.

    Positional parameters up to the first list are arguments, all others and `out` are options. A class of settings
    becomes an option for each of its fields. What is not given on the command line is left to the function.
    """
    with extra(verb.extra):
        function = resolve_name(f"mote.{verb.function}")
    function = on_disk(function) if hasattr(function, "verb") else function
    classes, parameters = _parameters(function)
    parameters = {name: parameter for name, parameter in parameters.items() if name not in verb.fixed}
    signature = inspect.Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))

    def command(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        # None at all: `--no-instructions`.
        given = {name: False if value == [] else value for name, value in given.items()}
        for name, kind in classes.items():
            given[name] = _checked(kind, {field: given.pop(field) for field in kind.model_fields if field in given})
        with extra(verb.extra):
            result = function(**given, **verb.fixed)
        if isinstance(result, Report):
            show(result)

    command.__signature__ = signature  # type: ignore[attr-defined]
    _, *details = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0].split("\n\n")
    command.__doc__ = "\n\n".join([verb.help, *details])
    return command


def on_disk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb of `mote.experts`, a function over a model in memory, as a function over a MoTE on disk."""
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
    apply.__doc__ = re.sub(" model: .*", " src: A MoTE: a folder, or an id on the Hub.", function.__doc__ or "")
    return apply


def transform(src: str, options: EditOptions, function: Callable[..., Any], *args: Any, **settings: Any) -> None:
    """Call `mote.transform`, without the settings that were not given."""
    given = {name: value for name, value in settings.items() if value not in (None, [], {})}
    mote.transform(src, options.out, function, *args, revision=options.revision, options=options, **given)


def show(result: Any) -> None:
    """Print a result."""
    sys.stdout.write(f"{result}\n")


def _checked(settings: type[Settings], given: dict[str, Any]) -> Settings:
    """Make settings; an invalid value is a usage error that names its option."""
    try:
        return settings(**given)
    except ValidationError as error:
        faults = [f"{_flag(key.partition('.')[0])}: {text}" if key else text for key, text in error_messages(error)]
        raise CycloptsError(msg="; ".join(faults)) from error


# Parameters ----------------------------------------------------------------------------------------------------------


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, type[Settings]], dict[str, inspect.Parameter]]:
    """Return the classes of settings that a function takes, and the parameters of the command."""
    hints, texts = get_type_hints(function, localns=TYPES), documented(function, "Args")
    classes: dict[str, type[Settings]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    only_options = False
    for name, parameter in inspect.signature(function).parameters.items():
        kind = next((one for one in _members(hints[name]) if inspect.isclass(one) and issubclass(one, Settings)), None)
        if kind is not None:
            classes[name], described = kind, descriptions(kind)
            for field_name, field in kind.model_fields.items():
                default = REQUIRED if field.is_required() else field.default
                parameters[field_name] = _option(field_name, field.annotation, default, described[field_name])
        elif parameter.kind is not parameter.VAR_KEYWORD:
            only_options = only_options or parameter.kind is parameter.KEYWORD_ONLY
            declare = _option if only_options or name == "out" else _argument
            parameters[name] = declare(name, hints[name], parameter.default, texts[name])
            only_options = only_options or parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
    return classes, parameters


def _argument(name: str, annotation: Any, default: Any, text: str) -> inspect.Parameter:
    """Declare an argument; options may stand among those of a list."""
    several = any(origin in (list, Sequence) for origin in map(get_origin, _members(annotation)))
    read = Parameter(help=text, show_default=False, required=default is REQUIRED)
    if several:
        return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL, annotation=Annotated[str, read])
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=Annotated[str, read], default=default)


def _option(name: str, annotation: Any, default: Any, text: str) -> inspect.Parameter:
    """Declare an option; lists and mappings are repeated in the singular: `--expert a --task a=b`."""
    members, flag = [*_members(annotation)], _flag(name)
    kind, more = _type(members)
    negative = f"--no-{flag.removeprefix('--')}" if bool in members and default is not False else ()
    if get_origin(kind) is list and not flag.endswith("us"):
        flag = flag.removesuffix("s")
    shown = isinstance(default, str | int | float) and not isinstance(default, bool)
    if "converter" in more:
        # The kind says how words are read; cyclopts would compare what they become with it.
        kind = Annotated.__class_getitem__((kind, SkipValidation()))  # type: ignore[attr-defined]
    if default is not REQUIRED:
        # What a library takes for an empty list or None is not shown, nor are flags.
        default = default if shown or kind is bool else None
        kind = kind | None
    read = Parameter(name=flag, negative=negative, help=text, show_default=shown, **more)
    annotation = Annotated.__class_getitem__((kind, read))  # type: ignore[attr-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _type(members: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """Return what the command line reads for a union of types, and how."""
    origins = [get_origin(member) or member for member in members]
    if dict in origins or Mapping in origins:
        if float in members:
            return list[str], {"metavar": "NUMBER|NAME=NUMBER", "converter": _read_weights}
        return list[str], {"metavar": "NAME=VALUE", "converter": _read_pairs}
    if list[int] in members:
        return str, {"metavar": "NAME|N,N,…", "converter": _read_numbers}
    if Path in members:
        return str, {}
    if list in origins:
        items = next(get_args(one)[0] for one in members if get_origin(one) is list)
        return (list[items] if get_origin(items) is Literal else list[str]), {}  # type: ignore[valid-type]
    kind = next((one for one in members if one in (bool, int, float) or get_origin(one) is Literal), str)
    # cyclopts would round 1.5.
    return kind, {"converter": lambda _, tokens: int(tokens[0].value)} if kind is int else {}


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


# Values --------------------------------------------------------------------------------------------------------------


def _read_numbers(_: Any, tokens: Sequence[Token]) -> str | list[int]:
    words = tokens[0].value.split(",")
    return [int(word) for word in words] if all(word.removeprefix("-").isdigit() for word in words) else words[0]


def _read_pairs(_: Any, tokens: Sequence[Token]) -> dict[str, str]:
    found: dict[str, str] = {}
    for token in tokens:
        name, equals, value = token.value.partition("=")
        if not equals or not name or name in found:
            raise ValueError(f"{token.value!r}: expected NAME=VALUE, each name once")
        found[name] = value
    return found


def _read_weights(_: Any, tokens: Sequence[Token]) -> float | dict[str, float]:
    if len(tokens) == 1 and "=" not in tokens[0].value:
        return float(tokens[0].value)
    return weights([token.value for token in tokens])


def weights(words: Sequence[str], default: float | None = None) -> dict[str, float]:
    """Read NAME=NUMBER, each name once; without `=`, a name has the default."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, number = word.rpartition("=")
        if default is not None and not equals:
            name, number = word, str(default)
        try:
            weight = float(number)
        except ValueError:
            name = ""
        if not name or name in found:
            raise ValueError(f"{word!r}: expected NAME=NUMBER, each name once")
        found[name] = weight
    return found
