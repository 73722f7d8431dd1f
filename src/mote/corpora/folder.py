"""Folders that are written over hours: one writer, complete files, and a record of what is finished.

A file is moved into place complete, then enters the record with its hash. After a kill between the two it is made
again, with the same content.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from huggingface_hub.utils.sha import sha_fileobj

from mote.files import release, try_lock
from mote.reporting import HOW_TO_RESUME

FORMAT = 1  # readers refuse later formats


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder for writing; it is created if necessary, and removed again if it stays empty.

    Raises:
        OSError: If another process is writing there, or the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder / "lock")
    if lock is None:
        raise OSError(f"{folder} is being written by another process: wait for it, or choose another folder")
    try:
        yield
    finally:
        (folder / "lock").unlink(missing_ok=True)
        release(lock)
        with suppress(OSError):  # not empty
            folder.rmdir()


def read_record(folder: Path, name: str, entries: str, what: str) -> dict[str, Any] | None:
    """Read the record of a folder.

    Args:
        folder: The folder.
        name: File name of the record.
        entries: Key of the finished entries in the record.
        what: What the folder should hold, for errors.

    Returns:
        Content of the record; None if the folder does not exist, or is empty.

    Raises:
        ValueError: If the folder holds something else, or the record is damaged or of a later version.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a folder")
    file = folder / name
    if not file.is_file():
        if any(not path.name.startswith(".") and path.name != "lock" for path in folder.glob("*")):
            raise ValueError(f"{folder} holds something other than {what}: choose another folder")
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        later = record["format"] > FORMAT
        if not isinstance(record[entries], dict):
            raise TypeError(entries)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: choose another folder") from error
    if later:
        raise ValueError(f"{folder} was written by a later version of MoTE, which is needed to read it")
    return dict(record)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of a killed writer."""
    for path in folder.rglob(".*.writing-*"):
        if path.is_file():
            path.unlink()


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write the record of a folder.

    Raises:
        OSError: If it cannot be written.
    """
    content = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(file, lambda path: path.write_text(content, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let a function write a temporary file, and move it into place.

    Raises:
        OSError: If it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.writing-{uuid4().hex}")
    try:
        write(unfinished)
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path} could not be written: {error}; {HOW_TO_RESUME}") from error
        raise


def is_intact(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is the one that an entry of the record describes."""
    return path.is_file() and sha256(path) == entry["sha256"]


def sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as content:
        return sha_fileobj(content).hex()
