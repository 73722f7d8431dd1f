"""Texts for analyses and calibration: from a file, a folder of datasets, or the 128 shipped with MoTE."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mote.data.columns import TEXT, check_value
from mote.data.rows import ENDINGS, Row, has_columns, read_files, read_text_lines, require_valid, split_files

TEXT_COLUMNS = ("text", "query", "sentence", "sentence1")
QUERY_COLUMNS = ("query", "question", "anchor")
DOCUMENT_COLUMNS = ("positive", "document", "passage", "answer")
OTHER_FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""Endings of files of rows, in lower case: such a file is not plain text, whether it can be read or not."""
FOLDERS = ("retrieval", "classification", "clustering")
"""Folders of the tasks that experts are trained on."""


@dataclass(frozen=True)
class Texts:
    """A sample of at least two texts.

    Attributes:
        texts: The texts.
        source: Where they come from, in words.
    """

    texts: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.texts) < 2:
            raise ValueError(f"{self.source} has {len(self.texts)} texts: a distribution needs at least two")


@dataclass(frozen=True)
class TextPairs:
    """A sample of queries and their documents.

    Attributes:
        queries: N texts.
        documents: N texts.
        source: Where they come from, in words.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    source: str


def read_texts(file: str | Path | None = None) -> list[str]:
    """Read all texts of a file.

    Args:
        file: One text per line; or rows (`.jsonl`, `.jsonl.gz`, `.parquet`) with a column of `TEXT_COLUMNS`.
            Default: the 128 texts shipped with MoTE, freely licensed.

    Raises:
        ValueError: If it is damaged, not UTF-8 or of another format, a row has no text, or there are no texts.
    """
    if file is None:
        lines = (files("mote.data") / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]
    file = Path(file)
    if has_columns(file):
        texts = [_text(row, TEXT_COLUMNS) for row in require_valid(read_files([file]))]
    elif file.name.lower().removesuffix(".gz").endswith(OTHER_FORMATS):
        raise ValueError(f"{file}: unknown format, expected plain text, or rows in {', '.join(ENDINGS)}")
    else:
        texts = [line.strip() for _, line in read_text_lines(file) if line.strip()]
    if not texts:
        raise ValueError(f"{file} has no texts: expected one per line")
    return texts


def find_texts(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Texts:
    """Sample distinct texts from a file, else from the datasets of a folder, else from those shipped with MoTE.

    Args:
        file: As for `read_texts`.
        folder: A data folder with datasets in `retrieval`, `classification` or `clustering`. Each is read from its
            test split if there is one, else from its train split, and all contribute the same number of texts.
        limit: Size of the sample, which keeps the order of the file.
        seed: Seed of the sample.

    Raises:
        FileNotFoundError: If the file or the folder does not exist, or the folder holds no dataset.
        ValueError: If a file is damaged, a row has no text, there are fewer than two texts, or both are given.
    """
    if file is not None and folder is not None:
        raise ValueError("Texts come from a file (`--texts`) or from a folder (`--data`): give one of them")
    if folder is None:
        source = "the texts that come with MoTE" if file is None else Path(file).name
        return Texts(_sample(_distinct(read_texts(file)), limit, seed), source)
    datasets = [_distinct(_text(row, TEXT_COLUMNS) for row in rows) for rows in _datasets(Path(folder), FOLDERS)]
    source = f"{Path(folder).resolve().name}, {len(datasets)} datasets"
    return Texts(_sample_of_each(datasets, limit, seed), source)


def find_pairs(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> TextPairs | None:
    """Sample distinct pairs from a file, else from the datasets in `retrieval` of a folder, else return None.

    Args:
        file: Rows with a column of `QUERY_COLUMNS` and one of `DOCUMENT_COLUMNS`; of a list, the first text counts.
        folder: A data folder.
        limit: Size of the sample.
        seed: Seed of the sample.

    Raises:
        ValueError: If a file is damaged, a row is not a pair, or there are fewer than two.
    """
    if file is not None:
        pairs = _sample(_pairs(require_valid(read_files([Path(file)]))), limit, seed)
        source = Path(file).name
    elif folder is not None and (Path(folder) / "retrieval").is_dir():
        datasets = [_pairs(rows) for rows in _datasets(Path(folder), ("retrieval",))]
        pairs = _sample_of_each(datasets, limit, seed)
        source = f"{Path(folder).resolve().name}, {len(datasets)} retrieval datasets"
    else:
        return None
    if len(pairs) < 2:
        raise ValueError(f"{source} has {len(pairs)} pairs: expected at least two")
    queries, documents = zip(*pairs, strict=True)
    return TextPairs(queries, documents, source)


def _pairs(rows: Iterator[Row]) -> list[tuple[str, str]]:
    return _distinct((_text(row, QUERY_COLUMNS), _text(row, DOCUMENT_COLUMNS)) for row in rows)


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _datasets(folder: Path, names: Sequence[str]) -> list[Iterator[Row]]:
    """Open each dataset in some folders of a data folder: its test split, or its train split if it has no other."""
    paths = sorted(path for name in names for path in (folder / name).glob("*") if path.is_dir())
    found = [split_files(path, "test") or split_files(path, "train") for path in paths]
    if not any(found):
        raise FileNotFoundError(f"{folder} holds no datasets: expected {' or '.join(names)}, with NAME/train.jsonl.gz")
    return [require_valid(read_files(files)) for files in found if files]


def _text(row: Row, columns: Sequence[str]) -> str:
    """Take the text of the first column that a row has."""
    column = next((column for column in columns if column in row.content), None)
    if column is None:
        raise ValueError(f"{row.where} has the columns {[*row.content]}: expected one of {', '.join(columns)}")
    value = row.content[column]
    try:
        return str(check_value({column: value[0] if isinstance(value, list) and value else value}, column, TEXT))
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None


def _sample(items: Sequence[Any], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw `limit` items, in their order, or all if there are fewer."""
    if len(items) <= limit:
        return tuple(items)
    return tuple(items[index] for index in sorted(random.Random(seed).sample(range(len(items)), limit)))


def _sample_of_each(datasets: Sequence[list[Any]], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw from each dataset in turn until there are enough; the last round draws from some of the datasets."""
    shuffled = [random.Random(f"{seed}/{number}").sample(items, len(items)) for number, items in enumerate(datasets)]
    last = random.Random(seed)
    chosen: dict[Any, None] = {}
    for items in zip_longest(*shuffled):
        new = [item for item in _distinct(items) if item is not None and item not in chosen]
        chosen |= dict.fromkeys(last.sample(new, min(len(new), limit - len(chosen))))
    return tuple(chosen)
