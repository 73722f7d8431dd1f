"""The cache of results, in mteb's format and layout: `results/MODEL/REVISION/[experiments/SETTINGS/]TASK.json`."""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mteb
from mteb.models import ModelMeta

_ASIDE = ".writing-"
_ADDED_TO = "run_settings.jsonl"  # one file for all tasks


class CacheError(OSError):
    """A result could not be written: the run ends, as its work would be lost."""


class Cache(mteb.ResultCache):
    """mteb's cache, with two additional guarantees.

    - Results on other data do not count: mteb compares the revision of the data only if a result is incomplete.
    - A file is complete or missing: mteb writes in place, so that a kill leaves half a file, which breaks every later
      run.
    """

    def __init__(self, folder: Path, tasks: Iterable[Any]) -> None:
        """Open or create the cache in a folder, for results of these tasks.

        Raises:
            CacheError: If the folder cannot be made.
        """
        try:
            super().__init__(folder)
            folder.mkdir(parents=True, exist_ok=True)  # not every version of mteb does it
        except OSError as error:
            raise CacheError(f"Results cannot be written to {folder}: {error}") from error
        for leftover in folder.glob(f"{_ASIDE}*"):  # of a killed writer: writing takes no time
            with suppress(FileNotFoundError):  # its writer is alive, and has finished
                if time.time() - leftover.stat().st_mtime > 60:
                    shutil.rmtree(leftover, ignore_errors=True)
        every = [*with_subtasks(tasks)]
        self.revisions = {task.metadata.name: task.metadata.revision for task in every}
        self.subtasks = {task.metadata.name: task.metadata.tasks for task in every if task.is_aggregate}

    def load_task_result(self, task_name: str, *args: Any, **kwargs: Any) -> Any:
        """Load a result, if there is one for the same data; the data of an aggregate are those of its subtasks."""
        for part in self.subtasks.get(task_name, ()):
            if self.load_task_result(part.metadata.name, *args, **kwargs) is None:
                return None
        try:
            result = super().load_task_result(task_name, *args, **kwargs)
        except (ValueError, KeyError, TypeError, AttributeError):  # damaged: invalid JSON, or not what mteb writes
            return None
        return result if result is not None and result.dataset_revision == self.revisions.get(task_name) else None

    def set_aside(self, task: Any, meta: ModelMeta) -> None:
        """Rename the results of a task and its subtasks, so that they count as missing; see `restore`.

        Raises:
            CacheError: If they cannot be renamed.
        """
        for path in self._paths(task, meta):
            try:
                with suppress(FileNotFoundError):
                    path.replace(_earlier(path))
            except OSError as error:
                raise CacheError(f"The earlier result {path} cannot be renamed: {error}") from error

    def restore(self, task: Any, meta: ModelMeta) -> None:
        """Take back those results that were set aside and have not been computed again, and delete the others."""
        for path in self._paths(task, meta):
            with suppress(OSError):
                if not path.exists():
                    _earlier(path).replace(path)
                _earlier(path).unlink(missing_ok=True)

    def _paths(self, task: Any, meta: ModelMeta) -> list[Path]:
        return [self.get_task_result_path(part.metadata.name, meta) for part in with_subtasks([task])]

    def find(self, task: Any, meta: ModelMeta) -> Any:
        """Load the result of a task, if there is a complete one."""
        result = self.load_task_result(task.metadata.name, meta)
        return result if result is not None and not result.get_missing_evaluations(task) else None

    def save_to_cache(self, task_result: Any, model_name: Any, *args: Any, **kwargs: Any) -> None:
        """Write a result to a temporary folder, and move it into place file by file."""
        place = self.get_task_result_path(task_result.task_name, model_name, *args).parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache_path, prefix=_ASIDE) as aside:
                staged = mteb.ResultCache(aside)
                folder = staged.get_task_result_path(task_result.task_name, model_name, *args).parent
                folder.mkdir(parents=True)
                if (place / _ADDED_TO).is_file():
                    shutil.copy(place / _ADDED_TO, folder / _ADDED_TO)
                staged.save_to_cache(task_result, model_name, *args, **kwargs)
                for file in folder.iterdir():
                    file.replace(place / file.name)
        except OSError as error:
            raise CacheError(f"The result of {task_result.task_name} cannot be written to {place}: {error}") from error


def with_subtasks(tasks: Iterable[Any]) -> Iterator[Any]:
    """Iterate over tasks, and over the tasks that aggregate tasks consist of."""
    for task in tasks:
        yield task
        if task.is_aggregate:
            yield from with_subtasks(task.metadata.tasks)


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}.earlier")
