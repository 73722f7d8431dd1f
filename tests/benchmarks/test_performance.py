"""benchmarks/performance: that every figure can be measured, and that a missed bar is said."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from benchmarks.performance.__main__ import FIGURES, report
from benchmarks.performance.figures import Bar, Figure


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.performance", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_bars_are_judged_on_their_side() -> None:
    assert Bar("slower", 1.010, 1.01).holds
    assert not Bar("slower", 1.011, 1.01).holds
    assert Bar("faster", 2.0, 2, at_least=True).holds
    assert not Bar("faster", 1.9, 2, at_least=True).holds


def test_the_report_names_every_bar_and_says_which_are_missed() -> None:
    bars = [Bar("batch 1", 1.001, 1.01), Bar("batch 32", 1.02, 1.01)]
    figure = Figure("forward", "Forward", ["batch", "ratio"], [["1", "1.001"], ["32", "1.020"]], bars, ["One thread."])
    text = report([figure])
    assert "| Forward | batch 1 | 1.001 | ≤ 1.01 | yes |" in text
    assert "| Forward | batch 32 | 1.020 | ≤ 1.01 | **no** |" in text
    assert "- batch 32: 1.020 (≤ 1.01) MISSED\n- One thread." in text


def test_every_figure_has_a_module_of_its_name() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks" / "performance").glob("*.py")}
    assert modules >= FIGURES.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["forwards"], "unknown figure 'forwards'; there are forward, mixed,"), (["--checkpoint", "none"], "config.json")],
)
def test_what_cannot_be_measured_is_named(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_every_figure_can_be_measured(tmp_path: Path) -> None:
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(FIGURES)
    assert (tmp_path / "performance.md").read_text().count("### ") == len(FIGURES)
