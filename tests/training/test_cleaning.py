"""Rows of a dataset: checked, cleaned, sampled, and a validation split held out."""

from collections import Counter
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
    [('{"query": "", "positive": "b"}', "'query': String should have"), ('{"query": "a", "posi', "invalid JSON")],
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


@pytest.mark.parametrize(
    ("lines", "wrong", "fault", "texts"),
    [
        (['["a", "b", "c"]', '["d", "e", "f", "g"]'], '["a", 3]', "'positive'", ["a b c", "d e f"]),
        (['{"set": ["a", "b", "c"]}', '{"set": ["d", "e"]}'], '{"set": ["a"]}', "'anchor'", ["a b", "a c", "d e"]),
        (
            [
                '{"query": "a", "pos": ["b", "c"], "neg": ["d"]}',
                '{"query": "e", "pos": ["f"], "neg": ["g"], "prompt": ""}',
            ],
            '{"query": "a", "pos": [], "neg": []}',
            "'pos'",
            ["a b d", "a c d", "e f g"],
        ),
    ],
)
def test_lines_as_they_are_published(
    tmp_path: Path, lines: list[str], wrong: str, fault: str, texts: list[str]
) -> None:
    path = write(tmp_path, "retrieval/tiny", [])
    path.write_text("\n".join([*lines, wrong]))
    data = load(tmp_path, "retrieval/tiny", data={"max_invalid_fraction": 0.34})
    (note,) = data.reports[0].notes
    assert note.startswith(f"invalid row {path}:3: {fault}: ")
    columns = [name for name in only(data).rows.column_names if name != "label"]
    assert [" ".join(row[name] for name in columns) for row in only(data).rows] == texts


def test_ids_of_texts_are_fixed() -> None:
    assert text_id("a") == text_id(" a\n") == 4681665781835383343
    assert text_id("ä") == -1131041350483206087  # as a validation part, it must never change


def scored(*scores: float) -> Rows:
    return [{"sentence1": f"a{i}", "sentence2": f"b{i}", "score": score} for i, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "expected", "largest"),
    [
        ((0.0, 2.5, 5.0), [0.0, 0.5, 1.0], 5),
        ((0.0, 0.25, 0.5), [0.0, 0.25, 0.5], None),
        ((-10.0, -7.5, -5.0), [-1.0, -0.75, -0.5], 10),
    ],
)
def test_scores_are_scaled(tmp_path: Path, scores: tuple[float, ...], expected: list[float], largest: Any) -> None:
    write(tmp_path, "sts/tiny", scored(*scores))
    data = load(tmp_path, "sts/tiny", task="s", settings={"loss": "CoSENTLoss"})
    assert only(data).label_type == "scored"
    assert only(data).rows["label"][:] == expected
    notes = [] if largest is None else [f"scores divided by the largest absolute value, {largest}"]
    assert data.reports[0].notes == notes


def test_pairs_of_zero_and_one(tmp_path: Path) -> None:
    write(tmp_path, "pair/tiny", scored(0, 1, 0, 1))
    data = load(tmp_path, "pair/tiny", task="p")
    assert only(data).rows["anchor"][:] == ["a1", "a3"]
    assert only(data).column_tasks == {"anchor": "classification", "positive": "classification"}
    assert data.reports[0].dropped == {"label is 0": 2}
    assert only(load(tmp_path, "pair/tiny", task="p", settings={"loss": "CoSENTLoss"})).rows["label"][:] == [0, 1] * 2


def entailment(*classes: int) -> Rows:
    return [{"premise": f"a{i}", "hypothesis": f"b{i}", "label": label} for i, label in enumerate(classes)]


def test_integers_may_be_classes(tmp_path: Path) -> None:
    """Only if nothing says that they are scores."""
    write(tmp_path, "pair/tiny", entailment(0, 1, 0, 1))
    assert "if it is a class, it may mean the opposite" in load(tmp_path, "pair/tiny", task="p").reports[0].notes[0]
    write(tmp_path, "pair/tiny", entailment(0, 1, 2))
    columns = {"sentence1": "premise", "sentence2": "hypothesis", "score": "label"}
    graded = load(tmp_path, {"path": "pair/tiny", "columns": columns}, task="p", settings={"loss": "CoSENTLoss"})
    assert only(graded).rows["label"][:] == [0, 0.5, 1]


def test_rows_that_do_not_suit_the_loss(tmp_path: Path) -> None:
    for rows, loss, message in (
        (scored(0, 2.5), "InfoNCE", "has graded scores, but InfoNCE takes 0 and 1: set the loss CoSENTLoss"),
        ([{"query": "a"}], "InfoNCE", "InfoNCE takes rows of the type pairs or labelled or scored, got texts"),
        (entailment(0, 1, 2), "InfoNCE", "integers in `label` may be classes"),
        (entailment(0, 1, 2), "CoSENTLoss", "integers in `label` may be classes"),
        (labelled(x=2, y=2), "CoSENTLoss", "CoSENTLoss takes rows of the type scored, got labelled"),
    ):
        write(tmp_path, "any/tiny", rows)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, "any/tiny", task="t", settings={"loss": loss})


def test_a_label_with_one_example_is_dropped_by_name(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=2, lonely=1, y=2))
    data = load(tmp_path, "classification/tiny", task="c")
    assert "lonely 0" not in only(data).rows["anchor"][:]
    assert data.reports[0].dropped == {"label with one example": 1}
    write(tmp_path, "classification/tiny", labelled(x=1, y=1))
    with pytest.raises(ValueError, match=r"nothing is left to train on(.|\n)*dropped 2: label with one example"):
        load(tmp_path, "classification/tiny", task="c")


RERANKING = [
    {"query": "a", "positive": ["p1", "p2"], "negative": ["n1", "n2", "n3"]},
    {"query": "b", "positive": ["p3"], "negative": ["n4", "n5"]},
    {"query": "c", "positive": ["p4"], "negative": []},
]
IN_COLUMNS = [{"query": f"q{i}", "positive": "p", "negative_2": "n2", "negative_1": f"n{i}"} for i in range(2)]
FALSE = [{"query": q, "positive": ["p", q + "p"], "negative": ["n", " p", q]} for q in "ab"]


@pytest.mark.parametrize(
    ("rows", "dataset", "expected"),
    [
        (RERANKING, {}, ["n1 n2", "n3 n1", "n4 n5"]),
        (RERANKING, {"negatives": 1}, ["n1", "n2", "n4"]),
        (RERANKING, {"negatives": 3}, ["n1 n2 n3", "n1 n2 n3", "n4 n5 n4"]),
        (RERANKING, {"negatives": 9}, ["n1 n2 n3", "n1 n2 n3", "n4 n5 n4"]),
        (RERANKING, {"negatives": 0}, ["", "", "", ""]),
        # at most four if nothing is said
        ([{"query": q, "positive": "b", "negative": list("cdefghi")} for q in "xy"], {}, ["c d e f"] * 2),
        ([*IN_COLUMNS, {**IN_COLUMNS[0], "query": "q3", "negative_1": None}], {}, ["n0", "n1", "n2"]),
        ([{**row, "score": 0.5} for row in IN_COLUMNS], {}, ["n0 n2", "n1 n2"]),  # the score of some other model
        (IN_COLUMNS, {"columns": {"anchor": "query", "positive": "positive", "negative": ["negative_2"]}}, ["n2"] * 2),
        (FALSE, {}, ["n"] * 4),  # known false negatives are removed
    ],
)
def test_hard_negatives(tmp_path: Path, rows: Rows, dataset: dict[str, Any], expected: list[str]) -> None:
    write(tmp_path, "some/tiny", rows)
    data = load(tmp_path, {"path": "some/tiny", **dataset})
    assert [" ".join(texts) for texts in negatives_of(data)] == expected
    if rows is RERANKING:
        assert only(data).rows["positive"][:] == ["p1", "p2", "p3", "p4"][: len(expected)]
        assert data.reports[0].dropped == ({} if len(expected) == 4 else {"no hard negative": 1})
    if rows is FALSE:
        assert data.reports[0].notes == ["4 hard negatives removed that equal the anchor or a positive"]


SCORED = {"loss": "CoSENTLoss"}
DISTILLED = {"loss": "MSELoss", "teacher": {"source": "none"}}
AMBIGUOUS = [{"text": "x 0", "label": label} for label in "xy"]


def with_one_pair(*scores: float) -> Rows:
    """Two pairs alike, and one several times."""
    return [*scored(1, 1), *({"sentence1": "a", "sentence2": "b ", "score": score} for score in scores)]


@pytest.mark.parametrize(
    ("rows", "dataset", "settings", "several", "used"),
    [
        ([*pairs(3), {"query": "text 1 ", "positive": "answer to text 1"}, *pairs(1, "b")], {}, {}, None, 4),
        ([{"query": "a", "positive": "b", "negative": n} for n in "cdd"], {}, {}, None, 2),
        ([*labelled(x=3, y=2), *AMBIGUOUS], {}, {}, "text has several labels", 4),
        (with_one_pair(0, 1, 1), {}, {}, "pair has several scores", 2),
        (with_one_pair(1, 5.0, 1.0), {}, SCORED, "pair has several scores", 2),
        (with_one_pair(1, 5.0, 1.0), {"min_score": 1}, {}, "pair has several scores", 4),
        (with_one_pair(1, 1.0), {}, SCORED, None, 3),
        (with_one_pair(0, 1), {}, DISTILLED, None, 3),
    ],
)
def test_repeated_and_ambiguous_rows_are_dropped(
    tmp_path: Path, rows: Rows, dataset: dict[str, Any], settings: dict[str, Any], several: str | None, used: int
) -> None:
    write(tmp_path, "any/tiny", rows)
    (report,) = load(tmp_path, {"path": "any/tiny", **dataset}, task="t", settings=settings).reports
    assert report.dropped == {"repeated": 1} | ({several: 2} if several else {})
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
    assert (validation.row_type, validation.tasks) == ("pairs", ("search_query", "search_document"))
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
    trained = {text.strip() for one in data.sets.values() for column in one.column_tasks for text in one.rows[column]}
    held_out = {row.anchor for validation in data.validation for row in validation.held_out}
    assert held_out >= set(chosen)
    assert not trained & held_out
    reports = {report.name: report for report in data.reports}
    assert reports["retrieval/a"].dropped["has a text that is held out"] >= len(chosen) - 5
    assert negatives_of(data, "retrieval/c") == [["n0", "n1"], ["n2", "n2"]]
    for name in ("retrieval/b", "retrieval/c"):
        assert reports[name].dropped == {"has a text that another dataset holds out": 1}


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


def test_a_limit_keeps_the_shares_of_labels(tmp_path: Path) -> None:
    write(tmp_path, "c/tiny", labelled(x=60, y=30, z=10))
    anchors = only(load(tmp_path, {"path": "c/tiny", "limit": 20}, task="c")).rows["anchor"][:]
    assert Counter(text[0] for text in anchors) == {"x": 12, "y": 6, "z": 2}


def test_rows_in_test_sets_are_counted(tmp_path: Path) -> None:
    """By default those of the data's own folder."""
    write(tmp_path, "retrieval/tiny", pairs(8))
    assert load(tmp_path, "retrieval/tiny").reports[0].in_tests is None
    write(
        tmp_path / "other",
        "sts/a",
        [{"sentence1": "text 1", "sentence2": " answer to  Text 2", "score": 1}],
        "test.jsonl",
    )
    write(tmp_path, "classification/b", [{"text": "none", "label": "x"}], "test.jsonl")
    (report,) = load(tmp_path, "retrieval/tiny").reports
    assert (report.in_tests, report.notes) == (0, [])
    data = load(tmp_path, "retrieval/tiny", data={"tests": str(tmp_path / "other")})
    assert data.reports[0].in_tests == 2
    assert "2 rows have a text of the test sets sts/a (see `mote filter --against`)" in str(data)
    with pytest.raises(FileNotFoundError, match="holds no datasets with a test split"):
        load(tmp_path, "retrieval/tiny", data={"tests": str(tmp_path / "retrieval")})


def test_texts_are_truncated(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    row = {"query": "ab, Cde fgh", "positive": "short", "negative": "ij klmnop"}  # a token for each letter
    write(tmp_path, "retrieval/tiny", [row, {**row, "query": "other"}])
    write(tmp_path, "c/tiny", labelled(abcd=2, efgh=2))

    def cut(max_length: Any, path: str = "retrieval/tiny", task: str = "retrieval") -> tuple[str, ...]:
        dataset = {"path": path, "max_length": max_length}
        (rows,) = load_data(recipe_of(tmp_path, task, settings={"datasets": [dataset]}), tokenizer).sets.values()
        *texts, label = rows.rows[0].values()
        assert label[:-1] == [*map(text_id, texts)]  # of what is trained on
        return tuple(texts)

    assert cut(6) == ("ab, Cde", "short", "ij klmn")
    assert cut({"anchor": 3, "positive": 2}) == ("ab,", "sh", "ij")
    assert cut({"negative": 1}) == ("ab, Cde fgh", "short", "i")
    assert cut({"anchor": 3}, "c/tiny", "c") == ("abc", "abc"), "a labelled text is cut on either side of a pair"
    tokenizer.truncation_side = "left"
    assert cut(6)[0] == ", Cde fgh"[-7:]
