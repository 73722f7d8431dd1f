"""Which tasks to evaluate on: of a folder, of a benchmark of MTEB, or of MTEB by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mteb


def choose_tasks(
    benchmark: str | None, data: str | Path | None, names: Sequence[str] = (), limit: int | None = None
) -> list[Any]:
    """Choose tasks; the arguments are those of `evaluate`.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If the arguments contradict each other, or name what is not there.
    """
    if data is not None and benchmark is not None:
        raise ValueError("--data and --benchmark say two things: give one of them")
    if data is not None:
        from mote.evaluation.tasks import load_tasks

        return load_tasks(Path(data), tuple(names), limit)
    if limit is not None:
        raise ValueError(
            "--limit cuts sets of --data alone: the sets of MTEB are scored whole, else their scores would be no MTEB "
            "scores. Choose some of them with --task instead"
        )
    if benchmark is not None:
        return _of_benchmark(benchmark, names)
    if not names:
        raise ValueError("Nothing to evaluate on: give --data FOLDER, --benchmark NAME, or --task with a name of MTEB")
    return [_task(name) for name in dict.fromkeys(names)]


def _of_benchmark(benchmark: str, patterns: Sequence[str]) -> list[Any]:
    try:
        tasks = list(mteb.get_benchmark(benchmark).tasks)
    except KeyError:
        known = [one.name for one in mteb.get_benchmarks()]
        raise ValueError(f"MTEB has no benchmark {benchmark!r}{_nearest(benchmark, known)}") from None
    names = [task.metadata.name for task in tasks]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"No task of {benchmark} is called {pattern!r}{_nearest(pattern, names)}")
    return [
        task for task, name in zip(tasks, names, strict=True)
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]  # fmt: skip


def _task(name: str) -> Any:
    try:
        return mteb.get_task(name)
    except KeyError:
        known = [task.metadata.name for task in mteb.get_tasks(exclude_superseded=False)]
        hint = _nearest(name, known) if not set(name) & set("*?[") else ""
        raise ValueError(
            f"MTEB has no task {name!r}{hint}. Patterns choose from a --benchmark or a folder (--data)"
        ) from None


def _nearest(name: str, known: Sequence[str]) -> str:
    """List the names that are most like one that is wrong."""
    near = get_close_matches(name, known, n=5, cutoff=0.4) or sorted(known)[:5]
    return f"; the nearest are {', '.join(near)}"
