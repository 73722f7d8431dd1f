"""No text of a test split is trained on."""

from pathlib import Path
from typing import Any

import pytest
from helpers.paths import SHARED

from mote.corpora.pairs import write_rows
from mote.data.rows import read_files, split_files
from research.data import copy_without_tests, prepare


def test_rows_with_texts_of_tests_are_not_copied(tmp_path: Path) -> None:
    def rows(folder: Path) -> list[dict[str, Any]]:
        return [row.content for row in read_files(split_files(folder, "train"))]

    data = tmp_path / "data"
    for name in ("beir/bank", "sts/bank", "retrieval/bank", "classification/bank"):
        (data / name).mkdir(parents=True)
    write_rows(data / "beir" / "bank" / "corpus.jsonl.gz", [{"_id": "d1", "title": "", "text": "Cards arrive soon."}])
    write_rows(data / "sts" / "bank" / "test.jsonl.gz", [{"sentence1": "a card", "sentence2": "a bank", "label": 1}])
    pairs = [
        {"query": "where is it", "positive": " Cards arrive soon."},
        {"query": "a bank", "positive": "yes"},
        {"query": "1", "positive": "no"},
    ]
    write_rows(data / "retrieval" / "bank" / "train.jsonl.gz", pairs)
    labelled = [{"text": "a card", "label": "card"}, {"text": "card", "label": "card"}]
    write_rows(data / "classification" / "bank" / "train.jsonl.gz", labelled)
    out = tmp_path / "out"
    for _ in range(2):
        assert copy_without_tests(data, ["retrieval/bank", "classification/bank"], out) == out
        assert rows(out / "retrieval" / "bank") == pairs[2:]
        assert rows(out / "classification" / "bank") == labelled[1:]
    (data / "retrieval" / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"none has no .train. split"):
        copy_without_tests(data, ["retrieval/none"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data of ../shared")
def test_no_text_of_a_test_or_validation_set_is_trained_on(tmp_path: Path) -> None:
    folder = prepare(SHARED / "data", tmp_path / "data")

    def texts(folder: Path, *patterns: str) -> set[str]:
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        assert files
        values = [
            value for row in read_files(files) for key, value in row.content.items() if key not in ("_id", "label")
        ]
        lists = [value if isinstance(value, list) else [value] for value in values]
        return {one.strip() for values in lists for one in values if isinstance(one, str) and one.strip()}

    of_tests = ("*/*/test.jsonl.gz", "*/*/queries.jsonl.gz", "*/*/corpus.jsonl.gz")
    tests, held_out = texts(SHARED / "data", *of_tests), texts(folder / "validation", *of_tests)
    for kind in ("pairs", "labels", "five_tasks"):
        trained_on = texts(folder / kind, "*/*/train.jsonl.gz")
        assert len(trained_on & tests) == len(trained_on & held_out) == 0
        assert sum(1 for _ in read_files(list((folder / kind).glob("*/*/train.jsonl.gz")))) >= 60_000
    labelled = texts(folder / "validation", "[!b]*/*/test.jsonl.gz")
    assert len(labelled & tests) == 0  # those of NFCorpus share its documents
    tasks = {path.parent.parent.name for path in folder.glob("five_tasks/*/*/train.jsonl.gz")}
    assert tasks == {"retrieval", "classification", "clustering", "paraphrases"}
    types = {path.parent.parent.name for path in folder.glob("validation/*/*/test.jsonl.gz")}
    assert types == {"classification", "clustering", "pair", "reranking", "sts"}
