"""Significance tests over datasets: is one model better than another?"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Comparison:
    """A model compared with a reference, over the datasets that both have scores for.

    The p-values are one-sided: the probability of a gain as large as this, if the model were not better. Welch's t-test
    is the paper's. It treats the scores of the two models as independent samples, so that the spread between datasets
    hides a gain; the paired tests look at the gain on each dataset.

    Attributes:
        model: The model.
        reference: The model that it is compared with.
        datasets: Number of datasets that both have scores for.
        gain: Mean of the model's scores minus the mean of the reference's.
        higher: Number of datasets on which the model scores higher.
        lower: Number of datasets on which it scores lower.
        welch: p of Welch's t-test. None if undefined: fewer than 2 datasets, or equal scores in each model.
        paired_t: p of the paired t-test. None if undefined: fewer than 2 datasets, or all gains equal.
        wilcoxon: p of Wilcoxon's signed-rank test. None if undefined: fewer than 2 datasets, or no gains.
    """

    model: str
    reference: str
    datasets: int
    gain: float
    higher: int
    lower: int
    welch: float | None
    paired_t: float | None
    wilcoxon: float | None

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
        return text + "one-sided p: " + ", ".join(f"{name} {_p(value)}" for name, value in tests.items())


def compare_scores(model: str, reference: str, scores: Sequence[float], others: Sequence[float]) -> Comparison:
    """Test whether a model is better than another.

    Args:
        model: Name of the model.
        reference: Name of the other.
        scores: The model's, one for each dataset.
        others: The reference's, of the same datasets in the same order.

    Raises:
        ValueError: If the numbers of scores differ.
    """
    if len(scores) != len(others):
        raise ValueError(f"{model} has {len(scores)} scores, {reference} has {len(others)}: expected the same datasets")
    gains = [round(ours - theirs, 9) for ours, theirs in zip(scores, others, strict=True)]  # ties stay ties
    mean = sum(gains) / len(gains) if gains else 0.0
    signs = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return Comparison(model, reference, len(gains), mean, *signs, *_p_values(scores, others, gains))


def _p_values(
    scores: Sequence[float], others: Sequence[float], gains: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    if len(gains) < 2:
        return None, None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few datasets and about ties, for which scipy approximates
        return (
            _number(stats.ttest_ind(scores, others, equal_var=False, alternative="greater").pvalue)
            if _spread(scores) or _spread(others)
            else None,
            _number(stats.ttest_rel(scores, others, alternative="greater").pvalue) if _spread(gains) else None,
            _number(stats.wilcoxon(gains, alternative="greater").pvalue) if any(gains) else None,
        )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _spread(values: Sequence[float]) -> bool:
    """Whether values differ by more than the rounding of sums; scipy divides by their variance."""
    return max(values) - min(values) > 1e-9


def _p(value: float | None) -> str:
    if value is None:
        return "none (no spread)"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
