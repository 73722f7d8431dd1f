"""What the columns of a dataset mean, and which rows are valid."""

from typing import Any

import pytest

from mote.data.columns import Example, check_row, find_columns
from mote.data.settings import DatasetSettings


def check(row: dict[str, Any], columns: dict[str, Any] | None = None, present: tuple[str, ...] = ()) -> Example:
    """Read a row of a dataset that has the row's columns, if no others are named."""
    settings = DatasetSettings(path="tiny", columns=columns or {})
    return check_row(row, find_columns(settings, present or row, "retrieval/tiny"))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"anchor": "a", "positive": "b"}, {}),
        ({"question": "a", "answer": "b", "id": 7}, {}),
        ({"sentence1": "a", "sentence2": "b"}, {}),
        ({"title": "a", "abstract": "b"}, {"anchor": "title", "positive": "abstract"}),
        ({"query": "x", "question": "a", "answer": "b"}, {"anchor": "question", "positive": "answer"}),
        ({"query": "a", "document": "b", "score": 0.5}, {"anchor": "query", "positive": "document"}),
    ],
)
def test_pairs_under_many_names(row: dict[str, Any], columns: dict[str, str]) -> None:
    assert check(row, columns) == Example("a", ("b",))


@pytest.mark.parametrize(
    ("row", "row_type", "example"),
    [
        ({"query": "a", "positive": ["b", "c"]}, "pairs", Example("a", ("b", "c"))),
        ({"query": "a", "positive": "b", "negative": ["c", "d"]}, "pairs", Example("a", ("b",), ("c", "d"))),
        (
            {"query": "a", "positive": "b", "negative_10": "d", "negative_2": "c", "negative_3": None},
            "pairs",
            Example("a", ("b",), ("c", "d")),
        ),
        ({"query": "a", "positive": "b", "negative": [], "score": 1}, "pairs", Example("a", ("b",))),
        ({"sentence1": "a", "sentence2": "b", "score": 3}, "scored", Example("a", ("b",), label=3.0)),
        ({"text": "a", "label": 3}, "labelled", Example("a", label="3")),
        ({"text": "a", "label": " x "}, "labelled", Example("a", label="x")),
        ({"sentence": "a"}, "texts", Example("a")),
        ({"query": "a"}, "texts", Example("a")),
    ],
)
def test_every_type_of_row(row: dict[str, Any], row_type: str, example: Example) -> None:
    assert find_columns(DatasetSettings(path="tiny"), row, "tiny").row_type == row_type
    assert check(row) == example


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"title": "a", "abstract": "b"}, {}, r"columns 'abstract', 'title' are neither pairs .* name them with `colu"),
        ({"query": "a", "question": "b", "answer": "c"}, {}, "'query' and 'question' mean the same: choose one with"),
        ({"query": "a", "positive": "b"}, {"anchor": "quary", "positive": "positive"}, "no column 'quary'. Did you"),
        ({"e\u0301": "a", "b": "b"}, {"anchor": "\u00e9", "positive": "b"}, r"'\\xe9'\. .*Available: 'b', 'e\u0301'\."),
        ({"query": "a", "positive": "b"}, {"ancor": "query"}, "unknown column 'ancor' in `columns`. Did you"),
        ({"q": "a", "title": "b", "body": "c"}, {"anchor": "q", "positive": ["title", "body"]}, "must name one column"),
        ({"q": "a", "body": "c"}, {"anchor": "q", "positive": []}, r"'positive' .* must name one column, got \[\]"),
        ({"q": "a", "t": "b", "p": "c"}, {"anchor": "q", "text": "t", "positive": "p"}, "name the anchor: 'q' and 't'"),
    ],
)
def test_missing_and_ambiguous_columns(row: dict[str, Any], columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"retrieval/tiny: .*{message}"):
        check(row, columns)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"query": "", "positive": "b"}, "'query' is empty"),
        ({"query": " \t", "positive": "b"}, "'query' is empty"),
        ({"query": "a", "positive": None}, "'positive' must be a string, got NoneType"),
        ({"query": 3, "positive": "b"}, "'query' must be a string, got int"),
        ({"query": "a", "positive": []}, "'positive' is an empty list"),
        ({"query": "a", "positive": ["b", ""]}, "'positive' is empty"),
        ({"query": "a"}, "there is no column 'positive'"),
        ({}, "there is no column 'query'"),
        ({"query": "a", "positive": "\ud800"}, "'positive' is invalid Unicode: it has half of a surrogate pair"),
    ],
)
def test_invalid_pairs(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}$"):
        check(row, present=("query", "positive"))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "a", "label": None}, "'label' must be a string or an integer, got NoneType"),
        ({"text": "a", "label": 0.5}, "'label' must be a string or an integer, got float"),
        ({"text": "a", "label": " "}, "'label' is empty"),
        ({"text": "a", "label": "\ud800"}, "'label' is invalid Unicode: it has half of a surrogate pair"),
        ({"text": "a"}, "there is no column 'label'"),
    ],
)
def test_invalid_labels(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}$"):
        check(row, present=("text", "label"))


@pytest.mark.parametrize(
    ("score", "fault"),
    [
        ("3", "be a number, got str"),
        (None, "be a number, got NoneType"),
        (float("nan"), "be finite, got nan"),
        pytest.param(10**400, "be within ±1.8e308, got an integer of 401 digits", id="large"),
        pytest.param(-(10**400), "be within ±1.8e308, got an integer of 401 digits", id="small"),
    ],
)
def test_invalid_scores(score: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^'score' must {fault}$"):
        check({"sentence1": "a", "sentence2": "b", "score": score})
