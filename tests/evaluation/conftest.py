"""Data that tests of evaluation share."""

from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.rows import read_rows, write_rows


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small real data: a set of STS in three parts, and clusters of questions."""
    folder = tmp_path_factory.mktemp("data")
    questions = read_rows(ROOT / "examples" / "data" / "clustering" / "open_trivia" / "train.jsonl.gz")
    write_rows(
        folder / "clustering" / "trivia" / "test.jsonl.gz",
        [{name: row[name] for name in ("text", "label")} for row in questions[:200]],
    )
    pairs = read_rows(ROOT / "examples" / "data" / "sts" / "sts17_en" / "test.jsonl.gz")
    for part in range(3):
        write_rows(folder / "sts" / f"part{part}" / "test.jsonl.gz", pairs[50 * part : 50 * part + 50])
    return folder
