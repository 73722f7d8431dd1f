"""Locks that let several commands share the work of a benchmark."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


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


def share(jobs: Iterable[Callable[[float], object]]) -> None:
    """Do the jobs that no other command is working on.

    Args:
        jobs: Functions of a timeout in seconds, which pass it on to `alone`. Their results have to be stored.
    """
    for job in jobs:
        with suppress(Timeout):
            job(0)
