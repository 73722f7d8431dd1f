"""Significance tests: is one model better than another, or are its values lower?"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


@dataclass(frozen=True)
class Comparison:
    """A model compared with a reference, over the datasets that both have scores for.

    The p-values are one-sided: the probability of a gain as large as this, if the model were not better. Welch's t-test
    is the paper's. It treats the scores of the two models as independent samples, so that the spread between datasets
    hides a gain; the paired tests look at the gain on each dataset. With fewer than 2 datasets there are none.
    """

    model: str
    reference: str
    datasets: int  # number of datasets that both have scores for
    gain: float  # mean of the model's scores minus the mean of the reference's
    higher: int  # number of datasets on which the model scores higher
    lower: int  # number of datasets on which it scores lower
    welch: float | None  # p of Welch's t-test; None if all scores of each model are equal
    paired_t: float | None  # p of the paired t-test; None if all gains are equal
    wilcoxon: float | None  # p of Wilcoxon's signed-rank test; None if there are no gains

    def __str__(self) -> str:
        """Format as one line."""
        over = f"{self.model} over {self.reference}"
        if self.datasets == 0:
            return f"{over}: no dataset has scores of both"
        counted = f"{self.datasets} dataset{'s' if self.datasets > 1 else ''}"
        text = f"{over}, {counted}: {self.gain:+.2f} on average, higher on {self.higher}, lower on {self.lower}; "
        if self.datasets < 2:
            return text + "a test needs 2 datasets or more"
        tests = {"Welch": self.welch, "paired t": self.paired_t, "Wilcoxon": self.wilcoxon}
        values = [f"{name} {'none (no spread)' if p is None else decimals(p)}" for name, p in tests.items()]
        return f"{text}one-sided p: {', '.join(values)}"


def compare_scores(model: str, reference: str, scores: Sequence[float], others: Sequence[float]) -> Comparison:
    """Test whether a model is better than another, by the scores of both on the same datasets, in the same order."""
    # Rounded, so that gains which differ only in their last bits are ties.
    gains = [round(ours - theirs, 9) for ours, theirs in zip(scores, others, strict=True)]
    welch = paired_t = wilcoxon = None
    if len(gains) > 1:
        welch = welch_test(others, scores).p
        with warnings.catch_warnings():
            # About few datasets and about ties, for which scipy approximates.
            warnings.simplefilter("ignore")
            if len(set(gains)) > 1:
                paired_t = float(stats.ttest_rel(scores, others, alternative="greater").pvalue)
            if any(gains):
                wilcoxon = float(stats.wilcoxon(gains, alternative="greater").pvalue)
    mean = sum(gains) / len(gains) if gains else 0.0
    higher, lower = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return Comparison(model, reference, len(gains), mean, higher, lower, welch, paired_t, wilcoxon)


@dataclass(frozen=True)
class WelchTest:
    """One-sided Welch's t-test: is the mean of the first sample lower than that of the second?

    Without a result if neither sample varies by more than rounding.
    """

    mean_first: float
    mean_second: float
    t: float | None = None  # test statistic, negative if the first mean is lower
    degrees_of_freedom: float | None = None  # those of Welch and Satterthwaite
    p: float | None = None  # probability of at least this difference if the first mean were not lower


def welch_test(first: ArrayLike, second: ArrayLike) -> WelchTest:
    """Test whether the mean of the first sample is lower than that of the second."""
    samples = [np.asarray(sample, dtype=np.float64) for sample in (first, second)]
    means = float(samples[0].mean()), float(samples[1].mean())
    if all(np.ptp(sample) <= 1e-9 * np.abs(sample).max() for sample in samples):
        return WelchTest(*means)
    with warnings.catch_warnings():
        # One of the samples may be constant.
        warnings.simplefilter("ignore")
        test = stats.ttest_ind(*samples, equal_var=False, alternative="less")
    return WelchTest(*means, float(test.statistic), float(test.df), float(test.pvalue))


def decimals(value: float) -> str:
    """Format a number with three decimals, or a small one as a power of ten: `0.793`, `7.2e-05`."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"
