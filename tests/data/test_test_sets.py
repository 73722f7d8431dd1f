"""Test sets of data folders: what is read of them, limits, and what is refused."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.rows import read_rows, write_rows

from mote.data import test_sets
from mote.data.test_sets import EvaluationDataset, find_evaluation_datasets

EXAMPLES = ROOT / "examples" / "data"
READERS: dict[str, Callable[[EvaluationDataset], Any]] = {
    "classification": test_sets.read_classification,
    "clustering": test_sets.read_clustering,
    "pair": test_sets.read_pairs,
    "reranking": test_sets.read_reranking,
    "beir": test_sets.read_retrieval,
    "sts": test_sets.read_sts,
    "summarization": test_sets.read_summaries,
}
Rows = list[dict[str, Any]]


def content(path: str, limit: int | None = None, folder: Path = EXAMPLES) -> Any:
    """What is read of a dataset."""
    task, name = path.split("/")
    return READERS[task](EvaluationDataset(task, name, folder, limit))


def test_datasets_with_a_test_split_are_found_in_the_order_of_types() -> None:
    found = [dataset.path for dataset in find_evaluation_datasets(EXAMPLES)]
    assert [path.split("/")[0] for path in found] == list(READERS)
    assert "beir/arxiv" in found


# Limits --------------------------------------------------------------------------------------------------------------


def test_limits_are_fixed_samples_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    other = shutil.copytree(EXAMPLES, tmp_path / "other")
    for file in other.glob("*/*/*.jsonl.gz"):
        write_rows(file, read_rows(file)[::-1])
    for path in ("pair/sts17_en", "sts/sts17_en", "summarization/arxiv"):
        first, again, reversed_rows = (content(path, 10, folder) for folder in (EXAMPLES, EXAMPLES, other))
        assert len(first) == 10
        assert first == again
        assert [row for row in content(path) if row in first] == first, "rows stay in order"
        assert reversed_rows == first[::-1]


def test_a_limit_keeps_the_shares_of_labels() -> None:
    limited, whole = (Counter(row["labels"] for row in content("pair/sts17_en", limit)) for limit in (61, None))
    assert limited[1] / 61 == pytest.approx(whole[1] / 183, abs=0.01)
    splits = content("classification/banking77", 40)
    assert len(splits["test"]) == 40
    assert set(Counter(row["label"] for row in splits["test"]).values()) == {1}
    train = Counter(row["label"] for row in read_rows(EXAMPLES / "classification/banking77/train.jsonl.gz"))
    kept = Counter(row["label"] for row in splits["train"])
    assert sorted(kept.values()) == sorted(min(count, 16) for count in train.values())


def test_a_limited_pair_dataset_has_both_labels(tmp_path: Path) -> None:
    assert sorted(row["labels"] for row in content("pair/sts17_en", 1)) == [0, 1]
    uneven = [{"sentence1": str(number), "sentence2": "b", "label": int(number == 0)} for number in range(100)]
    write_rows(tmp_path / "pair/uneven/test.jsonl.gz", uneven)
    assert sorted(row["labels"] for row in content("pair/uneven", 1, tmp_path)) == [0, 1]
    with pytest.raises(ValueError, match=r"all labels within a limit of 5 \(raise it\?\) are 0, expected two"):
        content("pair/uneven", 5, tmp_path)


def test_a_limited_clustering_dataset_has_few_labels_but_enough_texts_of_each() -> None:
    sizes = Counter(row["label"] for row in content("clustering/arxiv_titles", 40))
    assert list(sizes.values()) == [8] * 5


def test_a_clustering_dataset_is_not_cut_until_any_clustering_fits_it(tmp_path: Path) -> None:
    rows = [{"text": str(number), "label": "ab"[number % 2]} for number in range(20)]
    write_rows(tmp_path / "clustering/made/test.jsonl.gz", rows)
    with pytest.raises(ValueError, match=r"made: all labels within a limit of 1 \(raise it\?\) are '.', expected two"):
        content("clustering/made", 1, tmp_path)
    with pytest.raises(ValueError, match=r"made: no label has two texts within a limit of 2 \(raise it\?\)"):
        content("clustering/made", 2, tmp_path)
    assert {row["label"] for row in content("clustering/made", 3, tmp_path)} == {"a", "b"}


def test_a_limited_corpus_holds_the_documents_of_the_qrels_and_others() -> None:
    limited = content("beir/arxiv", 5)
    assert len(limited.queries) == 5
    assert set(limited.qrels) == {query["id"] for query in limited.queries}
    corpus = {document["id"] for document in limited.corpus}
    assert len(corpus) == len(limited.corpus) == 50
    assert {document for documents in limited.qrels.values() for document in documents} <= corpus
    assert len(content("beir/arxiv", 30).corpus) == 200, "more than there are"
    assert len(content("reranking/liveqa_med", 3)) == 3


def test_relevance_goes_before_other_scores(tmp_path: Path) -> None:
    row = {"text": "t", "machine_summaries": ["a", "b"], "fluency": [1, 2], "relevance": [5, 3]}
    write_rows(tmp_path / "summarization/both/test.jsonl.gz", [row])
    assert content("summarization/both", folder=tmp_path)[0]["relevance"] == [5, 3]


# Invalid data --------------------------------------------------------------------------------------------------------


def retrieval_dataset(folder: Path, corpus: Rows, queries: Rows, qrels: Sequence[Sequence[str]]) -> None:
    write_rows(folder / "beir/made/corpus.jsonl.gz", corpus)
    write_rows(folder / "beir/made/queries.jsonl.gz", queries)
    lines = ["\t".join(line) for line in [("query-id", "corpus-id", "score"), *qrels]]
    (folder / "beir/made/qrels").mkdir(parents=True)
    (folder / "beir/made/qrels/test.tsv").write_text("\n".join(lines) + "\n")


def fault(folder: Path, path: str) -> str:
    """The error of a dataset."""
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        content(path, folder=folder)
    return str(refused.value)


PAIR = {"sentence1": "a", "sentence2": "b"}
SUMMARY = {"text": "t", "machine_summaries": ["a", "b"], "relevance": [1, 2]}
INVALID = {  # case → task, rows of the test split, and what the error must say
    "no column": ("sts", [{**PAIR, "score": 1}, PAIR], "test.jsonl.gz:2: no column 'score', expected a number."),
    "no number": ("sts", [{**PAIR, "score": "4"}], """:1: 'score' must be a number, got "4\""""),
    "a NaN": ("sts", [{**PAIR, "score": float("nan")}], "'score' must be a number, got NaN"),
    "a number that no float holds": (
        "sts",
        [{**PAIR, "score": 10**400}],
        "test.jsonl.gz:1: 'score' must be a number, got 1" + 79 * "0" + "… (401 characters)",
    ),
    "a list with such a number": (
        "summarization",
        [SUMMARY, {**SUMMARY, "relevance": [1, -(10**400)]}],
        "test.jsonl.gz:2: 'relevance' must be a list of numbers",
    ),
    "half of a surrogate pair": (
        "sts",
        [{**PAIR, "score": 1}, {**PAIR, "sentence2": "b\ud800", "score": 1}],
        "test.jsonl.gz:2: 'sentence2' is invalid Unicode: it has half of a surrogate pair",
    ),
    "a label with half of a surrogate pair": (
        "clustering",
        [{"text": "a", "label": "\udc00"}],
        "test.jsonl.gz:1: 'label' is invalid Unicode",
    ),
    "a list with half of a surrogate pair": (
        "reranking",
        [{"query": "q", "positive": ["a"], "negative": ["b", "\ud800"]}],
        "test.jsonl.gz:1: 'negative' is invalid Unicode",
    ),
    "an unexpected half of a surrogate pair": (
        "sts",
        [{**PAIR, "sentence1": {"text": "\ud800"}, "score": 1}],
        r"""test.jsonl.gz:1: 'sentence1' must be a string, got {"text": "\ud800"}""",
    ),
    "no text": ("sts", [{**PAIR, "sentence1": None, "score": 1}], "'sentence1' must be a string, got null"),
    "equal scores": ("sts", [{**PAIR, "score": 1}] * 2, "all scores are 1, expected two values or more"),
    "no rows": ("sts", [], "the 'test' split has no rows"),
    "no object": ("sts", [[1, 2]], ":1: expected a JSON object, got list"),
    "another label": ("pair", [{**PAIR, "label": 2}], "'label' must be 1 (same meaning) or 0 (another), got 2"),
    "no label": ("pair", [PAIR], "no column 'label'"),
    "one label": ("pair", [{**PAIR, "label": 1}] * 2, "all labels are 1, expected two values or more"),
    "no clusters": ("clustering", [{"text": "a", "label": "x"}] * 2, "all labels are 'x', expected two"),
    "a cluster for each text": (
        "clustering",
        [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
        "clustering/bad: no label has two texts",
    ),
    "an empty label": ("clustering", [{"text": "a", "label": ""}], "'label' must be a label"),
    "no list": (
        "reranking",
        [{"query": "q", "positive": "a", "negative": ["b"]}],
        "'positive' must be a list of strings",
    ),
    "no positive": (
        "reranking",
        [{"query": "q", "positive": [], "negative": ["b"]}],
        "a list of strings that is not empty",
    ),
    "lengths": (
        "summarization",
        [SUMMARY, {**SUMMARY, "relevance": [1]}],
        "row 2 of the test split has 2 machine summaries, but 1 scores",
    ),
    "no scores": (
        "summarization",
        [{**PAIR, **SUMMARY, "relevance": ["x", 1]}],
        "'relevance' must be a list of numbers",
    ),
    "unknown scores": (
        "summarization",
        [{"text": "t", "machine_summaries": ["a", "b"], "beauty": [1, 2]}],
        "no human scores",
    ),
    "equal scores of summaries": (
        "summarization",
        [{**SUMMARY, "relevance": [2, 2]}] * 2,
        "all differences between the scores of a text are 0",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_rows_are_refused(case: str, tmp_path: Path) -> None:
    task, rows, message = INVALID[case]
    write_rows(tmp_path / f"{task}/bad/test.jsonl.gz", rows)
    error = fault(tmp_path, f"{task}/bad")
    assert message in error
    assert error.encode(), "it can be written to a file"


def test_one_summary_for_one_text_and_several_for_another(tmp_path: Path) -> None:
    rows = [{"text": "t", "machine_summaries": ["a"], "relevance": [1]}, SUMMARY]
    write_rows(tmp_path / "summarization/bad/test.jsonl.gz", rows)
    with pytest.raises(ValueError, match="the first text has one machine summary, another has 2"):
        test_sets.read_summary_pairs(EvaluationDataset("summarization", "bad", tmp_path))


def damaged(folder: Path) -> str:
    write_rows(folder / "sts/bad/test.jsonl.gz", [{**PAIR, "score": score} for score in range(100)])
    file = folder / "sts/bad/test.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    return "test.jsonl.gz is truncated or damaged"


def invalid_json(folder: Path) -> str:
    (folder / "sts/bad").mkdir(parents=True)
    (folder / "sts/bad/test.jsonl").write_text(json.dumps({**PAIR, "score": 1}) + "\n{half a li\n")
    return "test.jsonl:2: invalid JSON"


@pytest.mark.parametrize("damage", [damaged, invalid_json])
def test_damaged_files_are_refused(damage: Callable[[Path], str], tmp_path: Path) -> None:
    message = damage(tmp_path)
    assert message in fault(tmp_path, "sts/bad")


def test_labels_of_test_must_be_trained_on(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "classification/bad/test.jsonl.gz",
        [{"text": "a", "label": "old"}] + [{"text": "b", "label": "new"}] * 2,
    )
    assert "no 'train' split" in fault(tmp_path, "classification/bad")
    write_rows(
        tmp_path / "classification/bad/train.jsonl.gz", [{"text": "a", "label": "old"}, {"text": "b", "label": "news"}]
    )
    message = fault(tmp_path, "classification/bad")
    assert "2 test rows have one of 1 labels that the train split lacks" in message
    assert "'new'. Did you mean 'news'?" in message


DOCUMENTS = [{"_id": f"d{number}", "title": "", "text": "a text"} for number in range(3)]
QUERIES = [{"_id": f"q{number}", "text": "a query"} for number in range(2)]
QRELS = [("q0", "d0", "1"), ("q1", "d1", "2")]
INVALID_RETRIEVAL = {
    "no corpus": (([], QUERIES, QRELS), "the 'corpus' split has no rows"),
    "no qrels": ((DOCUMENTS, QUERIES, []), "no qrels"),
    "nothing relevant": (
        (DOCUMENTS, QUERIES, [("q0", "d0", "0")]),
        "in qrels/test.tsv no document is relevant to any query",
    ),
    "unknown queries": (
        (DOCUMENTS, QUERIES, [*QRELS, ("q7", "d0", "1"), ("q8", "d0", "1")]),
        "names 2 unknown query ids, for instance 'q7'; there are 2, for instance 'q0'",
    ),
    "unknown documents": (
        (DOCUMENTS, QUERIES, [*QRELS, ("q1", "d9", "1")]),
        "names 1 unknown document ids",
    ),
    "repeated ids": ((DOCUMENTS * 2, QUERIES, QRELS), "2 rows have the document id 'd0'"),
    "no title": (([{"_id": "d0", "text": "a"}], QUERIES, QRELS), "corpus.jsonl.gz:1: no column 'title'"),
    "no grade": (
        (DOCUMENTS, QUERIES, [("q0", "d0", "much")]),
        "test.tsv:2: expected query, document and an integer",
    ),
    "two signs": ((DOCUMENTS, QUERIES, [("q0", "d0", "--5")]), "an integer of up to 9 digits, got 'q0"),
    "a huge grade": ((DOCUMENTS, QUERIES, [("q0", "d0", "9" * 5000)]), "an integer of up to 9 digits, got 'q0"),
    "no columns": ((DOCUMENTS, QUERIES, [("q0 d0 1",)]), "test.tsv:2: expected query, document and an integer"),
}


@pytest.mark.parametrize("case", INVALID_RETRIEVAL)
def test_invalid_retrieval_datasets_are_refused(case: str, tmp_path: Path) -> None:
    parts, message = INVALID_RETRIEVAL[case]
    retrieval_dataset(tmp_path, *parts)
    assert message in fault(tmp_path, "beir/made")


@pytest.mark.parametrize("missing", ["corpus.jsonl.gz", "queries.jsonl.gz", "qrels/test.tsv"])
def test_missing_files_are_named(missing: str, tmp_path: Path) -> None:
    retrieval_dataset(tmp_path, DOCUMENTS, QUERIES, QRELS)
    (tmp_path / "beir/made" / missing).unlink()
    assert missing.removesuffix(".gz") in fault(tmp_path, "beir/made")


def test_a_header_of_qrels_is_required(tmp_path: Path) -> None:
    retrieval_dataset(tmp_path, DOCUMENTS, QUERIES, QRELS)
    (tmp_path / "beir/made/qrels/test.tsv").write_text("q0\t0\td0\t1\n")
    assert "test.tsv:1: expected the header query-id, corpus-id, score, tab-separated" in fault(tmp_path, "beir/made")


def test_qrels_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    retrieval_dataset(tmp_path, DOCUMENTS, QUERIES, [("qé", "d0", "1")])
    file = tmp_path / "beir/made/qrels/test.tsv"
    file.write_bytes(file.read_text(encoding="utf-8").encode("latin-1"))
    assert f"{file}:2: not a text in UTF-8" in fault(tmp_path, "beir/made")


def test_queries_without_relevant_documents_are_dropped(tmp_path: Path) -> None:
    retrieval_dataset(tmp_path, DOCUMENTS, QUERIES, [("q0", "d0", "1"), ("q1", "d1", "0")])
    assert [query["id"] for query in content("beir/made", folder=tmp_path).queries] == ["q0"]
