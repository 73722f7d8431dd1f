"""benchmarks.paper: the variants, and how scores become tables and verdicts."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import trusted
from helpers.paths import ROOT, SMALL_ENCODER

import mote
from benchmarks.paper import best, claims, data, experiments, improvements, runs, tables, unseen
from benchmarks.paper.interpolation import towards_start
from benchmarks.paper.kept import KeptScores
from benchmarks.paper.reports import make
from benchmarks.results import known_tables
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import fixed_settings


def scores_of(**every: dict[str, list[float]]) -> object:
    kinds = {"r": "Retrieval", "c": "Classification"}
    types = {name: kinds[name[0]] for of in every.values() for name in of}
    return runs.Scores(every, types)


@pytest.mark.long
def test_every_variant_is_a_valid_recipe_at_every_scale() -> None:
    for scale in experiments.SCALES.values():
        for name, variant in experiments.VARIANTS.items():
            recipe = experiments.recipe_of(variant, scale, "SOURCE", "DATA", 7, name=name)
            assert recipe.training.seed == 7
            assert recipe.model.source == "SOURCE"
            assert recipe.data.folder == "DATA"
            assert variant.made_of is None or variant.made_of in experiments.VARIANTS


def test_settings_of_variants() -> None:

    def recipe(name: str) -> object:
        variant = experiments.VARIANTS[name]
        return experiments.recipe_of(variant, experiments.SCALES["small"], "S", "D", 42, name=name)

    one = recipe("sem-retrieval-heterogeneous-0.03")
    assert list(one.tasks) == ["retrieval"]
    assert (one.tasks["retrieval"].batches, one.tasks["retrieval"].temperature) == ("heterogeneous", 0.03)
    assert recipe("mote-high-rate").training.learning_rate == 5e-4
    assert recipe("mote").training.learning_rate == recipe("ic").training.learning_rate == 1.5e-4
    assert recipe("mote-shared").model.tasks == {"clustering": "search_document"}
    assert list((recipe("mote-expert-rates").training.model_extra or {})["learning_rate_mapping"].values()) == [5e-4]


def test_texts_are_cut_in_training_alone() -> None:
    recipe = experiments.recipe_of(experiments.VARIANTS["sem-retrieval"], experiments.SCALES["medium"], "S", "D", 42)
    assert [one.max_length for one in recipe.tasks["retrieval"].datasets] == [64]
    assert recipe.model.max_length == 128


def test_seeds_of_a_variant(tmp_path: Path) -> None:
    medium = runs.Runs(experiments.SCALES["medium"], "S", "D", tmp_path)
    for name in ("em", "ic", "mote", "mote-average", "mote+homogeneous", "sem-retrieval+homogeneous"):
        assert medium.seeds_of(name) == (42, 43, 44)
    for name in ("start", "tlr", "mote-static", "sem-retrieval", "mote-every-other", "mote-own-rate"):
        assert medium.seeds_of(name) == (42,)
    assert replace(medium, scale=experiments.SCALES["small"]).seeds_of("sem-retrieval") == (42, 43)
    assert replace(medium, trial_rate=4e-4).seeds_of("mote") == (42,)


def test_a_scale_whose_trials_are_those_of_another(tmp_path: Path) -> None:
    medium = runs.Runs(experiments.SCALES["medium"], "S", "D", tmp_path / "medium", kept=ROOT / "docs/results/medium")
    kept = ROOT / "docs/results/medium-trials"
    other = runs.Runs(experiments.SCALES["medium-trials"], "S", "D", tmp_path / "medium-trials", kept=kept)
    assert medium.choosing == other
    assert other.choosing is other
    vars(medium.choosing)["sweep"] = {"em": {2e-4: 50.0, 4e-4: 51.0}}
    assert medium.rate(experiments.VARIANTS["ic"]) == 4e-4
    assert medium.choosing.trials.is_validated("ic+five-tasks+distilled")


def test_improvements_of_a_variant() -> None:
    medium = experiments.SCALES["medium"]
    for name in improvements.IMPROVEMENTS:
        variant = improvements.variant_of(f"mote+{name}")
        assert variant != experiments.VARIANTS["mote"]
        experiments.recipe_of(variant, medium, "S", "D", 42)
    for name, base in ((name, base) for name in improvements.FOR_ALL for base in best.BASES):
        for part in improvements.parts_of(f"{base}+{name}"):
            experiments.recipe_of(improvements.variant_of(part), medium, "S", "D", 42)
    together = improvements.variant_of("mote+five-tasks+search-expert+shared")
    model = experiments.recipe_of(together, medium, "S", "D", 42).model
    assert model.experts == ["classification", "text_matching", "search"]
    assert model.tasks["search_query"] == model.tasks["search_document"] == model.tasks["clustering"] == "search"
    assert model.tasks["sts"] == model.tasks["summarization"] == "text_matching"
    assert model.instruction_texts["search_query"] == "search_query: "
    matching = improvements.variant_of("mote+five-tasks+matching-by-search")
    model = experiments.recipe_of(matching, medium, "S", "D", 42).model
    assert model.experts == ["classification", "clustering", "search"]
    assert {model.tasks[task] for task in ("text_matching", "sts", "search_query")} == {"search"}
    assert model.instruction_texts["sts"] == model.instruction_texts["text_matching"] == "text_matching: "
    model = experiments.recipe_of(improvements.variant_of("mote+matching-by-search"), medium, "S", "D", 42).model
    assert "text_matching" not in model.tasks
    assert model.instruction_texts["sts"] == "classification: "
    both = improvements.variant_of("mote+five-tasks+homogeneous+unseen-by-mean")
    recipe = experiments.recipe_of(both, medium, "S", "D", 42)
    assert set(recipe.tasks) == {"retrieval", "classification", "clustering", "paraphrases"}
    assert {task.batches for task in recipe.tasks.values()} == {"homogeneous"}
    assert [one.path for one in recipe.tasks["paraphrases"].datasets] == ["paraphrases/*"]
    assert recipe.tasks["paraphrases"].anchor == "text_matching"
    assert both.made_of == "mote+five-tasks+homogeneous"
    with pytest.raises(ValueError, match="shared changes the training, and must precede"):
        improvements.variant_of("mote+to-mean-0.5+shared")


def test_the_recipe_mote_best_is_that_of_the_trials() -> None:
    variant = improvements.variant_of("mote+five-tasks+matching-by-search+homogeneous")
    tried, shipped = (
        fixed_settings(recipe) for recipe in (load_recipe(variant.recipe, variant.changes), load_recipe("mote-best"))
    )
    assert {key for key in tried.keys() | shipped.keys() if tried.get(key) != shipped.get(key)} == {
        "name",
        "model.source",
    }


def test_learning_rates_of_a_variant(tmp_path: Path) -> None:
    given = runs.Runs(experiments.SCALES["medium"], "S", "D", tmp_path)
    vars(given)["sweep"] = {"em": {1e-4: 50.0, 4e-4: 52.0}, "ic": {1e-4: 53.0, 4e-4: 52.0}, "mote": {4e-4: 53.0}}
    vars(given)["sweep"]["mote"][1e-4] = 50.0

    def training(name: str) -> Any:
        variant = improvements.variant_of(name)
        return experiments.recipe_of(variant, given.scale, "S", "D", 42, given.settings_of(variant)).training

    assert training("mote").learning_rate == 4e-4
    assert training("task-lora").learning_rate == pytest.approx(4e-3)
    assert training("ic-own-rate").learning_rate == 1e-4
    assert [given.trained_as(f"{name}-own-rate") for name in ("ic", "mote")] == ["ic-own-rate", "mote"]
    faster = training("mote+expert-rates")
    assert faster.learning_rate == 4e-4
    ((pattern, rate),) = faster.model_extra["learning_rate_mapping"].items()
    assert rate == pytest.approx(1.2e-3)
    assert re.search(pattern, "0.model.backbone.encoder.layer.0.experts.clustering.output.dense.weight")


class Validated:
    """Runs whose validation scores are given; unknown variants score 50."""

    pretrained = None
    stored: tuple[str, ...] = ()

    def __init__(self, **scores: float) -> None:
        self.scores = {name.replace("_", "-").replace("--", "+"): score for name, score in scores.items()}
        self.reported: list[str] = []

    def validated(self, name: str, timeout: float = -1) -> dict[str, float]:
        return {"STS": self.scores.get(name, 50.0)}

    def is_validated(self, name: str) -> bool:
        return name in self.stored

    def report(self, line: str) -> None:
        self.reported.append(line)


def test_an_improvement_is_kept_if_it_gains() -> None:
    given = Validated(ic=60.0, ic__homogeneous=61.0, ic__homogeneous__distilled=60.5, ic__homogeneous__mined=62.0)
    steps = best.improve(given, "ic")  # type: ignore[arg-type]
    assert [(step["name"], step["kept"]) for step in steps] == [
        ("ic", True),
        ("ic+late", False),
        ("ic+homogeneous", True),
        ("ic+homogeneous+distilled", False),
        ("ic+homogeneous+mined", True),
    ]
    assert best.best_of(steps)["score"] == 62.0
    assert given.reported == ["ic: not pre-trained, as --pretrained is not given"]
    given.stored = (f"{best.best_of(steps)['name']}+pretrained",)
    assert [*steps, best.Step(name=given.stored[0], score=50.0, kept=False)] == best.improve(given, "ic")  # type: ignore[arg-type]


def test_of_alternatives_the_best_is_kept() -> None:
    given = Validated(mote=60.0, mote__unseen_by_mean=61.0, mote__shared=62.0)
    kept = [step["name"] for step in best.improve(given, "mote") if step["kept"]]  # type: ignore[arg-type]
    assert kept == ["mote", "mote+shared"]


def test_one_kind_of_data_for_all() -> None:
    given = Validated(em=60.0, ic=61.0, mote=59.0, em__five_tasks=63.0, ic__five_tasks=60.0, mote__five_tasks=60.0)
    found = best.scores_of_data(given)  # type: ignore[arg-type]
    assert found[""] == {"em": 60.0, "ic": 61.0, "mote": 59.0}
    assert best.best_data(found) == "+five-tasks"
    steps = best.improve(given, "mote+five-tasks")  # type: ignore[arg-type]
    assert best.best_of(steps)["name"] == "mote+five-tasks"
    in_full = [best.Step(name="mote+five-tasks+to-start-0.5", score=64.0, kept=True)]
    table = best.validation_tables({"data": found, "steps": {"mote": steps}, "in_full": {"mote": in_full}})
    assert "| **five-tasks** | 63.00 | 60.00 | 60.00 | 61.00 |" in table
    assert "| mote+five-tasks+late | 50.00 | no |" in table
    assert "| mote+five-tasks+to-start-0.5 | 64.00 | yes |" in table


def test_changes_of_the_training_come_before_what_is_made_after_it() -> None:
    given = Validated(mote__unseen_by_mean=60.0, mote__no_instructions__unseen_by_mean=61.0)
    steps = best.improve(given, "mote+unseen-by-mean", best.ORDER_IN_FULL)  # type: ignore[arg-type]
    assert [step["name"] for step in steps] == [
        "mote+unseen-by-mean",
        "mote+no-instructions+unseen-by-mean",
        "mote+no-instructions+unseen-by-mean+to-start-0.25",
        "mote+no-instructions+unseen-by-mean+to-start-0.5",
    ]
    assert best.best_of(steps) == steps[1]
    for step in steps:
        assert improvements.variant_of(step["name"]).made_of is not None


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


def test_a_late_mote_is_dense_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Recipe] = []
    monkeypatch.setattr(runs, "trained", lambda recipe, _: trained.append(recipe) or Path(recipe.output, "model"))
    given = runs.Runs(experiments.SCALES["smoke"], "SOURCE", "DATA", tmp_path)
    given.model("mote+expert-rates+late", 42)
    dense, experts = trained
    assert (dense.model.kind, experts.model.kind) == ("dense", "mote")
    assert (dense.model.source, experts.model.source) == ("SOURCE", f"{dense.output}/model")
    assert dense.training.num_train_epochs == experts.training.num_train_epochs == 0.5
    assert dense.training.seed != experts.training.seed == 42


def test_unseen_tasks_are_served_at_no_cost_to_seen_ones() -> None:
    def scores(seen: float, unseen_ones: float) -> dict[str, float]:
        return {**dict.fromkeys(unseen.SEEN_TYPES, seen), **dict.fromkeys(unseen.UNSEEN_TYPES, unseen_ones)}

    ways = {"mote": scores(60, 50), "dear": scores(59.4, 70), "cheap": scores(59.6, 55)}
    assert unseen.best_way(ways) == "cheap"
    assert "| **cheap** | 55.00 | 55.00 | 55.00 | 55.00 | 59.60 |" in unseen.ways_table(ways)


def test_scores_depend_on_the_teacher(tmp_path: Path) -> None:
    given = runs.Runs(experiments.SCALES["smoke"], str(ROOT / "examples" / "small-encoder"), "DATA", tmp_path)
    for name in ("mote+distilled", "mote+mined"):
        assert given.settings_of_scores(name, 42)["teacher"] == "all-MiniLM-L6-v2"
        assert replace(given, teacher="A/B").settings_of_scores(name, 42)["teacher"] == "B"
    assert "teacher" not in given.settings_of_scores("mote", 42)


def test_a_rate_for_all_or_for_one() -> None:
    sweep = {"em": {1e-4: 50.0, 2e-4: 52.0, 4e-4: 51.0}, "mote": {1e-4: 50.0, 2e-4: 51.0, 4e-4: 53.0}}
    assert runs.best_rate(sweep) == 4e-4
    assert runs.best_rate(sweep, "em") == 2e-4


def test_every_column_of_a_table_is_a_known_variant() -> None:
    known = {*experiments.VARIANTS, "start", "sem"}
    for table in (*claims.TABLES.values(), claims.RATES, claims.OWN_RATES):
        assert known.issuperset(table.variants)
        assert table.reference in table.variants
        for claim in table.claims:
            assert {claim.better, claim.other}.issubset(table.variants)


def test_table_shows_means_spread_gains_and_the_best() -> None:
    scores = scores_of(
        em={"r1": [50.0], "r2": [60.0], "c1": [70.0]},
        mote={"r1": [51.0, 53.0], "r2": [62.0, 64.0], "c1": [69.0, 69.0]},
    )
    table = claims.Table("", ("em", "mote"), "em")
    lines = tables.table_of(table, scores).splitlines()[2:]
    assert lines == [
        "| Retrieval (2) | 55.00 | **57.50 ± 1.41** (+2.50) |",
        "| Classification (1) | **70.00** | 69.00 ± 0.00 (-1.00) |",
        "| mean over all (3) | 60.00 | **61.33 ± 0.94** (+1.33) |",
    ]


def test_a_dataset_without_scores_of_a_variant_is_excluded() -> None:
    scores = scores_of(em={"r1": [50.0], "r2": [60.0]}, mote={"r1": [52.0]})
    assert tables.datasets_of(scores, (), ("em", "mote")) == ["r1"]


def test_a_relative_gain_and_its_verdict() -> None:
    base = [40.0, 50.0, 60.0, 70.0]
    names = ["r1", "r2", "r3", "r4"]

    def model(*gains: float) -> dict[str, list[float]]:
        return {name: [score + gain] for name, score, gain in zip(names, base, gains, strict=True)}

    scores = scores_of(em=model(0, 0, 0, 0), ic=model(2, 2.2, 1.8, 2), mote=model(3, 3.3, 2.7, 3))
    table = claims.Table("", ("em", "ic", "mote"), "em")
    claim = claims.Claim("mote", "ic", relative_to="em", relative=0.59)
    found = tables.compared(claim, table, scores)
    assert (found.tests.gain, found.relative) == (pytest.approx(1.0), pytest.approx(0.5))
    assert found.verdict == "same direction"
    against = tables.compared(claims.Claim("ic", "mote", relative_to="mote", relative=1.0), table, scores)
    assert (against.verdict, against.relative) == ("**disagrees**", None)
    unsure = tables.compared(claims.Claim("a", "b"), table, scores_of(a=model(5, -4, 3, -3), b=model(0, 0, 0, 0)))
    assert unsure.verdict == "same direction, not significant"


def test_a_verdict_needs_each_seed() -> None:
    datasets = {f"r{number}": 40.0 + number for number in range(4)}

    def model(*gains: float) -> dict[str, list[float]]:
        return {name: [score + gain for gain in gains] for name, score in datasets.items()}

    mote = model(3.0, 2.0, 1.0)
    mote["r1"][0] += 0.1  # a paired test needs some spread
    scores = scores_of(
        start=model(0.5), ic=model(0.0, 0.0, 1.5), em=model(0.0, 0.0, 0.0), two=model(0.0, 0.0), mote=mote
    )
    of = {
        name: tables.compared(claims.Claim("mote", name), claims.Table("", (), "em"), scores) for name in scores.every
    }
    assert of["em"].with_seeds == pytest.approx((3.025, 2.0, 1.0))
    assert of["start"].with_seeds == pytest.approx((2.525, 1.5, 0.5))
    assert of["two"].with_seeds == ()
    assert of["ic"].with_seeds == pytest.approx((3.025, 2.0, -0.5))
    assert of["ic"].tests.paired_t < 0.05
    assert of["em"].verdict == "same direction"
    assert of["ic"].verdict == "same direction, not significant"


def test_models_of_one_task_each_form_one_column() -> None:
    scores = scores_of(a={"r1": [1.0]}, b={"c1": [2.0]}, em={"r1": [0.0], "c1": [0.0]})
    joined = scores.joined("sem", ["a", "b"])
    assert joined.every == {"em": {"r1": [0.0], "c1": [0.0]}, "sem": {"r1": [1.0], "c1": [2.0]}}


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
    assert elsewhere.scores(["start"], seeds=(42, 43)).every["start"] == first.every["start"]
    with pytest.raises(
        ValueError, match=r"mote-seed42.json has .* differ in training.weight_decay \(None .* 0.5 here\)"
    ):
        replace(given, changes=("training.weight_decay=0.5",)).scores(["mote"])
    (tmp_path / "copy").symlink_to(ROOT / "examples" / "small-encoder")
    assert replace(given, source=str(tmp_path / "copy")).scores(["start", "mote"]) == first


def test_other_seeds_may_have_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(experiments.SCALES["smoke"], seeds=(42,), limits={("sts/*",): None})
    monkeypatch.setattr(experiments, "ALL_DATASETS", ("sts/*",))
    one = runs.Runs(scale, "SOURCE", "DATA", tmp_path / "out", kept=tmp_path / "kept")
    other = replace(one, source="OTHER", scale=replace(scale, seeds=(43,)))
    monkeypatch.setattr(runs, "hash_of_weights", str.lower)
    monkeypatch.setattr(runs.Runs, "model", lambda self, name, seed: tmp_path / name)
    monkeypatch.setattr(runs.Runs, "start", lambda self: tmp_path / "start")
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


@pytest.mark.slow
def test_the_best_recipes_are_looked_for_and_scored(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On few texts and in one step: each start, each kind of data, and each way of making a variant."""
    checkpoints = shared / "checkpoints"
    dense, sides = checkpoints / "paraphrase-MiniLM-L3-v2", ["search_query", "search_document"]
    (tmp_path / "cot" / "siamese" / "pretrained").mkdir(parents=True)
    (tmp_path / "cot" / "siamese" / "pretrained" / "model").symlink_to(dense)
    none = dict.fromkeys(sides, "")
    mote.upcycle(str(dense), tmp_path / "cot" / "mote" / "pretrained" / "model", experts=sides, instructions=none)
    monkeypatch.setattr(data, "PAIRS", {task: dict.fromkeys(of_task, 40) for task, of_task in data.PAIRS.items()})
    monkeypatch.setattr(data, "LABELLED", dict.fromkeys(data.LABELLED, 300))
    monkeypatch.setattr(data, "CORPUS", 10)
    monkeypatch.setattr(runs, "VALIDATION_LIMIT", 5)
    monkeypatch.setattr(best, "ORDER", (("distilled",), ("mined",), ("unseen-by-mean",)))
    monkeypatch.setattr("benchmarks.paper.reports.LIKE_IC", ("separate", "task-lora"))
    changes = ("training.batch_size=16", "training.max_steps=1", "model.max_length=32", "validation.limit=5")
    limits: dict[tuple[str, ...], int | None] = {("sts/*",): 5, ("reranking/*",): 5}
    medium = experiments.SCALES["medium"]
    scale = replace(
        medium, changes=changes, sweep=(1e-4, 2e-4), chosen_by=None, text_length=16, seeds=(42,), limits=limits
    )
    teacher = str(checkpoints / "all-MiniLM-L6-v2")
    given = runs.Runs(
        scale, str(dense), str(shared / "data"), tmp_path / "out", teacher=teacher, pretrained=tmp_path / "cot"
    )
    assert "One rate for all: " in make("sweep", given)
    assert given.model("ic-own-rate", 42).parent.name in ("ic-seed42", "ic-own-rate-seed42")
    trials = [given.out / f"trials-{rate:g}" / "mote-seed42" for rate in scale.sweep]
    assert all((folder / "model").is_dir() for folder in trials)
    found = make("best", given)
    assert all(re.search(rf"\| {base}(\+five-tasks)?\+distilled \|", found) for base in ("ic", "mote"))
    assert given.model("task-lora+pretrained", 42).is_dir()
    ways = make("unseen", given)
    assert "mote+unseen-by-mean" in ways
    assert "mote+five-tasks" in ways
    for improved in ("pretrained+shared", "five-tasks+search-expert+pretrained", "late+pretrained"):
        assert given.model(f"mote+{improved}", 42).is_dir()
    assert given.model("task-lora+late", 42).is_dir()


@pytest.mark.slow
def test_all_tables_and_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.paper", "all", "training.max_steps=1", "--scale", "smoke"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = (tmp_path / "smoke" / "results.md").read_text()
    names = ["table2", "table3", "table4", "table5", "table6", "table7", "figure1", "figure3", "figures4to7"]
    names = ["sweep", *names, "rates", "beyond", "unseen", "best"]
    assert [line.split(":")[0] for line in results.splitlines() if line.startswith("### ")] == [
        f"### {name}" for name in names
    ]
    assert (tmp_path / "smoke" / "figures4to7.png").stat().st_size > 10_000
    assert (tmp_path / "smoke" / "figure3" / "similarity.png").stat().st_size > 10_000
    assert "| mote over ic | Retrieval | +1.94, gain over em +59% |" in results
    kept = known_tables(tmp_path)
    tables_kept = {"claims", *names} - {"sweep", "rates", "unseen", "best"}
    assert kept.keys() == {f"smoke/{name}" for name in tables_kept}
    assert all(part in results for name, text in kept.items() if name != "smoke/claims" for part in text.split("\n\n"))
