"""The folder of a run: its files, its lock, and whether a recipe can start or resume there."""

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mote.files import read_json
from mote.reporting import HOW_TO_RESUME
from mote.settings import Settings
from mote.training.pretraining_recipe import AnyRecipe
from mote.training.progress import CHECKPOINT_FILE

try:
    import fcntl
except ImportError:  # Windows: a second run in a folder is not detected there
    fcntl = None  # type: ignore[assignment]

RECIPE_FILE = "recipe.yaml"
UNFINISHED_RECIPE = f".{RECIPE_FILE}.part"
CURVES_FILE = "curves.png"
LOCK_FILE = ".lock"
START_FOLDER = ".mote-start"  # the upcycled source, until it is in memory; hidden, as a run may remove it
PROBE = ".mote-probe-"  # prefix of an empty folder that shows whether a run can write
CHECKPOINT = re.compile(r"checkpoint-\d+")  # a copy, `checkpoint-5-copy`, is none

# What a run makes before its recipe: left by killed runs, or just being made by another process.
_WHOLE = "|".join(map(re.escape, (LOCK_FILE, START_FOLDER, UNFINISHED_RECIPE)))
_STAGING = re.escape(f".{START_FOLDER}.writing-")
BEFORE_RECIPE = re.compile(rf"{_WHOLE}|{re.escape(PROBE)}\w+|{_STAGING}[0-9a-f]+")

# Top-level settings that every version has written into the recipe of a run.
ALWAYS_WRITTEN = {"name", "description", "model", "tasks", "data", "training", "validation", "output"}

# Settings that may change when a run is resumed: they do not affect what is learned.
FREE_SETTINGS = (
    "output",
    "description",
    "training.save_steps",
    "training.save_total_limit",
    "training.logging_steps",
    "training.dataloader_num_workers",
)


@dataclass
class RunFolder:
    """The folder of a run: `checkpoints/` and `log.jsonl` while it trains, `model/` when it has finished.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        complete = [folder for folder in self._own_checkpoints() if (folder / CHECKPOINT_FILE).is_file()]
        return max(complete, key=step_of, default=None)

    def _own_checkpoints(self) -> list[Path]:
        """List the checkpoints of the run, complete or not; other folders next to them are the user's."""
        return [path for path in self.checkpoints.glob("*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()]

    def check(self, recipe: AnyRecipe) -> None:
        """Check that a run of the recipe may write here.

        Raises:
            FileExistsError: If the folder holds something other than a run.
            ValueError: If the model's source is inside the folder.
            OSError: If nothing can be written here.
        """
        source = Path(recipe.model.source)
        if source.exists() and source.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"The source {source} is inside {self.path}, the folder of this run, which would replace it: choose "
                "another `output`"
            )
        self._refuse_foreign()
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        try:
            with tempfile.TemporaryDirectory(dir=existing, prefix=PROBE):
                pass
        except OSError as error:
            raise type(error)(f"Nothing can be written to {self.path}: {error}. Choose another `output`") from error

    def _refuse_foreign(self) -> None:
        """Raise `FileExistsError` if the folder holds something other than a run."""
        present = sorted(path.name for path in self.path.iterdir()) if self.path.exists() else []
        if RECIPE_FILE in present and "modules.json" not in present:  # not a model, which holds its recipe, too
            self._refuse_other_recipe()
            return
        if self.checkpoints.name in present and not any(self.checkpoints.glob("*")):
            present.remove(self.checkpoints.name)  # which the trainer makes before the recipe is written
        foreign = [name for name in present if not BEFORE_RECIPE.fullmatch(name)]
        if foreign:
            raise FileExistsError(
                f"{self.path} holds something other than a run: {self.path / foreign[0]} is in the way. Choose another "
                "`output`"
            )

    def _refuse_other_recipe(self) -> None:
        """Raise `FileExistsError` if there is a recipe that no run has written."""
        file = self.path / RECIPE_FILE
        if file.exists() and not _was_written_by_a_run(file):
            raise FileExistsError(
                f"{self.path} holds something other than a run: {file} was not written by one, and would be "
                "overwritten. Choose another `output`"
            )

    def open(self, recipe: AnyRecipe, overwrite: bool) -> Path | None:
        """Return the checkpoint from which a run of the recipe would resume here, if any. Changes nothing.

        Args:
            recipe: The recipe.
            overwrite: Start over, discarding any earlier run here.

        Raises:
            FileExistsError: If a run has finished here, or the folder holds something other than a run.
            ValueError: If the checkpoints here belong to another recipe (the message lists the differences), or the
                newest one is damaged.
            OSError: If nothing can be written here.
        """
        self.check(recipe)
        if overwrite:
            return None
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            if self.model.exists():
                raise FileExistsError(
                    f"{self.path} holds a finished run: its model is in {self.model}. Choose another `output`, or "
                    "start over with `--overwrite`"
                )
            return None
        kept, ours = read_metadata(checkpoint), fixed_settings(recipe)
        theirs = kept["recipe"]
        if "models" in kept:  # with the commits of source and teachers, which have to be the same, however named
            theirs, ours = _without_revisions(theirs), _without_revisions(ours)
        differing = differences(theirs, ours)
        if differing:
            raise ValueError(
                f"{checkpoint} belongs to another recipe, which differs in {', '.join(differing)}. Resume with that "
                "recipe, choose another `output`, or start over with `--overwrite`"
            )
        return checkpoint

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out of the folder, until this one has ended or its process has died.

        Raises:
            BlockingIOError: If a run is using the folder; the message names its host and process.
        """
        new = [path for path in (self.path, *self.path.absolute().parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / LOCK_FILE
        descriptor = _locked(file)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            file.unlink(missing_ok=True)
            _release(descriptor)
            with contextlib.suppress(OSError):  # a run that could not start leaves nothing
                for path in new:
                    path.rmdir()

    def clean(self) -> None:
        """Remove a start model that a killed run has left behind."""
        shutil.rmtree(self.path / START_FOLDER, ignore_errors=True)

    def begin(self, recipe: AnyRecipe, checkpoint: Path | None) -> None:
        """Make this the folder of the recipe's run: remove checkpoints after the one that it resumes from."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_other_recipe()  # which may have come while the data were read
        for folder in self._own_checkpoints() if (self.path / RECIPE_FILE).exists() else ():
            if checkpoint is None or step_of(folder) > step_of(checkpoint):
                (folder / CHECKPOINT_FILE).unlink(missing_ok=True)  # first: without it, a checkpoint is never used
                shutil.rmtree(folder)
        unfinished = self.path / UNFINISHED_RECIPE  # a recipe that was cut short would not be known as a run's
        unfinished.write_text(as_yaml(recipe), encoding="utf-8")
        unfinished.replace(self.path / RECIPE_FILE)

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of a run whose model is written."""
        own = self._own_checkpoints()
        for folder in own:
            (folder / CHECKPOINT_FILE).unlink(missing_ok=True)  # first, in case of a kill
        for folder in (*own, self.checkpoints / "eval"):  # which Sentence-Transformers makes
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # it does not exist, or holds something else
            self.checkpoints.rmdir()

    def how_to_resume(self) -> str:
        """Name the last complete checkpoint, for the message of a run that stops."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {checkpoint}; {HOW_TO_RESUME} from it."


_held: set[int] = set()


def _locked(file: Path) -> int:
    """Open and lock a file; raise `BlockingIOError` if another process holds it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                _held.add(descriptor)
                return descriptor
            os.close(descriptor)  # removed by its last holder after we opened it
        except BlockingIOError:
            holder = os.read(descriptor, 500).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise BlockingIOError(
                f"A run is using {file.parent}: {holder}. Wait until it has ended, stop it, or choose another `output`"
            ) from None


def _release(descriptor: int) -> None:
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _release_in_child() -> None:
    for descriptor in [*_held]:  # a worker that outlives its killed parent must not hold the lock
        _release(descriptor)


os.register_at_fork(after_in_child=_release_in_child)


def fixed_settings(recipe: AnyRecipe, given_only: bool = False) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed, as dotted keys.

    Args:
        recipe: The recipe.
        given_only: Leave out what neither the recipe nor one that it extends names, so that a later setting with a
            default changes nothing.
    """
    flat = _flat(recipe.model_dump(mode="json", exclude_unset=given_only))
    return {key: value for key, value in flat.items() if key not in FREE_SETTINGS}


def _without_revisions(fixed: dict[str, Any]) -> dict[str, Any]:
    """Leave the revisions of source and teachers out of fixed settings, in which a task's datasets are one value."""
    left = {}
    for key, value in fixed.items():
        if key == "model.revision" or re.fullmatch(r"tasks\..*\.teacher\.revision", key):
            continue
        if isinstance(value, list) and re.fullmatch(r"tasks\..*\.datasets", key):
            teachers = [dataset.get("teacher") for dataset in value]
            value = [
                {**dataset, "teacher": teacher and {**teacher, "revision": None}}
                for dataset, teacher in zip(value, teachers, strict=True)
            ]
        left[key] = value
    return left


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name the settings that differ, with both values if they are short."""
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    shown = [f"{key} ({theirs.get(key)!r} there, {ours.get(key)!r} here)" for key in keys]
    return [text if len(text) < 120 else key for key, text in zip(keys, shown, strict=True)]


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Read what a complete checkpoint records about its run.

    Raises:
        ValueError: If it is damaged.
    """
    file = checkpoint / CHECKPOINT_FILE
    try:
        metadata: dict[str, Any] = read_json(file)
        if "recipe" not in metadata:
            raise ValueError(f"{file} does not name a recipe")
    except ValueError as error:
        raise ValueError(
            f"{error}. It was written last, so its checkpoint is incomplete, too (after a power cut?): remove "
            f"{checkpoint} to resume from the one before, or start over with `--overwrite`"
        ) from error
    return metadata


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def as_yaml(recipe: Settings) -> str:
    """Return the complete recipe as YAML."""
    return _dump(recipe.model_dump(mode="json"))


def _dump(settings: Any) -> str:
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _was_written_by_a_run(file: Path) -> bool:
    """Whether a recipe is complete and laid out as `as_yaml` does: it has no comments, and extends no other."""
    try:
        text = file.read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(settings, dict) and settings.keys() >= ALWAYS_WRITTEN and text == _dump(settings)
