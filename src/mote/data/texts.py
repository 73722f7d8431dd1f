"""Texts for analyses and calibration: from a file, a folder of datasets, or the 128 shipped with MoTE."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mote.data.columns import ROW_TYPES, Example, RowType, read_examples
from mote.data.rows import Location, split_files
from mote.data.settings import DatasetSource

FOLDERS = ("retrieval", "classification", "clustering")  # of the tasks that experts are trained on


@dataclass(frozen=True)
class Texts:
    """A sample of at least two texts, or pairs of a query and its document, and its source in words."""

    texts: tuple[Any, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.texts) < 2:
            raise ValueError(f"{self.source} has {len(self.texts)} texts or pairs: a distribution needs at least two")


def count_longer(texts: Iterable[str], tokenizer: Any, longest: int) -> int:
    """Count the texts that have more tokens than the model reads, the special ones included."""
    candidates = [text for text in texts if len(text.encode()) > longest - 2]  # a token has a byte, or is special
    found = tokenizer(candidates, return_length=True, verbose=False)["length"] if candidates else []
    return sum(length > longest for length in found)


def read_texts(file: str | Path | None = None) -> list[str]:
    """Read all texts of a file.

    Args:
        file: One text per line (`.txt`, `.txt.gz`); or rows (`.jsonl`, `.jsonl.gz`, `.parquet`), of which the first
            text counts. Default: the 128 texts shipped with MoTE, freely licensed.

    Raises:
        ValueError: If it is damaged, not UTF-8 or of another format, a row has no text, or there are no texts.
    """
    path = Path(str(files("mote.data") / "texts.jsonl")) if file is None else Path(file)
    return [example.anchor for example in _read(path.name, (path,))]


def find_texts(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Texts:
    """Sample distinct texts from a file, else from the datasets of a folder, else from those shipped with MoTE.

    Of a data folder, each dataset in `FOLDERS` is read from its test split if there is one, else from its train split,
    and all contribute the same number of texts. The sample of a file keeps its order.
    """
    if file is None and folder is None:
        return Texts(_sample([read_texts()], limit, seed), "the texts that come with MoTE")
    splits, source = _splits_of(file, folder, FOLDERS)
    datasets = [[example.anchor for example in _read(source, split)] for split in splits]
    return Texts(_sample(datasets, limit, seed), source)


def find_pairs(
    file: str | Path | None = None, folder: str | Path | None = None, limit: int = 128, seed: int = 0
) -> Texts | None:
    """Sample distinct pairs from a file, else from the datasets in `retrieval` of a folder, else return None.

    Of several positives, the first counts.
    """
    if file is None and (folder is None or not (Path(folder) / "retrieval").is_dir()):
        return None
    splits, source = _splits_of(file, folder, ("retrieval",))
    read = [_read(source, split, ("pairs", "scored")) for split in splits]
    datasets = [[(example.anchor, example.positives[0]) for example in examples] for examples in read]
    return Texts(_sample(datasets, limit, seed), source)


def _splits_of(
    file: str | Path | None, folder: str | Path | None, names: Sequence[str]
) -> tuple[list[tuple[Path, ...]], str]:
    """Return the files of each dataset: one file, or those in some folders of a data folder; and what they are."""
    if file is not None:
        return [(Path(file),)], Path(file).name
    root = Path(str(folder))
    paths = sorted(path for name in names for path in (root / name).glob("*") if path.is_dir())
    splits = [found for path in paths if (found := split_files(path, "test") or split_files(path, "train"))]
    return splits, f"{root.resolve().name}, {len(splits)} datasets"


def _read(name: str, split: tuple[Path, ...], expected: Iterable[RowType] = tuple(ROW_TYPES)) -> list[Example]:
    return read_examples(Location(name, DatasetSource(path=name), split), expected=expected).rows


def _sample(datasets: Sequence[list[Any]], limit: int, seed: int) -> tuple[Any, ...]:
    """Draw distinct items of a dataset, in its order; or of several in turn, in the last round only of some of them."""
    last, datasets = random.Random(seed), [list(dict.fromkeys(items)) for items in datasets]
    if len(datasets) == 1:
        items = datasets[0]
        return tuple(items[index] for index in sorted(last.sample(range(len(items)), min(limit, len(items)))))
    shuffled = [random.Random(f"{seed}/{number}").sample(items, len(items)) for number, items in enumerate(datasets)]
    chosen: dict[Any, None] = {}
    for drawn in zip_longest(*shuffled):
        new = [item for item in dict.fromkeys(drawn) if item is not None and item not in chosen]
        chosen |= dict.fromkeys(last.sample(new, min(len(new), limit - len(chosen))))
    return tuple(chosen)
