"""The folder of a run: what is in it, and whether a recipe may go on there."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mote.training.card import RECIPE_FILE
from mote.training.model import START_FOLDER
from mote.training.progress import CHECKPOINT_FILE, LOG_FILE
from mote.training.recipe import Recipe

# Settings that a run may go on with when they have changed: they do not touch what is learned.
FREE_SETTINGS = (
    "output",
    "description",
    "training.save_every",
    "training.keep",
    "training.log_every",
    "training.workers",
)


@dataclass
class RunFolder:
    """The folder of a run: `checkpoints/` and `log.jsonl` while it trains, `model/` when it has ended.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def model(self) -> Path:
        """Where the trained model goes."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """Find the newest checkpoint that is whole."""
        whole = [folder for folder in self.checkpoints.glob("checkpoint-*") if (folder / CHECKPOINT_FILE).is_file()]
        return max(whole, key=step_of, default=None)

    def open(self, recipe: Recipe, overwrite: bool) -> Path | None:
        """Get ready to run a recipe here.

        Returns:
            The checkpoint to go on from, if there is one.

        Raises:
            FileExistsError: If a run has ended here, or something else is here.
            ValueError: If the checkpoints here are those of another recipe; the message says what differs.
        """
        if overwrite:
            self._clear()
        if self.model.exists():
            raise FileExistsError(
                f"{self.path} holds a run that has ended: its model is in {self.model}. Choose another `output`, or "
                "start again with `--overwrite`"
            )
        there = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        foreign = [name for name in there if START_FOLDER not in name]  # which a kill leaves before there is a recipe
        if foreign and RECIPE_FILE not in there:
            raise FileExistsError(f"{self.path} holds something other than a run: choose another `output`")
        checkpoint = self.last_checkpoint()
        if checkpoint is not None:
            theirs = json.loads((checkpoint / CHECKPOINT_FILE).read_text(encoding="utf-8"))["recipe"]
            differing = differences(theirs, fixed_settings(recipe))
            if differing:
                raise ValueError(
                    f"{checkpoint} is of another recipe; it differs in {', '.join(differing)}. Go on with that recipe, "
                    "choose another `output`, or start again with `--overwrite`"
                )
        return checkpoint

    def clean(self, checkpoint: Path | None) -> None:
        """Remove what a kill has left: a model on its way, which may be of another recipe, and cut checkpoints."""
        shutil.rmtree(self.path / START_FOLDER, ignore_errors=True)
        for folder in self.checkpoints.glob("checkpoint-*"):
            if checkpoint is None or step_of(folder) > step_of(checkpoint):
                shutil.rmtree(folder)

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the recipe, which makes the folder a run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / RECIPE_FILE).write_text(as_yaml(recipe), encoding="utf-8")

    def how_to_go_on(self) -> str:
        """Say where the last good checkpoint is."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {checkpoint}; the same command goes on from there."

    def _clear(self) -> None:
        if (self.path / RECIPE_FILE).is_file():  # which stays, as the mark of a run's folder
            for folder in (self.model, self.checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
            (self.path / LOG_FILE).unlink(missing_ok=True)


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that a run must not change midway, flat."""
    flat = _flat(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in FREE_SETTINGS}


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what differs, with both values where they are short."""
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    shown = [f"{key} ({theirs.get(key)!r} there, {ours.get(key)!r} here)" for key in keys]
    return [text if len(text) < 120 else key for key, text in zip(keys, shown, strict=True)]


def step_of(checkpoint: Path) -> int:
    """Return the step at which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def as_yaml(recipe: Recipe) -> str:
    """Write a recipe, complete, as a file that is one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
