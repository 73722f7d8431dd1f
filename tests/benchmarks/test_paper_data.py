"""benchmarks.paper.data: no text of a test split is trained on."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import data as paper_data
from benchmarks.paper.data import copy_without_tests, prepare
from mote.corpora.pairs import write_rows
from mote.data.rows import read_files, split_files


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


def test_more_rows_of_the_same_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"

    def write(name: str, *columns: str) -> None:
        (data / name).mkdir(parents=True)
        rows = [{column: f"{column} {number} of {name}" for column in columns} for number in range(40)]
        labels = {"label": "one"} if "text" in columns else {}
        write_rows(data / name / "train.jsonl.gz", [row | labels for row in rows])

    for name in ("retrieval/qa", "retrieval/duplicates", "retrieval/papers"):
        write(name, "query", "positive")
    for name in ("classification/bank", "clustering/topics"):
        write(name, "text")
    (data / "beir" / "nfcorpus" / "qrels").mkdir(parents=True)
    for file in ("corpus.jsonl.gz", "queries.jsonl.gz"):
        write_rows(data / "beir" / "nfcorpus" / file, [{"_id": "1", "title": "", "text": "Health"}])
    (data / "beir" / "nfcorpus" / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n1\t1\t1\n")
    of_tasks = {"retrieval": "qa", "classification": "duplicates", "clustering": "papers"}
    pairs = {task: {f"retrieval/{name}": 4} for task, name in of_tasks.items()}
    monkeypatch.setattr(paper_data, "PAIRS", pairs)
    monkeypatch.setattr(paper_data, "LABELLED", {"classification": 2, "clustering": 3})
    monkeypatch.setattr(paper_data, "IN_FIVE_TASKS", {"classification": 1, "clustering": 2, "paraphrases": 3})
    for constant in ("CLASSIFICATION", "CLUSTERING", "RERANKING", "PAIR"):
        monkeypatch.setattr(paper_data, constant, ())
    monkeypatch.setattr(paper_data, "STS", {})

    def rows(folder: Path, name: str) -> list[dict[str, Any]]:
        return [row.content for row in read_files(split_files(folder / name, "train"))]

    once, thrice = (prepare(data, tmp_path / f"x{times}", times) for times in (1, 3))
    for name, limit in {
        "pairs/retrieval/qa": 4,
        "pairs/clustering/papers": 4,
        "labels/classification/bank": 2,
        "five_tasks/clustering/topics": 2,
        "five_tasks/paraphrases/duplicates": 3,
        "five_tasks/retrieval/qa": 4,
    }.items():
        assert rows(thrice, name)[:limit] == rows(once, name)
        assert len(rows(thrice, name)) == 3 * limit
    queries = {row["query"] for row in rows(thrice, "pairs/retrieval/qa")}
    held_out = [row.content["text"] for row in read_files([*thrice.glob("validation/beir/qa/queries.jsonl.gz")])]
    assert len(held_out) + len(queries) <= 40
    assert queries.isdisjoint(held_out)
    assert prepare(data, thrice, 3) == thrice
    with pytest.raises(ValueError, match="x3 was made from other data"):
        prepare(data, thrice, 1)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4])
def test_no_text_of_a_test_or_validation_set_is_trained_on(shared: Path, tmp_path: Path, times: int) -> None:
    folder = prepare(shared / "data", tmp_path / "data", times)

    def texts(folder: Path, *patterns: str) -> set[str]:
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        assert files
        values = [
            value for row in read_files(files) for key, value in row.content.items() if key not in ("_id", "label")
        ]
        lists = [value if isinstance(value, list) else [value] for value in values]
        return {one.strip() for values in lists for one in values if isinstance(one, str) and one.strip()}

    of_tests = ("*/*/test.jsonl.gz", "*/*/queries.jsonl.gz", "*/*/corpus.jsonl.gz")
    tests, held_out = texts(shared / "data", *of_tests), texts(folder / "validation", *of_tests)
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
