"""benchmarks.paper: possible improvements of a variant, and the search for the best."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import trusted
from helpers.paths import SMALL_ENCODER

import mote
from benchmarks.paper import best, data, experiments, improvements, runs, unseen
from benchmarks.paper.interpolation import towards_start
from benchmarks.paper.reports import make
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import fixed_settings


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
    steps = best.improve(given, best.ORDER, "ic")  # type: ignore[arg-type]
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
    assert [*steps, best.Step(name=given.stored[0], score=50.0, kept=False)] == best.improve(given, best.ORDER, "ic")  # type: ignore[arg-type]


def test_of_alternatives_the_best_is_kept() -> None:
    given = Validated(mote=60.0, mote__unseen_by_mean=61.0, mote__shared=62.0)
    kept = [step["name"] for step in best.improve(given, best.ORDER, "mote") if step["kept"]]  # type: ignore[arg-type]
    assert kept == ["mote", "mote+shared"]


def test_one_kind_of_data_for_all() -> None:
    given = Validated(em=60.0, ic=61.0, mote=59.0, em__five_tasks=63.0, ic__five_tasks=60.0, mote__five_tasks=60.0)
    found = best.scores_of_data(given)  # type: ignore[arg-type]
    assert found[""] == {"em": 60.0, "ic": 61.0, "mote": 59.0}
    assert best.best_data(found) == "+five-tasks"
    steps = best.improve(given, best.ORDER, "mote+five-tasks")  # type: ignore[arg-type]
    assert best.best_of(steps)["name"] == "mote+five-tasks"
    in_full = [best.Step(name="mote+five-tasks+to-start-0.5", score=64.0, kept=True)]
    table = best.validation_tables({"data": found, "steps": {"mote": steps}, "in_full": {"mote": in_full}})
    assert "| **five-tasks** | 63.00 | 60.00 | 60.00 | 61.00 |" in table
    assert "| mote+five-tasks+late | 50.00 | no |" in table
    assert "| mote+five-tasks+to-start-0.5 | 64.00 | yes |" in table


def test_changes_of_the_training_come_before_what_is_made_after_it() -> None:
    given = Validated(mote__unseen_by_mean=60.0, mote__no_instructions__unseen_by_mean=61.0)
    steps = best.improve(given, best.ORDER_IN_FULL, "mote+unseen-by-mean")  # type: ignore[arg-type]
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
    monkeypatch.setattr("benchmarks.paper.reports.ORDER", (("distilled",), ("mined",), ("unseen-by-mean",)))
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
