"""benchmarks.paper: stored scores, and the models they are of."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

import mote
from benchmarks.paper import experiments, runs
from benchmarks.paper.kept import KeptScores


def test_scores_depend_on_the_teacher(tmp_path: Path) -> None:
    given = runs.Runs(experiments.SCALES["smoke"], str(ROOT / "examples" / "small-encoder"), "DATA", tmp_path)
    for name in ("mote+distilled", "mote+mined"):
        assert given.settings_of_scores(name, 42)["teacher"] == "all-MiniLM-L6-v2"
        assert replace(given, teacher="A/B").settings_of_scores(name, 42)["teacher"] == "B"
    assert "teacher" not in given.settings_of_scores("mote", 42)


def test_a_model_trained_with_other_settings_is_refused(tmp_path: Path) -> None:
    from mote.training.run_folder import as_yaml

    scale = experiments.SCALES["smoke"]
    folder = tmp_path / "models" / "mote-seed42"
    (folder / "model").mkdir(parents=True)
    recipe = experiments.recipe_of(
        experiments.VARIANTS["mote"], scale, "SOURCE", "DATA", 42, ["training.weight_decay=0.5"]
    )
    (folder / "recipe.yaml").write_text(as_yaml(recipe))
    models = runs.Runs(scale, "SOURCE", "DATA", tmp_path)
    with pytest.raises(ValueError, match=r"training\.weight_decay \(0\.5 there, 0\.1 here\)"):
        models.model("mote", 42)
    (folder / "recipe.yaml").write_text(
        as_yaml(experiments.recipe_of(experiments.VARIANTS["mote"], scale, "SOURCE", "DATA", 42))
    )
    assert models.model("mote", 42) == folder / "model"


def test_stored_scores_need_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(ROOT / "examples" / "small-encoder")
    given = runs.Runs(experiments.SCALES["smoke"], source, "DATA", tmp_path / "out", kept=tmp_path / "kept" / "smoke")
    evaluated: list[str] = []

    def evaluate(models: dict[str, str], **settings: Any) -> mote.Evaluation:
        (label,) = models
        evaluated.append(label)
        number = 40.00001 + len(evaluated)
        return mote.Evaluation({label: {settings["tasks"][0]: number}}, {settings["tasks"][0]: "STS"})

    monkeypatch.setattr(mote, "evaluate", evaluate)
    monkeypatch.setattr(runs.Runs, "model", lambda self, name, seed: tmp_path / name)
    first = given.scores(["start", "mote"])
    assert first.every["mote"] == {"beir/*": [43.0], "classification/*": [44.0]}
    monkeypatch.delattr(runs.Runs, "model")
    elsewhere = replace(given, data="ELSEWHERE", out=tmp_path / "other")
    assert elsewhere.scores(["start", "mote"]) == first
    assert evaluated == ["start-seed42"] * 2 + ["mote-seed42"] * 2
    with pytest.raises(
        ValueError, match=r"mote-seed42.json has .* differ in training.weight_decay \(None .* 0.5 here\)"
    ):
        replace(given, changes=("training.weight_decay=0.5",)).scores(["mote"])
    (tmp_path / "copy").symlink_to(ROOT / "examples" / "small-encoder")
    assert replace(given, source=str(tmp_path / "copy")).scores(["start", "mote"]) == first


def test_nothing_is_chosen_without_all_validation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = runs.Runs(experiments.SCALES["smoke"], str(ROOT / "examples" / "small-encoder"), "DATA", tmp_path / "out")
    monkeypatch.setattr(runs.Runs, "model", lambda self, name, seed: tmp_path / name)
    monkeypatch.setattr(runs.Runs, "prepared", lambda self: tmp_path)
    failed = mote.Evaluation({"mote": {"b": 40.0}}, {"b": "STS"}, failures={"mote": {"c": "no memory"}})
    monkeypatch.setattr(mote, "evaluate", lambda models, **settings: failed)
    with pytest.raises(RuntimeError, match="without all validation sets: mote on c: no memory"):
        given.validated("mote")
    assert not list(tmp_path.glob("out/runs/**/*.json"))


def test_other_seeds_may_have_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(experiments.SCALES["smoke"], seeds=(42,), limits={("sts/*",): None})
    one = runs.Runs(scale, "SOURCE", "DATA", tmp_path / "out", kept=tmp_path / "kept")
    other = replace(one, source="OTHER", scale=replace(scale, seeds=(43,)))
    monkeypatch.setattr(runs, "hash_of_weights", str.lower)
    monkeypatch.setattr(runs.Runs, "model", lambda self, name, seed: tmp_path / name)
    scored = {"sts": 40.0}
    monkeypatch.setattr(
        mote, "evaluate", lambda models, **settings: mote.Evaluation(dict.fromkeys(models, scored), {"sts": "STS"})
    )
    for given in (one, other):
        assert given.scores(["start", "mote"]).every["start"] == {"sts": [40.0]}
    stored = {path.stem: json.loads(path.read_text())["weights"]["start"] for path in tmp_path.glob("kept/**/*.json")}
    assert stored == {
        "start-seed42": "source",
        "mote-seed42": "source",
        "start-seed43": "other",
        "mote-seed43": "other",
    }
    with pytest.raises(ValueError, match=r"trained from other weights \(start: source, here other\).*--seeds"):
        replace(other, scale=scale).scores(["ic"])


def test_scores_with_a_failure_are_not_stored(tmp_path: Path) -> None:
    reported: list[str] = []
    kept = KeptScores(tmp_path, tmp_path / "locks", reported.append)
    start = partial(dict, start="abc")
    failing = mote.Evaluation({"mote": {"b": 1.0}}, {"b": "STS"}, failures={"mote": {"c": "no memory"}})
    assert kept.get("mote", {}, start, lambda: [failing]) == {"STS": {"b": 1.0}}
    assert reported == ["FAILED, excluded from all means of mote: mote on c: no memory"]
    whole = mote.Evaluation({"mote": {"b": 1.0, "c": 2.0}}, {"b": "STS", "c": "Retrieval"})
    settings = {"datasets": [{"path": "a", "limit": None, "columns": {}}], "empty": {}, "rate": 0.1}
    for evaluations in ([whole], []):
        found = kept.get("mote", settings, start, partial(list, evaluations))
        assert found == {"STS": {"b": 1.0}, "Retrieval": {"c": 2.0}}
    file = tmp_path / "mote.json"
    stored = json.loads(file.read_text())
    assert stored["settings"] == {"datasets": [{"path": "a"}], "empty": {}, "rate": 0.1}
    assert stored["weights"] == {"start": "abc"}
    file.write_text(json.dumps({**stored, "settings": settings}))  # as earlier versions stored them
    assert kept.get("mote", settings, start, list) == found
    with pytest.raises(ValueError, match=r"differ in datasets \(\[{'path': 'a'}\] there, \[{'path': 'b'}\] here\)"):
        kept.get("mote", {**settings, "datasets": [{"path": "b", "limit": None}]}, start, list)


def test_stored_scores_of_a_seed_are_of_models_from_the_same_weights(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    evaluations = [mote.Evaluation({"any": {"b": 1.0}}, {"b": "STS"})]

    def score(label: str, settings: dict[str, int], **weights: str) -> None:
        kept.get(label, settings, lambda: weights, lambda: evaluations)

    score("test/em", {}, start="abc")
    score("test/mote", {}, start="abc", pretrained="123")
    with pytest.raises(ValueError, match=r"em.json has scores with the same seed .* \(start: abc, here def\).*--seeds"):
        score("test/ic", {}, start="def")
    with pytest.raises(ValueError, match=r"pretrained: 123, here 456"):
        score("test/ic", {}, start="abc", pretrained="456")
    score("test/em-seed43", {"training.seed": 43}, start="def")
    score("other/ic", {}, start="def")
    score("test/em", {}, start="def")  # stored scores need no weights
    assert json.loads((tmp_path / "test" / "em.json").read_text())["weights"] == {"start": "abc"}
    assert not (tmp_path / "test" / "ic.json").exists()
