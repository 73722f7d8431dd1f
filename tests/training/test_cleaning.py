"""Rows of a dataset: checked, cleaned, sampled, and a validation split held out."""

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import tiny_tokenizer
from helpers.datasets import Rows, labelled, load, negatives_of, only, pairs, recipe_of, write
from transformers import AutoTokenizer

from mote.training.cleaning import text_id
from mote.training.data import load_data

VALID = '{"query": "a %d", "positive": "b"}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"query": "", "positive": "b"}', "'query': String should have"),
        ('{"query": "a", "posi', "invalid JSON"),
    ],
)
def test_an_invalid_row_is_counted_and_reported_with_its_line(tmp_path: Path, line: str, fault: str) -> None:
    path = write(tmp_path, "retrieval/tiny", [])
    path.write_text("\n".join([VALID % 1, "", line, VALID % 2]))
    data = load(tmp_path, "retrieval/tiny", data={"max_invalid_fraction": 0.34})
    (report,) = data.reports
    assert (report.read, report.invalid, report.used) == (3, 1, 2)
    assert f"retrieval/tiny: invalid row {path}:3: {fault}" in str(data)
    with pytest.raises(ValueError, match=r"tiny: 1 of 3 rows are invalid; the allowed fraction is 0.33 (.|\n)*:3: "):
        load(tmp_path, "retrieval/tiny", data={"max_invalid_fraction": 0.33})


def test_ids_of_texts_are_fixed() -> None:
    assert text_id("a") == text_id(" a\n") == 4681665781835383343
    assert text_id("ä") == -1131041350483206087  # as a validation part, it must never change


def scored(*scores: float) -> Rows:
    return [{"sentence1": f"a{i}", "sentence2": f"b{i}", "score": score} for i, score in enumerate(scores)]


GRADED = scored(0.0, 2.5, 5.0)


@pytest.mark.parametrize(
    ("scores", "loss", "expected", "largest"),
    [
        ((0.0, 2.5, 5.0), "CoSENTLoss", [0.0, 0.5, 1.0], 5),
        ((0.0, 0.25, 0.5), "CoSENTLoss", [0.0, 0.25, 0.5], None),
        ((-10.0, -7.5, -5.0), "CosineSimilarityLoss", [-1.0, -0.75, -0.5], 10),
    ],
)
def test_scores_are_scaled(
    tmp_path: Path, scores: tuple[float, ...], loss: str, expected: list[float], largest: int | None
) -> None:
    write(tmp_path, "sts/tiny", scored(*scores))
    data = load(tmp_path, "sts/tiny", task="s", settings={"loss": loss})
    assert only(data).label_type == "scored"
    assert only(data).rows["label"][:] == expected
    notes = [] if largest is None else [f"scores divided by the largest absolute value, {largest}"]
    assert data.reports[0].notes == notes


def test_pairs_of_zero_and_one(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a{i}", "sentence2": f"b{i}", "label": i % 2} for i in range(6)]
    write(tmp_path, "pair/tiny", rows)
    data = load(tmp_path, "pair/tiny", task="p")
    assert only(data).rows["anchor"][:] == ["a1", "a3", "a5"]
    assert only(data).column_tasks == {"anchor": "classification", "positive": "classification"}
    assert data.reports[0].dropped == {"label is 0": 3}
    assert only(load(tmp_path, "pair/tiny", task="p", settings={"loss": "CoSENTLoss"})).rows["label"][:] == [0, 1] * 3


@pytest.mark.parametrize(
    ("rows", "loss", "message"),
    [
        (GRADED, "InfoNCE", "has graded scores, but InfoNCE takes 0 and 1: set the loss CoSENTLoss, or `min_score`"),
        ([{"query": "a"}], "InfoNCE", "InfoNCE takes rows of the type pairs or labelled or scored, got texts"),
        (labelled(x=2, y=2), "CoSENTLoss", "CoSENTLoss takes rows of the type scored, got labelled"),
    ],
)
def test_rows_that_do_not_suit_the_loss(tmp_path: Path, rows: Rows, loss: str, message: str) -> None:
    write(tmp_path, "any/tiny", rows)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "any/tiny", task="t", settings={"loss": loss})


def test_a_label_with_one_example_is_dropped_by_name(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=2, lonely=1, y=2))
    data = load(tmp_path, "classification/tiny", task="c")
    assert "lonely 0" not in only(data).rows["anchor"][:]
    assert data.reports[0].dropped == {"label with one example": 1}
    assert "classification/tiny: dropped 1: label with one example" in str(data)
    write(tmp_path, "classification/tiny", labelled(x=1, y=1))
    with pytest.raises(ValueError, match=r"nothing is left to train on(.|\n)*dropped 2: label with one example"):
        load(tmp_path, "classification/tiny", task="c")


RERANKING = [
    {"query": "a", "positive": ["p1", "p2"], "negative": ["n1", "n2", "n3"]},
    {"query": "b", "positive": ["p3"], "negative": ["n4", "n5"]},
    {"query": "c", "positive": ["p4"], "negative": []},
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [["n1", "n2"], ["n3", "n1"], ["n4", "n5"]]),
        (1, [["n1"], ["n2"], ["n4"]]),
        (3, [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n4", "n5", "n4"]]),
        (9, [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n4", "n5", "n4"]]),
        (0, [[], [], [], []]),
    ],
)
def test_lists_of_positives_and_negatives(tmp_path: Path, wanted: int | None, expected: list[list[str]]) -> None:
    write(tmp_path, "reranking/tiny", RERANKING)
    data = load(tmp_path, {"path": "reranking/tiny", "negatives": wanted})
    assert only(data).rows["positive"][:] == ["p1", "p2", "p3", "p4"][: len(expected)]
    assert negatives_of(data) == expected
    assert data.reports[0].dropped == ({} if wanted == 0 else {"no hard negative": 1})


def test_at_most_four_negatives_if_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path, "reranking/tiny", [{"query": q, "positive": q + "b", "negative": list("cdefghi")} for q in "xy"])
    assert negatives_of(load(tmp_path, "reranking/tiny")) == [list("cdef")] * 2


def test_negatives_in_columns_of_their_own(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "positive": "p", "negative_2": "n2", "negative_1": f"n{i}"} for i in range(2)]
    write(tmp_path, "retrieval/tiny", [*rows, {**rows[0], "query": "q3", "negative_1": None}])
    assert negatives_of(load(tmp_path, "retrieval/tiny")) == [["n0"], ["n1"], ["n2"]]
    data = load(tmp_path, {"path": "retrieval/tiny", "negatives": 2})
    assert negatives_of(data) == [["n0", "n2"], ["n1", "n2"], ["n2", "n2"]]
    write(tmp_path, "retrieval/scored", [{**row, "score": 0.5} for row in rows])  # of some other model
    assert negatives_of(load(tmp_path, "retrieval/scored")) == [["n0", "n2"], ["n1", "n2"]]
    columns = {"anchor": "query", "positive": "positive", "negative": ["negative_2"]}
    assert negatives_of(load(tmp_path, {"path": "retrieval/tiny", "columns": columns})) == [["n2"]] * 3


def test_known_false_negatives_are_removed(tmp_path: Path) -> None:
    rows = [{"query": q, "positive": ["p", q + "p"], "negative": ["n", " p", q]} for q in "ab"]
    write(tmp_path, "retrieval/tiny", rows)
    data = load(tmp_path, "retrieval/tiny")
    assert negatives_of(data) == [["n"]] * 4
    assert data.reports[0].notes == ["4 hard negatives removed that equal the anchor or a positive"]


SAME_PAIR = {"sentence1": "a", "sentence2": "b "}
SCORED = {"loss": "CoSENTLoss"}
DISTILLED = {"loss": "MSELoss", "teacher": {"source": "none"}}


@pytest.mark.parametrize(
    ("rows", "dataset", "settings", "dropped", "used"),
    [
        (
            [*pairs(3), {"query": "text 1 ", "positive": "answer to text 1"}, *pairs(1, "b")],
            {},
            {},
            {"repeated": 1},
            4,
        ),
        ([{"query": "a", "positive": "b", "negative": n} for n in "cdd"], {}, {}, {"repeated": 1}, 2),
        (
            [*labelled(x=3, y=2), {"text": "x 0", "label": "x"}, {"text": "x 0", "label": "y"}],
            {},
            {},
            {"repeated": 1, "text has several labels": 2},
            4,
        ),
        ([*scored(1, 1), *({**SAME_PAIR, "score": score} for score in (0, 1, 1))], {}, {}, "several", 2),
        ([*scored(1, 1), *({**SAME_PAIR, "score": score} for score in (1, 5.0, 1.0))], {}, SCORED, "several", 2),
        (
            [*scored(1, 1), *({**SAME_PAIR, "score": score} for score in (1, 5.0, 1.0))],
            {"min_score": 1},
            {},
            "several",
            4,
        ),
        ([*scored(1, 1), *({**SAME_PAIR, "score": score} for score in (1, 1.0))], {}, SCORED, {"repeated": 1}, 3),
        ([*scored(1, 1), *({**SAME_PAIR, "score": score} for score in (0, 1))], {}, DISTILLED, {"repeated": 1}, 3),
    ],
)
def test_repeated_and_ambiguous_rows_are_dropped(
    tmp_path: Path, rows: Rows, dataset: dict[str, Any], settings: dict[str, Any], dropped: Any, used: int
) -> None:
    write(tmp_path, "any/tiny", rows)
    (report,) = load(tmp_path, {"path": "any/tiny", **dataset}, task="t", settings=settings).reports
    assert report.dropped == ({"repeated": 1, "pair has several scores": 2} if dropped == "several" else dropped)
    assert report.used == used


def test_the_validation_split_is_the_same_for_every_recipe(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(1000))
    held_out = []
    for limit, seed in ((None, 1), (100, 2), (10, 3)):
        parts = {"validation": {"share": 0.1}, "data": {"limit": limit}, "training": {"seed": seed}}
        data = load(tmp_path, "retrieval/tiny", **parts)
        (validation,) = data.validation
        held_out.append([row.anchor for row in validation.held_out])
        assert not set(held_out[-1]) & set(only(data).rows["anchor"])
    assert held_out[0] == held_out[1] == held_out[2]
    assert 70 < len(held_out[0]) < 130
    assert (validation.name, validation.task_name, validation.row_type) == ("retrieval/tiny", "retrieval", "pairs")
    assert validation.tasks == ("search_query", "search_document")
    fewer = load(tmp_path, "retrieval/tiny", validation={"share": 0.1, "limit": 20})
    assert [row.anchor for row in fewer.validation[0].held_out] == held_out[0][:20]
    assert (fewer.reports[0].held_out, fewer.reports[0].used) == (20, 980)
    write(tmp_path, "retrieval/tiny", pairs(3))
    data = load(tmp_path, "retrieval/tiny", validation={"share": 0.001})
    assert (data.validation, len(only(data).rows)) == ([], 3), "a split of one row is skipped"


def test_texts_that_are_held_out_are_trained_nowhere(tmp_path: Path) -> None:
    rows = pairs(200)
    write(tmp_path, "retrieval/a", rows)
    chosen = [row.anchor for row in load(tmp_path, "retrieval/a", validation={"share": 0.1}).validation[0].held_out]
    backwards = [{"query": f"new {i}", "positive": text} for i, text in enumerate(chosen)]
    write(tmp_path, "retrieval/a", [*rows, *backwards, {"query": chosen[0], "positive": "another answer"}])
    write(tmp_path, "retrieval/b", [*pairs(2, "other"), {"query": "unlikely", "positive": f" {chosen[1]}"}])
    negatives = [["n0", "n1"], [f"{chosen[0]} ", "n2"], [chosen[1], chosen[0]]]
    hard = [{"query": f"hard {i}", "positive": f"p{i}", "negatives": texts} for i, texts in enumerate(negatives)]
    write(tmp_path, "retrieval/c", hard)
    data = load(tmp_path, "retrieval/*", validation={"share": 0.1})
    trained = {text for one in data.sets.values() for column in one.column_tasks for text in one.rows[column]}
    held_out = {text for validation in data.validation for text in [row.anchor for row in validation.held_out]}
    assert held_out >= set(chosen)
    assert not {text.strip() for text in trained} & held_out
    reports = {report.name: report for report in data.reports}
    assert reports["retrieval/a"].dropped["has a text that is held out"] >= len(chosen) - 5
    assert reports["retrieval/b"].dropped == {"has a text that another dataset holds out": 1}
    rows_of_c = data.sets["retrieval/c"].rows
    assert list(zip(rows_of_c["negative_1"], rows_of_c["negative_2"], strict=True)) == [("n0", "n1"), ("n2", "n2")]
    assert reports["retrieval/c"].dropped == {"has a text that another dataset holds out": 1}


def test_a_limit_takes_a_sample_of_its_own(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, f"retrieval/{name}", pairs(100, name))
    alone = load(tmp_path, "retrieval/a", data={"limit": 20})
    beside = load(tmp_path, {"path": "retrieval/b", "limit": 5}, "retrieval/a", data={"limit": 20})
    sample = only(alone).rows["anchor"][:]
    assert sample == beside.sets["retrieval/a"].rows["anchor"][:]
    assert len(sample) == 20
    assert sample != [f"a {i}" for i in range(20)]
    assert len(beside.sets["retrieval/b"].rows) == 5
    other = only(load(tmp_path, "retrieval/b", data={"limit": 20})).rows["anchor"][:]
    assert [text.replace("b", "a") for text in other] != sample
    assert alone.reports[0].dropped == {"over the limit": 80}
    other_seed = only(load(tmp_path, "retrieval/a", data={"limit": 20}, training={"seed": 7}))
    assert sample != other_seed.rows["anchor"][:]


def test_texts_are_truncated(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    row = {"query": "ab, Cde fgh", "positive": "short", "negative": "ij klmnop"}  # a token for each letter
    write(tmp_path, "retrieval/tiny", [row, {**row, "query": "other"}])

    def cut(max_length: Any, path: str = "retrieval/tiny", task: str = "retrieval") -> dict[str, Any]:
        dataset = {"path": path, "max_length": max_length}
        return only(load_data(recipe_of(tmp_path, task, settings={"datasets": [dataset]}), tokenizer)).rows[0]

    texts = cut(6)
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab, Cde", "short", "ij klmn")
    assert texts["label"][2] == text_id("ij klmn")  # of what is trained on
    texts = cut({"anchor": 3, "positive": 2})
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab,", "sh", "ij")
    texts = cut({"negative": 1})
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab, Cde fgh", "short", "i")
    write(tmp_path, "c/tiny", labelled(abcd=2, efgh=2))
    texts = cut({"anchor": 3}, "c/tiny", "c")
    assert (texts["anchor"], texts["positive"]) == ("abc", "abc"), "a labelled text is cut on either side of a pair"
    tokenizer.truncation_side = "left"
    assert cut(6)["anchor"] == ", Cde fgh"[-7:]
    with pytest.raises(ValueError, match=r"(?s)max_length.*'anchor', 'positive' or 'negative'"):
        cut({"querry": 3})
