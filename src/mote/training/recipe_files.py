"""Recipe files: finds them, reads them with those that they extend, applies overrides, and checks the result."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from typing_extensions import TypeVar
from yaml import YAMLError  # type: ignore[import-untyped]

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
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        try:
            value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"The override {override!r} is invalid YAML: {error}") from None
        _require_tasks_to_remove(settings, OmegaConf.from_dotlist([override]))
        OmegaConf.update(settings, key, value["value"], merge=False)  # a mapping is replaced as a whole
    plain: Any = OmegaConf.to_container(settings)  # `${…}` stays as it is: it is text, of an instruction perhaps
    return parse_recipe(plain, str(recipe), kind)


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


def _read(recipe: str, place: Any, folder: Path | None = Path(), extended_by: tuple[Any, ...] = ()) -> DictConfig:
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
    try:
        settings = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"The recipe {recipe} is invalid YAML: {error}") from None
    if not isinstance(settings, DictConfig):
        raise ValueError(f"The recipe {recipe} must be a mapping of keys to values, got a list")  # noqa: TRY004
    if "extends" not in settings:
        return settings
    extended = _read(str(settings.pop("extends")), place, file.parent if file in found else None, (*extended_by, file))
    _require_tasks_to_remove(extended, settings)
    return OmegaConf.merge(extended, settings)  # type: ignore[return-value]  # of two mappings


def _require_tasks_to_remove(settings: DictConfig, changes: DictConfig) -> None:
    """Raise `ValueError` if `null` is to remove a task that the settings do not name: probably it is misspelt."""
    named: Any = settings.get("tasks") or {}
    for name, task in (changes.get("tasks") or {}).items():
        if task is None and name not in named:
            left = [task for task, task_settings in named.items() if task_settings is not None]
            raise ValueError(f"tasks.{name}=null: the recipe has no task {name!r}." + alternatives(name, left))
