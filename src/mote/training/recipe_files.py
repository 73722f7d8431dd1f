"""Recipe files: finds them, reads them with those that they extend, applies overrides, and checks the result."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from typing_extensions import TypeVar

from mote.remote.configuration_mote import alternatives
from mote.settings import error_messages
from mote.training.recipe import SHIPPED, Recipe, RunSettings

logger = logging.getLogger(__name__)

AnyRecipe = TypeVar("AnyRecipe", bound=RunSettings, default=Recipe)


def shipped_recipes(place: Any = SHIPPED) -> list[str]:
    """List the recipes shipped with the package, for training or of another kind."""
    return sorted(entry.name.removesuffix(".yaml") for entry in place.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    kind: type[AnyRecipe] = Recipe,  # type: ignore[assignment]  # of the default
) -> AnyRecipe:
    """Read a recipe.

    Args:
        recipe: File, or name of a shipped recipe.
        overrides: `key=value` pairs, with a dotted key and a value in YAML.
        kind: Class of its settings.

    Returns:
        The complete recipe.

    Raises:
        FileNotFoundError: If there is no such recipe; the message lists the shipped ones.
        ValueError: If the recipe is invalid; the message lists every error.
    """
    settings = _read(str(recipe), kind.PLACE)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        settings = _replaced(settings, key.split("."), _parse(value, f"override {override!r}"))
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
    if isinstance(tasks := settings.get("tasks"), dict):
        settings = {**settings, "tasks": {task: value for task, value in tasks.items() if value is not None}}
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        errors = [f"  {key or 'the recipe'}: {message}" for key, message in error_messages(error)]
        raise ValueError("\n".join([f"The recipe {name} is invalid:", *errors])) from None


def _read(recipe: str, place: Any, folder: Path | None = Path(), extended_by: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Read a recipe's settings, merged into those of the recipe that it extends.

    Args:
        recipe: File, or name of a shipped recipe.
        place: Folder of the shipped recipes.
        folder: Where a file is looked up before the shipped recipes. None: only these are.
        extended_by: Files that extend it; the last may extend a shipped recipe of its own name.
    """
    candidates = [] if folder is None else [folder / recipe, folder / f"{recipe}.yaml"]
    found = [path.resolve() for path in candidates if path.is_file()]
    file: Any = next((path for path in found if path not in extended_by[-1:]), place / f"{recipe}.yaml")
    if not file.is_file():
        raise FileNotFoundError(f"There is no recipe {recipe!r}." + alternatives(recipe, shipped_recipes(place)))
    if file in extended_by:
        raise ValueError(f"The recipe {recipe} extends itself")
    if file in found and recipe in shipped_recipes(place):
        logger.info("The recipe %s is the file %s, not the shipped one", recipe, file)
    settings = _parse(file.read_bytes(), f"recipe {recipe}")
    if not isinstance(settings, dict):
        raise ValueError(f"The recipe {recipe} must be a mapping of keys to values, got {type(settings).__name__}")  # noqa: TRY004
    if "extends" not in settings:
        return settings
    extended = str(settings.pop("extends"))
    return _merged(_read(extended, place, file.parent if file in found else None, (*extended_by, file)), settings)


def _merged(base: dict[str, Any], changes: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Merge changes into a base: mappings key by key, anything else as a whole."""
    result = dict(base)
    for name, value in changes.items():
        below = result.get(name)
        if isinstance(below, dict) and isinstance(value, dict):
            result[name] = _merged(below, value, name)
        else:
            result = _replaced(result, [name], value, key)
    return result


def _replaced(settings: dict[str, Any], path: list[str], value: Any, key: str = "") -> dict[str, Any]:
    """Return settings with another value; `null` may only remove a task that is there."""
    name, *rest = path
    below = settings.get(name)
    if rest:
        return {**settings, name: _replaced(below if isinstance(below, dict) else {}, rest, value, name)}
    if key == "tasks" and value is None and name not in settings:
        left = [task for task, task_settings in settings.items() if task_settings is not None]
        raise ValueError(f"tasks.{name}=null: the recipe has no task {name!r}." + alternatives(name, left))
    return {**settings, name: value}


class _Loader(yaml.SafeLoader):
    """Reads `5e-6` as a number, as YAML 1.2 does, and refuses a key given twice, of which PyYAML keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if key.value != "<<"]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str | bytes, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"The {what} is invalid YAML: {error}") from None
