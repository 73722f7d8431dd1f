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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mote.settings import alternatives

if TYPE_CHECKING:
    from mote.data.settings import DatasetSource

HUB = "hub:"
ENDINGS = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
TEXT_ENDINGS = (".txt", ".txt.gz")
PARQUET_BATCH = 4096
"""Rows of a parquet file held in memory at once, besides those of its reader."""

# Some exports append a hash to the names.
_SHARD = re.compile(r"(\d+)-of-(\d+)\b")

logger = logging.getLogger(__name__)


# Rows of files -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row as it was read: its location (`file:line` or `file: row n`), and its columns or what is wrong with it."""

    where: str
    content: dict[str, Any]
    fault: str = ""


def read_files(files: Iterable[Path]) -> Iterator[Row]:
    """Read JSON lines, parquet and plain text, whose lines become rows with a column `text`, one after another.

    Raises:
        ValueError: If a file is truncated or damaged, has an unknown format, or is a text in another encoding.
    """
    for file in files:
        if file.suffix == ".parquet":
            yield from _numbered(str(file), _read_parquet(file))
        elif file.name.endswith(ENDINGS):
            yield from (_parse(where, line) for where, line in _read_lines(file))
        elif file.name.endswith(TEXT_ENDINGS):
            yield from (Row(where, {"text": line}) for where, line in read_text_lines(file))
        else:
            raise ValueError(f"{file}: unknown format, expected one of {', '.join(ENDINGS + TEXT_ENDINGS)}")


def require_valid(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows up to the first invalid one, which is a `ValueError`."""
    for row in rows:
        if row.fault:
            raise ValueError(f"{row.where}: {row.fault}")
        yield row


def read_text_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Read a text file, compressed or not: the location of each non-blank line, and the line without outer spaces."""
    for where, line in _read_lines(file):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not a text in UTF-8 ({error})") from error
        if text:
            yield where, text


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
            these, or `hub:user/name`. Text files are taken only if the path ends like one.
        folder: Data folder, which relative paths start from.

    Returns:
        The datasets, sorted by path.

    Raises:
        FileNotFoundError: If there is no such dataset, or no such split.
        ValueError: If the split exists in more than one form, or `exclude` matches no dataset.
    """
    path, split = settings.path, settings.split
    if path.startswith(HUB):
        name = path.removeprefix(HUB)
        return [Location(f"{name}/{settings.subset}" if settings.subset else name, settings)]
    endings = TEXT_ENDINGS if path.endswith(TEXT_ENDINGS) else ENDINGS
    places = _matching(path, folder)
    found = []
    for place in places:
        name = _name(place, folder, split)
        if not place.is_dir() and not place.name.endswith(endings) and len(places) > 1:
            logger.warning("%s: unknown format, skipped: expected one of %s", place, ", ".join(endings))
        elif files := split_files(place, split) if place.is_dir() else (place,):
            found.append(Location(name, settings, files))
        else:
            logger.info("%s: no %r split, skipped", name, split)
    left = _without_excluded(found, settings.exclude)
    if not left:
        target, excluded = folder / path, " that is not excluded" if found else ""
        hint = f". For all datasets in it: {path.rstrip('/')}/*" if any(target.glob("*/")) else ""
        expected = ", ".join(split + ending for ending in ENDINGS)
        raise FileNotFoundError(f"{target} has no {split!r} split{excluded}: expected one of {expected}{hint}")
    return left


def split_files(folder: Path, split: str) -> tuple[Path, ...]:
    """Find the files of a split in a folder: `train.jsonl`, `train-00000-of-00002.parquet`, `train/0.parquet`.

    Raises:
        ValueError: If the split exists in more than one form, or shards of it are missing.
    """
    patterns = (split, f"{split}-[0-9]*", f"{split}/*")
    found = {file: ending for ending in ENDINGS for pattern in patterns for file in folder.glob(pattern + ending)}
    # Nothing else would reveal that shards are missing, or that there are two exports.
    shards = {shard.groups() for shard in map(_SHARD.search, (file.name for file in found)) if shard}
    wrong = shards and {len(shards), *(int(total) for _, total in shards)} != {len(found)}
    forms = {(file.parent, ending, file.name == split + ending) for file, ending in found.items()}
    if len(forms) > 1 or wrong:
        names = ", ".join(sorted(str(file.relative_to(folder)) for file in found)[:5])
        problem = "in several forms" if len(forms) > 1 else "with shards missing, or of two exports"
        raise ValueError(f"{folder} has its {split!r} split {problem} ({names}): name the files to read")
    return tuple(sorted(found))


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


def _matching(path: str, folder: Path) -> list[Path]:
    """Find the files and folders that a path stands for: itself, or what matches the pattern."""
    target = folder / path
    if target.exists():
        return [target]
    # A pattern may be absolute.
    found = sorted(folder / match for match in glob(path, root_dir=folder, recursive=True))  # noqa: PTH207
    if not found:
        nearest = next(parent for parent in target.parents if parent.exists())
        inside = sorted(child.name for child in nearest.iterdir() if not child.name.startswith("."))
        missing = target.relative_to(nearest).parts[0]
        raise FileNotFoundError(f"There is no dataset {target}. In {nearest}:" + alternatives(missing, inside))
    return found


def _name(path: Path, folder: Path, split: str) -> str:
    ending = next((ending for ending in ENDINGS + TEXT_ENDINGS if path.name.endswith(ending)), "")
    stem = path.name.removesuffix(ending)
    path = path.parent if path.is_file() and stem == split else path.with_name(stem)
    path = path.resolve()
    inside = path.is_relative_to(folder.resolve()) and path != folder.resolve()
    parts = path.relative_to(folder.resolve()).parts if inside else path.parts[1:]
    return "/".join(parts[-2:])


def _without_excluded(found: list[Location[AnySettings]], exclude: list[str]) -> list[Location[AnySettings]]:
    """Leave out datasets by patterns of their names."""
    left = found
    for pattern in exclude:
        matching = [one for one in found if fnmatch(one.name, pattern) or fnmatch(one.name.split("/")[-1], pattern)]
        if not matching:
            names = sorted(one.name for one in found)
            raise ValueError(f"exclude: there is no dataset {pattern!r}." + alternatives(pattern, names))
        left = [one for one in left if one not in matching]
    return left
