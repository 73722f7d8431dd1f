"""The folder of a run: its files, its lock, and whether a recipe can start or resume there."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mote.files import read_json, replaced, sha256_of, write_json
from mote.reporting import HOW_TO_RESUME
from mote.settings import Settings
from mote.training.recipe import RunSettings

RUN_FILE = "mote-run.json"  # marks the folder of a run, and identifies the run
RECIPE_FILE = "recipe.yaml"
STATE_FILE = "trainer_state.json"  # of a finished run, with the trainer's log
CURVES_FILE = "curves.png"
CHECKPOINT_FILE = "checkpoint.json"  # written last: a checkpoint without it is incomplete
LOCK_FILE = ".lock"
START_FOLDER = ".mote-start"  # the upcycled source, until it is in memory

# Last parts of the keys that may change when a run is resumed: they do not affect what is learned. What a revision
# selects is compared as a commit, or as the rows read.
FREE_SETTINGS = (
    "output",
    "engine",
    "description",
    "revision",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "dataloader_num_workers",
)


class RunFolder:
    """The folder of a run: `checkpoints` while it trains, `model` when it has finished."""

    def __init__(self, path: Path) -> None:
        self.path, self.model, self.checkpoints = path, path / "model", path / "checkpoints"
        self.start = path / START_FOLDER

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        complete = [folder for folder in self._own_checkpoints() if (folder / CHECKPOINT_FILE).is_file()]
        return max(complete, key=step_of, default=None)

    def _own_checkpoints(self) -> list[Path]:
        """List the checkpoints of the run, complete or not; other folders next to them are the user's."""
        found = self.checkpoints.glob("checkpoint-*")
        return [path for path in found if path.name.removeprefix("checkpoint-").isdecimal() and path.is_dir()]

    def open(self, recipe: RunSettings, overwrite: bool) -> Path | None:
        """Return the checkpoint from which a run of the recipe would resume here, if any. Changes nothing.

        A run may write into the folder of a run, or one without visible files.
        """
        self.refuse_source(recipe)
        if self.path.exists() and not (self.path / RUN_FILE).exists():
            for path in sorted(self.path.iterdir()):
                # The trainer makes its folder of checkpoints before the run begins.
                if not path.name.startswith(".") and (path != self.checkpoints or any(path.iterdir())):
                    raise FileExistsError(
                        f"{self.path} holds something other than a run: {path} is in the way. Choose another `output`"
                    )
        checkpoint = None if overwrite else self.last_checkpoint()
        begun = not read_json(self.path / RUN_FILE, missing_ok=True).get("finished", True)  # and maybe an older model
        if not overwrite and (checkpoint is not None or (begun and self.model.exists())):
            self.require_same(settings=fixed_settings(recipe))
        elif self.model.exists() and not overwrite:
            raise FileExistsError(
                f"{self.path} holds a finished run: its model is in {self.model}. Choose another `output`, or "
                "start over with `--overwrite`"
            )
        return checkpoint

    def refuse_source(self, recipe: RunSettings) -> None:
        """Refuse a source in the folder, which the run would replace."""
        source = Path(recipe.model.source)
        if source.exists() and source.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"The source {source} is inside {self.path}, the folder of this run, which would replace it: choose "
                "another `output`"
            )

    def require_same(self, **identity: dict[str, Any]) -> None:
        """Raise `ValueError` if a part of the run's identity differs from what it was started with."""
        kept = read_json(self.path / RUN_FILE)
        for part, ours in identity.items():
            theirs = kept[part]
            found = [
                f"{key} ({theirs.get(key)!r} there, {ours.get(key)!r} here)"
                for key in {**theirs, **ours}
                if theirs.get(key) != ours.get(key)
            ]
            if found:
                raise ValueError(
                    f"The {part} differ from those of the run in {self.path}: {', '.join(found)}. Resume with the "
                    "earlier ones, choose another `output`, or start over with `--overwrite`"
                )

    def begin(self, recipe: RunSettings, identity: dict[str, dict[str, Any]], checkpoint: Path | None) -> None:
        """Make this the folder of the recipe's run, without checkpoints after the one that it resumes from.

        `identity` is what determines the result, for `require_same`.
        """
        self._remove_after(-1 if checkpoint is None else step_of(checkpoint))
        write_json(self.path / RUN_FILE, {**identity, "finished": False})
        with replaced(self.path / RECIPE_FILE) as file:
            file.write_text(as_yaml(recipe), encoding="utf-8")

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of a run whose model is written."""
        write_json(self.path / RUN_FILE, {**read_json(self.path / RUN_FILE, missing_ok=True), "finished": True})
        self._remove_after(-1)
        shutil.rmtree(self.checkpoints / "eval", ignore_errors=True)  # which Sentence-Transformers makes
        with suppress(OSError):  # it does not exist, or holds something else
            self.checkpoints.rmdir()

    def _remove_after(self, step: int) -> None:
        for folder in self._own_checkpoints():
            if step_of(folder) > step:
                (folder / CHECKPOINT_FILE).unlink(missing_ok=True)  # first, in case of a kill
                shutil.rmtree(folder, ignore_errors=True)

    def how_to_resume(self) -> str:
        """Name the last complete checkpoint, for the message of a run that stops."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {checkpoint}; {HOW_TO_RESUME} from it."


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """Hash the files of a checkpoint, all but the one that completes it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != CHECKPOINT_FILE)
    return {path.relative_to(checkpoint).as_posix(): sha256_of(path) for path in files}


def read_checkpoint(checkpoint: Path, check: bool) -> dict[str, Any]:
    """Return the counts of a checkpoint; with `check`, a missing or changed file is a `ValueError`."""
    counts = read_json(checkpoint / CHECKPOINT_FILE)
    expected, found = counts.pop("files", {}), hashes_of(checkpoint) if check else {}
    if damaged := [name for name, digest in expected.items() if check and found.get(name) != digest]:
        raise ValueError(
            f"{checkpoint / damaged[0]} is missing or damaged: remove its folder to resume from an earlier one"
        )
    return counts


def fixed_settings(recipe: RunSettings, given_only: bool = False) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed, as dotted keys; with or without defaults."""
    flat = _flat(recipe.model_dump(mode="json", exclude_unset=given_only))
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in FREE_SETTINGS}


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict | list) or not settings:
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def as_yaml(recipe: Settings) -> str:
    """Return the complete recipe as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
