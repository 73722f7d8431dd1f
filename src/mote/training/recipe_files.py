"""Recipe files: finds them, reads them with those that they extend, applies overrides, and checks the result.

A class of settings defines what they may hold: `Recipe` of training, unless another is given.
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from typing_extensions import TypeVar

from mote.data.settings import Settings
from mote.remote.configuration_mote import alternatives
from mote.training.recipe import SHIPPED, Recipe

logger = logging.getLogger(__name__)

MAX_VALUES = 100_000  # in a recipe, with aliases counted as often as they are used
MAX_DEPTH = 30
MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`


def shipped_recipes(place: Any = SHIPPED) -> list[str]:
    """List the recipes shipped with the package, for training or of another kind."""
    return sorted(entry.name.removesuffix(".yaml") for entry in place.iterdir() if entry.name.endswith(".yaml"))


AnyRecipe = TypeVar("AnyRecipe", bound=Settings, default=Recipe)


def load_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    kind: type[AnyRecipe] = Recipe,  # type: ignore[assignment]  # of the default
    changes: Sequence[dict[str, Any]] = (),
) -> AnyRecipe:
    """Read a recipe.

    Args:
        recipe: File, or name of a shipped recipe.
        overrides: `key=value` pairs, with a dotted key and a value in YAML.
        kind: Class of its settings.
        changes: Settings that override the recipe, as a recipe that extends it would.

    Returns:
        The complete recipe.

    Raises:
        FileNotFoundError: If there is no such recipe; the message lists the shipped ones.
        ValueError: If the recipe is invalid; the message lists every error.
    """
    settings = _read(str(recipe), kind.PLACE)  # type: ignore[attr-defined]
    for change in changes:
        _refuse_extends("extends" in change, "settings that override a recipe")
        settings = _merged(settings, change)  # may remove a task that only other recipes have
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        *path, name = key.split(".")
        _refuse_extends(key == "extends", f"override {override!r}")
        parent = settings
        for part in path:
            if not isinstance(parent.get(part), dict):
                parent[part] = {}
            parent = parent[part]
        given = _parse_yaml(value, f"override {override!r}")
        if path == ["tasks"]:
            _refuse_unknown_removals({name: given}, parent)
        parent[name] = given
    return parse_recipe(settings, str(recipe), kind)


def parse_recipe(
    settings: dict[str, Any],
    name: str = "recipe",
    kind: type[AnyRecipe] = Recipe,  # type: ignore[assignment]  # of the default
) -> AnyRecipe:
    """Validate settings, and fill in the defaults.

    Raises:
        ValueError: If a key is unknown or a value is invalid; the message lists every error.
    """
    settings = copy.deepcopy(settings)
    settings.pop("extends", None)
    if isinstance(settings.get("tasks"), dict):  # `null` removes a task of the recipe that is extended
        settings["tasks"] = {task: value for task, value in settings["tasks"].items() if value is not None}
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        errors = []
        for fault in error.errors():
            message = fault["msg"].removeprefix("Value error, ")
            if fault["type"] != "value_error" and isinstance(fault["input"], str | int | float):
                message += f", found {fault['input']!r}"
            errors.append(f"  {'.'.join(map(str, fault['loc'])) or 'the recipe'}: {message}")
        raise ValueError("\n".join([f"The recipe {name} is invalid:", *errors])) from None


def _read(
    recipe: str,
    place: Any,
    extended_by: tuple[str, ...] = (),
    folder: Path | None = Path(),
    extending: Path | None = None,
) -> dict[str, Any]:
    """Read a recipe's settings, merged into those of the recipe that it extends.

    Args:
        recipe: File, or name of a shipped recipe.
        place: Folder of the shipped recipes.
        extended_by: Names of the recipes that extend it.
        folder: Where a file is looked up before the shipped recipes. None: only these are.
        extending: File that extends it; a recipe of the same name in the same folder is not looked for.
    """
    path = None if folder is None else folder / recipe
    candidates = [] if path is None else [path, path.with_name(path.name + ".yaml")]
    files = (one for one in candidates if one.is_file() and (extending is None or not one.samefile(extending)))
    found = next(files, None)
    is_shipped = recipe in shipped_recipes(place)
    if found is not None:
        if is_shipped:
            logger.info("The recipe %s is the file %s, not the shipped one", recipe, found)
        try:
            text, folder = found.read_text(encoding="utf-8"), found.parent
        except UnicodeDecodeError as error:
            raise ValueError(f"The recipe {recipe} is not a text in UTF-8 ({error}): save it as one") from None
    elif is_shipped:
        text, folder = (place / f"{recipe}.yaml").read_text(encoding="utf-8"), None
    else:
        raise FileNotFoundError(f"There is no recipe {recipe!r}." + alternatives(recipe, shipped_recipes(place)))
    settings = _parse_yaml(text, f"recipe {recipe}")
    if not isinstance(settings, dict):
        raise ValueError(f"The recipe {recipe} must be a mapping of keys to values, got {type(settings).__name__}")  # noqa: TRY004
    if "extends" in settings:
        extended = str(settings["extends"])
        if extended in extended_by:
            raise ValueError(f"The recipe {extended} extends itself, through {', '.join(extended_by)}")
        settings = _extended(_read(extended, place, (*extended_by, extended), folder, found), settings)
    return settings


def _extended(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge the settings of a recipe that extends another into those of the other."""
    tasks = [one["tasks"] if isinstance(one.get("tasks"), dict) else {} for one in (changes, recipe)]
    _refuse_unknown_removals(*tasks)
    return _merged(recipe, changes)


def _refuse_unknown_removals(changes: dict[str, Any], tasks: dict[str, Any]) -> None:
    """Raise `ValueError` if changes remove (`null`) a task that the recipe does not have."""
    for name, value in changes.items():
        if value is None and name not in tasks:
            left = [task for task, settings in tasks.items() if settings is not None]
            raise ValueError(f"tasks.{name}=null: the recipe has no task {name!r}." + alternatives(name, left))


def _refuse_extends(given: bool, where: str) -> None:
    if given:
        raise ValueError(f"The {where}: `extends` is for recipe files. Name the recipe itself, or write a file")


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; an error in it names its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # such as of 2024-13-45, which is taken for a date
            problem = f"{node.value!r:.50} is not of the type that YAML takes it for ({error}): put texts into quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _parse_yaml(text: str, what: str) -> Any:
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _check_nodes(root, what)
        return None if root is None else _numbers(loader.construct_document(root))
    except yaml.YAMLError as error:
        raise ValueError(f"The {what} is invalid YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"The {what} is nested too deeply: at most {MAX_DEPTH} levels are allowed") from None


def _check_nodes(root: yaml.Node | None, what: str) -> None:
    """Refuse YAML whose aliases make it enormous or infinite, or that has a key twice, before it is constructed."""
    count, pending = 0, [(root, 0)]
    while pending:
        node, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        if count > MAX_VALUES:
            raise ValueError(f"The {what} has more than {MAX_VALUES:,} values, aliases counted at each use")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, what)
            pending += [(child, depth + 1) for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(child, depth + 1) for child in node.value]


def _check_keys(mapping: yaml.MappingNode, what: str) -> None:
    """Refuse a key that is given twice, of whose values PyYAML would take the last."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        known, line = (key.tag, key.value), key.start_mark.line + 1
        if known in lines:
            where = f"line {line}" if lines[known] == line else f"lines {lines[known]} and {line}"
            raise ValueError(f"The {what} names {key.value!r} twice ({where}): make them one")
        lines[known] = line


def _numbers(value: Any) -> Any:
    """Read `5e-6` as a number, which YAML 1.1 reads as a string."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and value[:1].isdigit() and "e-" in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into a base: mappings key by key, anything else as a whole."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
