"""The data of a recipe: found, checked, cleaned, and in the form that each loss wants."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from helpers.checkpoints import tiny_tokenizer
from pyarrow import parquet
from transformers import AutoTokenizer

from mote.training.cleaning import text_id
from mote.training.data import TrainingData, TrainingSet, load_data
from mote.training.recipe import Recipe, parse_recipe

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
RETRIEVAL = {"anchor": "search_query", "positive": "search_document", "batches": "homogeneous"}
CLASSIFICATION = {"anchor": "classification", "batches": "heterogeneous"}

Rows = Sequence[dict[str, Any]]


def write(folder: Path, name: str, rows: Rows, file: str = "train.jsonl") -> Path:
    """Write a dataset; the ending of the file decides on its format."""
    path = folder / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def recipe_of(folder: Path, task: str = "retrieval", settings: Any = None, **parts: Any) -> Recipe:
    """A recipe of one task, without a validation part if none is asked for."""
    settings = {**(RETRIEVAL if task == "retrieval" else CLASSIFICATION), **(settings or {})}
    parts = {"tasks": {task: settings}, "validation": {"share": 0.0}, **parts}
    data = {"folder": str(folder), **parts.pop("data", {})}
    return parse_recipe({"model": {"source": "none"}, "data": data, **parts})


def load(folder: Path, *datasets: Any, task: str = "retrieval", settings: Any = None, **parts: Any) -> TrainingData:
    """Load datasets for one task."""
    return load_data(recipe_of(folder, task, {"datasets": list(datasets), **(settings or {})}, **parts))


def only(data: TrainingData) -> TrainingSet:
    (training_set,) = data.sets.values()
    return training_set


def pairs(count: int, word: str = "text", start: int = 0) -> list[dict[str, Any]]:
    return [{"query": f"{word} {i}", "positive": f"answer to {word} {i}"} for i in range(start, start + count)]


def labelled(**counts: int) -> list[dict[str, Any]]:
    return [{"text": f"{label} {i}", "label": label} for label, count in counts.items() for i in range(count)]


# Datasets


def test_two_datasets_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/retrieval/tiny", pairs(2))
    write(tmp_path, "b/retrieval/tiny", pairs(2))
    with pytest.raises(ValueError, match=r"Two datasets are named 'retrieval/tiny': 'a/retrieval/tiny' of the task"):
        load(tmp_path, "a/retrieval/tiny", "b/retrieval/tiny")


def test_a_dataset_and_a_task_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "", pairs(2), "loose.jsonl")
    write(tmp_path, "", labelled(a=2, b=2), "other.jsonl")
    tasks = {
        "retrieval": {**RETRIEVAL, "datasets": ["loose.jsonl"]},
        "loose": {**CLASSIFICATION, "datasets": ["other.jsonl"]},
    }
    with pytest.raises(ValueError, match="both named 'loose': rename the task"):
        load_data(recipe_of(tmp_path, tasks=tasks))


# Invalid rows

VALID = '{"query": "a %d", "positive": "b"}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [('{"query": "", "positive": "b"}', "'query' is empty"), ('{"query": "a", "posi', "invalid JSON")],
)
def test_an_invalid_row_is_counted_and_reported_with_its_line(
    tmp_path: Path, line: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "retrieval/tiny", [])
    path.write_text("\n".join([VALID % 1, "", line, VALID % 2]))
    caplog.set_level("INFO", "mote")
    recipe = recipe_of(tmp_path, settings={"datasets": ["retrieval/tiny"]}, data={"max_invalid_fraction": 0.34})
    data = load_data(recipe)
    (report,) = data.reports
    assert (report.read, report.invalid, report.used) == (3, 1, 2)
    assert report.errors[0].startswith(f"{path}:3: {fault}")
    assert f"{path}:3: {fault}" in caplog.text
    assert f"{path}:3: {fault}" in str(data)
    with pytest.raises(ValueError, match=r"tiny: 1 of 3 rows are invalid; allowed is a fraction of 0.33 (.|\n)*:3: "):
        load(tmp_path, "retrieval/tiny", data={"max_invalid_fraction": 0.33})


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", [])
    with pytest.raises(ValueError, match="retrieval/tiny has no rows"):
        load(tmp_path, "retrieval/tiny")
    write(tmp_path, "retrieval/tiny", [{"query": "", "positive": ""}])
    with pytest.raises(ValueError, match="1 of 1 rows are invalid"):
        load(tmp_path, "retrieval/tiny", data={"max_invalid_fraction": 1.0})
    with pytest.raises(ValueError, match="the task has no data"):
        load(tmp_path)


# Forms


def test_pairs_carry_the_identities_of_their_texts(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", [{"query": "a", "positive": "b", "negative": "c"}])
    training_set = only(load(tmp_path, "retrieval/tiny"))
    assert training_set.label_type == "pairs"
    assert training_set.rows.column_names == ["anchor", "positive", "negative_1", "label"]
    assert training_set.rows[0]["label"] == [text_id("a"), text_id("b"), text_id("c"), text_id("a")]
    documents = {"positive": "search_document", "negative_1": "search_document"}
    assert training_set.column_tasks == {"anchor": "search_query", **documents}
    assert training_set.sources == {"retrieval/tiny": 1}


def test_identity_is_fixed() -> None:
    assert text_id("a") == text_id(" a\n") == 4681665781835383343
    assert text_id("ä") == -1131041350483206087  # as a validation part, it must never change


def test_labelled_texts_are_each_an_anchor_and_a_positive_once(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=5, y=2, z=3))
    training_set = only(load(tmp_path, "classification/tiny", task="c"))
    rows = training_set.rows
    assert training_set.name == "c"
    assert sorted(rows["anchor"]) == sorted(rows["positive"]) == sorted(row["text"] for row in labelled(x=5, y=2, z=3))
    for row in rows:
        assert row["anchor"][0] == row["positive"][0]
        assert row["anchor"] != row["positive"]
        group = text_id(f"classification/tiny\0{row['anchor'][0]}")
        assert row["label"] == [text_id(row["anchor"]), text_id(row["positive"]), group]
    following = dict(zip(rows["anchor"], rows["positive"], strict=True))
    chain = ["x 0"]
    while following[chain[-1]] != "x 0":
        chain.append(following[chain[-1]])
    assert sorted(chain) == [f"x {i}" for i in range(5)]  # one cycle, not several
    other_seed = only(load(tmp_path, "classification/tiny", task="c", training={"seed": 1})).rows
    assert dict(zip(other_seed["anchor"], other_seed["positive"], strict=True)) != following


def test_a_label_with_one_example_is_dropped_by_name(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=2, lonely=1, y=2))
    data = load(tmp_path, "classification/tiny", task="c")
    assert "lonely 0" not in only(data).rows["anchor"][:]
    assert data.reports[0].dropped == {"label with one example": 1}
    assert "labels with one example: 'lonely'" in str(data)
    write(tmp_path, "classification/tiny", labelled(x=1, y=1))
    with pytest.raises(ValueError, match=r"no row is left to train on(.|\n)*labels with one example: 'x', 'y'"):
        load(tmp_path, "classification/tiny", task="c")


def test_equal_labels_of_two_datasets_are_two_groups(tmp_path: Path) -> None:
    write(tmp_path, "classification/a", labelled(x=2))
    write(tmp_path, "classification/b", [{"text": "other 1", "label": "x"}, {"text": "other 2", "label": "x"}])
    training_set = only(load(tmp_path, "classification/*", task="c"))
    assert len({label[-1] for label in training_set.rows["label"]}) == 2
    assert training_set.sources == {"classification/a": 2, "classification/b": 2}
    losses = {"loss": "BatchAllTripletLoss"}
    rows = only(load(tmp_path, "classification/*", task="c", settings=losses)).rows
    assert rows.column_names == ["anchor", "label"]
    assert rows["label"][:] == [0, 0, 1, 1]


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", [{"text": f"t{i}", "label": i % 2} for i in range(4)])
    rows = only(load(tmp_path, "classification/tiny", task="c", settings={"loss": "BatchHardTripletLoss"})).rows
    assert rows["label"][:] == [0, 1, 0, 1]


def test_a_set_of_one_group_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=4))
    with pytest.raises(ValueError, match="All rows of 'c' have the same label or anchor: there are no negatives"):
        load(tmp_path, "classification/tiny", task="c")


SCORED = [{"sentence1": f"a{i}", "sentence2": f"b{i}", "score": score} for i, score in enumerate([0.0, 2.5, 5.0])]


def test_scores_are_brought_to_one_scale(tmp_path: Path) -> None:
    write(tmp_path, "sts/tiny", SCORED)
    data = load(tmp_path, "sts/tiny", task="s", settings={"loss": "CoSENTLoss"})
    assert only(data).label_type == "scored"
    assert only(data).rows["label"][:] == [0.0, 0.5, 1.0]
    assert data.reports[0].notes == ["scores divided by their maximum, 5"]
    write(tmp_path, "sts/tiny", [{**row, "score": row["score"] / 10} for row in SCORED])
    data = load(tmp_path, "sts/tiny", task="s", settings={"loss": "CoSENTLoss"})
    assert only(data).rows["label"][:] == [0.0, 0.25, 0.5]
    assert data.reports[0].notes == []


def test_pairs_of_zero_and_one(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a{i}", "sentence2": f"b{i}", "label": i % 2} for i in range(6)]
    write(tmp_path, "pair/tiny", rows)
    data = load(tmp_path, "pair/tiny", task="p")
    assert only(data).rows["anchor"][:] == ["a1", "a3", "a5"]
    assert only(data).column_tasks == {"anchor": "classification", "positive": "classification"}
    assert data.reports[0].dropped == {"label is 0": 3}
    for loss in ("OnlineContrastiveLoss", "CoSENTLoss"):
        assert only(load(tmp_path, "pair/tiny", task="p", settings={"loss": loss})).rows["label"][:] == [0, 1] * 3


@pytest.mark.parametrize(
    ("rows", "loss", "message"),
    [
        (SCORED, "InfoNCE", "has graded scores, InfoNCE takes pairs that belong together: try the loss CoSENTLoss"),
        (SCORED, "ContrastiveLoss", "has graded scores, ContrastiveLoss takes 0 and 1: try the loss CoSENTLoss"),
        (SCORED, "BatchAllTripletLoss", "has pairs with scores, BatchAllTripletLoss takes texts with labels"),
        ([{"query": "a"}], "InfoNCE", "has single texts, InfoNCE takes pairs"),
        (pairs(2), "BatchAllTripletLoss", "has no labels, which BatchAllTripletLoss needs"),
        (pairs(2), "CoSENTLoss", "has no scores, which CoSENTLoss needs"),
        (labelled(x=2, y=2), "CoSENTLoss", "has no scores, which CoSENTLoss needs"),
        (pairs(2), "MSELoss", "a teacher goes with EmbedDistillLoss and MSELoss, and they with one"),
    ],
)
def test_data_that_does_not_fit_its_loss(tmp_path: Path, rows: Rows, loss: str, message: str) -> None:
    write(tmp_path, "any/tiny", rows)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "any/tiny", task="t", settings={"loss": loss})


def test_a_teacher_wants_a_distillation_loss(tmp_path: Path) -> None:
    write(tmp_path, "any/tiny", pairs(2))
    with pytest.raises(ValueError, match="has the loss InfoNCE: a teacher goes with"):
        load(tmp_path, "any/tiny", settings={"teacher": {"source": "none"}})


# Hard negatives

RERANKING = [
    {"query": "a", "positive": ["p1", "p2"], "negative": ["n1", "n2", "n3"]},
    {"query": "b", "positive": ["p3"], "negative": ["n4", "n5"]},
    {"query": "c", "positive": ["p4"], "negative": []},
]


def negatives_of(data: TrainingData) -> list[list[str]]:
    rows = only(data).rows
    columns = [column for column in rows.column_names if column.startswith("negative")]
    return [[row[column] for column in columns] for row in rows]


def test_lists_of_positives_and_negatives(tmp_path: Path) -> None:
    write(tmp_path, "reranking/tiny", RERANKING)
    data = load(tmp_path, "reranking/tiny")
    assert only(data).rows["positive"][:] == ["p1", "p2", "p3"]
    assert negatives_of(data) == [["n1", "n2"], ["n3", "n1"], ["n4", "n5"]]
    assert data.reports[0].dropped == {"no hard negative": 1}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (1, [["n1"], ["n2"], ["n4"]]),
        (3, [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n4", "n5", "n4"]]),
        (9, [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n4", "n5", "n4"]]),
        (0, [[], [], [], []]),
    ],
)
def test_a_number_of_negatives(tmp_path: Path, wanted: int, expected: list[list[str]]) -> None:
    write(tmp_path, "reranking/tiny", RERANKING)
    assert negatives_of(load(tmp_path, {"path": "reranking/tiny", "negatives": wanted})) == expected


def test_at_most_four_negatives_if_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path, "reranking/tiny", [{"query": "a", "positive": "b", "negative": list("cdefghi")}, *pairs(0)])
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


def test_negatives_that_are_known_to_be_none_are_taken_out(tmp_path: Path) -> None:
    rows = [{"query": q, "positive": ["p", q + "p"], "negative": ["n", " p", q]} for q in "ab"]
    write(tmp_path, "retrieval/tiny", rows)
    data = load(tmp_path, "retrieval/tiny")
    assert negatives_of(data) == [["n"]] * 4
    assert data.reports[0].notes == ["4 hard negatives removed that equal the anchor or a positive"]


def test_datasets_in_one_batch_have_the_same_columns_and_tasks(tmp_path: Path) -> None:
    write(tmp_path, "a/with", [{"query": f"q{i}", "positive": "p", "negative": "n"} for i in range(2)])
    write(tmp_path, "a/without", pairs(2))
    mixed = {"batches": "heterogeneous"}
    with pytest.raises(ValueError, match=r"different columns \(a/with: .*negative_1, label; a/without: .*negatives: 0"):
        load(tmp_path, "a/*", settings=mixed)
    assert len(only(load(tmp_path, {"path": "a/with", "negatives": 0}, "a/without", settings=mixed)).rows) == 4
    assert len(load(tmp_path, "a/*").sets) == 2
    unlike = {"path": "a/with", "negatives": 0, "anchor": "classification"}
    with pytest.raises(ValueError, match=r"different tasks .*classification and search_document"):
        load(tmp_path, unlike, "a/without", settings=mixed)
    tasks = load(tmp_path, unlike, "a/without").sets["a/with"].column_tasks
    assert tasks == {"anchor": "classification", "positive": "search_document"}


# Repeats, the validation part, limits, weights


def test_repeated_rows_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", [*pairs(3), {"query": "text 1 ", "positive": "answer to text 1"}, *pairs(1, "b")])
    data = load(tmp_path, "retrieval/tiny")
    assert only(data).rows["anchor"][:] == ["text 0", "text 1", "text 2", "b 0"]
    assert data.reports[0].dropped == {"repeated": 1}
    write(tmp_path, "c/tiny", [*labelled(x=3, y=2), {"text": "x 0", "label": "x"}, {"text": "x 0", "label": "y"}])
    (report,) = load(tmp_path, "c/tiny", task="c").reports
    assert report.dropped == {"repeated": 1, "text has several labels": 2}
    assert report.used == 4
    rows = [{"query": "a", "positive": "b", "negative": negative} for negative in ("c", "d", "d")]
    write(tmp_path, "retrieval/tiny", rows)
    assert negatives_of(load(tmp_path, "retrieval/tiny")) == [["c"], ["d"]]


def test_the_validation_part_is_the_same_for_every_recipe(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(1000))
    held_out = []
    for limit, seed in ((None, 1), (100, 2), (10, 3)):
        parts = {"validation": {"share": 0.1}, "data": {"limit": limit}, "training": {"seed": seed}}
        data = load(tmp_path, "retrieval/tiny", **parts)
        (validation,) = data.validation
        held_out.append(validation.rows["anchor"][:])
        assert not set(held_out[-1]) & set(only(data).rows["anchor"])
    assert held_out[0] == held_out[1] == held_out[2]
    assert 70 < len(held_out[0]) < 130
    assert (validation.name, validation.task, validation.row_type) == ("retrieval/tiny", "retrieval", "pairs")
    assert (validation.anchor, validation.positive) == ("search_query", "search_document")
    assert validation.rows.column_names == ["anchor", "positive"]
    fewer = load(tmp_path, "retrieval/tiny", validation={"share": 0.1, "limit": 20})
    assert fewer.validation[0].rows["anchor"][:] == held_out[0][:20]
    assert (fewer.reports[0].held_out, fewer.reports[0].used) == (20, 980)


def test_texts_that_are_held_out_are_trained_nowhere(tmp_path: Path) -> None:
    rows = pairs(200)
    write(tmp_path, "retrieval/a", rows)
    chosen = load(tmp_path, "retrieval/a", validation={"share": 0.1}).validation[0].rows["anchor"][:]
    backwards = [{"query": f"new {i}", "positive": text} for i, text in enumerate(chosen)]
    write(tmp_path, "retrieval/a", [*rows, *backwards, {"query": chosen[0], "positive": "another answer"}])
    write(tmp_path, "retrieval/b", [*pairs(2, "other"), {"query": "unlikely", "positive": f" {chosen[1]}"}])
    data = load(tmp_path, "retrieval/*", validation={"share": 0.1})
    trained = {text for name in data.sets for column in ("anchor", "positive") for text in data.sets[name].rows[column]}
    held_out = {text for validation in data.validation for text in validation.rows["anchor"]}
    assert held_out >= set(chosen)
    assert not {text.strip() for text in trained} & held_out
    reports = {report.name: report for report in data.reports}
    assert reports["retrieval/a"].dropped["has a text that is held out"] >= len(chosen) - 5
    assert reports["retrieval/b"].dropped == {"has a text that another dataset holds out": 1}


def test_validation_of_labelled_and_scored_sets(tmp_path: Path) -> None:
    write(tmp_path, "c/tiny", labelled(x=100, y=100))
    data = load(tmp_path, "c/tiny", task="c", validation={"share": 0.2})
    (validation,) = data.validation
    assert (validation.row_type, validation.rows.column_names) == ("labelled", ["text", "label"])
    assert set(validation.rows["label"]) == {"x", "y"}
    assert not set(validation.rows["text"]) & {*only(data).rows["anchor"], *only(data).rows["positive"]}
    assert len(only(data).rows) + len(validation.rows) == 200
    write(tmp_path, "pair/tiny", [{"sentence1": f"a{i}", "sentence2": f"b{i}", "label": i % 2} for i in range(100)])
    (validation,) = load(tmp_path, "pair/tiny", task="p", validation={"share": 0.2}).validation
    assert (validation.row_type, validation.rows.column_names) == ("scored", ["anchor", "positive", "score"])
    assert set(validation.rows["score"]) == {0.0, 1.0}  # the loss takes only pairs alike, the measure takes both


def test_a_validation_part_of_one_row_measures_nothing(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(3))
    data = load(tmp_path, "retrieval/tiny", validation={"share": 0.001})
    assert (data.validation, len(only(data).rows)) == ([], 3)


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


def test_weights_repeat_rows(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(10))
    data = load(tmp_path, {"path": "retrieval/tiny", "weight": 1.25}, settings={"weight": 2.0})
    counts = Counter(only(data).rows["anchor"])
    assert sorted(counts.values()) == [2] * 5 + [3] * 5
    assert (data.reports[0].used, only(data).sources) == (10, {"retrieval/tiny": 25})
    half = only(load(tmp_path, {"path": "retrieval/tiny", "weight": 0.5})).rows["anchor"][:]
    assert len(set(half)) == 5
    assert half != [f"text {i}" for i in range(5)]
    assert half == only(load(tmp_path, {"path": "retrieval/tiny", "weight": 0.5})).rows["anchor"][:]


def test_a_weight_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(3))
    with pytest.raises(ValueError, match=r"tiny: the weight 0.01 leaves no row of 3"):
        load(tmp_path, {"path": "retrieval/tiny", "weight": 0.01})


# Lengths


def test_texts_are_cut_to_a_number_of_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))
    row = {"query": "ab, Cde fgh", "positive": "short", "negative": "ij klmnop"}  # a token for each letter
    write(tmp_path, "retrieval/tiny", [row, {**row, "query": "other"}])

    def cut(max_length: Any) -> dict[str, str]:
        dataset = {"path": "retrieval/tiny", "max_length": max_length}
        return only(load_data(recipe_of(tmp_path, settings={"datasets": [dataset]}), tokenizer)).rows[0]

    texts = cut(6)
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab, Cde", "short", "ij klmn")
    assert texts["label"][2] == text_id("ij klmn")  # of what is trained on
    texts = cut({"anchor": 3, "positive": 2})
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab,", "sh", "ij")
    texts = cut({"negative": 1})
    assert (texts["anchor"], texts["positive"], texts["negative_1"]) == ("ab, Cde fgh", "short", "i")
    with pytest.raises(ValueError, match="unknown column 'querry' in `max_length`"):
        cut({"querry": 3})
    with pytest.raises(ValueError, match="`max_length` needs a fast tokenizer"):
        load(tmp_path, {"path": "retrieval/tiny", "max_length": 5})


# The table, and real data


def test_the_table_tells_what_became_of_the_rows(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/a", [*pairs(1500), pairs(1)[0], {"query": "", "positive": ""}])
    write(tmp_path, "retrieval/much_longer_name", pairs(2, "b"))
    table = str(load(tmp_path, "retrieval/*", data={"limit": 1000})).splitlines()
    assert table[0].split() == ["task", "dataset", "read", "invalid", "held", "out", "dropped", "used"]
    assert table[2].split() == ["retrieval", "retrieval/a", "1,502", "1", "0", "501", "1,000"]
    assert table[3].split() == ["retrieval", "retrieval/much_longer_name", "2", "0", "0", "0", "2"]
    assert len({len(line) for line in table[:4]}) == 1
    assert "retrieval/a: dropped 1: repeated" in table
    assert "retrieval/a: dropped 500: over the limit" in table


TASKS = {
    "retrieval": {**RETRIEVAL, "datasets": ["retrieval/*"]},
    "classification": {**CLASSIFICATION, "datasets": ["classification/*"]},
    "clustering": {**CLASSIFICATION, "anchor": "clustering", "datasets": ["clustering/*"]},
}


def test_the_examples_can_be_trained_on() -> None:
    data = load_data(recipe_of(EXAMPLES, tasks=TASKS, validation={"share": 0.02}))
    assert {name: training_set.label_type for name, training_set in data.sets.items()} == dict.fromkeys(
        ("retrieval/arxiv", "retrieval/tldr_pages", "classification", "clustering"), "pairs"
    )
    assert sum(report.read for report in data.reports) == 3700
    assert not any(report.invalid for report in data.reports)
    assert all(report.held_out < 40 for report in data.reports)
    assert len(data.validation) == 6
    assert sum(file.stat().st_size for file in EXAMPLES.rglob("*.gz")) < 400_000


@pytest.mark.slow
def test_all_shared_data(shared: Path) -> None:
    """Every set with a training part is read whole, and each row of it is accounted for."""
    others = {
        "pair": {**CLASSIFICATION, "datasets": ["pair/*"]},
        "sts": {**CLASSIFICATION, "datasets": ["sts/*"], "loss": "CoSENTLoss"},
        "reranking": {**RETRIEVAL, "datasets": ["reranking/*"]},
        "beir": {**RETRIEVAL, "datasets": ["beir/*"]},
    }
    data = load_data(recipe_of(shared / "data", tasks={**TASKS, **others}, validation={"share": 0.02}))
    index = json.loads((shared / "data" / "index.json").read_text())
    expected = {f"{entry['kind']}/{entry['name']}": entry["rows"].get("train") for entry in index}
    assert {r.name: r.read for r in data.reports} == {name: rows for name, rows in expected.items() if rows}
    for report in data.reports:
        assert report.invalid == 0
        accounted = report.held_out + sum(report.dropped.values()) + report.used
        assert accounted >= report.read if report.task == "reranking" else accounted == report.read
        assert report.held_out <= 400
    held_out = {
        row["anchor"] for validation in data.validation if validation.row_type == "pairs" for row in validation.rows
    }
    for training_set in data.sets.values():
        assert not held_out & set(training_set.rows["anchor"])
        assert not held_out & set(training_set.rows["positive"])
