"""Makes commands from functions: from their signatures, docstrings, and the classes of settings that they take."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import CycloptsError, Parameter, Token
from pydantic import SkipValidation, ValidationError

import mote
from mote.checkpoints.options import WriteOptions
from mote.cli import GUIDES, Verb
from mote.integrations import extra
from mote.reporting import Report
from mote.settings import Settings, descriptions, documented, error_messages

REQUIRED = inspect.Parameter.empty
TYPES = {"MoTEModel": Any}
"""Names in annotations that modules import for type checkers alone."""


class EditOptions(WriteOptions):
    """Where a changed MoTE, or a model made from it, goes.

    Attributes:
        out: Output folder. Default, with `--overwrite`, for a changed MoTE: SRC itself.
        revision: Branch, tag or commit of SRC on the Hub.
    """

    out: str | None = None
    revision: str | None = None


def as_command(verb: Verb, name: str) -> Callable[..., Any]:
    """Return a function with a signature that cyclopts turns into a command.

    Positional parameters up to the first list are arguments, all others and `out` are options. A class of settings
    becomes an option for each of its fields. What is not given on the command line is left to the function.
    """
    with extra(verb.extra):
        function = resolve_name(f"mote.{verb.function}")
    function = on_disk(function) if hasattr(function, "verb") else function
    classes, parameters = _parameters(function)
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def command(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        # None at all: `--no-instructions`, `--shared-module "[]"`.
        given = {name: False if value == [] else value for name, value in given.items()}
        given = {name: [] if value == ["[]"] else value for name, value in given.items()}
        for name, kind in classes.items():
            given[name] = _checked(kind, {field: given.pop(field) for field in kind.model_fields if field in given})
        with extra(verb.extra):
            result = function(**given)
        if isinstance(result, Report):
            sys.stdout.write(f"{result}\n")
            if failed := result.failed():
                raise ValueError(f"{len(failed)} failed: {'; '.join(failed)}")

    command.__signature__ = signature  # type: ignore[attr-defined]
    _, *details = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0].split("\n\n")
    page, example = GUIDES[name]
    details += [f"Example: `mote {name} {example}`", f"Guide: docs/{page}.md"]
    command.__doc__ = "\n\n".join([verb.help, *details])
    return command


def on_disk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb of `mote.experts`, a function over a model in memory, as a function over a MoTE on disk."""
    model, *others = inspect.signature(function).parameters.values()
    positional: Sequence[str] = function.verb.positional  # type: ignore[attr-defined]
    hints = get_type_hints(function, localns=TYPES)

    def apply(src: str, options: EditOptions, **arguments: Any) -> None:
        opened = {name: _opened(arguments[name], hints[name]) for name in positional if name in arguments}
        arguments |= opened
        mote.transform(src, options.out, function, revision=options.revision, options=options, **arguments)

    arguments = [other for other in others if other.name in positional]
    named = [other.replace(kind=other.KEYWORD_ONLY) for other in others if other not in arguments]
    named.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY))
    apply.__signature__ = inspect.Signature([model.replace(name="src"), *arguments, *named])  # type: ignore[attr-defined]
    apply.__annotations__ = {**hints, "src": str, "options": EditOptions}
    apply.__doc__ = re.sub(" model: .*", " src: A MoTE: a folder, or an id on the Hub.", function.__doc__ or "")
    return apply


def _opened(given: Any, annotation: Any) -> Any:
    """Open the experts and models among the arguments of a verb of `mote.experts`."""
    from mote.checkpoints.reading import open_mote
    from mote.experts.artefact import ExpertArtefact, open_word

    if get_origin(annotation) is Sequence:
        return [open_mote(word) for word in given]
    if get_origin(annotation) is Mapping:
        return {open_word(name): float(weight) for name, weight in _pairs(given, default="1").items()}
    return open_word(given) if ExpertArtefact in _members(annotation) else given


def _checked(settings: type[Settings], given: dict[str, Any]) -> Settings:
    """Make settings; an invalid value is a usage error that names its option."""
    try:
        return settings(**given)
    except ValidationError as error:
        faults = [f"{_flag(key.partition('.')[0])}: {text}" if key else text for key, text in error_messages(error)]
        raise CycloptsError(msg="; ".join(faults)) from error


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, type[Settings]], list[inspect.Parameter]]:
    """Return the classes of settings that a function takes, and the parameters of the command."""
    hints, texts = get_type_hints(function, localns=TYPES), documented(function, "Args")
    classes: dict[str, type[Settings]] = {}
    parameters: list[inspect.Parameter] = []
    only_options = False
    for name, parameter in inspect.signature(function).parameters.items():
        kind = next((one for one in _members(hints[name]) if inspect.isclass(one) and issubclass(one, Settings)), None)
        if kind is not None:
            classes[name], described = kind, descriptions(kind)
            for field_name, field in kind.model_fields.items():
                default = REQUIRED if field.is_required() else field.default
                parameters.append(_option(field_name, field.annotation, default, described[field_name]))
        elif parameter.kind is not parameter.VAR_KEYWORD:
            only_options = only_options or parameter.kind is parameter.KEYWORD_ONLY
            declare = _option if only_options or name == "out" else _argument
            parameters.append(declare(name, hints[name], parameter.default, texts[name]))
            only_options = only_options or parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL
    return classes, parameters


def _argument(name: str, annotation: Any, default: Any, text: str) -> inspect.Parameter:
    """Declare an argument; options may stand among those of a list."""
    read = Parameter(help=text, show_default=False, required=default is REQUIRED)
    word = Annotated[str, read]
    if get_origin(annotation) is Mapping or {list, Sequence} & {*map(get_origin, _members(annotation))}:
        return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL, annotation=word)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=word, default=default)


def _option(name: str, annotation: Any, default: Any, text: str) -> inspect.Parameter:
    """Declare an option; lists and mappings are repeated in the singular: `--expert a --task a=b`."""
    members, flag = [*_members(annotation)], _flag(name)
    kind, more = _type(members)
    negative = f"--no-{flag.removeprefix('--')}" if bool in members and default is not False else ()
    if get_origin(kind) is list and not flag.endswith("us"):
        flag = flag.removesuffix("s")
    if "converter" in more:
        # The kind says how words are read; cyclopts would compare what they become with it.
        kind = Annotated[kind, SkipValidation()]
    if default is not REQUIRED:
        # What a library takes for an empty list or None is not shown, nor are flags.
        shown = isinstance(default, str | int | float) and not isinstance(default, bool)
        default, kind = default if shown else None, kind | None
    names = (flag, "-v") if name == "verbose" else flag
    annotation = Annotated[kind, Parameter(name=names, negative=negative, help=text, **more)]
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "src" else inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, place, annotation=annotation, default=default)


def _type(members: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """Return what the command line reads for a union of types, and how."""
    origins = {get_origin(member) or member for member in members}
    if origins & {dict, Mapping} and str not in origins:
        if float in origins:
            return list[str], {"metavar": "NUMBER|NAME=NUMBER", "converter": _read_weights}
        return list[str], {"metavar": "NAME=VALUE", "converter": _read_pairs}
    if list[int] in members:
        return str, {"metavar": "NAME|N,N,…", "converter": _read_numbers}
    if Path in members:
        return str, {}
    if origins & {list, Iterable}:
        items = next(get_args(one)[0] for one in members if get_origin(one) in (list, Iterable))
        return list[items if get_origin(items) is Literal else str], {}  # type: ignore[misc]
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
    return "--" + name.rstrip("_").replace("_", "-")


def _read_numbers(_: Any, tokens: Sequence[Token]) -> str | list[str]:
    word = tokens[0].value
    return word.split(",") if re.fullmatch(r"[-\d,]+", word) else word


def _read_pairs(_: Any, tokens: Sequence[Token]) -> dict[str, str]:
    return _pairs([token.value for token in tokens])


def _read_weights(_: Any, tokens: Sequence[Token]) -> float | dict[str, float]:
    if len(tokens) == 1 and "=" not in tokens[0].value:
        return float(tokens[0].value)
    return {name: float(weight) for name, weight in _read_pairs(_, tokens).items()}


def _pairs(words: Iterable[str], default: str | None = None) -> dict[str, str]:
    """Read NAME=VALUE, each name once; without `=`, a name has the default."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or name in found or not (equals or default):
            raise ValueError(f"{word!r}: expected NAME=VALUE, each name once")
        found[name] = value if equals else str(default)
    return found
