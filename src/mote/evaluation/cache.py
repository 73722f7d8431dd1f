"""The cache of results, in mteb's format and layout: `results/MODEL/REVISION/[experiments/SETTINGS/]TASK.json`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mteb


class CacheError(OSError):
    """A result cannot be written, so that the work of every further dataset would be lost as well."""


class Cache(mteb.ResultCache):
    """mteb's cache, in which results on other data and damaged files do not count."""

    def __init__(self, folder: Path, tasks: Iterable[Any]) -> None:
        super().__init__(folder)
        self.tasks = {task.metadata.name: task for task in with_subtasks(tasks)}

    def load_task_result(self, task_name: str, *args: Any, **kwargs: Any) -> Any:
        """Load a result, if there is one for the same data; the data of an aggregate are those of its subtasks."""
        task = self.tasks[task_name]
        parts = task.metadata.tasks if task.is_aggregate else ()
        if any(self.load_task_result(part.metadata.name, *args, **kwargs) is None for part in parts):
            return None
        try:
            result = super().load_task_result(task_name, *args, **kwargs)
        except Exception:  # half a file of a killed run, or not what mteb writes
            return None
        # mteb compares revisions only if a result is incomplete.
        return result if result is not None and result.dataset_revision == task.metadata.revision else None

    def find(self, task: Any, meta: Any) -> Any:
        """Load the result of a task, if there is a complete one."""
        result = self.load_task_result(task.metadata.name, meta)
        return result if result is not None and not result.get_missing_evaluations(task) else None

    def save_to_cache(self, task_result: Any, *args: Any, **kwargs: Any) -> None:
        """Write a result as mteb does; `CacheError` if that is impossible."""
        try:
            super().save_to_cache(task_result, *args, **kwargs)
        except OSError as error:
            raise CacheError(
                f"The result of {task_result.task_name} cannot be written to {self.cache_path}: {error}"
            ) from error


def with_subtasks(tasks: Iterable[Any]) -> Iterator[Any]:
    """Iterate over tasks, and over the tasks that aggregate tasks consist of."""
    for task in tasks:
        yield task
        if task.is_aggregate:
            yield from with_subtasks(task.metadata.tasks)
