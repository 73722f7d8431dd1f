"""Test sets of data folders: what is read of them, limits, and what is refused."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLE_DATA
from helpers.rows import read_rows, write_rows

from mote.data import test_sets
from mote.data.test_sets import EvaluationDataset, find_evaluation_datasets

READERS: dict[str, Callable[[EvaluationDataset], Any]] = {
    "classification": test_sets.read_classification,
    "clustering": test_sets.read_clustering,
    "pair": test_sets.read_pairs,
    "reranking": test_sets.read_test_rows,
    "beir": test_sets.read_retrieval,
    "sts": test_sets.read_test_rows,
    "summarization": test_sets.read_summaries,
}
Rows = list[dict[str, Any]]
PAIR = {"sentence1": "a", "sentence2": "b"}
SUMMARY = {"text": "t", "machine_summaries": ["a", "b"], "relevance": [1, 2]}


def content(path: str, limit: int | None = None, folder: Path = EXAMPLE_DATA) -> Any:
    task, name = path.split("/")
    return READERS[task](EvaluationDataset(task, name, folder, limit))


def test_datasets_with_a_test_split_are_found_in_the_order_of_types() -> None:
    found = [dataset.path for dataset in find_evaluation_datasets(EXAMPLE_DATA)]
    assert [path.split("/")[0] for path in found] == list(READERS)
    assert "beir/arxiv" in found


def test_limits_are_fixed_samples_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    other = shutil.copytree(EXAMPLE_DATA, tmp_path / "other")
    for file in other.glob("*/*/*.jsonl.gz"):
        write_rows(file, read_rows(file)[::-1])
    for path in ("pair/sts17_en", "sts/sts17_en", "summarization/arxiv"):
        first, again, reversed_rows = (content(path, 10, folder) for folder in (EXAMPLE_DATA, EXAMPLE_DATA, other))
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
    sizes = Counter(row["label"] for row in content("clustering/arxiv_titles", 40))
    assert list(sizes.values()) == [8] * 5, "few labels, but enough texts of each"
    assert len(splits["train"]) == len(read_rows(EXAMPLE_DATA / "classification/banking77/train.jsonl.gz"))


PAIRS = [{**PAIR, "sentence1": str(i), "label": int(i == 0)} for i in range(100)]
CLUSTERS = [{"text": str(i), "label": "ab"[i % 2]} for i in range(20)]


def test_a_limit_that_leaves_nothing_to_score(tmp_path: Path) -> None:
    for path, rows, limit in (
        ("pair/made", PAIRS, 5),
        ("clustering/made", CLUSTERS, 1),
        ("clustering/made", CLUSTERS, 2),
    ):
        write_rows(tmp_path / path / "test.jsonl.gz", rows)
        with pytest.raises(ValueError, match=rf"{path}: \d labels in {limit} rows within the limit of {limit} cannot"):
            content(path, limit, tmp_path)
        assert len(content(path, 60, tmp_path)) == min(60, len(rows))


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
    write_rows(tmp_path / "summarization/both/test.jsonl.gz", [{**SUMMARY, "fluency": [5, 3]}])
    assert content("summarization/both", folder=tmp_path)[0]["relevance"] == SUMMARY["relevance"]


def retrieval_dataset(folder: Path, corpus: Rows, queries: Rows, qrels: Sequence[Sequence[str]]) -> None:
    write_rows(folder / "beir/made/corpus.jsonl.gz", corpus)
    write_rows(folder / "beir/made/queries.jsonl.gz", queries)
    (folder / "beir/made/qrels").mkdir(parents=True)
    if qrels:
        (folder / "beir/made/qrels/test.tsv").write_text("".join("\t".join(line) + "\n" for line in qrels))


def fault(folder: Path, path: str) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        content(path, folder=folder)
    return str(refused.value)


RERANKING = {"query": "q", "positive": ["a"], "negative": ["b"]}
UNKNOWN = {"text": "t", "machine_summaries": ["a", "b"], "beauty": [1, 2]}


def test_invalid_rows_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, Rows, str]] = [
        ("sts", [{**PAIR, "score": 1}, PAIR], "test.jsonl.gz:2: 'score': Input should be a valid number, got None"),
        ("sts", [{**PAIR, "score": "4"}], ":1: 'score': Input should be a valid number, got '4'"),
        ("sts", [], "no 'test' split, or one without rows"),
        ("pair", [{**PAIR, "label": 2}], "'label': Input should be 0 or 1, got 2"),
        ("pair", [{**PAIR, "label": 1}] * 2, "pair/bad: 1 labels in 2 rows cannot be scored"),
        ("clustering", [{"text": "a", "label": "x"}] * 2, "clustering/bad: 1 labels in 2 rows cannot be scored"),
        ("reranking", [{**RERANKING, "positive": "a"}], "'positive': Input should be a valid list"),
        ("reranking", [{**RERANKING, "positive": []}], "'positive': List should have at least 1 item"),
        ("summarization", [SUMMARY, {**SUMMARY, "relevance": [1]}], ":2: machine_summaries and relevance are not of"),
        ("summarization", [UNKNOWN], "'relevance': Input should be a valid list, got None"),
    ]
    for task, rows, message in cases:
        write_rows(tmp_path / f"{task}/bad/test.jsonl.gz", rows)
        assert message in fault(tmp_path, f"{task}/bad")


def test_one_summary_for_one_text_and_several_for_another(tmp_path: Path) -> None:
    rows = [{"text": "t", "machine_summaries": ["a"], "relevance": [1]}, SUMMARY]
    write_rows(tmp_path / "summarization/bad/test.jsonl.gz", rows)
    with pytest.raises(ValueError, match=r"gz:2: 'machine_summaries': List should have at most 1 item"):
        test_sets.read_summary_pairs(EvaluationDataset("summarization", "bad", tmp_path))


def test_labels_of_test_must_be_trained_on(tmp_path: Path) -> None:
    folder, old = tmp_path / "classification/bad", {"text": "a", "label": "old"}
    write_rows(folder / "test.jsonl.gz", [old, *[{"text": "b", "label": "new"}] * 2])
    assert "no 'train' split" in fault(tmp_path, "classification/bad")
    write_rows(folder / "train.jsonl.gz", [old, {"text": "b", "label": "news"}])
    message = fault(tmp_path, "classification/bad")
    assert "2 test rows have labels that the train split lacks, for instance 'new'. Did you mean 'news'?" in message


DOCUMENTS = [{"_id": f"d{number}", "title": "", "text": "a text"} for number in range(3)]
QUERIES = [{"_id": f"q{number}", "text": "a query"} for number in range(2)]
HEADER = ("query-id", "corpus-id", "score")
QRELS = [HEADER, ("q0", "d0", "1"), ("q1", "d1", "2")]
UNKNOWN_QUERIES = [*QRELS, ("q7", "d0", "1"), ("q8", "d0", "1")]


@pytest.mark.parametrize(
    ("corpus", "queries", "qrels", "message"),
    [
        ([], QUERIES, QRELS, "no 'corpus' split, or one without rows"),
        (DOCUMENTS, [], QRELS, "no 'queries' split, or one without rows"),
        (DOCUMENTS, QUERIES, [], "beir/made/qrels/test.tsv"),
        (DOCUMENTS, QUERIES, [HEADER, ("q0", "d0", "0")], "no query with a relevant document in qrels/test.tsv"),
        (DOCUMENTS, QUERIES, UNKNOWN_QUERIES, "2 query ids of qrels/test.tsv are unknown or repeated, for instance"),
        (DOCUMENTS, QUERIES, [*QRELS, ("q1", "d9", "1")], "1 document ids of qrels/test.tsv are unknown"),
        (DOCUMENTS * 2, QUERIES, QRELS, "3 document ids of qrels/test.tsv are unknown or repeated, for instance 'd0'"),
        ([{"_id": "d0", "text": "a"}], QUERIES, QRELS, "corpus.jsonl.gz:1: 'title': Input should be a valid string"),
        (DOCUMENTS, QUERIES, [HEADER, ("q0", "d0", "much")], "test.tsv:2: invalid literal for int() with base 10:"),
        (DOCUMENTS, QUERIES, [HEADER, ("q0",)], "test.tsv:2: 'corpus-id': Input should be a valid string, got None"),
        (DOCUMENTS, QUERIES, [("q0", "0", "d0", "1")] * 2, "test.tsv:2: 'query-id': Input should be a valid string"),
    ],
)
def test_invalid_retrieval_datasets_are_refused(
    corpus: Rows, queries: Rows, qrels: Any, message: str, tmp_path: Path
) -> None:
    retrieval_dataset(tmp_path, corpus, queries, qrels)
    assert message in fault(tmp_path, "beir/made")


def test_queries_without_relevant_documents_are_dropped(tmp_path: Path) -> None:
    retrieval_dataset(tmp_path, DOCUMENTS, QUERIES, [HEADER, ("q0", "d0", "1"), ("q1", "d1", "0")])
    assert [query["id"] for query in content("beir/made", folder=tmp_path).queries] == ["q0"]
