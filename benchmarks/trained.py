"""Models that benchmarks train once, and then use again."""

from collections.abc import Callable
from pathlib import Path

import yaml  # type: ignore[import-untyped]

import mote
from benchmarks.locking import alone
from mote.training.recipe import Recipe
from mote.training.recipe_files import parse_recipe
from mote.training.run_folder import differences, fixed_settings


def trained(recipe: Recipe, report: Callable[[str], None] = print) -> Path:
    """Return the model of a recipe; train it first if its folder has none.

    Args:
        recipe: The recipe.
        report: Function called with a line before training.

    Raises:
        ValueError: If the folder holds a model trained with other settings.
    """
    folder = Path(recipe.output)
    with alone(folder):
        if (folder / "model").exists():
            saved = parse_recipe(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")))
            if differing := differences(fixed_settings(saved), fixed_settings(recipe)):
                raise ValueError(
                    f"{folder} was trained with other settings; it differs in {', '.join(differing)}. Choose another "
                    "folder, or remove it"
                )
        else:
            report(f"== training {folder.name}")
            mote.train(recipe)
    return folder / "model"
