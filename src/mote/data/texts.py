"""The texts that a model is looked at with: from a file, a folder of datasets, or the 128 that come with MoTE."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

TEXT_FIELDS = ("text", "query", "sentence", "sentence1")
QUERY_FIELDS = ("query", "question", "anchor")
DOCUMENT_FIELDS = ("positive", "document", "passage", "answer")
KINDS = ("retrieval", "classification", "clustering")  # of the tasks that experts are trained on
PARTS = ("test.jsonl.gz", "test.jsonl", "train.jsonl.gz", "train.jsonl")

_BOTH = "give one with `--texts FILE` (one text per line, or .jsonl with a column 'text') or `--data FOLDER`"


@dataclass(frozen=True)
class Texts:
    """Some texts.

    Attributes:
        texts: They.
        source: Where they come from, for people.
    """

    texts: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse what nothing can be computed of."""
        if len(self.texts) < 2:
            raise ValueError(f"{self.source} has {len(self.texts)} texts: a distribution takes two at least; {_BOTH}")


@dataclass(frozen=True)
class Pairs:
    """Queries and the documents that belong to them.

    Attributes:
        queries: N texts.
        documents: N texts.
        source: Where they come from, for people.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse what nothing can be computed of."""
        if len(self.queries) < 2:
            raise ValueError(f"{self.source} has {len(self.queries)} pairs: expected two at least")


def find_texts(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Texts:
    """Read texts: of a file, else a sample over the datasets of a folder, else those that come with MoTE.

    Args:
        file: One text per line; or JSON lines (`.jsonl`, `.jsonl.gz`) with a column of `TEXT_FIELDS`.
        folder: Holds `KIND/NAME/train.jsonl.gz` for the kinds of `KINDS`. Of each dataset the test part, if there is
            one; as many texts of each as of any other.
        limit: How many. Of a larger file, a sample in its order.
        seed: Of the sample.

    Raises:
        FileNotFoundError: If the file or the folder is not there, or holds no dataset.
        ValueError: If a file is damaged, a row has no text, there are fewer than two texts, or both are given.
    """
    if limit < 2:
        raise ValueError(f"limit {limit}: a distribution takes two texts at least")
    if file is not None and folder is not None:
        raise ValueError("Texts come from a file (`--texts`) or from a folder (`--data`): give one of them")
    if file is not None:
        return Texts(_sample(_distinct(_texts_in(Path(file))), limit, seed), Path(file).name)
    if folder is not None:
        sets = [_distinct(_texts_in(path)) for path in _datasets(Path(folder), KINDS)]
        return Texts(tuple(_over_sets(sets, limit, seed)), f"{Path(folder).resolve().name}, {len(sets)} datasets")
    bundled = [json.loads(line)["text"] for line in _bundled().splitlines()]
    return Texts(_sample(bundled, limit, seed), "the texts that come with MoTE")


def find_pairs(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Pairs | None:
    """Read pairs of query and document: of a file, else a sample over the retrieval sets of a folder, else none.

    Args:
        file: JSON lines with a column of `QUERY_FIELDS` and one of `DOCUMENT_FIELDS`; of a list, its first text.
        folder: Holds `retrieval/NAME/train.jsonl.gz`.
        limit: How many.
        seed: Of the sample.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If a file is damaged, a row is no pair, or there are fewer than two.
    """
    if file is not None:
        pairs, source = _sample(_distinct(_pairs_in(Path(file))), limit, seed), Path(file).name
    elif folder is not None and (Path(folder) / "retrieval").is_dir():
        sets = [_distinct(_pairs_in(path)) for path in _datasets(Path(folder), ("retrieval",))]
        pairs = tuple(_over_sets(sets, limit, seed))
        source = f"{Path(folder).resolve().name}, {len(sets)} retrieval sets"
    else:
        return None
    return Pairs(tuple(query for query, _ in pairs), tuple(document for _, document in pairs), source)


def _bundled() -> str:
    """128 real texts, freely licensed; each names its source."""
    return (files("mote.data") / "texts.jsonl").read_text(encoding="utf-8")


def _datasets(folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Find a file of each dataset, the test part where there is one."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}")
    names = sorted(path for kind in kinds for path in (folder / kind).glob("*") if path.is_dir())
    found = [[name / part for part in PARTS if (name / part).is_file()] for name in names]
    if not any(found):
        raise FileNotFoundError(
            f"{folder} holds no dataset: expected {' or '.join(kinds)}, and below NAME/train.jsonl.gz or test.jsonl.gz"
        )
    return [parts[0] for parts in found if parts]


def _texts_in(path: Path) -> Iterator[str]:
    if ".jsonl" not in path.suffixes:
        yield from (line.strip() for _, line in _lines(path) if line.strip())
        return
    for where, row in _rows(path):
        yield _text(where, row, TEXT_FIELDS)


def _pairs_in(path: Path) -> Iterator[tuple[str, str]]:
    for where, row in _rows(path):
        yield _text(where, row, QUERY_FIELDS), _text(where, row, DOCUMENT_FIELDS)


def _text(where: str, row: dict[str, Any], fields: Sequence[str]) -> str:
    """Take the text of the first field that a row has."""
    field = next((field for field in fields if field in row), None)
    if field is None:
        raise ValueError(f"{where} has the columns {', '.join(row) or 'none'}: expected one of {', '.join(fields)}")
    value = row[field][0] if isinstance(row[field], list) and row[field] else row[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} has no text in {field!r}, but {value!r}")
    return value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds a {type(row).__name__}: expected an object of columns")  # noqa: TRY004
        yield where, row


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Read a file, packed or not, with the place of each line."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", line.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no text in UTF-8: {error}") from error


def _distinct(items: Iterator[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _sample(items: Sequence[Any], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw from some items, in their order; all if they are not more."""
    if len(items) <= limit:
        return tuple(items)
    return tuple(items[index] for index in sorted(random.Random(seed).sample(range(len(items)), limit)))


def _over_sets(sets: Sequence[list[Any]], limit: int, seed: int) -> list[Any]:
    """Draw from each set in turn until there is enough; the last round takes some of the sets, drawn as well."""
    drawn = [random.Random(f"{seed}/{number}").sample(items, len(items)) for number, items in enumerate(sets)]
    last = random.Random(seed)
    chosen: dict[Any, None] = {}
    for turn in range(max(map(len, drawn))):
        here = list(dict.fromkeys(items[turn] for items in drawn if turn < len(items) and items[turn] not in chosen))
        chosen |= dict.fromkeys(last.sample(here, min(len(here), limit - len(chosen))))
    return list(chosen)
