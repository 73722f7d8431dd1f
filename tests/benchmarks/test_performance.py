"""benchmarks.performance: every benchmark runs, and missed targets are reported."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT

from benchmarks.performance.__main__ import BENCHMARKS
from benchmarks.performance.benchmark import Benchmark, Target


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.performance", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_targets_are_upper_or_lower_limits() -> None:
    assert Target("slower", 1.010, 1.01).met
    assert not Target("slower", 1.011, 1.01).met
    assert Target("faster", 2.0, 2, at_least=True).met
    assert not Target("faster", 1.9, 2, at_least=True).met


def test_a_benchmark_lists_met_and_missed_targets() -> None:
    targets = [Target("batch 1", 1.001, 1.01), Target("batch 32", 1.02, 1.01)]
    benchmark = Benchmark("forward", "Forward", ["batch", "ratio"], [["1", "1.001"]], targets, ["One thread."])
    assert "- batch 1: 1.001 (≤ 1.01), met\n- batch 32: 1.020 (≤ 1.01), MISSED\n- One thread." in str(benchmark)


def test_invalid_arguments() -> None:
    for words, said in (
        (["forwards"], "unknown benchmark 'forwards'; available: forward, mixed,"),
        (["--checkpoint", "none"], "config.json"),
    ):
        done = run(*words)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.slow
def test_every_benchmark_runs() -> None:
    done = run("--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("### ") == len(BENCHMARKS)
