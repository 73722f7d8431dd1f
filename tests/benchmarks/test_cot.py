"""benchmarks.cot: which models are trained, and how scores become a table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import mote
from benchmarks import cot
from benchmarks.cot import KINDS, VARIANTS, Comparison, report

ALL = Comparison("MODEL", Path("DATA"), Path("OUT"), [42, 43], quick=False, only=list(VARIANTS), kept={})


def scores_of(name: str, first: float) -> dict[str, dict[str, list[float]]]:
    seeds = [0.0, 1.0] if VARIANTS[name].main else [0.0]
    return {
        f"{stage} {kind}": {"a": [first + seed for seed in seeds], "b": [first + 2 + 3 * seed for seed in seeds]}
        for stage in VARIANTS[name].paper
        for kind in KINDS
    }


def test_variants_with_kept_scores_are_not_trained() -> None:
    first = [(name, 42) for name in VARIANTS]
    assert ALL.runs() == [*first, ("siamese", 43), ("mote", 43), ("separate", 43)]
    assert replace(ALL, only=["mote"]).runs() == [("mote", 42), ("mote", 43)]
    assert replace(ALL, kept={"siamese": {}, "mote": {}}).runs() == [
        ("separate", 42),
        ("mote, switched", 42),
        ("separate", 43),
    ]


def test_kept_scores_are_joined_with_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"separate": scores_of("separate", 50.0)}

    def scores(self: Comparison, name: str, seed: int, timeout: float = -1) -> dict[str, dict[str, float]]:
        stages = VARIANTS[name].paper if seed == 42 else ["stage2"]
        return {f"{stage} {kind}": {"a": float(seed)} for stage in stages for kind in KINDS}

    monkeypatch.setattr(Comparison, "scores", scores)
    every = replace(ALL, only=["siamese", "separate"], kept=kept).collected()
    assert list(every) == ["siamese", "separate"]
    assert every["separate"] == kept["separate"]
    assert every["siamese"]["stage2 hybrid"] == {"a": [42.0, 43.0]}


def test_a_failed_dataset_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = mote.Evaluation({"stage2": {}}, {"a": "Retrieval"}, failures={"stage2": {"a": "out of memory"}})
    monkeypatch.setattr(Comparison, "model", lambda *_: tmp_path)
    monkeypatch.setattr(mote, "evaluate", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="a: out of memory"):
        replace(ALL, out=tmp_path).scores("siamese", 42)


def test_kept_scores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "cot.json"
    kept.write_text(json.dumps({"siamese": scores_of("siamese", 40.0)}))
    command = ["cot", "--source", "MODEL", "--data", "DATA", "--out", str(tmp_path / "new"), "--kept", str(kept)]
    monkeypatch.setattr("sys.argv", [*command, "--only", "siamese"])
    cot.main()
    assert "| siamese | mined | 42.00" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "scores.json").read_text()) == json.loads(kept.read_text())


def test_table_shows_the_variants_that_have_scores() -> None:
    every = {"siamese": scores_of("siamese", 40.0), "mote": scores_of("mote", 42.0)}
    table = report(every)
    assert "| siamese | mined | 42.00 ± 1.41 |" in table
    assert "| mote | BM25 | 44.00 ± 1.41 | 44.00 ± 1.41 | 44.00 ± 1.41 | 37.7 | 39.6 | 40.5 |" in table
    assert "separate" not in table
    assert "mote, stage2 dense over siamese, stage2 dense, 2 datasets: +2.00 on average, higher on 2" in table
    assert cot.report({"siamese": every["siamese"]}).count("\n") == 3


def test_models_are_compared_by_the_seeds_that_both_have() -> None:
    table = report({"mote": scores_of("mote", 42.0), "mote, switched": scores_of("mote, switched", 40.0)})
    assert "mote, stage2 dense over mote, switched, stage2 dense, 2 datasets: +2.00 on average" in table
