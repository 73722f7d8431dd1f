"""What the columns of a dataset mean, and which rows are valid."""

import re
from typing import Any

import pytest

from mote.data.columns import Example, check_row, find_columns
from mote.data.settings import DatasetSource

PAIR, LABELLED, SCORED = ("query", "positive"), ("text", "label"), ("sentence1", "sentence2", "score")
TEXTS = {"sentence1": "a", "sentence2": "b"}


def check(row: dict[str, Any], columns: dict[str, Any] | None = None, present: tuple[str, ...] = ()) -> Example:
    """Read a row of a dataset that has the row's columns, if no others are named."""
    settings = DatasetSource(path="tiny", columns=columns or {})
    return check_row(row, find_columns(settings, present or row, "retrieval/tiny"))


TITLED = {"anchor": "title", "positive": "abstract"}
TAUGHT: dict[str, Any] = {"query": "a", "positive": "b", "negative": "c", "scores": [1.0]}
SCORED_PAIR = Example("a", ("b",), ("c", "d"), scores={"b": 3.0, "c": 0.5, "d": -1.0})
ALL_NAMED = {"anchor": "query", "positive": "positive", "negative": ["negative_2", "negative_10"], "scores": "s"}
NEGATIVES = {"query": "a", "positive": "b", "negative_10": "d", "negative_2": "c", "negative_3": None}


@pytest.mark.parametrize(
    ("row", "columns", "row_type", "example"),
    [
        ({"anchor": "a", "positive": "b"}, {}, "pairs", Example("a", ("b",))),
        ({"question": "a", "answer": "b", "id": 7}, {}, "pairs", Example("a", ("b",))),
        ({"title": "a", "abstract": "b"}, TITLED, "pairs", Example("a", ("b",))),
        ({"query": "x", "title": "a", "abstract": "b", "score": 1}, TITLED, "pairs", Example("a", ("b",))),
        ({"query": "a", "positive": ["b", "c"]}, {}, "pairs", Example("a", ("b", "c"))),
        ({"query": "a", "positive": "b", "negative": ["c", "d"]}, {}, "pairs", Example("a", ("b",), ("c", "d"))),
        ({"query": "a", "pos": ["b"], "neg": ["c", "d"]}, {}, "pairs", Example("a", ("b",), ("c", "d"))),
        (NEGATIVES, {}, "pairs", Example("a", ("b",), ("c", "d"))),
        ({**NEGATIVES, "scores": [3, 0.5, -1]}, {}, "pairs", SCORED_PAIR),
        ({**NEGATIVES, "pos_scores": [3.0], "neg_scores": [0.5, -1.0]}, {}, "pairs", SCORED_PAIR),
        ({**NEGATIVES, "s": [3, 0.5, -1]}, ALL_NAMED, "pairs", SCORED_PAIR),
        ({"query": "a", "positive": "b", "negative": [], "score": 1}, {}, "pairs", Example("a", ("b",))),
        ({"sentence1": "a", "sentence2": "b", "score": 3}, {}, "scored", Example("a", ("b",), label=3.0)),
        ({"text": "a", "label": 3}, {}, "labelled", Example("a", label="3")),
        ({"text": "a", "label": " x "}, {}, "labelled", Example("a", label="x")),
        ({"sentence": "a"}, {}, "texts", Example("a")),
        ({"query": "a"}, {}, "texts", Example("a")),
    ],
)
def test_every_type_of_row(row: dict[str, Any], columns: Any, row_type: str, example: Example) -> None:
    assert find_columns(DatasetSource(path="tiny", columns=columns), row, "tiny").row_type == row_type
    assert check(row, columns) == example


def test_missing_and_ambiguous_columns() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"title": "a", "abstract": "b"}, {}),
        ({"query": "a", "question": "b", "answer": "c"}, {}),
        ({"query": "a", "question": "b", "text": "c"}, {}),
        ({"sentence1": "a", "sentence2": "b", "score": 1, "similarity": 2}, {}),
        ({"query": "a", "positive": "b"}, {"anchor": "quary", "positive": "positive"}),
        ({"q": "a", "t": "b", "p": "c"}, {"anchor": "q", "positive": ["t", "p"]}),
        ({"q": "a", "p": "c"}, {"anchor": "q", "positive": []}),
        ({"q": "a", "t": "b"}, {"anchor": "q", "text": "t"}),
        ({"q": "a", "p": "b", "n": "c", "s": 1}, {"anchor": "q", "positive": "p", "negative": "n", "score": "s"}),
    ]
    for row, columns in cases:
        named = ", ".join(map(repr, sorted(row))) + (f" with `columns` {columns}" if columns else "")
        with pytest.raises(ValueError, match=re.escape(f"retrieval/tiny: its columns {named} are not pairs (anchor, ")):
            check(row, columns)


def test_invalid_rows() -> None:
    cases: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (PAIR, {"query": "", "positive": "b"}, "'query': String should have at least 1 character, got ''"),
        (PAIR, {"query": 3, "positive": "b"}, "'query': Input should be a valid string, got 3"),
        (PAIR, {"query": "a", "positive": []}, r"'positive': List should have at least 1 item .*, got \[\]"),
        (PAIR, {"query": "a", "positive": ["b", ""]}, "'positive': String should have at least 1 character, got .*"),
        (PAIR, {"query": "a"}, r"'positive': .* list, got None \(there is no such column, only 'query'\)"),
        (PAIR, {"query": "a", "positive": "\ud83d"}, "'positive': .* unable to parse raw data as a unicode .*"),
        (LABELLED, {"text": "a", "label": 0.5}, "'label': Input should be a valid string, got 0.5"),
        (LABELLED, {"text": "a", "label": " "}, "'label': String should have at least 1 character, got ' '"),
        (tuple(TAUGHT), TAUGHT, "there are 1 scores for 2 positives and negatives"),
        (tuple(TAUGHT), {**TAUGHT, "scores": None}, "'scores': Input should be a valid list, got None"),
        (SCORED, {**TEXTS, "score": "three"}, "'score': Input should be a valid number, .*, got 'three'"),
        (SCORED, {**TEXTS, "score": float("nan")}, "'score': Input should be a finite number, got nan"),
    ]
    for present, row, fault in cases:
        with pytest.raises(ValueError, match=f"^{fault}$"):
            check(row, present=present)
