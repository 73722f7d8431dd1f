"""Significance tests over datasets."""

import numpy as np
import pytest
from scipy import stats

from mote import Evaluation


def of_scores(ours: list[float], theirs: list[float]) -> Evaluation:
    names = [f"d{index}" for index in range(len(ours))]
    scores = {"ours": dict(zip(names, ours, strict=True)), "theirs": dict(zip(names, theirs, strict=True))}
    return Evaluation(scores, dict.fromkeys(names, "STS"))


def test_p_values_are_scipys() -> None:
    random = np.random.default_rng(0)
    theirs = random.uniform(20, 90, 30)
    ours = theirs + random.normal(0.5, 1, 30)
    compared = of_scores(ours.tolist(), theirs.tolist()).compare("ours", "theirs")
    assert compared.welch == pytest.approx(stats.ttest_ind(ours, theirs, equal_var=False, alternative="greater").pvalue)
    assert compared.paired_t == pytest.approx(stats.ttest_rel(ours, theirs, alternative="greater").pvalue)
    assert compared.wilcoxon == pytest.approx(stats.wilcoxon(ours, theirs, alternative="greater").pvalue)
    assert compared.paired_t < 0.05 < compared.welch  # the spread between datasets hides the gain from Welch


def test_p_values_by_hand() -> None:
    compared = of_scores([1.0, 3.0, 5.0], [0.0, 1.0, 2.0]).compare("ours", "theirs")
    assert (compared.gain, compared.higher, compared.lower, compared.datasets) == (2.0, 3, 0, 3)
    assert compared.wilcoxon == pytest.approx(1 / 8)  # one of the 8 ways to sign three gains
    # t = 2 / (1 / √3) = √12 with two degrees of freedom, for which P(T > t) = 1/2 - t / (2 √(t² + 2))
    assert compared.paired_t == pytest.approx(0.5 - 12**0.5 / (2 * 14**0.5))
    # t = (3 - 1) / √(4/3 + 1/3) with (5/3)² / ((4/3)² / 2 + (1/3)² / 2) = 50/17 degrees of freedom
    assert compared.welch == pytest.approx(stats.t.sf(2 / (5 / 3) ** 0.5, 50 / 17))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([], [], "no dataset has scores of both"),
        ([2.0], [1.0], "1 dataset: +1.00 on average, higher on 1, lower on 0; a test needs 2 datasets or more"),
        ([2.0, 3.0], [1.0, 2.0], "paired t none (no spread), Wilcoxon 0.250"),
        ([1.0, 2.0], [1.0, 2.0], "Welch 0.500, paired t none (no spread), Wilcoxon none (no spread)"),
        ([1.0, 1.0], [1.0, 1.0], "Welch none (no spread)"),
    ],
)
def test_where_a_test_says_nothing(ours: list[float], theirs: list[float], said: str) -> None:
    assert said in str(of_scores(ours, theirs).compare("ours", "theirs"))


def test_equal_gains_are_ties_although_floats_differ() -> None:
    gains = [0.1, -0.1, 0.1]
    two = [of_scores([70.1, 50.0, 61.2], [70.0, 50.1, 61.1]), of_scores([50.1, 70.0, 61.2], [50.0, 70.1, 61.1])]
    for evaluation in two:
        expected = stats.wilcoxon(gains, alternative="greater").pvalue
        assert evaluation.compare("ours", "theirs").wilcoxon == pytest.approx(expected)
