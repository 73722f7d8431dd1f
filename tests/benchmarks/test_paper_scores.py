"""benchmarks.paper: stored scores, and the models they are of."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file

import mote
from benchmarks.locking import alone, share
from benchmarks.paper import experiments, runs
from benchmarks.paper.kept import COMMON, SEED, KeptScores, read_scores, read_settings
from mote.training.recipe import Recipe

RESULTS = ROOT / "docs" / "results"


def _name(folder: Path) -> str:
    return folder.relative_to(RESULTS).as_posix()


def test_scores_depend_on_the_teacher(tmp_path: Path) -> None:
    given = runs.Runs(experiments.SCALES["smoke"], str(ROOT / "examples" / "small-encoder"), "DATA", tmp_path)
    for name in ("mote+distilled", "mote+mined"):
        assert given.settings_of_scores(name, 42)["teacher"] == "all-MiniLM-L6-v2"
        assert replace(given, teacher="A/B").settings_of_scores(name, 42)["teacher"] == "B"
    assert "teacher" not in given.settings_of_scores("mote", 42)


def test_a_model_trained_with_other_settings_weights_or_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mote.training.run_folder import as_yaml

    def train(recipe: Recipe) -> None:
        (Path(recipe.output) / "model").mkdir(parents=True)
        (Path(recipe.output) / "recipe.yaml").write_text(as_yaml(recipe), encoding="utf-8")

    monkeypatch.setattr(mote, "train", train)
    monkeypatch.setattr(runs, "prepare", lambda data, out: tmp_path)
    (tmp_path / "digest.txt").write_text("abc", encoding="utf-8")
    scale = replace(experiments.SCALES["smoke"], trained_on="pairs")
    start = shutil.copytree(ROOT / "examples" / "small-encoder", tmp_path / "start")
    given = runs.Runs(scale, str(start), "DATA", tmp_path / "out")
    folder = given.model("mote", 42)
    monkeypatch.delattr(mote, "train")
    assert given.model("mote", 42) == folder
    with pytest.raises(ValueError, match=r"training\.weight_decay \(0\.1 there, 0\.5 here\)"):
        replace(given, changes=("training.weight_decay=0.5",)).model("mote", 42)
    (tmp_path / "digest.txt").write_text("def", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other weights or data; it differs in data \('abc' there, 'def' here\)"):
        given.model("mote", 42)
    (tmp_path / "digest.txt").write_text("abc", encoding="utf-8")
    weights = load_file(start / "model.safetensors")
    save_file({name: one + 1 for name, one in weights.items()}, start / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"other weights or data; it differs in start \('c26d"):
        given.model("mote", 42)


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
    stored = {
        path.stem: json.loads(path.read_text())["weights"]["start"] for path in tmp_path.glob("kept/**/*-seed*.json")
    }
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


@pytest.mark.parametrize("folder", sorted({path.parent for path in RESULTS.rglob("*-seed*.json")}), ids=_name)
def test_stored_models_of_a_seed_had_the_same_start_data_and_tests(folder: Path) -> None:
    """Also if they were stored on several machines."""
    known: dict[tuple[int | None, str], object] = {}
    for path in folder.glob("*-seed*.json"):
        settings, weights = read_settings(path), json.loads(path.read_text(encoding="utf-8"))["weights"]
        shared = {key: one for key, one in settings.items() if key in ("data", "dtype") or key.startswith("limit")}
        for key, value in {**shared, **weights}.items():
            assert known.setdefault((settings.get(SEED), key), value) == value, path


def test_scores_are_stored_without_the_names_that_others_have(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    types = {"r1": "Retrieval", "r2": "Retrieval", "s": "STS"}
    of_models = {
        "test/retrieval": {"r1": 1.0, "r2": 2.0},
        "test/whole": {"r1": 3.0, "r2": 4.0, "s": 5.0},
        "test/part": {"r2": 6.0, "s": 7.0},
        "test/reversed": {"r2": 8.0, "r1": 9.0},
        "other/part": {"r2": 10.0},
    }
    stored = {}
    for label, of_model in of_models.items():
        evaluation = mote.Evaluation({"any": of_model}, types)
        scores = kept.get(label, {}, dict, lambda evaluation=evaluation: [evaluation])
        assert {name: one for of_type in scores.values() for name, one in of_type.items()} == of_model
        assert kept.get(label, {}, dict, list) == read_scores(kept.file(label)) == scores
        stored[label] = json.loads(kept.file(label).read_text())["scores"]
    assert stored == {
        "test/retrieval": {"Retrieval": [1.0, 2.0]},
        "test/whole": {"Retrieval": [3.0, 4.0], "STS": [5.0]},
        "test/part": {"Retrieval": {"r2": 6.0}, "STS": [7.0]},
        "test/reversed": {"Retrieval": {"r2": 8.0, "r1": 9.0}},
        "other/part": {"Retrieval": [10.0]},
    }
    common = {"settings": {}, "datasets": {"Retrieval": ["r1", "r2"], "STS": ["s"]}}
    assert json.loads((tmp_path / "test" / COMMON).read_text()) == common
    (tmp_path / "test" / COMMON).write_text(
        json.dumps({"settings": {}, "datasets": {"Retrieval": ["r2", "r1"], "STS": ["s"]}})
    )
    for label in ("test/retrieval", "test/whole"):
        with pytest.raises(ValueError, match=r"stored beside another common.json, .* or other datasets"):
            kept.get(label, {}, dict, list)
    for label in ("test/part", "test/reversed"):
        assert kept.get(label, {}, dict, list)
    (tmp_path / "other" / COMMON).unlink()
    with pytest.raises(ValueError, match="stored beside another"):
        read_scores(kept.file("other/part"))


def test_settings_that_all_scores_have_are_stored_once(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    evaluations = [mote.Evaluation({"any": {"b": 1.0}}, {"b": "STS"})]
    common = {"dtype": None, "batch": 256}

    def score(label: str, settings: dict[str, Any], common: dict[str, Any]) -> None:
        kept.get(label, settings, dict, lambda: evaluations, common=common)

    score("test/em", {"rate": 0.1}, common)
    score("test/mote", {"rate": 0.1, "batch": 128}, common)  # its own setting wins
    stored = {path.stem: json.loads(path.read_text())["settings"] for path in tmp_path.glob("test/*.json")}
    assert stored == {"common": common, "em": {"rate": 0.1}, "mote": {"rate": 0.1, "batch": 128}}
    assert read_settings(kept.file("test/mote")) == {"dtype": None, "batch": 128, "rate": 0.1}
    score("test/em", {"rate": 0.1}, common)
    score("test/em", {"rate": 0.1, "batch": 256}, {"dtype": None})  # wherever they come from
    with pytest.raises(ValueError, match=r"em.json has the scores of other settings; they differ in batch \(256 there"):
        score("test/em", {"rate": 0.1}, {**common, "batch": 64})
    with pytest.raises(
        ValueError, match=r"scores in .*test have other settings; they differ in batch .*another folder"
    ):
        score("test/ic", {"rate": 0.1}, {**common, "batch": 64})
    assert not kept.file("test/ic").exists()
    (tmp_path / "test" / COMMON).write_text(json.dumps({"settings": {"batch": 64}, "datasets": {"STS": ["b"]}}))
    with pytest.raises(ValueError, match=r"stored beside another common.json, with other settings"):
        read_scores(kept.file("test/em"))


def test_work_is_shared(tmp_path: Path) -> None:
    """A job that another command is doing is left out; then it is waited for."""
    done: list[str] = []

    def job(name: str, timeout: float = -1) -> str:
        with alone(tmp_path / name, timeout):
            done.append(name)
            return name

    with ThreadPoolExecutor() as pool:
        with alone(tmp_path / "a"):
            shared = pool.submit(share, [partial(job, "a"), partial(job, "b")])
            assert shared.result(timeout=10) == [None, "b"]
            assert done == ["b"]
            waiting = pool.submit(job, "a")
            with pytest.raises(Timeout):
                job("a", 0.1)
        assert waiting.result(timeout=10) == "a"
    assert done == ["b", "a"]


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
    evaluations.clear()

    def stored_meanwhile() -> list[mote.Evaluation]:
        score("late/em", {}, start="abc")
        return [whole]

    whole = mote.Evaluation({"any": {"b": 1.0}}, {"b": "STS"})
    evaluations.append(whole)
    with pytest.raises(ValueError, match=r"start: abc, here def"):
        kept.get("late/ic", {}, lambda: {"start": "def"}, stored_meanwhile)
    assert json.loads((tmp_path / "test" / "em.json").read_text())["weights"] == {"start": "abc"}
    assert not (tmp_path / "test" / "ic.json").exists()
