"""benchmarks.paper: the variants, their recipes and learning rates, and the whole command."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

from benchmarks.paper import experiments, improvements, runs
from benchmarks.paper.__main__ import main
from benchmarks.paper.experiments import TASKS
from benchmarks.paper.reports import score
from benchmarks.results import known_tables


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
    kept = ROOT / "docs/results/medium-bf16"
    other = runs.Runs(experiments.SCALES["medium-bf16"], "S", "D", tmp_path / "medium-bf16", kept=kept)
    assert medium.choosing == other
    assert other.choosing is other
    vars(medium.choosing)["sweep"] = {"em": {2e-4: 50.0, 4e-4: 51.0}}
    assert medium.rate(experiments.VARIANTS["ic"]) == 4e-4
    assert medium.choosing.trials.can_validate("ic+five-tasks+distilled+pretrained")


def test_a_scale_that_shares_the_distilled_start_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "distilled", lambda of, trained_on: f"{of.out.name} {trained_on}")
    variant = improvements.variant_of("ic+five-tasks+distilled")
    for name, out in {"large-gpu": "medium-bf16", "medium-gpu": "medium-gpu"}.items():
        given = runs.Runs(experiments.SCALES[name], "S", "D", tmp_path / name)
        assert given.source_of(variant) == f"{out} five_tasks"


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


def test_a_rate_for_all_or_for_one() -> None:
    sweep = {"em": {1e-4: 50.0, 2e-4: 52.0, 4e-4: 51.0}, "mote": {1e-4: 50.0, 2e-4: 51.0, 4e-4: 53.0}}
    assert runs.best_rate(sweep) == 4e-4
    assert runs.best_rate(sweep, "em") == 2e-4


def test_variants_are_scored_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the given seeds, or those of each; three separate models one by one."""
    given = runs.Runs(experiments.SCALES["smoke"], "SOURCE", "DATA", tmp_path)
    asked: list[tuple[str, int]] = []

    def tested(self: runs.Runs, name: str, seed: int, timeout: float = -1) -> runs.ScoresOfTypes:
        asked.append((name, seed))
        return {"STS": {"s": float(seed)}}

    monkeypatch.setattr(runs.Runs, "tested", tested)
    monkeypatch.setattr(runs.Runs, "validated", lambda self, name, timeout=-1: {"STS": len(name), "Retrieval": 10.0})
    table = score(["tlr", "sem"], "tests", [43, 44], given)
    assert asked == [(name, seed) for seed in (43, 44) for name in ("tlr", *(f"sem-{task}" for task in TASKS))]
    assert table.splitlines()[2] == "| tlr | 43.00 | 44.00 | 43.50 | 43.50 |"
    assert score(["tlr"], "tests", None, given).splitlines()[2] == "| tlr | 42.00 | 42.00 |"
    table = score(["em", "mote+homogeneous"], "validation", None, given)
    assert table.splitlines()[2:] == ["| mote+homogeneous | 13.00 | 10.00 | 16.00 |", "| em | 6.00 | 10.00 | 2.00 |"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mot+homogeneous", "Unknown part 'mot' of variant 'mot+homogeneous'. Did you mean 'mote'?"),
        ("mote+homogenous", "Unknown part 'homogenous' of variant 'mote+homogenous'. Did you mean 'homogeneous'?"),
    ],
)
def test_an_unknown_variant_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        improvements.variant_of(name)


@pytest.mark.parametrize("given", [["score"], ["table2", "--variants", "mote"]])
def test_variants_are_for_score_alone(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", *given, "--scale", "smoke", "--out", "OUT"])
    with pytest.raises(SystemExit):
        main()
    assert "score needs --variants, which no other table or figure takes" in capsys.readouterr().err


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
    tables_kept = {"claims", "models", *names} - {"sweep", "rates", "unseen", "best"}
    assert kept.keys() == {f"smoke/{name}" for name in tables_kept}
    beside = {"smoke/claims", "smoke/models"}  # not in the command's output
    assert all(part in results for name, text in kept.items() if name not in beside for part in text.split("\n\n"))
