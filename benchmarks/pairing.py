"""Compare running times side by side: these machines are noisy, so only ratios of paired runs are worth reading."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Comparison(NamedTuple):
    """Medians over paired runs.

    Attributes:
        baseline: Seconds.
        candidate: Seconds.
        ratio: The median of candidate / baseline, pair by pair.
    """

    baseline: float
    candidate: float
    ratio: float


def compare(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    seconds: float = 6.0,
    synchronize: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run two functions in turn, which one first changing from pair to pair, and compare their times.

    Args:
        baseline: What to compare with.
        candidate: What to compare.
        seconds: How long to go on, for both together; at least 7 pairs are run.
        synchronize: Waits for a GPU.

    Returns:
        Medians.
    """
    for _ in range(3):
        baseline()
        candidate()
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < 7 or time.perf_counter() - started < seconds:
        if len(pairs) % 2:
            second, first = _time(candidate, synchronize), _time(baseline, synchronize)
        else:
            first, second = _time(baseline, synchronize), _time(candidate, synchronize)
        pairs.append((first, second))
    return Comparison(
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
        statistics.median(second / first for first, second in pairs),
    )


def _time(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started
