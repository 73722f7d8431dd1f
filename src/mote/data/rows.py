"""The reader of text data: finds the files of a dataset, and reads its rows, each with its location.

Datasets on the Hub are read by `datasets.load_dataset`. Files are read here, because the library's JSON reader rejects
a whole file for one invalid row, knows no line numbers, and copies the data into the user's cache.
"""

import codecs
import csv
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, TypeVar

from mote.files import refuse_pointer
from mote.settings import alternatives

if TYPE_CHECKING:
    from mote.data.settings import DatasetSource

HUB = "hub:"
TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
ENDINGS = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet", *TABLE_ENDINGS)
TEXT_ENDINGS = (".txt", ".txt.gz")
PARQUET_BATCH = 4096  # rows in memory at once, besides those of the parquet file's reader

# Some exports append a hash to the names.
_SHARD = re.compile(r"(\d+)-of-(\d+)\b")

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A row as it was read: its location (`file:line` or `file: row n`), and its columns or what is wrong with it."""

    where: str
    content: dict[str, Any]
    fault: str = ""

    def take(self, function: Callable[[dict[str, Any]], T]) -> T:
        """Return what a function makes of the columns; the `ValueError` about an invalid row has its location."""
        problem: object = self.fault
        try:
            if not self.fault:
                return function(self.content)
        except (ValueError, TypeError) as error:
            problem = error
        raise ValueError(f"{self.where}: {problem}")


def read_files(files: Iterable[Path]) -> Iterator[Row]:
    """Read JSON lines, parquet, CSV, TSV, and plain text, whose lines become rows with a column `text`."""
    for file in files:
        refuse_pointer(file)
        with file.open("rb") as stream:
            try:
                yield from _read(file, stream)
            except (EOFError, OSError, ValueError, csv.Error, zlib.error) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error


def _read(file: Path, stream: BinaryIO) -> Iterator[Row]:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        batches = parquet.ParquetFile(stream).iter_batches(PARQUET_BATCH)
        yield from _numbered(str(file), (row for batch in batches for row in batch.to_pylist()))
    elif file.name.endswith(TABLE_ENDINGS):
        yield from _read_table(file, stream)
    elif file.name.endswith(ENDINGS + TEXT_ENDINGS):
        for number, line in enumerate(_unpacked(stream) if file.suffix == ".gz" else stream, start=1):
            if row := _parse(f"{file}:{number}", line, file.name.endswith(TEXT_ENDINGS)):
                yield row
    else:
        raise ValueError(f"unknown format, expected one of {', '.join(ENDINGS + TEXT_ENDINGS)}")


def _read_table(file: Path, stream: BinaryIO) -> Iterator[Row]:
    """Read CSV or TSV with a header, which shows whether commas or, as in some countries, semicolons end fields."""
    csv.field_size_limit(2**31 - 1)  # texts of any length; the default is 128 KB
    content = _unpacked(stream) if file.suffix == ".gz" else stream
    with io.TextIOWrapper(content, "utf-8-sig", newline="") as text:
        header = text.readline()
        delimiter = "\t" if ".tsv" in file.suffixes else max(",;\t", key=header.count)
        text.seek(0)
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        if len({*(rows.fieldnames or ())}) < len(rows.fieldnames or ()):
            raise ValueError(f"two columns have the same name: {', '.join(rows.fieldnames or ())}")
        for row in rows:
            where, wrong = f"{file}:{rows.line_num}", None in row or None in row.values()
            yield Row(where, {}, "it has more or fewer fields than the header") if wrong else Row(where, row)


def _unpacked(stream: BinaryIO) -> Any:
    if not stream.read(1):  # `gzip` takes this for a file without lines
        raise EOFError("it has 0 bytes")
    stream.seek(0)
    return gzip.open(stream)


def _parse(where: str, line: bytes, plain: bool) -> Row | None:
    """Read a line of plain text or JSON; None if it is blank."""
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode().strip()
        if not text:
            return None
        if "\0" in text:
            raise ValueError("it has null characters, as texts in UTF-16 have")
        content = {"text": text} if plain else _with_columns(json.loads(text))
    except ValueError as error:
        return Row(where, {}, f"not a text in UTF-8 ({error})" if plain else f"invalid JSON ({error})")
    if not isinstance(content, dict):
        return Row(where, {}, f"expected a JSON object, got {type(content).__name__}")
    return Row(where, content)


def _with_columns(content: Any) -> Any:
    """Name the texts of a line that has no columns, as in public collections of pairs: `["a", "b"]`, `{"set": […]}`."""
    in_set = isinstance(content, dict) and content.keys() == {"set"}
    texts = content["set"] if in_set else content
    if not isinstance(texts, list) or len(texts) < 2:
        return content
    positives, negatives = (texts[1:], []) if in_set else (texts[1], texts[2:])
    return {"anchor": texts[0], "positive": positives, **({"negative": negatives} if negatives else {})}


def _numbered(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    return (Row(f"{name}: row {number}", row) for number, row in enumerate(rows, start=1))


AnySettings = TypeVar("AnySettings", bound="DatasetSource")


@dataclass(frozen=True)
class Location(Generic[AnySettings]):
    """Where a dataset was found, and by which settings."""

    name: str  # the last two parts of its path below the data folder, `retrieval/arxiv`; or its id on the Hub
    settings: AnySettings
    files: tuple[Path, ...] = ()  # of the split; none for a dataset on the Hub


def find_datasets(settings: AnySettings, folder: Path) -> list[Location[AnySettings]]:
    """Find the datasets that an entry of a recipe stands for, sorted by path.

    Its path, relative to the data folder, is a file, a folder with files for the split, a pattern that matches some of
    these, or `hub:user/name`, perhaps with a file. Text files are taken only if the path ends like one.
    """
    path, split, target = settings.path, settings.split, folder / settings.path
    if path.startswith(HUB):
        name = path.removeprefix(HUB)
        if name.count("/") > 1 and name.endswith(ENDINGS + TEXT_ENDINGS):
            # One file, perhaps with lines that are lists, which `datasets` does not read.
            from huggingface_hub import hf_hub_download

            user, repository, file = name.split("/", 2)
            file = hf_hub_download(f"{user}/{repository}", file, repo_type="dataset", revision=settings.revision)
            return [Location(_name(folder / name, folder, split), settings, (Path(file),))]
        parts = (name, settings.subset, None if split == "train" else split)  # some collections have splits as datasets
        return [Location("/".join(filter(None, parts)), settings)]
    endings = TEXT_ENDINGS if path.endswith(TEXT_ENDINGS) else ENDINGS
    # A pattern may be absolute.
    matches = [path] if target.exists() else glob(path, root_dir=folder, recursive=True)  # noqa: PTH207
    found = []
    for place in sorted(folder / match for match in matches):
        name = _name(place, folder, split)
        is_data = place.name.endswith(endings) and not is_test_file(place)
        is_file = not place.is_dir() and (len(matches) == 1 or is_data)
        if files := (place,) if is_file else split_files(place, split):
            found.append(Location(name, settings, files))
        else:
            logger.warning("%s: no %r split, and no file that is read here: skipped", place, split)
    left = found
    for pattern in settings.exclude:
        matching = [one for one in found if fnmatch(f"/{one.name}", f"*/{pattern}")]
        if not matching:
            names = [one.name for one in found]
            raise ValueError(f"exclude: there is no dataset {pattern!r}." + alternatives(pattern, names))
        left = [one for one in left if one not in matching]
    if not left:
        nearest = next(place for place in (target, *target.parents) if place.is_dir())
        inside = sorted(child.name for child in nearest.iterdir() if not child.name.startswith("."))
        missing = [*target.relative_to(nearest).parts, split][0]
        expected = " or ".join(split + ending for ending in ENDINGS)
        raise FileNotFoundError(
            f"There is no dataset {target} with {expected}. In {nearest}:" + alternatives(missing, inside)
        )
    return left


def is_test_file(path: Path) -> bool:
    """Whether a file is the test split beside a file of training rows: `NAME.test.csv` beside `NAME.csv`."""
    return ".test" in path.suffixes


def split_files(folder: Path, split: str) -> tuple[Path, ...]:
    """Find the files of a split in a folder: `train.jsonl`, `train-00000-of-00002.parquet`, `train/0.parquet`."""
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
    """Read a dataset, with invalid rows."""
    if location.files:
        return read_files(location.files)
    return _numbered(location.name, load_from_hub(location.settings))


def load_from_hub(settings: "DatasetSource") -> Any:
    """Load a dataset from the Hub, or from the cache of `datasets`."""
    import datasets

    name = settings.path.removeprefix(HUB)
    if Path(name).is_dir():
        # `datasets` would read the folder.
        raise ValueError(f"{settings.path} is also a folder here: leave out `{HUB}`, or run elsewhere")
    return datasets.load_dataset(name, name=settings.subset, split=settings.split, revision=settings.revision)


def _name(path: Path, folder: Path, split: str) -> str:
    ending = next((ending for ending in ENDINGS + TEXT_ENDINGS if path.name.endswith(ending)), "")
    stem = path.name.removesuffix(ending)
    path = path.parent if path.is_file() and stem == split else path.with_name(stem)
    path, folder = path.resolve(), folder.resolve()
    inside = path.is_relative_to(folder) and path != folder
    parts = path.relative_to(folder).parts if inside else path.parts[1:]
    return "/".join(parts[-2:])
