"""Means, gains, tables and JSON of scores; significance over datasets."""

import json
import re
from typing import Any

import pytest
from scipy import stats

from mote import Evaluation

SETTINGS = {
    "limit": 10,
    "dtype": "bfloat16",
    "retrieval": "sparse",
    "mteb": ["2.26.1"],
    "instructions": {"s1": "x", "s2": "y"},
}
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
    evaluation = three_models(reference="dense", settings=SETTINGS)
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
    about = "x 100; mteb: 2.26.1; dtype: bfloat16; retrieval: sparse; instructions: s1, s2; datasets cut by --limit 10,"
    assert all(part in lines[0] for part in (about, "gain over dense", "best in bold"))
    assert "- Means are over the 3 of 4 datasets" in str(evaluation)
    assert "- Failed: part on s2: ValueError: no" in str(evaluation)
    assert "| s2 | STS | main | 60.00 | **64.00** (+4.00) | failed |" in re.sub(" +", " ", evaluation.per_dataset())
    alone = str(Evaluation({"a": {"s1": 50.0}}, {"s1": "STS"}))
    assert alone.startswith("Main scores of MTEB x 100.\n")
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


def of_scores(ours: list[float], theirs: list[float]) -> Evaluation:
    names = [f"d{index}" for index in range(len(ours))]
    scores = {"ours": dict(zip(names, ours, strict=True)), "theirs": dict(zip(names, theirs, strict=True))}
    return Evaluation(scores, dict.fromkeys(names, "STS"))


def test_p_values_by_hand() -> None:
    compared = of_scores([1.0, 3.0, 5.0], [0.0, 1.0, 2.0]).compare("ours", "theirs")
    assert (compared.gain, compared.higher, compared.lower, compared.datasets) == (2.0, 3, 0, 3)
    assert compared.wilcoxon == pytest.approx(1 / 8)  # one of the 8 ways to sign three gains
    # t = 2 / (1 / √3) = √12 with two degrees of freedom, for which P(T > t) = 1/2 - t / (2 √(t² + 2))
    assert compared.paired_t == pytest.approx(0.5 - 12**0.5 / (2 * 14**0.5))
    # t = (3 - 1) / √(4/3 + 1/3) with (5/3)² / ((4/3)² / 2 + (1/3)² / 2) = 50/17 degrees of freedom
    assert compared.welch == pytest.approx(stats.t.sf(2 / (5 / 3) ** 0.5, 50 / 17))


def test_where_a_test_says_nothing() -> None:
    cases: list[tuple[list[float], list[float], str]] = [
        ([], [], "no dataset has scores of both"),
        ([2.0], [1.0], "1 dataset: +1.00 on average, higher on 1, lower on 0; a test needs 2 datasets or more"),
        ([2.0, 3.0], [1.0, 2.0], "paired t none (no spread), Wilcoxon 0.250"),
        ([1.0, 2.0], [1.0, 2.0], "Welch 0.500, paired t none (no spread), Wilcoxon none (no spread)"),
        ([1.0, 1.0], [1.0, 1.0], "Welch none (no spread)"),
    ]
    for ours, theirs, said in cases:
        assert said in str(of_scores(ours, theirs).compare("ours", "theirs"))


def test_equal_gains_are_ties_although_floats_differ() -> None:
    gains = [0.1, -0.1, 0.1]
    two = [of_scores([70.1, 50.0, 61.2], [70.0, 50.1, 61.1]), of_scores([50.1, 70.0, 61.2], [50.0, 70.1, 61.1])]
    for evaluation in two:
        expected = stats.wilcoxon(gains, alternative="greater").pvalue
        assert evaluation.compare("ours", "theirs").wilcoxon == pytest.approx(expected)
