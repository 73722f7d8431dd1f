"""Atomic folders: a result is moved into place complete or not at all, and nothing else is lost."""

import fnmatch
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from mote.checkpoints.provenance import RECORD_FILE, read_steps, recorded_files

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed, which serves as the lock
    fcntl = None  # type: ignore[assignment]

EXPERT_FILE = "expert.json"

# Files with these names belong to a model and are removed when it is replaced, as are those that its `mote.json` lists;
# all other files are somebody else's.
_WEIGHTS = (
    *("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin.index.json"),
)
_CODE = ("*_mote.py",)
_MODULES = ("[0-9]*_*/*",)
_MODEL_FILES = (
    *_WEIGHTS,
    *("config.json", "generation_config.json", "modules.json", "README.md", RECORD_FILE),
    *("config_sentence_transformers.json", "sentence_bert_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "sentencepiece*.model", "spiece.model"),
    *("onnx/*.onnx*", "openvino/*.xml", "openvino/*.bin", EXPERT_FILE, "expert.safetensors"),
)


def refuse_occupied(out: Path, overwrite: bool = False) -> None:
    """Make sure that a new model may be written to `out`.

    Raises:
        FileExistsError: If the folder is not empty; with `overwrite`, if it holds something other than a model or an
            expert of this package.
        NotADirectoryError: If a file is in the place of one of its parents.
    """
    parent = _nearest(out.absolute().parent)
    if not parent.is_dir():
        raise NotADirectoryError(f"{out} cannot be a folder: {parent} is a file")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} is in use: choose another folder, or replace the model there with `--overwrite`")
    if not (out.is_dir() and _is_ours(out)):
        raise FileExistsError(f"{out} holds something other than a MoTE: it is not overwritten, choose another folder")


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model or an expert of this package, judged by the content of its files."""
    with suppress(OSError, ValueError):
        if read_steps(folder):
            return True
    try:  # a MoTE that was saved by other means
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fields = (config["backbone_config"], config["experts"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False
    return str(config.get("model_type")).startswith("mote") and tuple(map(type, fields)) == (dict, list)


def refuse_source(out: Path, source: Path) -> None:
    """Raise `ValueError` if the result would replace, contain, or lie inside its source."""
    ours, theirs = out.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents:
        raise ValueError(f"{out} is the source itself, or holds it: choose another folder for the result")
    if theirs in ours.parents:
        raise ValueError(f"{out} is inside the source {source}: choose another folder for the result")


def require_space(out: Path, size: int) -> None:
    """Make sure that `size` bytes fit on the disk of `out`.

    Raises:
        OSError: If they do not; the message says how many bytes are free.
    """
    free = shutil.disk_usage(_nearest(out.resolve())).free
    if size > free:
        raise OSError(
            f"{out} needs {size / 1e6:,.1f} MB, but its disk has {free / 1e6:,.1f} MB left: free some, or write "
            "elsewhere"
        )


def _nearest(path: Path) -> Path:
    """Return the path itself if it exists, else its nearest parent that does."""
    return next(place for place in (path, *path.parents) if place.exists())


def require_shard_size(size: str) -> None:
    """Raise `ValueError` for an invalid size of files, which the library would read as the smallest one."""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[KMGT]B", str(size), re.IGNORECASE):
        raise ValueError(f"max_shard_size {size!r} is invalid: expected a number with KB, MB, GB or TB, as in '5GB'")


class Staging:
    """A folder to write into, which is moved into its final place at the end.

    If the body raises, nothing is left behind. If the process is killed, the final place holds what it held before,
    and the next writer to the same place removes the leftovers. A kill can leave the place empty only between the two
    renames that replace a model; the replaced model is then in `.NAME.writing-…/replaced` next to it until another one
    is written.

    Each writer has its own folder with a random name, and holds a lock in it for as long as it runs; writers in other
    threads, processes, containers or hosts leave it alone. If several write to one place, the first one takes it and
    the others fail, or, with `overwrite`, each replaces the previous one.

    Args:
        out: Final place: free, or, with `overwrite`, a model.
        overwrite: Replace an existing model. Files in its folder that are not part of it are kept.
        in_place: The new model is a modification of the existing one: keep all of its other files, too.
    """

    def __init__(self, out: Path, overwrite: bool = False, in_place: bool = False) -> None:
        self.out = out.resolve()  # a link cannot be replaced by a folder, but the folder that it points to can
        self.overwrite = overwrite
        self.in_place = in_place

    def __enter__(self) -> Path:
        """Create the folder."""
        self.new_parents = [parent for parent in self.out.parents if not parent.exists()]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(with_replaced=False)
        lock = None
        while lock is None:  # another writer may mistake a folder without a lock for a leftover
            self.work = self.out.parent / f"{self._prefix}{uuid.uuid4().hex}"
            try:
                self.work.mkdir()
                lock = try_lock(self.work, ours=True)
                if lock is not None:
                    (self.work / "new").mkdir()
            except BaseException:  # an interrupt, when `__exit__` would not yet clean up
                _remove(self.work)
                raise
        self.lock = lock
        self.folder, self.replaced = self.work / "new", self.work / "replaced"
        self.identity = _identity(self.folder)
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Move the folder into place, or remove it."""
        try:
            if kind is None:
                self._move_into_place()
        finally:
            if self.out.exists() or not self.replaced.exists():
                _remove(self.work)
            os.close(self.lock)
        if kind is not None:
            with suppress(OSError):  # others have put something there in the meantime
                for parent in self.new_parents:
                    parent.rmdir()
        if isinstance(error, OSError | SafetensorError):  # safetensors' error for a full disk
            raise OSError(f"{self.out} could not be written, nothing was left behind: {error}") from error

    def _move_into_place(self) -> None:
        with _one_at_a_time(self.out.parent):
            self._require_intact()
            refuse_occupied(self.out, self.overwrite)
            if self.out.is_dir() and any(self.out.iterdir()):
                self._keep_other_files()
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
            shutil.rmtree(self.replaced, ignore_errors=True)
        self._remove_leftovers(with_replaced=True)

    def _require_intact(self) -> None:
        """Raise `OSError` unless the folder is the one that was created, with all files that `mote.json` lists."""
        missing = [name for name in recorded_files(self.folder) if not (self.folder / name).is_file()]
        if missing or _identity(self.folder) != self.identity:
            raise OSError(
                f"{self.out} was not written: another process removed "
                f"{', '.join(missing) or 'the folder'} while it was being written. Run it again"
            )

    def _keep_other_files(self) -> None:
        """Link files of the replaced folder into the new one, unless they belong to the replaced model."""
        belongs = self._belongs_to_model()
        for path in self.out.rglob("*"):
            name = path.relative_to(self.out)
            target = self.folder / name
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()) and not _matches(name, ("[0-9]*_*",)):  # git needs empty folders
                    target.mkdir(parents=True, exist_ok=True)
            elif not (belongs(name) or os.path.lexists(target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target, follow_symlinks=False)
                except (OSError, NotImplementedError):  # a file or operating system without such links
                    shutil.copy2(path, target, follow_symlinks=False)

    def _belongs_to_model(self) -> Callable[[Path], bool]:
        """Return a function that tells whether a file of the replaced folder goes with the replaced model.

        Patterns as wide as those of code and modules, which other files may match, only count without a `mote.json`.
        """
        recorded: set[str] = set()
        with suppress(ValueError):
            recorded = set(recorded_files(self.out))
        if self.in_place:
            return lambda name: (
                _matches(name, _WEIGHTS) or (_matches(name, _CODE) and (not recorded or name.as_posix() in recorded))
            )
        patterns = _MODEL_FILES if recorded else (*_MODEL_FILES, *_CODE, *_MODULES)
        return lambda name: name.as_posix() in recorded or _matches(name, patterns)

    @property
    def _prefix(self) -> str:
        return f".{self.out.name}.writing-"

    def _remove_leftovers(self, with_replaced: bool) -> None:
        """Remove what killed writers to the same place left; a model being replaced only if `with_replaced`."""
        for path in self.out.parent.glob(f"{glob.escape(self._prefix)}*"):
            try:
                content = {child.name for child in path.iterdir()}
            except OSError:  # a file, or another writer has removed it
                continue
            if content <= {"lock", "new", "replaced"} and (with_replaced or "replaced" not in content):
                lock = try_lock(path)
                if lock is not None:
                    _remove(path)
                    os.close(lock)


def _remove(work: Path) -> None:
    try:
        for path in (work / "new", work / "replaced", work):  # the lock last
            shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # an interrupt: finish removing first
        shutil.rmtree(work, ignore_errors=True)
        raise


def try_lock(work: Path, ours: bool = False) -> int | None:
    """Lock the folder of a writer until the returned file descriptor is closed.

    Args:
        work: The folder.
        ours: Whether the folder is our own; then a file system without locks is fine.

    Returns:
        The file descriptor; None if another writer has the lock, or, unless the folder is `ours`, may have it.
    """
    path = work / "lock"
    if fcntl is None and not ours:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # another writer has it open
            return None
        return os.open(os.devnull, os.O_RDONLY)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):  # else it was removed between these lines
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # a file system without locks
        if ours:
            return lock
    os.close(lock)
    return None


def _matches(name: Path, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns, part by part."""
    return any(
        len(name.parts) == len(parts) and all(map(fnmatch.fnmatchcase, name.parts, parts))
        for parts in (pattern.split("/") for pattern in patterns)
    )


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one writer at a time move its result into a folder, if the file system can lock folders."""
    lock = None
    with suppress(OSError, AttributeError):
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
