"""Means, gains, tables and JSON of scores."""

import json
import re
from typing import Any

import pytest

from mote import Evaluation

TYPES = {"s1": "STS", "s2": "STS", "r1": "Retrieval", "x1": "BitextMining"}


def three_models(**settings: Any) -> Evaluation:
    return Evaluation(
        scores={
            "dense": {"s1": 50.0, "s2": 60.0, "r1": 20.0, "x1": 10.0},
            "mote": {"s1": 51.0, "s2": 64.0, "r1": 20.0, "x1": 9.0},
            "part": {"s1": 40.0, "r1": 30.0, "x1": 10.0},
        },
        types=TYPES,
        metrics=dict.fromkeys(TYPES, "main"),
        failures={"part": {"s2": "ValueError: no"}},
        **settings,
    )


def test_means_are_over_the_datasets_that_all_models_have() -> None:
    evaluation = three_models()
    assert evaluation.datasets == ["r1", "s1", "s2", "x1"]  # the paper's types in the paper's order, then others
    assert evaluation.common == ["r1", "s1", "x1"]
    over = {"mean over datasets": pytest.approx(80 / 3), "mean over types": pytest.approx(80 / 3)}
    assert evaluation.means("mote") == {"Retrieval": 20.0, "STS": 51.0, "BitextMining": 9.0, **over}
    without = Evaluation({name: evaluation.scores[name] for name in ("dense", "mote")}, TYPES)
    assert without.means("mote")["STS"] == 57.5
    assert without.means("dense")["mean over datasets"] == 35.0
    assert without.means("mote")["mean over types"] == pytest.approx((57.5 + 20 + 9) / 3)


def test_a_model_without_any_score_does_not_take_the_others_theirs() -> None:
    evaluation = Evaluation({"a": {"s1": 1.0}, "b": {}}, {"s1": "STS"}, failures={"b": {"s1": "no"}}, reference="a")
    assert evaluation.means("a")["STS"] == 1.0
    assert evaluation.means("b") == {}
    assert "| STS (1)                | 1.00 | - |" in str(evaluation)
    assert "no dataset has scores of both" in str(evaluation)
    assert json.loads(evaluation.to_json())["means"]["b"] == {}


def test_the_tables() -> None:
    evaluation = three_models(reference="dense", settings={"limit": 10, "dtype": "bfloat16", "mteb": ["2.26.1"]})
    lines = str(evaluation).splitlines()
    assert [re.sub(" +", " ", line) for line in [lines[2], *lines[4:9]]] == [
        "| | dense | mote | part |",
        "| Retrieval (1) | 20.00 | 20.00 (+0.00) | **30.00** (+10.00) |",
        "| STS (1) | 50.00 | **51.00** (+1.00) | 40.00 (-10.00) |",
        "| BitextMining (1) | **10.00** | 9.00 (-1.00) | **10.00** (+0.00) |",
        "| mean over datasets (3) | **26.67** | **26.67** (+0.00) | **26.67** (+0.00) |",
        "| mean over types (3) | **26.67** | **26.67** (+0.00) | **26.67** (+0.00) |",
    ]
    assert len({len(line) for line in lines[2:9]}) == 1
    assert all(
        part in lines[0] for part in ("mteb: 2.26.1", "bfloat16", "--limit 10", "gain over dense", "best in bold")
    )
    assert "- Means are over the 3 of 4 datasets" in str(evaluation)
    assert "- Failed: part on s2: ValueError: no" in str(evaluation)
    assert "| s2 | STS | main | 60.00 | **64.00** (+4.00) | failed |" in re.sub(" +", " ", evaluation.per_dataset())
    alone = str(Evaluation({"a": {"s1": 50.0}}, {"s1": "STS"}))
    assert "**" not in alone
    assert "gain" not in alone


def test_scores_go_through_json() -> None:
    evaluation = three_models(reference="dense", settings={"limit": None, "mteb": ["2.26.1"]})
    content = json.loads(evaluation.to_json())
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    assert content["means"]["mote"]["STS"] == 51.0
    assert [one["model"] for one in content["comparisons"]] == ["mote", "part"]


def test_scores_that_do_not_hold_are_refused() -> None:
    with pytest.raises(KeyError, match="s9"):
        str(Evaluation({"a": {"s9": 1.0}}, {"s1": "STS"}))
    with pytest.raises(ValueError, match="Unknown model 'c'"):
        Evaluation({"a": {"s1": 1.0}}, {"s1": "STS"}, reference="c")


def test_the_heading_says_what_was_scored_if_it_is_not_the_models_own() -> None:
    scores: dict[str, Any] = {"scores": {"a": {"s": 1.0, "t": 2.0}}, "types": {"s": "STS", "t": "STS"}}
    own = str(Evaluation(**scores, settings={"retrieval": None, "instructions": {}}))
    assert own.startswith("Main scores of MTEB x 100.\n")
    changed = Evaluation(**scores, settings={"retrieval": "sparse", "instructions": {"s": "Find: ", "t": "Look: "}})
    assert "; retrieval: sparse; instructions: s, t." in str(changed)
