"""Rows in files, whose endings decide on the format."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Write `.jsonl`, packed where the name ends in `.gz`, or `.parquet`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow  # an extra brings it, and not every environment that runs tests has that extra
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read packed JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
