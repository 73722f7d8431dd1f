"""Locks that let several commands share the work of a benchmark."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

Result = TypeVar("Result")


@contextmanager
def alone(folder: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of a folder.

    Args:
        folder: The folder, which need not exist.
        timeout: Seconds to wait for another command; -1: no limit.

    Raises:
        filelock.Timeout: If the other command holds the lock for longer.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=timeout):
        yield


def share(jobs: Iterable[Callable[[float], Result]]) -> list[Result | None]:
    """Do the jobs that no other command is working on.

    Args:
        jobs: Functions of a timeout in seconds, which pass it on to `alone`.

    Returns:
        The result of each job; None if another command is working on it.
    """
    results: list[Result | None] = []
    for job in jobs:
        try:
            results.append(job(0))
        except Timeout:
            results.append(None)
    return results
