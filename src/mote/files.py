"""Write folders whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType


def refuse_occupied(out: Path, overwrite: bool = False) -> None:
    """Make sure that a new model may be written to `out`.

    Raises:
        FileExistsError: If something is there; with `overwrite`, if it is something other than a MoTE.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} is in use: choose another folder, or replace the model there with `--overwrite`")
    try:
        is_mote = json.loads((out / "config.json").read_text(encoding="utf-8")).get("model_type") == "mote"
    except (OSError, ValueError):
        is_mote = False
    if not is_mote:
        raise FileExistsError(f"{out} holds something other than a MoTE: it is not overwritten, choose another folder")


class Staging:
    """A folder to write into, beside its final place, which it takes at the end.

    If the block raises, nothing stays behind. If the process is killed, the final place holds what it held before,
    and the next writer removes the leftover. Only between two renames, when a model is replaced, can a kill leave
    the place empty; the replaced model is then still beside it.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        """Stage for `out`, which must be free or, with `overwrite`, hold a model."""
        self.out = out
        self.overwrite = overwrite
        self.folder = out.parent / f".{out.name}.writing-{os.getpid()}"
        self.replaced = out.parent / f".{out.name}.replaced-{os.getpid()}"

    def __enter__(self) -> Path:
        """Create the folder."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.out.parent.glob(f".{self.out.name}.writing-*"):
            if not _is_running(int(leftover.name.rsplit("-", 1)[-1])):
                shutil.rmtree(leftover)
        self.folder.mkdir()
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Move the folder into place, or remove it."""
        try:
            if kind is None:
                self._move_into_place()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{self.out} could not be written, nothing was left behind: {error}") from error

    def _move_into_place(self) -> None:
        refuse_occupied(self.out, self.overwrite)
        if self.out.is_dir() and any(self.out.iterdir()):
            self.out.rename(self.replaced)
            try:
                self.folder.rename(self.out)
            except OSError:
                self.replaced.rename(self.out)
                raise
            shutil.rmtree(self.replaced)
        else:
            self.folder.replace(self.out)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
