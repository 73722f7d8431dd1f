"""Folders that are written over hours: one writer, complete files, and a record of those that are finished.

A file is moved into place complete, then enters the record with its hash. After a kill between the two it is written
again, with the same content.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mote.files import lock, read_json, remove_leftovers, sha256_of, write_json
from mote.reporting import HOW_TO_RESUME

FORMAT = 2
"""Version of the records; a run in another format is never resumed."""
WORK = ".work"
"""Folder for what a run needs until it is complete."""


class Record:
    """The record of a folder, while this process is its only writer: the identity of the run, and finished files.

    Attributes:
        folder: The folder.
        file: File of the record.
        content: Its content; `files` holds the finished files with their hashes.
    """

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        self.folder, self.file, self.content = file.parent, file, content
        self.work = self.folder / WORK

    @property
    def finished(self) -> dict[str, dict[str, Any]]:
        """File → its entry in the record."""
        return self.content["files"]

    def update(self, **changes: Any) -> None:
        """Change the record."""
        self.content |= changes
        write_json(self.file, self.content)

    def add(self, name: str, **details: Any) -> None:
        """Add a finished file."""
        entry = {"sha256": sha256_of(self.folder / name), **details}
        self.update(files=dict(sorted({**self.finished, name: entry}.items())))

    def is_finished(self, name: str) -> bool:
        """Whether a file is finished, and unchanged since."""
        path, entry = self.folder / name, self.finished.get(name)
        return entry is not None and path.is_file() and sha256_of(path) == entry["sha256"]


@contextmanager
def locked_folder(folder: Path, name: str) -> Iterator[Path]:
    """Hold the lock of a folder of results with a record of this name, and yield the file of the record.

    The folder is created, and removed again if it stays empty.
    """
    with lock(folder / ".lock"):
        remove_leftovers(folder)
        if not (folder / name).exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds files but no {name}: choose another folder")
        yield folder / name


@contextmanager
def open_record(file: Path, identity: dict[str, Any], overwrite: bool) -> Iterator[Record]:
    """Start or resume a run in a locked folder.

    Args:
        file: File of the record.
        identity: The `command`, and everything else that determines the results.
        overwrite: Replace another run.

    Raises:
        ValueError: If the folder holds a run with another identity.
    """
    identity = json.loads(json.dumps({"format": FORMAT, **identity}))
    folder, found = file.parent, read_json(file) if file.exists() else None
    if overwrite and found is not None and found.get("command") == identity["command"]:
        for name in found["files"]:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / WORK, ignore_errors=True)
        found = None
    record = Record(file, found or {**identity, "files": {}})
    _require_same(record, identity)
    record.update()
    try:
        yield record
        shutil.rmtree(record.work, ignore_errors=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what is finished is kept in {folder}, and {HOW_TO_RESUME}") from None
    finally:
        if not record.finished and not any(any(folder.rglob(name)) for name in ("shard-[0-9]*", "block-[0-9]*")):
            shutil.rmtree(record.work, ignore_errors=True)
            file.unlink()


def _require_same(record: Record, identity: dict[str, Any]) -> None:
    different = []
    for key, value in identity.items():
        found = record.content.get(key)
        if without_names(found) != without_names(value):
            plain = not isinstance(value, dict) and not isinstance(found, dict)
            different.append(f"{key} ({found!r}, now {value!r})" if plain else key)
    if different:
        raise ValueError(
            f"{record.folder} holds another run, which differs in {', '.join(different)}: choose another folder, or "
            "replace it with --overwrite"
        )


def without_names(value: Any) -> Any:
    """Leave out the names of models and files, however nested: their content identifies them."""
    if isinstance(value, list):
        return [without_names(item) for item in value]
    if isinstance(value, dict):
        return {key: without_names(item) for key, item in value.items() if key != "name"}
    return value
