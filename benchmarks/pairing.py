"""Compare running times by paired runs: on noisy machines only ratios of paired runs are meaningful."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Comparison(NamedTuple):
    """Medians over paired runs.

    Attributes:
        baseline: Of the baseline.
        candidate: Of the candidate.
        ratio: Median of candidate / baseline over the pairs.
    """

    baseline: float
    candidate: float
    ratio: float


def compare(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    seconds: float = 6.0,
    least: int = 7,
    synchronize: Callable[[], None] = lambda: None,
) -> Comparison:
    """Time two functions in turn, swapping their order from pair to pair.

    Args:
        baseline: Reference.
        candidate: Function to compare with it.
        seconds: Total measuring time.
        least: Pairs, at least.
        synchronize: Function that waits for a GPU.
    """
    for _ in range(min(3, least)):
        baseline()
        candidate()
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < least or time.perf_counter() - started < seconds:
        if len(pairs) % 2:
            second, first = _time(candidate, synchronize), _time(baseline, synchronize)
        else:
            first, second = _time(baseline, synchronize), _time(candidate, synchronize)
        pairs.append((first, second))
    return medians(pairs)


def medians(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Return the medians of paired values."""
    baseline, candidate = map(statistics.median, zip(*pairs, strict=True))
    return Comparison(baseline, candidate, statistics.median(second / first for first, second in pairs))


def _time(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started
