"""Folders that are written over hours: one writer, complete files, and a record of those that are finished.

A file is moved into place complete, then enters the record with its hash. After a kill between the two it is written
again, with the same content.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mote.files import lock, read_json, remove_leftovers, sha256_of, write_json
from mote.reporting import HOW_TO_RESUME

FORMAT = 4
"""Version of the records; a run in another format is never resumed."""

NEW = ".mote-new"
"""Folder of a run that replaces another one, until it is complete."""


class Record:
    """The record of a folder, while this process is its only writer: the identity of the run, and finished files."""

    def __init__(self, file: Path) -> None:
        self.started = False
        self._read(file)

    def _read(self, file: Path) -> None:
        self.folder, self.file = file.parent, file
        self.work = file.parent / ".work"  # what the run needs until it is complete
        self.content: dict[str, Any] = read_json(file, missing_ok=True)
        if not all((file.parent / name).resolve().is_relative_to(file.parent.resolve()) for name in self.finished):
            raise ValueError(f"{file} is damaged: it lists files outside of its folder. Remove it")

    @property
    def finished(self) -> dict[str, dict[str, Any]]:
        """File → its entry in the record, with its hash."""
        return self.content.get("files", {})

    def start(self, identity: dict[str, Any], overwrite: bool) -> None:
        """Start a run, or resume it; its identity is the `command`, and everything else that determines the results."""
        identity = json.loads(json.dumps({"format": FORMAT, **identity}))
        new = not self.content and all(path.name.startswith(".") for path in self.folder.iterdir())
        if overwrite and self.content.get("command") == identity["command"]:
            self._read(self.folder / NEW / self.file.name)
            new = any(self.content.get(key) != value for key, value in identity.items())
            if new:
                shutil.rmtree(self.folder, ignore_errors=True)
        if new:
            self.content = {**identity, "files": {}}
        different = []
        for key, value in identity.items():
            found = self.content.get(key)
            if found != value:
                different.append(key if isinstance(value, dict) else f"{key} ({found!r}, now {value!r})")
        if different:
            raise ValueError(
                f"{self.folder} holds other files, or another run, which differs in {', '.join(different)}: choose "
                "another folder, or replace the run with --overwrite"
            )
        self.started = True
        self.update()

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
        return entry is not None and path.is_file() and sha256_of(path) == entry.get("sha256")

    def take_place(self) -> None:
        """Let a complete run that overwrites another one take its place; the next run here ends it after a kill."""
        out = self.folder.parent
        for name in Record(out / self.file.name).finished:
            (out / name).unlink(missing_ok=True)
        (out / self.file.name).unlink(missing_ok=True)  # of files that are not there
        for name in self.finished:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # moved before a kill
                (self.folder / name).replace(out / name)
        write_json(out / self.file.name, self.content)
        shutil.rmtree(self.folder)
        self._read(out / self.file.name)


@contextmanager
def open_record(folder: Path, name: str) -> Iterator[Record]:
    """Hold the lock of a folder and its record; a new folder is removed again if nothing is finished in it."""
    with lock(folder / ".lock"):
        remove_leftovers(folder)
        if (new := Record(folder / NEW / name)).content.get("complete"):
            new.take_place()
        record = Record(folder / name)
        try:
            yield record
            record.update(complete=True)
            shutil.rmtree(record.work, ignore_errors=True)
            if record.folder != folder:
                record.take_place()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what is finished is kept in {folder}, and {HOW_TO_RESUME}") from None
        finally:
            place = record.folder
            if record.started and not record.finished and not any([*place.rglob("shard-*"), *place.rglob("block-*")]):
                shutil.rmtree(record.work if place == folder else place, ignore_errors=True)
                record.file.unlink(missing_ok=True)
