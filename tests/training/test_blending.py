"""Blended batches, whose loss is the sum of their tasks'; labels and scores as pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.datasets import CLASSIFICATION, RETRIEVAL, labelled, only, recipe_of, write
from helpers.runs import overrides, plan, train_step
from sentence_transformers import SentenceTransformer

from mote.training.cleaning import text_id
from mote.training.data import load_data
from mote.training.losses import InfoNCELoss
from mote.training.train import TrainingRun, train

BLENDED = (
    "{retrieval: {batches: blended, temperature: 0.02}, classification: {batches: blended, pairs: label_text, "
    "in_batch_negatives: false, temperature: 0.05}, clustering: {batches: blended, symmetric: true}}"
)


def blended(tiny: Path, data: Path, out: Path, *more: str) -> list[str]:
    """A small run of blended batches: with several negatives, with one and with none."""
    recipe = out.parent / "recipe.yaml"
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(f"extends: mote\nname: blended\ntasks: {BLENDED}\n")
    return overrides(tiny, data, out, "tasks.classification.datasets=[classification/banking77]", *more)


@pytest.mark.parametrize("kind", ["mote", pytest.param("dense", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "more",
    [
        "training.mini_batch_size=4",
        pytest.param("training.mini_batch_size=null", marks=pytest.mark.long),
        pytest.param("model.instruction_pooling=excluded", marks=pytest.mark.long),
    ],
)
def test_a_batch_is_its_tasks_computed_separately(kind: str, more: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    """Loss and gradients of all weights, each task with its own texts, instruction and expert."""
    out = tmp_path / "run"
    settings = blended(tiny, data, out, f"model.kind={kind}", "model.max_length=48", more)
    run = TrainingRun(tmp_path / "recipe.yaml", settings).prepare()
    model = run.model.eval()  # without dropout
    training_set = run.data.sets["blended"]
    assert [part.name.split("/")[0] for part in training_set.parts].count("classification") == 1
    rows = [training_set.rows[index] for index in range(0, len(training_set.rows), 11)]
    numbers = [row["label"][-1] for row in rows]
    assert len(set(numbers)) == len(training_set.parts) > 2
    trainer: Any = run.trainer
    inputs = trainer.data_collator([{**row, "dataset_name": "blended"} for row in rows])
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    total, routed = 0.0, kind == "mote"
    for number, part in enumerate(training_set.parts):
        own = [row for row, of_part in zip(rows, numbers, strict=True) if of_part == number]
        features = [
            model.preprocess([row[column] for row in own], prompt=f"{task}: ", **({"task": task} if routed else {}))
            for column, task in part.column_tasks.items()
        ]
        count, task = len(part.column_tasks), part.settings
        labels = torch.tensor([[*row["label"][:count], row["label"][-2]] for row in own])
        share = InfoNCELoss(model, task)(features, labels) * len(own) / len(rows)
        share.backward()
        total += share.item()
    assert loss.item() == pytest.approx(total, abs=1e-5)
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert max((found[name] - gradient).abs().max().item() for name, gradient in expected.items()) <= 1e-5
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-2


@pytest.mark.parametrize("kind", ["mote", pytest.param("dense", marks=pytest.mark.long)])
def test_datasets_with_their_own_instructions_are_negatives_of_each_other(
    kind: str, tiny: Path, data: Path, tmp_path: Path
) -> None:
    """As in NV-Embed's first stage."""
    own = ["{path: retrieval/arxiv, definition: Find abstracts}", "{path: retrieval/tldr_pages, instruction: 'Find '}"]
    settings = [f"tasks.retrieval.datasets=[{', '.join(own)}]", "tasks.retrieval.batches=heterogeneous"]
    settings += ["tasks.classification=null", "tasks.clustering=null", f"model.kind={kind}", "model.max_length=48"]
    run = TrainingRun("mote", overrides(tiny, data, tmp_path / "run", *settings)).prepare()
    model, (training_set,) = run.model.eval(), run.data.sets.values()
    assert (training_set.name, len(training_set.parts)) == ("retrieval", 2)
    rows = [training_set.rows[index] for index in range(0, len(training_set.rows), 7)]
    trainer: Any = run.trainer
    inputs = trainer.data_collator([{**row, "dataset_name": "retrieval"} for row in rows])
    loss = trainer.compute_loss(model, inputs)

    def embedded(column: str, prompts: tuple[str, str], task: str) -> torch.Tensor:
        options = {"task": task} if kind == "mote" else {}
        texts = [model.preprocess([row[column]], prompt=prompts[row["label"][-1]], **options) for row in rows]
        return torch.cat([model(features)["sentence_embedding"] for features in texts])

    anchors = embedded("anchor", ("Instruct: Find abstracts\nQuery: ", "Find "), "search_query")
    positives = embedded("positive", ("search_document: ",) * 2, "search_document")
    labels = torch.tensor([row["label"][:-1] for row in rows])
    expected = InfoNCELoss(model, training_set.settings).calculate_loss([[anchors], [positives]], labels)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert expected.item() > 0.1  # not only rows of one dataset


@pytest.mark.long
def test_a_run_of_blended_batches(tiny: Path, data: Path, tmp_path: Path) -> None:
    settings = blended(tiny, data, tmp_path / "run", "training.max_steps=-1", "training.batch_size=64")
    assert "blended" in plan(tmp_path / "recipe.yaml", settings)
    model = train(tmp_path / "recipe.yaml", settings)
    record = train_step(model)
    assert [*record["training_sets"]] == ["blended"]
    used = {one["name"]: one["used"] for one in record["data"]}
    assert record["training_sets"]["blended"]["rows"] == sum(used.values())
    encoder = SentenceTransformer(str(model), trust_remote_code=True)
    assert encoder.encode(["a text"], task="classification").shape == (1, 16)


def test_labels_as_positives(tmp_path: Path) -> None:
    task = {**CLASSIFICATION, "pairs": "label_text", "batches": "homogeneous"}
    write(tmp_path, "classification/tiny", labelled(red=3, green=2, blue=1))
    rows = only(load_data(recipe_of(tmp_path, tasks={"c": {**task, "datasets": ["classification/tiny"]}}))).rows
    assert len(rows) == 6  # a label with one text is a label too
    for row in rows:
        assert row["anchor"].startswith(row["positive"])
        assert {row["positive"], row["negative_1"], row["negative_2"]} == {"red", "green", "blue"}
        assert row["label"][1] == text_id(row["positive"])


def test_one_of_several_labels_is_the_positive_and_none_of_them_a_negative(tmp_path: Path) -> None:
    task = {**CLASSIFICATION, "pairs": "label_text", "batches": "homogeneous"}
    content = [{"text": f"text {i}", "label": ["a", "b"]} for i in range(20)]
    write(tmp_path, "clustering/tiny", [*content, {"text": "x", "label": "c"}, {"text": "y", "label": [*"abcd"]}])
    rows = only(load_data(recipe_of(tmp_path, tasks={"c": {**task, "datasets": ["clustering/tiny"]}}))).rows
    several = [row for row in rows if row["anchor"] not in "xy"]
    assert {row["positive"] for row in several} == {"a", "b"}
    assert all({row["negative_1"], row["negative_2"]} == {"c", "d"} for row in several)
    assert "y" not in rows["anchor"]  # it has every label


@pytest.mark.parametrize("labels", [("0", "1", "2"), ("-1.0", "0.0", "1.0")])
def test_labels_that_are_numbers_need_texts(labels: tuple[str, ...], tmp_path: Path) -> None:
    content = [{"text": f"text {index}", "label": labels[index % 3]} for index in range(9)]
    write(tmp_path, "classification/tiny", content)
    dataset: dict[str, Any] = {"path": "classification/tiny", "negatives": 1}
    task = {**CLASSIFICATION, "pairs": "label_text", "batches": "homogeneous", "datasets": [dataset]}
    with pytest.raises(ValueError, match=f"needs labels that are texts, got {', '.join(sorted(labels))}: "):
        load_data(recipe_of(tmp_path, tasks={"c": task}))


def test_scored_pairs_in_both_directions(tmp_path: Path) -> None:
    scored = [("a", "b", 5.0), ("c", "d", 4.0), ("a", "e", 1.0), ("f", "g", 3.9), ("h", "i", 0.0)]
    write(tmp_path, "sts/tiny", [{"sentence1": one, "sentence2": two, "score": score} for one, two, score in scored])
    task = {**RETRIEVAL, "datasets": [{"path": "sts/tiny", "min_score": 4, "negatives": 2}]}
    training_set = only(load_data(recipe_of(tmp_path, tasks={"sts": task})))
    found = {(row["anchor"], row["positive"]) for row in training_set.rows}
    assert found == {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")}
    assert next(row["negative_1"] for row in training_set.rows if row["anchor"] == "a") == "e"  # it scores low
    for row in training_set.rows:
        assert len({row["anchor"], row["positive"], row["negative_1"], row["negative_2"]}) == 4


def test_negatives_of_scored_pairs_by_bm25(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    scored = [
        ("red whale song", "a red whale sings", 5.0),
        ("red whale song", "red whale song now", 3.0),  # known to be too near
        ("red whale song", "whale bones", 2.5),
        ("blue sky", "the song of the red fox", 0.0),  # shares two words
        ("green bread", "stone", 1.0),
    ]
    write(tmp_path, "sts/tiny", [{"sentence1": one, "sentence2": two, "score": score} for one, two, score in scored])
    dataset = {"path": "sts/tiny", "min_score": 4, "max_negative_score": 2.5, "negatives": 2}
    rows = only(load_data(recipe_of(tmp_path, tasks={"s": {**RETRIEVAL, "datasets": [dataset]}}))).rows
    negatives = {row["anchor"]: [row["negative_1"], row["negative_2"]] for row in rows}
    assert negatives["red whale song"] == ["the song of the red fox", "whale bones"]
