"""The reader of text data: finds the files of a dataset, and reads its rows, each with its location.

Datasets on the Hub are read by `datasets.load_dataset`. Files are read here, because the library's JSON reader rejects
a whole file for one invalid row, knows no line numbers, and copies the data into the user's cache.
"""

import codecs
import gzip
import json
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mote.remote.configuration_mote import alternatives

if TYPE_CHECKING:
    from mote.data.settings import DatasetSource

HUB = "hub:"
ENDINGS = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
PARQUET_BATCH = 4096
"""Rows of a parquet file held in memory at once, besides those of its reader."""

# Some exports append a hash to the names.
_SHARD = re.compile(r"(?P<start>.*?)(?P<number>\d+)-of-(?P<total>\d+)\b")

logger = logging.getLogger(__name__)


# Rows of files -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row as it was read: its location (`file:line` or `file: row n`), and its columns or what is wrong with it."""

    where: str
    content: dict[str, Any]
    fault: str = ""


def has_columns(file: Path) -> bool:
    """Whether a file holds rows with columns, judged by its name; otherwise it may be plain text."""
    return file.name.endswith(ENDINGS)


def read_files(files: Iterable[Path]) -> Iterator[Row]:
    """Read JSON lines (compressed or not) and parquet files, one after another.

    Raises:
        ValueError: If a file is truncated or damaged.
    """
    for file in files:
        if file.suffix == ".parquet":
            yield from _numbered(str(file), _read_parquet(file))
        else:
            yield from (_parse(where, line) for where, line in _read_lines(file))


def require_valid(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows up to the first invalid one, which is a `ValueError`."""
    for row in rows:
        if row.fault:
            raise ValueError(f"{row.where}: {row.fault}")
        yield row


def read_text_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Read a text file, compressed or not: the location of each non-blank line, and the line without its line break."""
    for where, line in _read_lines(file):
        try:
            yield where, line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not a text in UTF-8 ({error})") from error


def _read_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    compressed = file.suffix == ".gz"
    if compressed and not file.stat().st_size:
        # `gzip` takes this for a file without lines.
        raise ValueError(f"{file} is truncated or damaged: it has 0 bytes")
    with gzip.open(file) if compressed else file.open("rb") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{file} is truncated or damaged: {error}") from error


def _parse(where: str, line: bytes) -> Row:
    try:
        content = json.loads(line.decode())
    except ValueError as error:
        return Row(where, {}, f"invalid JSON ({error})")
    if not isinstance(content, dict):
        return Row(where, {}, f"expected a JSON object, got {type(content).__name__}")
    return Row(where, content)


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    with file.open("rb") as stream:
        try:
            for batch in parquet.ParquetFile(stream).iter_batches(PARQUET_BATCH):
                yield from batch.to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file} is truncated or damaged: {error}") from error


def _numbered(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    return (Row(f"{name}: row {number}", row) for number, row in enumerate(rows, start=1))


# Datasets ------------------------------------------------------------------------------------------------------------

AnySettings = TypeVar("AnySettings", bound="DatasetSource")


@dataclass(frozen=True)
class Location(Generic[AnySettings]):
    """Where a dataset was found.

    Attributes:
        name: The last two parts of its path below the data folder, `retrieval/arxiv`; of a dataset on the Hub its id.
        settings: The settings by which it was found.
        files: Files of the split; empty for a dataset on the Hub.
    """

    name: str
    settings: AnySettings
    files: tuple[Path, ...] = ()


def find_datasets(settings: AnySettings, folder: Path) -> list[Location[AnySettings]]:
    """Find the datasets that an entry of a recipe stands for.

    Args:
        settings: The entry. Its path is a file, a folder with files for the split, a pattern that matches some of
            these, or `hub:user/name`.
        folder: Data folder, which relative paths start from.

    Returns:
        The datasets, sorted by path.

    Raises:
        FileNotFoundError: If there is no such dataset, or no such split.
        ValueError: If the split exists in more than one form, or `exclude` matches no dataset.
    """
    if settings.path.startswith(HUB):
        name = settings.path.removeprefix(HUB)
        return [Location(f"{name}/{settings.subset}" if settings.subset else name, settings)]
    found = []
    paths = matching_paths(settings.path, folder)
    readable = [path for path in paths if path.is_dir() or has_columns(path)] or paths
    for path in paths:
        name = _name(path, folder, settings.split)
        if path not in readable:
            logger.warning("%s: unknown format, skipped: expected one of %s", path, ", ".join(ENDINGS))
        elif files := split_files(path, settings.split):
            found.append(Location(name, settings, files))
        else:
            logger.info("%s: no %r split, skipped", name, settings.split)
    if not found:
        endings, target = ", ".join(settings.split + ending for ending in ENDINGS), folder / settings.path
        hint = f". For all datasets in it: {settings.path.rstrip('/')}/*" if any(target.glob("*/")) else ""
        raise FileNotFoundError(f"{target} has no {settings.split!r} split: expected one of {endings}{hint}")
    return without_excluded(found, settings.exclude)


def split_files(path: Path, split: str) -> tuple[Path, ...]:
    """Find the files of a split in a folder: `train.jsonl`, `train-00000-of-00002.parquet`, `train/0.parquet`.

    A path to a file stands for itself, whatever the split is. Without a file for the split there are none.

    Raises:
        ValueError: If the split exists in more than one form, shards of it are missing, or the path is a file of
            another format.
    """
    if not path.is_dir():
        if not has_columns(path):
            raise ValueError(f"{path}: unknown format, expected one of {', '.join(ENDINGS)}")
        return (path,)
    patterns = (split, f"{split}-[0-9]*", f"{split}/*")
    found = {file: ending for ending in ENDINGS for pattern in patterns for file in path.glob(pattern + ending)}
    if len({(file.parent, ending, file.name == split + ending) for file, ending in found.items()}) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in sorted(found))
        raise ValueError(f"{path} has its {split!r} split in several forms ({names}): name the file to read")
    _require_all_shards(path, found)
    return tuple(sorted(found))


def _require_all_shards(folder: Path, files: Iterable[Path]) -> None:
    """Refuse an incomplete set of shards, or two sets: nothing else would tell them from a whole dataset."""
    exports: dict[str, list[re.Match[str]]] = defaultdict(list)
    for shard in filter(None, (_SHARD.match(file.name) for file in files)):
        exports[shard["start"]].append(shard)
    for shards in exports.values():
        numbers, totals = {shard["number"] for shard in shards}, {int(shard["total"]) for shard in shards}
        if len(numbers) != len(shards) or totals != {len(shards)}:
            names = ", ".join(sorted(shard.string for shard in shards)[:5])
            raise ValueError(
                f"{folder} lacks shards of a dataset, or holds two sets ({names} …): name the files to read"
            )


def read_rows(location: Location[Any]) -> Iterator[Row]:
    """Read a dataset, with invalid rows; errors as in `read_files` and `load_from_hub`."""
    if location.files:
        return read_files(location.files)
    return _numbered(location.name, load_from_hub(location.settings))


def load_from_hub(settings: "DatasetSource") -> Any:
    """Load a dataset from the Hub, or from the cache of `datasets`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the dataset has no such split, or its name is also a folder.
    """
    import datasets

    name = settings.path.removeprefix(HUB)
    if Path(name).is_dir():
        # `datasets` would read the folder.
        raise ValueError(f"{settings.path} is also a folder here: leave out `{HUB}`, or run elsewhere")
    return datasets.load_dataset(name, name=settings.subset, split=settings.split, revision=settings.revision)


def matching_paths(path: str, folder: Path) -> list[Path]:
    """Find the files and folders that a path stands for: itself, or what matches the pattern.

    Raises:
        FileNotFoundError: If there are none.
    """
    target = folder / path
    if target.exists():
        return [target]
    if set("*?[") & set(path):
        start, pattern = (
            (Path(target.anchor), target.relative_to(target.anchor)) if Path(path).is_absolute() else (folder, path)
        )
        if matches := sorted(start.glob(str(pattern))):
            return matches
        raise FileNotFoundError(f"Nothing matches the pattern {path} in {folder}")
    nearest = next(parent for parent in target.parents if parent.exists())
    inside = [child.name for child in sorted(nearest.iterdir()) if not child.name.startswith(".")]
    missing = target.relative_to(nearest).parts[0]
    raise FileNotFoundError(f"There is no dataset {target}. In {nearest}:" + alternatives(missing, inside))


def _name(path: Path, folder: Path, split: str) -> str:
    stem = path.name.removesuffix(next((ending for ending in ENDINGS if path.name.endswith(ending)), ""))
    path = path.parent if path.is_file() and stem == split else path.with_name(stem)
    path = path.resolve()
    inside = path.is_relative_to(folder.resolve()) and path != folder.resolve()
    parts = path.relative_to(folder.resolve()).parts if inside else path.parts[1:]
    return "/".join(parts[-2:])


def without_excluded(found: list[Location[AnySettings]], exclude: list[str]) -> list[Location[AnySettings]]:
    """Leave out datasets by patterns of their names.

    Raises:
        ValueError: If a pattern matches none, or none is left.
    """
    names = {location.name for location in found}
    excluded: set[str] = set()
    for pattern in exclude:
        matching = {name for name in names if fnmatch(name, pattern) or fnmatch(name.rpartition("/")[2], pattern)}
        if not matching:
            raise ValueError(f"exclude: there is no dataset {pattern!r}." + alternatives(pattern, sorted(names)))
        excluded |= matching
    if names == excluded:
        raise ValueError(f"{found[0].settings.path}: `exclude` leaves no datasets")
    return [location for location in found if location.name not in excluded]
