"""Files, folders and locks that survive a kill: what is written is complete or absent, and nothing else is lost."""

import glob
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from huggingface_hub.utils.sha import sha_fileobj

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed, which serves as the lock
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".writing-"


# Files ---------------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path with the same suffix, and move it into place at the end.

    After an error the temporary file is removed, and the place holds what it held before. A link is replaced, not
    followed. Several files that belong together: enter them into one `contextlib.ExitStack`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}-{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def link(path: Path, target: Path) -> None:
    """Link a file, or a link, to a second place in its file system; copy it where that does not work."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a file or operating system without such links
        shutil.copy2(path, target, follow_symlinks=False)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed writers left in a folder and below; call it while holding its lock."""
    for path in folder.rglob(f"{_TEMPORARY}*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def read_json(path: Path, kind: type = dict, missing_ok: bool = False) -> Any:
    """Read a JSON file; with `missing_ok`, one that does not exist is an empty `kind`."""
    if missing_ok and not path.is_file():
        return kind()
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def expanded(value: Any) -> Any:
    """Expand the `~/` that a path begins with, also after `NAME=`, where shells do not; anything else stays."""
    found = re.fullmatch(r"([\w.-]+=)?(~/.*)", value) if isinstance(value, str) else None
    return f"{found[1] or ''}{Path(found[2]).expanduser()}" if found else value


def refuse_pointer(path: Path) -> None:
    """Raise `ValueError` if a file is a pointer to what Git LFS stores."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer: run `git lfs pull`")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Hash the content of a file, block by block."""
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


# Locks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file, which is removed at the end; it is free again when the process ends, however it ends.

    Child processes do not hold it, so that a worker which outlives its killed parent does not either. A file system
    without locks excludes nobody. The folder that it protects is created, and removed if it stays empty.
    """
    new_folders = [folder for folder in path.absolute().parents if not folder.exists()]
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = try_lock(path)
        if descriptor is not None:
            break
        with suppress(FileNotFoundError):  # released in the meantime: try again
            holder = path.read_text(encoding="utf-8", errors="replace") or "another process"
            raise BlockingIOError(
                f"{path.parent} is in use by {holder}: wait until it has ended, or choose another folder"
            )
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        if fcntl is not None:
            path.unlink(missing_ok=True)  # while it is held: afterwards it may be another's
        release(descriptor)
        with suppress(OSError):  # on Windows, another one has it open; or the folders are not empty
            if fcntl is None:
                path.unlink(missing_ok=True)
            for folder in new_folders:
                folder.rmdir()


def try_lock(path: Path, may_be_held: bool = False) -> int | None:
    """Create and lock a file until the returned descriptor is released; None if another writer holds the lock.

    On a file system without locks it counts as free, or, with `may_be_held`, as held by another writer.
    """
    if fcntl is None:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # another writer has it open
            return None
        if may_be_held:  # an open file would keep its folder from being removed
            return os.open(os.devnull, os.O_RDONLY)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:  # the folder has been removed
        return None
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # else it was removed between these lines
            _held.add(descriptor)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a file system without locks
        if not may_be_held:
            _held.add(descriptor)
            return descriptor
    os.close(descriptor)
    return None


_held: set[int] = set()


def release(descriptor: int) -> None:
    """Release a lock from `try_lock`."""
    _held.discard(descriptor)
    with suppress(OSError):  # in a child process, which has released it
        os.close(descriptor)


def _release_in_child() -> None:
    for descriptor in [*_held]:
        release(descriptor)


if fcntl is not None:
    os.register_at_fork(after_in_child=_release_in_child)


# Folders -------------------------------------------------------------------------------------------------------------


class Staging:
    """A folder to write into, which is moved into its final place at the end.

    If the body raises, nothing is left behind. If the process is killed, the final place holds what it held before,
    and the next writer to the same place removes the leftovers. A kill can leave the place empty only between the two
    renames that replace a folder; the replaced one is then in `.NAME.writing-…/replaced` next to it until another one
    is written.

    Each writer has its own folder with a random name, and holds a lock in it for as long as it runs; writers in other
    threads, processes, containers or hosts leave it alone. If several write to one place, each replaces the previous
    one, unless a subclass refuses an occupied place.
    """

    write_errors: tuple[type[BaseException], ...] = (OSError,)

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()  # a link cannot be replaced by a folder, but the folder that it points to can

    def before_move(self) -> None:
        """Where a subclass refuses a place, or takes what it keeps of it; no other writer moves anything there then."""

    def __enter__(self) -> Path:
        """Create the folder."""
        self.new_parents = [parent for parent in self.out.parents if not parent.exists()]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(with_replaced=False)
        descriptor = None
        while descriptor is None:  # another writer may mistake a folder without a lock for a leftover
            self.work = self.out.parent / f"{self._prefix}{uuid.uuid4().hex}"
            try:
                self.work.mkdir()
                descriptor = try_lock(self.work / "lock")
                if descriptor is not None:
                    (self.work / "new").mkdir()
            except BaseException:  # an interrupt, when `__exit__` would not yet clean up
                _remove(self.work)
                raise
        self.lock = descriptor
        self.folder, self.replaced = self.work / "new", self.work / "replaced"
        self.inode = self.folder.stat().st_ino
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Move the folder into place, or remove it."""
        try:
            if kind is None:
                with _one_at_a_time(self.out.parent):
                    self._move_into_place()
                self._remove_leftovers(with_replaced=True)
        finally:
            if self.out.exists() or not self.replaced.exists():
                _remove(self.work)
            release(self.lock)
        if kind is not None:
            with suppress(OSError):  # others have put something there in the meantime
                for parent in self.new_parents:
                    parent.rmdir()
        if isinstance(error, self.write_errors):
            raise OSError(f"{self.out} could not be written, nothing was left behind: {error}") from error

    def _move_into_place(self) -> None:
        if not self.folder.is_dir() or self.folder.stat().st_ino != self.inode:
            self.lost("the folder")
        self.before_move()
        if self.out.is_dir() and not any(self.out.iterdir()):
            self.out.rmdir()  # Windows does not replace it
        if not self.out.exists():
            self.folder.rename(self.out)
            return
        self.out.rename(self.replaced)
        try:
            self.folder.rename(self.out)
        except OSError:
            self.replaced.rename(self.out)
            raise
        shutil.rmtree(self.replaced, ignore_errors=True)

    def lost(self, what: str) -> NoReturn:
        """Raise the `OSError` for a result, or files of it, that another process has removed."""
        raise OSError(
            f"{self.out} was not written: another process removed {what} while it was being written. Run it again"
        )

    @property
    def _prefix(self) -> str:
        return f".{self.out.name}{_TEMPORARY}"

    def _remove_leftovers(self, with_replaced: bool) -> None:
        """Remove what killed writers to the same place left; a folder being replaced only if `with_replaced`."""
        for path in self.out.parent.glob(f"{glob.escape(self._prefix)}*"):
            with suppress(OSError):  # a file, another user's, or removed by another writer
                content = {child.name for child in path.iterdir()}
                if content <= {"lock", "new", "replaced"} and (with_replaced or "replaced" not in content):
                    descriptor = try_lock(path / "lock", may_be_held=True)
                    if descriptor is not None:
                        _remove(path)
                        release(descriptor)


def _remove(work: Path) -> None:
    try:
        for path in (work / "new", work / "replaced", work):  # the lock last
            shutil.rmtree(path, ignore_errors=True)
    finally:  # what an interrupt has left
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one writer at a time move its result into a folder, if the file system can lock folders."""
    descriptor = None
    with suppress(OSError, AttributeError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
