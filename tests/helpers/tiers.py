"""Which tier of the test suite a test belongs to, where a rule can tell."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest

TESTS = Path(__file__).parents[1]


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test, one of its fixtures, or what they call in `tests/`, uses `subprocess` or `os.fork`."""
    fixtures = [definition.func for found in item._fixtureinfo.name2fixturedefs.values() for definition in found]  # type: ignore[attr-defined]
    seen: set[object] = set()
    return any(_uses_processes(function, seen) for function in (item.function, *fixtures))  # type: ignore[attr-defined]


def _uses_processes(function: object, seen: set[object]) -> bool:
    if isinstance(function, type) and function.__module__ != "builtins" and function not in seen:
        seen.add(function)  # a class may hold itself
        return any(_uses_processes(method, seen) for method in vars(function).values())
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    if not Path(function.__code__.co_filename).is_relative_to(TESTS):
        return False
    names = set(_names(function.__code__))
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    if any(value is subprocess for value in used) or (any(value is os for value in used) and "fork" in names):
        return True
    return any(_uses_processes(value, seen) for value in used)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
