"""The data of a recipe, in training sets with the labels that each loss takes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.datasets import CLASSIFICATION, RETRIEVAL, Rows, labelled, load, only, pairs, recipe_of, write
from helpers.paths import EXAMPLE_DATA

from mote.training.cleaning import text_id
from mote.training.data import load_data


def test_datasets_and_tasks_have_different_names(tmp_path: Path) -> None:
    for name in ("a/some/tiny", "b/some/tiny"):
        write(tmp_path, name, pairs(2))
    with pytest.raises(ValueError, match=r"retrieval: 'b/some/tiny' is a dataset named 'some/tiny'"):
        load(tmp_path, "a/some/tiny", "b/some/tiny")
    for name in ("loose", "blended", "retrieval", "other"):
        write(tmp_path, "", pairs(2, name), f"{name}.jsonl")
    assert len(load(tmp_path, "retrieval.jsonl", "other.jsonl").sets) == 2  # its own task's name
    other = {**CLASSIFICATION, "datasets": ["other.jsonl"]}
    for name in ("loose", "blended"):
        tasks = {"retrieval": {**RETRIEVAL, "datasets": [f"{name}.jsonl"]}, "loose": other}
        with pytest.raises(ValueError, match=f"tasks.retrieval: .* named '{name}', .* need different names"):
            load_data(recipe_of(tmp_path, tasks=tasks))


def test_pairs_are_labelled_with_the_ids_of_their_texts(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", [{"query": "a", "positive": "b", "negative": "c"}])
    training_set = only(load(tmp_path, "retrieval/tiny"))
    assert training_set.label_type == "pairs"
    assert training_set.rows.column_names == ["anchor", "positive", "negative_1", "label"]
    assert training_set.rows[0]["label"] == [text_id("a"), text_id("b"), text_id("c"), text_id("a")]
    documents = {"positive": "search_document", "negative_1": "search_document"}
    assert training_set.column_tasks == {"anchor": "search_query", **documents}


def test_labelled_texts_are_each_an_anchor_and_a_positive_once(tmp_path: Path) -> None:
    write(tmp_path, "classification/tiny", labelled(x=5, y=2, z=3))
    training_set = only(load(tmp_path, "classification/tiny", task="c"))
    rows = training_set.rows
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


def test_equal_labels_of_two_datasets_are_two_groups(tmp_path: Path) -> None:
    write(tmp_path, "classification/a", labelled(x=2))
    write(tmp_path, "classification/b", [{"text": "other 1", "label": "x"}, {"text": "other 2", "label": "x"}])
    training_set = only(load(tmp_path, "classification/*", task="c"))
    assert len({label[-1] for label in training_set.rows["label"]}) == 2
    assert len(training_set.rows) == 4


@pytest.mark.parametrize(("rows", "settings"), [(labelled(x=4), {}), (pairs(3), {"in_batch_negatives": False})])
def test_a_training_set_without_negatives_is_refused(tmp_path: Path, rows: Rows, settings: Any) -> None:
    write(tmp_path, "some/tiny", rows)
    with pytest.raises(ValueError, match="rows of 'c' have no negatives: in_batch_negatives is false, or all have"):
        load(tmp_path, "some/tiny", task="c", settings=settings)


def test_datasets_in_one_batch_have_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path, "a/with", [{"query": f"q{i}", "positive": "p", "negative": "n"} for i in range(2)])
    write(tmp_path, "a/without", pairs(2))
    mixed = {"batches": "heterogeneous"}
    with pytest.raises(ValueError, match=r"different columns \(a/with: .*negative_1, label; a/without: .*negatives: 0"):
        load(tmp_path, "a/*", settings=mixed)
    assert len(only(load(tmp_path, {"path": "a/with", "negatives": 0}, "a/without", settings=mixed)).rows) == 4
    assert len(load(tmp_path, "a/*").sets) == 2


def test_validation_of_labelled_and_scored_sets(tmp_path: Path) -> None:
    write(tmp_path, "c/tiny", labelled(x=100, y=100))
    data = load(tmp_path, "c/tiny", task="c", validation={"share": 0.2})
    (validation,) = data.validation
    assert validation.row_type == "labelled"
    assert {row.label for row in validation.held_out} == {"x", "y"}
    held_out = {row.anchor for row in validation.held_out}
    assert not held_out & {*only(data).rows["anchor"], *only(data).rows["positive"]}
    assert len(only(data).rows) + len(validation.held_out) == 200
    write(tmp_path, "pair/tiny", [{"sentence1": f"a{i}", "sentence2": f"b{i}", "label": i % 2} for i in range(100)])
    (validation,) = load(tmp_path, "pair/tiny", task="p", validation={"share": 0.2}).validation
    assert validation.row_type == "scored"
    assert {row.label for row in validation.held_out} == {0.0, 1.0}  # the loss takes only the latter, the measure both


def test_weights_repeat_rows(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", pairs(10))
    data = load(tmp_path, {"path": "retrieval/tiny", "weight": 1.25}, settings={"weight": 2.0})
    counts = Counter(only(data).rows["anchor"])
    assert sorted(counts.values()) == [2] * 5 + [3] * 5
    assert (data.reports[0].used, len(only(data).rows)) == (10, 25)
    first, again = (load(tmp_path, {"path": "retrieval/tiny", "weight": 0.5}) for _ in range(2))
    half = only(first).rows["anchor"][:]
    assert len(set(half)) == 5
    assert half == only(again).rows["anchor"][:] != [f"text {i}" for i in range(5)]
    with pytest.raises(ValueError, match=r"tiny: nothing is left to train on"):
        load(tmp_path, {"path": "retrieval/tiny", "weight": 0.01})


def test_the_table_of_datasets(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/a", [*pairs(1500), pairs(1)[0], {"query": "", "positive": ""}])
    write(tmp_path, "retrieval/much_longer_name", pairs(2, "b"))
    table = str(load(tmp_path, "retrieval/*", data={"limit": 1000})).splitlines()
    assert table[2].replace("|", " ").split() == ["retrieval", "retrieval/a", "1,502", "1", "0", "501", "1,000"]
    assert {"retrieval/a: dropped 1: repeated", "retrieval/a: dropped 500: over the limit"} <= {*table}


def test_every_row_of_the_examples_is_counted() -> None:
    tasks = {
        "retrieval": {**RETRIEVAL, "datasets": ["retrieval/*"]},
        "c": {**CLASSIFICATION, "datasets": ["classification/*", "clustering/*"]},
    }
    data = load_data(recipe_of(EXAMPLE_DATA, tasks=tasks, validation={"share": 0.02}))
    assert {*data.sets} == {"retrieval/arxiv", "retrieval/tldr_pages", "c"}
    assert sum(report.read for report in data.reports) == 3700
    for report in data.reports:
        assert report.read == report.used + report.held_out + sum(report.dropped.values())
    assert sum(file.stat().st_size for file in EXAMPLE_DATA.rglob("*.gz")) < 600_000
