"""Printed text against what a page shows of it."""

import re

import pytest

NUMBER = re.compile(r"-?\d+\.\d+")


def assert_same_output(printed: str, shown: str, tolerance: float) -> None:
    """Compare two texts: numbers with a decimal point within the tolerance, all else exactly."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    assert [*map(float, NUMBER.findall(printed))] == pytest.approx([*map(float, NUMBER.findall(shown))], abs=tolerance)
