"""Texts for analyses and calibration: from a file, a folder of datasets, or the 128 shipped with MoTE."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mote.data.columns import check_string
from mote.data.rows import ENDINGS, Row, has_columns, read_files, read_text_lines, require_valid, split_files

TEXT_COLUMNS = ("text", "query", "sentence", "sentence1")
QUERY_COLUMNS = ("query", "question", "anchor")
DOCUMENT_COLUMNS = ("positive", "document", "passage", "answer")
OTHER_FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""Endings, in lower case, of files of rows that are not read, unless they end in one of `ENDINGS`."""
FOLDERS = ("retrieval", "classification", "clustering")  # of the tasks that experts are trained on

_BOTH = "give one with `--texts FILE` (one text per line, or .jsonl with a column 'text') or `--data FOLDER`"


@dataclass(frozen=True)
class Texts:
    """A sample of texts.

    Attributes:
        texts: The texts.
        source: Where they come from, in words.
    """

    texts: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse fewer than two."""
        if len(self.texts) < 2:
            raise ValueError(f"{self.source} has {len(self.texts)} texts: a distribution needs at least two; {_BOTH}")


@dataclass(frozen=True)
class Pairs:
    """Queries and their documents.

    Attributes:
        queries: N texts.
        documents: N texts.
        source: Where they come from, in words.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse fewer than two."""
        if len(self.queries) < 2:
            raise ValueError(f"{self.source} has {len(self.queries)} pairs: expected at least two")


def read_texts(file: str | Path | None = None) -> list[str]:
    """Read all texts of a file.

    Args:
        file: One text per line; or rows (`.jsonl`, `.jsonl.gz`, `.parquet`) with a column of `TEXT_COLUMNS`.
            Default: the 128 texts shipped with MoTE, freely licensed.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, not UTF-8 or of another format, a row has no text, or there are no texts.
    """
    if file is None:
        lines = (files("mote.data") / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]
    file = Path(file)
    if has_columns(file):
        texts = [_text(row, TEXT_COLUMNS) for row in require_valid(read_files([file]))]
    else:
        if file.name.lower().removesuffix(".gz").endswith(OTHER_FORMATS):
            raise ValueError(
                f"{file}: unknown format, expected plain text (one text per line), or rows with a column "
                f"'text' in a file that ends in {', '.join(ENDINGS)}"
            )
        texts = [text for _, line in read_text_lines(file) if (text := line.strip())]
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
    if limit < 2:
        raise ValueError(f"limit {limit}: a distribution needs at least two texts")
    if file is not None and folder is not None:
        raise ValueError("Texts come from a file (`--texts`) or from a folder (`--data`): give one of them")
    if folder is not None:
        datasets = [
            list(dict.fromkeys(_text(row, TEXT_COLUMNS) for row in rows)) for rows in _datasets(Path(folder), FOLDERS)
        ]
        return Texts(
            tuple(_over_datasets(datasets, limit, seed)), f"{Path(folder).resolve().name}, {len(datasets)} datasets"
        )
    source = "the texts that come with MoTE" if file is None else Path(file).name
    return Texts(_sample(list(dict.fromkeys(read_texts(file))), limit, seed), source)


def find_pairs(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Pairs | None:
    """Sample distinct pairs from a file, else from the datasets in `retrieval` of a folder, else return None.

    Args:
        file: Rows with a column of `QUERY_COLUMNS` and one of `DOCUMENT_COLUMNS`; of a list, the first text counts.
        folder: A data folder.
        limit: Size of the sample.
        seed: Seed of the sample.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If a file is damaged, a row is not a pair, or there are fewer than two.
    """
    if file is not None:
        pairs = _sample(_pairs(require_valid(read_files([Path(file)]))), limit, seed)
        source = Path(file).name
    elif folder is not None and (Path(folder) / "retrieval").is_dir():
        datasets = [_pairs(rows) for rows in _datasets(Path(folder), ("retrieval",))]
        pairs = tuple(_over_datasets(datasets, limit, seed))
        source = f"{Path(folder).resolve().name}, {len(datasets)} retrieval datasets"
    else:
        return None
    return Pairs(tuple(query for query, _ in pairs), tuple(document for _, document in pairs), source)


def _pairs(rows: Iterator[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((_text(row, QUERY_COLUMNS), _text(row, DOCUMENT_COLUMNS)) for row in rows))


def _datasets(folder: Path, names: Sequence[str]) -> list[Iterator[Row]]:
    """Open each dataset in some folders of a data folder: its test split, or its train split if it has no other."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}")
    paths = sorted(path for name in names for path in (folder / name).glob("*") if path.is_dir())
    found = [split_files(path, "test") or split_files(path, "train") for path in paths]
    if not any(found):
        raise FileNotFoundError(
            f"{folder} holds no datasets: expected {' or '.join(names)}, with NAME/train.jsonl.gz or test.jsonl.gz in "
            "it"
        )
    return [require_valid(read_files(files)) for files in found if files]


def _text(row: Row, columns: Sequence[str]) -> str:
    """Take the text of the first column that a row has."""
    column = next((column for column in columns if column in row.content), None)
    if column is None:
        present = ", ".join(map(repr, row.content)) or "none"
        raise ValueError(f"{row.where} has the columns {present}: expected one of {', '.join(columns)}")
    value = row.content[column]
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{row.where}: {column!r} must be a text that is not empty, got {value!r}")
    try:
        return check_string(value, column)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None


def _sample(items: Sequence[Any], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw `limit` items, in their order, or all if there are fewer."""
    if len(items) <= limit:
        return tuple(items)
    return tuple(items[index] for index in sorted(random.Random(seed).sample(range(len(items)), limit)))


def _over_datasets(datasets: Sequence[list[Any]], limit: int, seed: int) -> list[Any]:
    """Draw from each dataset in turn until there are enough; the last round draws from some of the datasets."""
    drawn = [random.Random(f"{seed}/{number}").sample(items, len(items)) for number, items in enumerate(datasets)]
    last = random.Random(seed)
    chosen: dict[Any, None] = {}
    for turn in range(max(map(len, drawn))):
        here = list(dict.fromkeys(items[turn] for items in drawn if turn < len(items) and items[turn] not in chosen))
        chosen |= dict.fromkeys(last.sample(here, min(len(here), limit - len(chosen))))
    return list(chosen)
