"""benchmarks.performance: every benchmark runs, and missed targets are reported."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from benchmarks.performance.__main__ import BENCHMARKS, report
from benchmarks.performance.benchmark import Benchmark, Target


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.performance", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_targets_are_upper_or_lower_limits() -> None:
    assert Target("slower", 1.010, 1.01).met
    assert not Target("slower", 1.011, 1.01).met
    assert Target("faster", 2.0, 2, at_least=True).met
    assert not Target("faster", 1.9, 2, at_least=True).met


def test_the_report_lists_met_and_missed_targets() -> None:
    targets = [Target("batch 1", 1.001, 1.01), Target("batch 32", 1.02, 1.01)]
    benchmark = Benchmark(
        "forward", "Forward", ["batch", "ratio"], [["1", "1.001"], ["32", "1.020"]], targets, ["One thread."]
    )
    text = report([benchmark])
    assert "| Forward | batch 1 | 1.001 | ≤ 1.01 | yes |" in text
    assert "| Forward | batch 32 | 1.020 | ≤ 1.01 | **no** |" in text
    assert "- batch 32: 1.020 (≤ 1.01), MISSED\n- One thread." in text


def test_every_benchmark_has_a_module() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks" / "performance").glob("*.py")}
    assert modules >= BENCHMARKS.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["forwards"], "unknown benchmark 'forwards'; available: forward, mixed,"),
        (["--checkpoint", "none"], "config.json"),
    ],
)
def test_invalid_arguments(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path: Path) -> None:
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(BENCHMARKS)
    assert (tmp_path / "performance.md").read_text().count("### ") == len(BENCHMARKS)
