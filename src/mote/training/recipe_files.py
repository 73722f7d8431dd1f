"""Recipe files: finds them, reads them with those that they extend, applies overrides, and checks the result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from typing_extensions import TypeVar
from yaml import YAMLError  # type: ignore[import-untyped]

from mote.remote.configuration_mote import alternatives, require_known
from mote.settings import error_messages
from mote.training.recipe import SHIPPED, Recipe, RunSettings

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
        recipe: Name of a shipped recipe, or a file.
        overrides: `key=value` pairs, with a dotted key and a value in YAML.
        kind: Class of its settings.

    Raises:
        FileNotFoundError: If there is no such recipe; the message lists the shipped ones.
        ValueError: If the recipe is invalid; the message lists every error.
    """
    settings = _read(str(recipe), kind.PLACE)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        with _valid_yaml(f"The override {override!r}"):
            value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
            _require_tasks_to_remove(settings, OmegaConf.from_dotlist([override]))
            OmegaConf.update(settings, key, value["value"], merge=False)  # a mapping is replaced as a whole
    try:
        # `${…}` stays as it is: it is text, of an instruction perhaps.
        return kind.model_validate(OmegaConf.to_container(settings))
    except ValidationError as error:
        errors = [f"  {key or 'the recipe'}: {message}" for key, message in error_messages(error)]
        raise ValueError("\n".join([f"The recipe {recipe} is invalid:", *errors])) from None


def _read(recipe: str, place: Any, folder: Path = Path(), extended_by: tuple[Path, ...] = ()) -> DictConfig:
    """Read a recipe, shipped in `place` or a file in `folder`, merged into the one that it extends."""
    shipped = shipped_recipes(place)
    candidates = [place / f"{recipe}.yaml"] if recipe in shipped else [folder / recipe, folder / f"{recipe}.yaml"]
    file = next((path.resolve() for path in candidates if path.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"There is no recipe {recipe!r}." + alternatives(recipe, shipped))
    if file in extended_by:
        raise ValueError(f"The recipe {recipe} extends itself")
    with _valid_yaml(f"The recipe {recipe}"):
        settings = DictConfig(OmegaConf.load(file))
    if "extends" not in settings:
        return settings
    extended = _read(str(settings.pop("extends")), place, file.parent, (*extended_by, file))
    _require_tasks_to_remove(extended, settings)
    return OmegaConf.merge(extended, settings)  # type: ignore[return-value]  # of two mappings


@contextmanager
def _valid_yaml(what: str) -> Iterator[None]:
    """Name what is read in the message of an error in it."""
    try:
        yield
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{what} is invalid: {error}") from None


def _require_tasks_to_remove(settings: DictConfig, changes: DictConfig) -> None:
    """Raise `ValueError` if `null` is to remove a task that the settings do not name: probably it is misspelt."""
    for name, task in (changes.get("tasks") or {}).items():
        if task is None:
            require_known(name, settings.get("tasks") or {}, "task to remove:")
