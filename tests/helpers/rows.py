"""Rows in files, whose endings decide on the format."""

import gzip
import json
from collections.abc import Mapping, Sequence
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
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_retrieval_dataset(folder: Path, corpus: Mapping[str, str], queries: Mapping[str, str], *qrels: str) -> None:
    """Write a retrieval dataset: documents and queries by id, and lines of qrels, their fields separated by blanks."""
    write_rows(folder / "corpus.jsonl", [{"_id": name, "title": "", "text": text} for name, text in corpus.items()])
    write_rows(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    (folder / "qrels").mkdir(parents=True)
    lines = ["query-id corpus-id score", *qrels]
    (folder / "qrels" / "test.tsv").write_text("".join(line.replace(" ", "\t") + "\n" for line in lines))
