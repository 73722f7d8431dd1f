"""Locks that let several commands share the work of a benchmark."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


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
