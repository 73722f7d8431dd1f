"""Texts for analyses and calibration: from a file, a folder of datasets, or the 128 shipped with MoTE."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mote.data.columns import Example, read_examples
from mote.data.rows import Location, split_files
from mote.data.settings import DatasetSource

FOLDERS = ("retrieval", "classification", "clustering")
"""Folders of the tasks that experts are trained on."""


@dataclass(frozen=True)
class Texts:
    """A sample of at least two texts, and its source in words."""

    texts: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        _require_two(self.texts, self.source)


@dataclass(frozen=True)
class TextPairs:
    """A sample of at least two queries and their documents, and its source in words."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        _require_two(self.queries, self.source)


def _require_two(texts: tuple[str, ...], source: str) -> None:
    if len(texts) < 2:
        raise ValueError(f"{source} has {len(texts)} texts or pairs: a distribution needs at least two")


def read_texts(file: str | Path | None = None) -> list[str]:
    """Read all texts of a file.

    Args:
        file: One text per line (`.txt`, `.txt.gz`); or rows (`.jsonl`, `.jsonl.gz`, `.parquet`), of which the first
            text counts. Default: the 128 texts shipped with MoTE, freely licensed.

    Raises:
        ValueError: If it is damaged, not UTF-8 or of another format, a row has no text, or there are no texts.
    """
    path = Path(str(files("mote.data") / "texts.jsonl")) if file is None else Path(file)
    return [example.anchor for example in _examples(path.name, (path,))]


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
        ValueError: If a file is damaged, a row has no text, or there are fewer than two texts.
    """
    if file is None and folder is None:
        return Texts(_sample([_distinct(read_texts())], limit, seed), "the texts that come with MoTE")
    return Texts(*_sample_of(file, folder, FOLDERS, lambda example: example.anchor, limit, seed))


def find_pairs(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> TextPairs | None:
    """Sample distinct pairs from a file, else from the datasets in `retrieval` of a folder, else return None.

    Args:
        file: Rows with pairs; of several positives, the first counts.
        folder: A data folder.
        limit: Size of the sample.
        seed: Seed of the sample.

    Raises:
        ValueError: If a file is damaged, a row is not a pair, or there are fewer than two.
    """
    if file is None and (folder is None or not (Path(folder) / "retrieval").is_dir()):
        return None
    pairs, source = _sample_of(file, folder, ("retrieval",), _first_pair, limit, seed)
    return TextPairs(tuple(query for query, _ in pairs), tuple(document for _, document in pairs), source)


def _sample_of(
    file: str | Path | None,
    folder: str | Path | None,
    names: Sequence[str],
    take: Callable[[Example], Any],
    limit: int,
    seed: int,
) -> tuple[tuple[Any, ...], str]:
    """Sample what `take` returns for the rows of a file, or of the datasets in some folders of a data folder."""
    if file is not None:
        splits: list[tuple[Path, ...]] = [(Path(file),)]
        source = Path(file).name
    else:
        root = Path(str(folder))
        paths = sorted(path for name in names for path in (root / name).glob("*") if path.is_dir())
        splits = [found for path in paths if (found := split_files(path, "test") or split_files(path, "train"))]
        if not splits:
            expected = " or ".join(names)
            raise FileNotFoundError(f"{root} holds no datasets: expected {expected}, with NAME/train.jsonl.gz")
        source = f"{root.resolve().name}, {len(splits)} datasets"
    datasets = [_distinct([take(example) for example in _examples(source, split)]) for split in splits]
    return _sample(datasets, limit, seed), source


def _distinct(items: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _examples(name: str, split: tuple[Path, ...]) -> list[Example]:
    return read_examples(Location(name, DatasetSource(path=name), split)).rows


def _first_pair(example: Example) -> tuple[str, str]:
    if not example.positives:
        raise ValueError(f"expected pairs (anchor, positive), got the text {example.anchor!r:.80}")
    return example.anchor, example.positives[0]


def _sample(datasets: Sequence[list[Any]], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw from a dataset, in its order; or from each of several in turn, in the last round only from some of them."""
    last = random.Random(seed)
    if len(datasets) == 1:
        items = datasets[0]
        return tuple(items[index] for index in sorted(last.sample(range(len(items)), min(limit, len(items)))))
    shuffled = [random.Random(f"{seed}/{number}").sample(items, len(items)) for number, items in enumerate(datasets)]
    chosen: dict[Any, None] = {}
    for drawn in zip_longest(*shuffled):
        new = [item for item in dict.fromkeys(drawn) if item is not None and item not in chosen]
        chosen |= dict.fromkeys(last.sample(new, min(len(new), limit - len(chosen))))
    return tuple(chosen)
