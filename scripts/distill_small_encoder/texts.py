"""Training texts: distinct texts of many sets, and sentences of the long ones."""

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from scripts.text_sets import ENCODER_SETS

TEXT_COLUMNS = ("query", "positive", "text")
LENGTH_GROUPS = (("short", 100), ("medium", 400), ("long", 10**9))  # name, characters up to which a text belongs
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a gzip-packed JSON lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def crops(text: str, generator: random.Random, count: int = 3) -> Iterator[str]:
    """Yield a few runs of one to three sentences of a long text.

    Documents outnumber sentences in the sets, whereas people search sentences.
    """
    sentences = SENTENCE_END.split(text)
    if len(text) <= 300 or len(sentences) < 3:
        return
    for _ in range(count):
        length = generator.choice((1, 1, 2, 3))
        start = generator.randrange(len(sentences) - length + 1)
        yield " ".join(sentences[start : start + length])


def usable(text: str) -> bool:
    """Whether a text has enough letters for its embedding to mean something."""
    return sum(map(str.isalpha, text[:200])) >= 3


def collect_texts(data: Path, limit: int | None, seed: int) -> tuple[list[str], dict[str, int]]:
    """Gather the distinct training texts, in an order that only the seed decides.

    Args:
        data: Data folder.
        limit: Number of texts to keep; None: all.
        seed: Seed of the crops and of the order.

    Returns:
        The texts, and set → number of its texts before the limit.
    """
    generator = random.Random(seed)
    texts: dict[str, None] = {}
    counts = {}
    for text_set in ENCODER_SETS:
        before = len(texts)
        for row in read_rows(data / text_set.path / "train.jsonl.gz"):
            for text in (row[column] for column in TEXT_COLUMNS if column in row):
                texts.update(dict.fromkeys(filter(usable, (text, *crops(text, generator)))))
        counts[text_set.path] = len(texts) - before
    shuffled = list(texts)
    generator.shuffle(shuffled)
    return shuffled[:limit], counts


def length_groups(texts: Sequence[str], targets: np.ndarray) -> datasets.DatasetDict:
    """Make one data set for each range of lengths.

    The trainer fills a batch from one data set, so short texts are not padded to the length of long ones.
    """
    lengths = np.array([len(text) for text in texts])
    groups = {}
    shortest = 0
    for name, longest in LENGTH_GROUPS:
        rows = np.flatnonzero((lengths > shortest) & (lengths <= longest)).tolist()
        if rows:
            groups[name] = datasets.Dataset.from_dict({"text": [texts[row] for row in rows], "label": targets[rows]})
        shortest = longest
    return datasets.DatasetDict(groups)
