"""Models that benchmarks train once, and then use again."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

import mote
from benchmarks.locking import alone
from mote.checkpoints.reading import open_checkpoint
from mote.corpora.folder import write_whole
from mote.training.recipe import Recipe
from mote.training.recipe_files import parse_recipe
from mote.training.run_folder import differences, fixed_settings


def hash_of_weights(model: str) -> str:
    """Return the first 16 digits of the SHA-256 of each file with weights."""
    return " ".join(one[:16] for one in open_checkpoint(model).sha256_of_weights().values())


def trained(recipe: Recipe, report: Callable[[str], None] = print, hashes: Mapping[str, str] | None = None) -> Path:
    """Return the model of a recipe; train it first if its folder has none.

    Args:
        recipe: The recipe.
        report: Function called with a line before training.
        hashes: Hashes of what the recipe only names, such as its data. That of the start's weights is added.

    Raises:
        ValueError: If the folder holds a model trained with other settings, or from other weights or data.
    """
    folder = Path(recipe.output)
    with alone(folder):
        _check_hashes(folder, {**(hashes or {}), "start": hash_of_weights(recipe.model.source)})
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


def _check_hashes(folder: Path, hashes: dict[str, str]) -> None:
    """Compare the hashes with those of an earlier run in the folder, or store them for later ones."""
    file = folder.with_name(f"{folder.name}.hashes.json")
    if not folder.exists():
        write_whole(file, lambda unfinished: unfinished.write_text(json.dumps(hashes), encoding="utf-8"))
        return
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if differing := differences(before, hashes):
        raise ValueError(
            f"{folder} was trained from other weights or data; it differs in {', '.join(differing)}. Choose another "
            "folder, or remove it"
        )
