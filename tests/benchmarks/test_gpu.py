"""benchmarks.gpu: every part runs on a CPU, is not run again, and the page's section is replaced."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import NEEDING_GPU, PARTS, main, show
from benchmarks.gpu.parts import measure
from mote.corpora.encoder import Encoder

QUICK = ("forward", "experts")
LONG = [name for name in PARTS if name not in (*QUICK, *NEEDING_GPU, "tests")]  # which is a pytest of its own
BEFORE, AFTER = "# Page\n\nBefore.\n\n## On a GPU\n\n", "\n\n## After\n\nThe end.\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_every_part_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in ("model", "identity"):  # as it was, at the end
        monkeypatch.setattr(Encoder, changed, getattr(Encoder, changed))
    measure(name, True, tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert all(math.isfinite(each["ratio"]) for each in figures)
    shown = show(name, {"parts": {name: figures}})
    assert shown.startswith("### ")
    assert all(each["what"] in shown for each in figures)
    assert name != "offloading" or "\n- " not in shown  # no bar is missed


def test_limits_of_all_parts_fit_into_ten_minutes() -> None:
    assert sum(seconds for _, seconds, _ in PARTS.values()) <= 600


@pytest.mark.long
def test_parts_are_kept_and_the_section_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "gpu.json", tmp_path / "page.md"
    page.write_text(f"{BEFORE}Old.{AFTER}", "utf-8")

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), "--tiny", "--commit", "abc", *words])
        assert main() == 0
        return capsys.readouterr().out

    assert "already" not in run("experts", "tests", "--page", str(page))
    kept, text = out.read_text("utf-8"), page.read_text("utf-8")
    assert text.startswith(f"{BEFORE}`python -m benchmarks.gpu` on one ")
    assert text.endswith(AFTER)
    assert "commit abc" in text
    assert "### One task / dense\n\nNot measured." in text
    assert "experts: already measured" in run("experts", *([] if torch.cuda.is_available() else NEEDING_GPU))
    assert out.read_text("utf-8") == kept
    page.write_text(f"{BEFORE}Old.{AFTER}", "utf-8")
    run("--page", str(page), "--only-page")
    assert page.read_text("utf-8") == text
