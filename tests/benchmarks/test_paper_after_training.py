"""benchmarks.paper: models that are made of trained ones, without training."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import trusted
from helpers.paths import SMALL_ENCODER
from safetensors.torch import load_file, save_file

import mote
from benchmarks.paper import experiments, improvements, runs
from benchmarks.paper.interpolation import move_experts, towards_start
from mote.checkpoints.reading import open_mote
from mote.checkpoints.tensors import weight_name


@pytest.mark.parametrize("kind", ["mote", "dense"])
def test_a_model_moved_to_its_start(kind: str, trained_folder: Path, tmp_path: Path) -> None:
    texts = ["whales breathe air", "bread"]
    trained = trained_folder
    if kind == "dense":
        trained = mote.transform(trained_folder, tmp_path / "dense", mote.experts.average)
    arguments: dict[str, Any] = {"task": "clustering"} if kind == "mote" else {}
    expected = {0.0: trusted(trained).encode(texts, **arguments), 1.0: trusted(SMALL_ENCODER).encode(texts)}
    assert not np.allclose(expected[0.0], expected[1.0], atol=1e-3)
    for weight, embeddings in expected.items():
        moved = towards_start(trained, tmp_path / f"{weight}", SMALL_ENCODER, weight)
        assert np.allclose(trusted(moved).encode(texts, **arguments), embeddings, atol=1e-6)


def test_weights_that_the_start_lacks_stay_as_trained(trained_folder: Path, tmp_path: Path) -> None:
    initial = load_file(SMALL_ENCODER / "model.safetensors")
    lacking = next(name for name in initial if name.endswith("word_embeddings.weight"))
    tmp_path.joinpath("start").mkdir()
    save_file({name: one for name, one in initial.items() if name != lacking}, tmp_path / "start" / "model.safetensors")
    moved = towards_start(trained_folder, tmp_path / "moved", tmp_path / "start", 1.0)
    before, after = (load_file(folder / "model.safetensors") for folder in (trained_folder, moved))
    same = {name for name, one in after.items() if one.equal(before[name])}
    assert any(name.endswith(lacking) for name in same)
    assert not any("intermediate" in name for name in same)


def test_an_expert_halfway_to_the_start_serves_unseen_tasks(trained_folder: Path, tmp_path: Path) -> None:
    variant = improvements.variant_of("mote+unseen-near-start")
    assert (variant.made_of, variant.made_by is None) == ("mote", False)
    made = variant.made_by(trained_folder, tmp_path / "made", SMALL_ENCODER)  # type: ignore[misc]
    tasks = open_mote(str(made)).config.tasks
    assert {task for task, expert in tasks.items() if expert == "near_start"} == {"near_start", *improvements.UNSEEN}
    before, start, after = (load_file(folder / "model.safetensors") for folder in (trained_folder, SMALL_ENCODER, made))
    added = {name: one for name, one in after.items() if ".experts.near_start." in name}
    assert before.keys() == after.keys() - added.keys()
    assert all(after[name].equal(one) for name, one in before.items())
    for name, one in added.items():
        dense = name.removeprefix("backbone.").replace("experts.near_start.", "")
        trained_for_them = before[name.replace("near_start", "classification")]
        assert one.allclose((trained_for_them + start[dense]) / 2, atol=1e-7)
    assert [one.name for one in tmp_path.iterdir()] == ["made"]


def test_experts_of_search_move_to_the_start(trained_folder: Path, tmp_path: Path) -> None:
    variant = improvements.variant_of("mote+search-to-start-0.25")
    made = variant.made_by(trained_folder, tmp_path / "made", SMALL_ENCODER)  # type: ignore[misc]
    before, start, after = (load_file(folder / "model.safetensors") for folder in (trained_folder, SMALL_ENCODER, made))
    moved = {name for name, one in after.items() if not one.equal(before[name])}
    assert {name.split(".experts.")[1].split(".")[0] for name in moved} == set(improvements.SEARCH)
    for name in moved:
        dense = start[weight_name(name, open_mote(str(made)).config).dense]
        assert after[name].allclose(0.75 * before[name] + 0.25 * dense, atol=1e-7)


def test_each_expert_is_moved_by_its_own_amounts(trained_folder: Path, tmp_path: Path) -> None:
    weights = {"classification": (0.0, -0.25), "clustering": (-0.25, 0.0), "search_query": (0.5, 0.25)}
    made = mote.transform(trained_folder, tmp_path / "made", move_experts, SMALL_ENCODER, weights)
    before, start, after = (load_file(folder / "model.safetensors") for folder in (trained_folder, SMALL_ENCODER, made))
    experts = open_mote(str(trained_folder)).config.experts
    for name, one in after.items():
        expert = next((expert for expert in experts if f".experts.{expert}." in name), None)
        if expert not in weights:
            assert one.equal(before[name])
            continue
        of_mean, of_start = weights[expert]
        mean = sum(before[name.replace(expert, other)] for other in experts) / len(experts)
        initial = start[name.removeprefix("backbone.").replace(f"experts.{expert}.", "")]
        moved = before[name] + of_mean * (mean - before[name]) + of_start * (initial - before[name])
        assert one.allclose(moved, atol=1e-6)


def test_shared_weights_are_moved_with_the_experts(trained_folder: Path, tmp_path: Path) -> None:
    start = {name: 2 * one.float() for name, one in load_file(SMALL_ENCODER / "model.safetensors").items()}
    tmp_path.joinpath("start").mkdir()
    save_file(start, tmp_path / "start" / "model.safetensors")
    weights = {"clustering": (0.0, 0.5)}
    made = mote.transform(trained_folder, tmp_path / "made", move_experts, tmp_path / "start", weights, 0.25)
    before, after = (load_file(folder / "model.safetensors") for folder in (trained_folder, made))
    config = open_mote(str(made)).config
    moved = set()
    for key, one in after.items():
        name = weight_name(key, config)
        weight = {None: 0.25, "clustering": 0.5}.get(name.expert, 0.0) if name.dense in start else 0.0
        assert one.allclose(before[key].lerp(start.get(name.dense, one), weight), atol=1e-6)
        moved |= set() if one.equal(before[key]) else {name.expert}
    assert moved == {None, "clustering"}


@pytest.mark.parametrize("kind", ["mote", "dense"])
def test_only_shared_weights_move_to_the_start(kind: str, trained_folder: Path, tmp_path: Path) -> None:
    trained = trained_folder
    if kind == "dense":
        trained = mote.transform(trained_folder, tmp_path / "dense", mote.experts.average)
    initial = {name: 2 * one.float() for name, one in load_file(SMALL_ENCODER / "model.safetensors").items()}
    tmp_path.joinpath("start").mkdir()
    save_file(initial, tmp_path / "start" / "model.safetensors")
    variant = improvements.variant_of(f"{'mote' if kind == 'mote' else 'ic'}+shared-to-start-0.25")
    made = variant.made_by(trained, tmp_path / "made", tmp_path / "start")  # type: ignore[misc]
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, made))
    moved = {re.sub(r"\d+", "N", name) for name, one in after.items() if not one.equal(before[name])}
    of_blocks = {name.rpartition("layer.N.")[2] for name in moved if "layer.N." in name}
    projections = {f"self.{name}" for name in ("query", "key", "value")} | {"output.dense"}
    shared = "shared." if kind == "mote" else ""
    assert of_blocks == {f"{shared}attention.{name}.{of}" for name in projections for of in ("weight", "bias")}
    assert {name for name in moved if "word_embeddings" in name}


def test_made_after_training_in_short_folders(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "trained", lambda recipe, *_: trained_folder)
    given = runs.Runs(experiments.SCALES["smoke"], str(SMALL_ENCODER), "DATA", tmp_path)
    names = ("mote+homogeneous+to-mean-0.25", "mote+homogeneous+to-mean-0.25+unseen-by-mean")
    once, twice = (given.model(name, 42) for name in names)
    assert re.fullmatch("to-mean-0.25-seed42-[0-9a-f]{8}", once.name)
    assert re.fullmatch("unseen-by-mean-seed42-[0-9a-f]{8}", twice.name)
    assert given.model(names[0], 42) == once
    assert open_mote(str(twice)).config.tasks["sts"] == "mean"
