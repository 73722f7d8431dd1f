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
from benchmarks.paper.kept import COMMON, SEED, KeptScores, read_hashes, read_scores, read_settings, score_files
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
    monkeypatch.setattr(runs, "prepare", lambda data, out, times: tmp_path)
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
    stored = {path.stem: read_hashes(path)["start"] for path in tmp_path.glob("kept/**/*-seed*.json")}
    assert stored == {
        "start-seed42": "source",
        "mote-seed42": "source",
        "start-seed43": "other",
        "mote-seed43": "other",
    }
    with pytest.raises(ValueError, match=r"from other weights or test sets \(start: source, here other\).*--seeds"):
        replace(other, scale=scale).scores(["ic"])
    (tmp_path / "other").mkdir()
    both = replace(one, scale=replace(scale, seeds=(42, 43)))
    found = both.scores(["start", "mote"])  # the start's seed 43 is another start
    assert (found.seeds_of("start"), found.seeds_of("mote")) == ((42,), (42, 43))
    with pytest.raises(ValueError, match=r"start-seed42.json has the scores of another start \(source, here .*other\)"):
        replace(one, source=str(tmp_path / "other")).scores(["start"])


def test_a_start_has_the_seeds_of_the_models_that_start_from_it() -> None:
    def scores(value: float) -> runs.ScoresOfTypes:
        return {"STS": {"s": value}}

    hashes = {
        ("start", 42): {"start": "a"},
        ("start", 44): {"start": "b"},
        ("start+distilled", 42): {"start": "a", "distilled": "x"},
        ("em", 42): {"start": "a"},
        ("em", 43): {"start": "a"},
        ("em", 44): {"start": "b"},
        ("ic+distilled", 45): {"start": "a", "distilled": "x"},
        ("ic+distilled", 46): {"start": "a", "distilled": "y"},
    }
    found: runs.FoundScores = {}
    for number, (name, seed) in enumerate(hashes):
        found.setdefault(name, {})[seed] = scores(number)
    every = runs.with_seeds_of_starts(found, lambda name, seed: hashes[name, seed])
    assert every["start"] == {**dict.fromkeys((42, 43, 45, 46), scores(0)), 44: scores(1)}
    assert every["start+distilled"] == dict.fromkeys((42, 43, 45), scores(2))
    assert {name: every[name] for name in ("em", "ic+distilled")} == {
        name: found[name] for name in ("em", "ic+distilled")
    }


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
    assert read_settings(file) == {"datasets": [{"path": "a"}], "empty": {}, "rate": 0.1}
    stored = json.loads(file.read_text())
    assert stored["hashes"] == {"start": "abc"}
    del stored["training"]
    file.write_text(json.dumps({**stored, "settings": settings}))  # as earlier versions stored them
    assert kept.get("mote", settings, start, list) == found
    with pytest.raises(ValueError, match=r"differ in datasets \(\[{'path': 'a'}\] there, \[{'path': 'b'}\] here\)"):
        kept.get("mote", {**settings, "datasets": [{"path": "b", "limit": None}]}, start, list)


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.rglob(COMMON)), ids=_name)
def test_stored_models_of_a_seed_had_the_same_start_data_and_tests(folder: Path) -> None:
    """Also if they were stored on several machines."""
    known: dict[tuple[int | None, str], object] = {}
    for path in score_files(folder):
        assert read_scores(path)
        settings = read_settings(path)
        assert "data" in settings
        for key, value in {"data": settings["data"], **read_hashes(path)}.items():
            assert known.setdefault((settings.get(SEED), key), value) == value, path


def test_scores_are_stored_without_the_names_of_their_datasets(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    types = {"r1": "Retrieval", "r2": "Retrieval", "r3": "Retrieval", "s": "STS"}

    def score(label: str, of_model: dict[str, float]) -> runs.ScoresOfTypes:
        return kept.get(label, {}, dict, lambda: [mote.Evaluation({"any": of_model}, types)])

    of_models = {
        "test/retrieval": {"r1": 1.0, "r2": 2.0},
        "test/whole": {"r1": 3.0, "r2": 4.0, "s": 5.0},
        "test/sts": {"s": 7.0},
        "test/reversed": {"r2": 8.0, "r1": 9.0},
        "other/part": {"r2": 10.0},
    }
    stored = {}
    for label, of_model in of_models.items():
        scores = score(label, of_model)
        assert {name: one for of_type in scores.values() for name, one in of_type.items()} == of_model
        assert kept.get(label, {}, dict, list) == read_scores(kept.file(label)) == scores
        stored[label] = json.loads(kept.file(label).read_text())["scores"]
    assert stored == {
        "test/retrieval": {"Retrieval": [1.0, 2.0]},
        "test/whole": {"Retrieval": [3.0, 4.0], "STS": [5.0]},
        "test/sts": {"STS": [7.0]},
        "test/reversed": {"Retrieval": [9.0, 8.0]},
        "other/part": {"Retrieval": [10.0]},
    }
    for others, differing in (({"r2": 1.0}, "r1"), ({"r1": 1.0, "r2": 1.0, "r3": 1.0}, "r3")):
        with pytest.raises(
            ValueError, match=rf"other Retrieval datasets than others.json; only one .* has {differing}\."
        ):
            score("test/others", others)
        assert not kept.file("test/others").exists()
    file = tmp_path / "test" / COMMON
    common = json.loads(file.read_text())
    assert common["datasets"] == {"Retrieval": ["r1", "r2"], "STS": ["s"]}
    file.write_text(json.dumps({**common, "datasets": {"Retrieval": ["r2", "r1"], "STS": ["s"]}}))
    assert kept.get("test/sts", {}, dict, list)
    for label in ("test/retrieval", "test/whole"):
        with pytest.raises(ValueError, match=r"stored beside another common.json, .* or other datasets"):
            kept.get(label, {}, dict, list)
    file.write_text(json.dumps({**common, "datasets": {"STS": ["s"]}}))  # from a folder without the others
    with pytest.raises(ValueError, match=r"common.json, which names the datasets of whole.json, lacks Retrieval: add"):
        kept.get("test/whole", {}, dict, list)
    (tmp_path / "other" / COMMON).unlink()
    with pytest.raises(ValueError, match=r"datasets of part.json, lacks Retrieval"):
        kept.get("other/part", {"rate": 1}, dict, list)  # before its settings are compared


def test_settings_that_all_scores_have_are_stored_once(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    evaluations = [mote.Evaluation({"any": {"b": 1.0}}, {"b": "STS"})]
    common = {"dtype": None, "batch": 256}

    def score(label: str, settings: dict[str, Any], common: dict[str, Any]) -> None:
        kept.get(label, settings, dict, lambda: evaluations, common=common)

    score("test/em", {"rate": 0.1}, common)
    score("test/mote", {"rate": 0.1, "batch": 128}, common)  # its own setting wins
    assert json.loads((tmp_path / "test" / COMMON).read_text())["settings"] == common
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

    def stored_meanwhile() -> list[mote.Evaluation]:
        score("late/em", {}, common)
        return evaluations

    with pytest.raises(ValueError, match=r"scores in .*late have other settings"):
        kept.get("late/ic", {}, dict, stored_meanwhile, common={"dtype": "bfloat16", "batch": 256})
    assert not kept.file("late/ic").exists()
    (tmp_path / "test" / COMMON).write_text(json.dumps({"settings": {"batch": 64}, "datasets": {"STS": ["b"]}}))
    with pytest.raises(ValueError, match=r"stored beside another common.json, with other settings"):
        read_scores(kept.file("test/em"))


def test_settings_that_several_scores_have_are_stored_once(tmp_path: Path) -> None:
    kept = KeptScores(tmp_path, tmp_path / "locks")
    evaluations = [mote.Evaluation({"any": {"b": 1.0}}, {"b": "STS"})]
    of_models = {
        "em-seed42": {"variant": "em", "rate": 0.1, "texts": ["a", "b"]},
        "em-seed43": {"variant": "em", SEED: 43, "rate": 0.1, "texts": ["a", "b"]},
        "ic-seed42": {"variant": "ic", "rate": 0.1, "texts": ["a", "b"]},
        "mote-seed42": {"variant": "mote", "rate": 0.2},
        "start": {},
    }
    for label, settings in of_models.items():
        kept.get(label, settings, dict, lambda: evaluations)
    common = json.loads((tmp_path / COMMON).read_text())
    trained = [{}, {"rate": 0.2}, {"rate": 0.1, "texts": ["a", "b"]}]
    assert sorted(common["trainings"].values(), key=len) == trained
    for label, settings in of_models.items():
        own = json.loads(kept.file(label).read_text())["settings"]
        assert own == {key: settings[key] for key in ("variant", SEED) if key in settings}
        assert read_settings(kept.file(label)) == settings
        assert kept.get(label, settings, dict, list)
    with pytest.raises(ValueError, match=r"differ in rate \(0.1 there, 0.2 here\)"):
        kept.get("em-seed43", {**of_models["em-seed43"], "rate": 0.2}, dict, list)
    lost, *_ = (key for key, settings in common["trainings"].items() if settings == {"rate": 0.2})
    for of_lost in ({}, {lost: {"rate": 0.3}}):
        kept_trainings = {key: settings for key, settings in common["trainings"].items() if key != lost}
        (tmp_path / COMMON).write_text(json.dumps({**common, "trainings": kept_trainings | of_lost}))
        with pytest.raises(ValueError, match=r"common.json lacks the settings of mote-seed42.json, or has others"):
            read_settings(kept.file("mote-seed42"))
    assert read_settings(kept.file("start")) == {}


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
    assert json.loads((tmp_path / "test" / "em.json").read_text())["hashes"] == {"start": "abc"}
    assert not (tmp_path / "test" / "ic.json").exists()
