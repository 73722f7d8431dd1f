"""Find the datasets of a recipe, and read their rows one by one, with the place of each."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import datasets
import pyarrow
from pyarrow import parquet

from configuration_mote import alternatives
from mote.data.settings import DatasetSettings

HUB = "hub:"
ENDINGS = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
_WILDCARDS = set("*?[")


class Line(NamedTuple):
    """A row as it was read: its place, and its content or what is wrong with it."""

    where: str
    content: dict[str, Any]
    fault: str = ""


AnySettings = TypeVar("AnySettings", bound=DatasetSettings)


@dataclass(frozen=True)
class Location(Generic[AnySettings]):
    """A dataset that was found.

    Attributes:
        name: The last two parts of its path below the data folder, `retrieval/arxiv`; of a dataset on the Hub its id.
        settings: The settings that it was found by.
        files: What to read; none for a dataset on the Hub.
    """

    name: str
    settings: AnySettings
    files: tuple[Path, ...] = ()


def find_datasets(
    settings: AnySettings, folder: Path, report: Callable[[str], None] = lambda line: None
) -> list[Location[AnySettings]]:
    """Find what one entry of a recipe stands for.

    Args:
        settings: The entry: its path is a file, a folder with a file for the split, a folder of such folders, a
            pattern, or `hub:user/name`.
        folder: Where relative paths begin.
        report: Called with each folder that a pattern or a folder of folders passes over.

    Returns:
        The datasets, sorted by path.

    Raises:
        FileNotFoundError: If nothing is there, or nothing for the split.
        ValueError: If the split is there in more than one format, or `exclude` names what is not there.
    """
    if settings.path.startswith(HUB):
        name = settings.path.removeprefix(HUB)
        return [Location(f"{name}/{settings.subset}" if settings.subset else name, settings)]
    found = []
    for path in _matches(settings.path, folder, settings.split):
        files = _files_of(path, settings.split)
        if files:
            found.append(Location(_name(path, folder, settings.split), settings, files))
        elif path.is_dir():
            report(f"{_name(path, folder, settings.split)}: no {settings.split!r} part, passed over")
    if not found:
        endings = ", ".join(settings.split + ending for ending in ENDINGS)
        raise FileNotFoundError(f"{folder / settings.path} holds no {settings.split!r} part: expected one of {endings}")
    return _without_excluded(found, settings.exclude)


def _matches(path: str, folder: Path, split: str) -> list[Path]:
    """The files and folders that a path stands for: itself, what fits the pattern, or the folders in a folder."""
    target = folder / path
    if not folder.is_dir() and not Path(path).is_absolute():
        raise FileNotFoundError(f"There is no folder {folder} (data.folder)")
    if target.exists():
        is_dataset = target.is_file() or _files_of(target, split) or any(_ending(file) for file in target.iterdir())
        return [target] if is_dataset else sorted(inside for inside in target.iterdir() if inside.is_dir())
    if _WILDCARDS & set(path):
        matches = sorted(Path(target.anchor or ".").glob(str(target.relative_to(target.anchor))))
        if matches:
            return matches
        raise FileNotFoundError(f"Nothing fits the pattern {path} in {folder} (data.folder)")
    nearest = next(parent for parent in target.parents if parent.exists())
    inside = [child.name for child in sorted(nearest.iterdir()) if not child.name.startswith(".")]
    missing = target.relative_to(nearest).parts[0]
    raise FileNotFoundError(f"There is no dataset {target}. In {nearest}:" + alternatives(missing, inside))


def _in_folder(folder: Path, split: str) -> Iterator[Path]:
    """The files of a split, also in parts: `train.jsonl`, `train-00000-of-00002.parquet`, `train/0.parquet`."""
    for ending in ENDINGS:
        for pattern in (split, f"{split}-[0-9]*", f"{split}/*"):
            yield from folder.glob(pattern + ending)


def _files_of(path: Path, split: str) -> tuple[Path, ...]:
    if path.is_file():
        if _ending(path):
            return (path,)
        raise ValueError(f"{path}: unknown format, expected one of {', '.join(ENDINGS)}")
    files = sorted(set(_in_folder(path, split)))
    if len({(file.parent, _ending(file), file.name == split + _ending(file)) for file in files}) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in files)
        raise ValueError(f"{path} has its {split!r} part in several forms ({names}): name the file to read")
    return tuple(files)


def _ending(path: Path) -> str:
    return next((ending for ending in ENDINGS if path.name.endswith(ending)), "")


def _name(path: Path, folder: Path, split: str) -> str:
    stem = path.name.removesuffix(_ending(path))
    path = path.parent if path.is_file() and stem == split else path.with_name(stem)
    path = path.resolve()
    inside = path.is_relative_to(folder.resolve()) and path != folder.resolve()
    parts = path.relative_to(folder.resolve()).parts if inside else path.parts[1:]
    return "/".join(parts[-2:])


def _without_excluded(found: list[Location[AnySettings]], exclude: list[str]) -> list[Location[AnySettings]]:
    names = [location.name for location in found]
    for pattern in exclude:
        if not any(_is_named(name, pattern) for name in names):
            raise ValueError(f"exclude: there is no dataset {pattern!r}." + alternatives(pattern, names))
    kept = [location for location in found if not any(_is_named(location.name, pattern) for pattern in exclude)]
    if not kept:
        raise ValueError(f"{found[0].settings.path}: `exclude` leaves no dataset")
    return kept


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition("/")[2], pattern)


def read_rows(location: Location[Any]) -> Iterator[Line]:
    """Read a dataset.

    Yields:
        Every row with its place, `file:line` or `file:row n`. What is no row at all carries its fault.

    Raises:
        FileNotFoundError: If there is no such dataset on the Hub.
        ValueError: If a file is cut short or damaged, or the dataset on the Hub has no such part.
    """
    if not location.files:
        yield from _numbered(location.name, _from_hub(location))
    for file in location.files:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)


def _numbered(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Line]:
    for number, row in enumerate(rows, start=1):
        yield Line(f"{name}: row {number}", row)


def _read_lines(file: Path) -> Iterator[Line]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parsed(f"{file}:{number}", line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{file} is cut short or damaged: {error}") from error


def _parsed(where: str, line: bytes) -> Line:
    try:
        content = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        return Line(where, {}, f"no JSON ({error})")
    if not isinstance(content, dict):
        return Line(where, {}, f"expected an object of columns, found {type(content).__name__}")
    return Line(where, content)


def _read_parquet(file: Path) -> Iterator[Line]:
    try:
        with parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            yield from _numbered(str(file), rows)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} is cut short or damaged: {error}") from error


def _from_hub(location: Location[Any]) -> Iterable[dict[str, Any]]:
    settings = location.settings
    name = settings.path.removeprefix(HUB)
    if Path(name).is_dir():  # `datasets` would read it instead
        raise ValueError(f"{settings.path} is also a folder here: leave out `{HUB}`, or run elsewhere")
    try:
        return datasets.load_dataset(name, name=settings.subset, split=settings.split, revision=settings.revision)
    except OSError as error:  # not there, no connection, and what else the Hub answers
        raise FileNotFoundError(f"The dataset {name} cannot be had from the Hub: {error}") from error
