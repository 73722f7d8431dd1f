"""Write folders whole or not at all."""

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

MERGING_RECORD = "merging.json"  # marks a dense model that was made of a MoTE here
EXPERT_FILE = "expert.json"  # marks an expert in files of its own


def refuse_occupied(out: Path, overwrite: bool = False) -> None:
    """Make sure that a new model may be written to `out`.

    Raises:
        FileExistsError: If something is there; with `overwrite`, if it is something other than a MoTE, or a
            dense model or an expert that was made of one.
        NotADirectoryError: If it would be in something that is no folder.
    """
    parent = _nearest(out.absolute().parent)
    if not parent.is_dir():
        raise NotADirectoryError(f"{out} cannot be a folder: {parent} is a file")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} is in use: choose another folder, or replace the model there with `--overwrite`")
    if any((out / mark).is_file() for mark in (MERGING_RECORD, EXPERT_FILE)):
        return
    try:
        settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict) or settings.get("model_type") != "mote":
        raise FileExistsError(f"{out} holds something other than a MoTE: it is not overwritten, choose another folder")


def refuse_source(out: Path, source: Path) -> None:
    """Raise `ValueError` where a result would take the place of its source, or of a folder that holds it."""
    ours, theirs = out.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents:
        raise ValueError(f"{out} is the source itself, or holds it: choose another folder for the result")


def require_space(out: Path, size: int) -> None:
    """Make sure that `size` bytes fit on the disk of `out`.

    Raises:
        OSError: If they do not; the message says how many there are.
    """
    free = shutil.disk_usage(_nearest(out.resolve())).free
    if size > free:
        raise OSError(
            f"{out} needs {size / 1e6:,.1f} MB, but its disk has {free / 1e6:,.1f} MB left: free some, or write "
            "elsewhere"
        )


def _nearest(path: Path) -> Path:
    """Find what there is of a path that is yet to be made."""
    return next(place for place in (path, *path.parents) if place.exists())


def require_shard_size(size: str) -> None:
    """Raise `ValueError` where this is no size of files, which the library would take for the smallest one."""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[KMGT]B", str(size), re.IGNORECASE):
        raise ValueError(f"max_shard_size {size!r} is no size as in '5GB': expected a number, and KB, MB, GB or TB")


class Staging:
    """A folder to write into, beside its final place, which it takes at the end.

    If the block raises, nothing stays behind. If the process is killed, the final place holds what it held before,
    and the next writer removes the leftover. Only between two renames, when a model is replaced, can a kill leave
    the place empty; the replaced model is then still beside it.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        """Stage for `out`, which must be free or, with `overwrite`, hold a model."""
        self.out = out.resolve()  # a link to a folder cannot be replaced by a folder, what it points to can
        self.overwrite = overwrite
        self.folder = self.out.parent / f".{self.out.name}.writing-{os.getpid()}"
        self.replaced = self.out.parent / f".{self.out.name}.replaced-{os.getpid()}"

    def __enter__(self) -> Path:
        """Create the folder."""
        self.new_parents = [parent for parent in self.out.parents if not parent.exists()]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers("writing")
        self.folder.mkdir()
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Move the folder into place, or remove it."""
        try:
            if kind is None:
                self._move_into_place()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        if kind is not None:
            self._remove_new_parents()
        if isinstance(error, OSError | SafetensorError):  # what safetensors raises on a full disk
            raise OSError(f"{self.out} could not be written, nothing was left behind: {error}") from error

    def _move_into_place(self) -> None:
        refuse_occupied(self.out, self.overwrite)
        if self.out.is_dir() and any(self.out.iterdir()):
            self._remove_leftovers("replaced")
            self.out.rename(self.replaced)
            try:
                self.folder.rename(self.out)
            except OSError:
                self.replaced.rename(self.out)
                raise
        else:
            if self.out.is_dir():
                self.out.rmdir()  # empty, and Windows does not replace it
            self.folder.rename(self.out)
        self._remove_leftovers("replaced")  # the model just replaced, and those of writers that were killed

    def _remove_new_parents(self) -> None:
        with suppress(OSError):  # somebody else has put something there meanwhile
            for parent in self.new_parents:
                parent.rmdir()

    def _remove_leftovers(self, kind: str) -> None:
        """Remove what writers to the same place left when they were killed."""
        prefix = f".{self.out.name}.{kind}-"
        for path in self.out.parent.iterdir():
            process = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and process.isdigit() and path.is_dir() and not _is_another(int(process)):
                shutil.rmtree(path)


def _is_another(process: int) -> bool:
    """Whether a process is running that is not this one; in a container, a killed one may have had our number."""
    if process == os.getpid():
        return False
    if sys.platform == "win32":  # where the signal 0 is not a question, but Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
