"""Samples of test sets: hashes of the rows decide, so that their order in a file does not."""

import json
from collections import defaultdict
from hashlib import blake2b
from typing import Any


def ranks(rows: list[dict[str, Any]], label: str | None = None) -> list[tuple[int, int]]:
    """Return for each row its rank by hash, among all rows or those of its label, and the number of such rows."""
    groups: dict[Any, list[tuple[bytes, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row[label] if label else None].append((_hash(row), index))
    found = {index: (rank, len(group)) for group in groups.values() for rank, (_, index) in enumerate(sorted(group))}
    return [found[index] for index in range(len(rows))]


def sample(rows: list[dict[str, Any]], limit: int | None, label: str | None = None) -> list[dict[str, Any]]:
    """Take at most `limit` rows, in their order; with a label, in proportion to the sizes of the labels."""
    if limit is None or len(rows) <= limit:
        return rows
    # The row of rank r among n is at (r + ½) / n: the first rows in this order are a fair share of each label.
    places = [((rank + 0.5) / size, _hash(rows[index]), index) for index, (rank, size) in enumerate(ranks(rows, label))]
    return [rows[index] for index in sorted(index for *_, index in sorted(places)[:limit])]


def _hash(row: dict[str, Any]) -> bytes:
    return blake2b(b"limit\0" + json.dumps(row, sort_keys=True, default=str).encode(), digest_size=8).digest()
