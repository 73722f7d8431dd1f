"""Stops a `mote` command at every moment at which it touches the disk, each time in a forked process."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mote.cli import main

RECORDS = {"mote.json"}  # holds dates, so two runs never write the same
FILE_SIZES = (0, 400, 5_000, 15_000, 40_000)  # limits in bytes, for `how="file size"`


class Outcome(NamedTuple):
    """What a stopped process left.

    Attributes:
        status: Exit status; negative: the signal that ended it.
        printed: The end of what it printed.
        out: State of the output folder: "absent", "old", "new", or "broken".
        left: Names next to the output folder.
        replaced: States of older outputs that were moved aside and not yet removed.
    """

    status: int
    printed: str
    out: str
    left: list[str]
    replaced: list[str]


def stop_everywhere(out: Path, *command: object, how: str = "SIGKILL", old: Path | None = None) -> list[Outcome]:
    """Run a command that writes `out`, first undisturbed, then stopped at its first, second, … change on disk.

    Each starts with nothing but `old` in the place, so that the changes are the same ones in the same order. One more
    run, after one that was stopped half-way, must succeed, write the same as the first, and leave nothing next to it.

    Args:
        out: The folder that the command writes, in a folder of its own.
        *command: Arguments of `mote`.
        how: Name of the signal, or "file size" to limit the size of written files instead.
        old: What `out` holds before each run; None: nothing.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    arguments = [out, old or "-", how, *command]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *stopped, last = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    assert (last.status, last.out, last.left) == (0, "new", []), last
    return stopped


def _contents(folder: Path) -> dict[str, bytes]:
    """Files by path; records only have to be whole."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: b"" if name in RECORDS and json.loads(content) else content for name, content in files.items()}


def _stop_at(moment: int, number: int, place: Path) -> None:
    count = 0

    def hook(event: str, arguments: Any) -> None:
        nonlocal count
        if event == "open":
            writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            counts = writes and str(arguments[0]).startswith(str(place))
        else:
            counts = event in ("os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.link")
        count += bool(counts)
        if counts and count == moment:
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def _fork(command: list[str], prepare: Callable[[], None]) -> tuple[int, str]:
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        prepare()
        status = main(command)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(writing)
    with open(reading, errors="replace") as pipe:  # noqa: PTH123 - a file descriptor
        printed = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), printed


def _ways_to_stop(how: str, place: Path) -> Iterator[Callable[[], None]]:
    if how == "file size":
        for limit in FILE_SIZES:
            yield partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    else:
        for moment in itertools.count(1):
            yield partial(_stop_at, moment, getattr(signal, how), place)


def _run() -> None:
    out, old, how, command = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    before = _contents(old) if old.exists() else None

    def reset() -> None:
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        if before is not None:
            shutil.copytree(old, out)

    reset()
    with contextlib.redirect_stdout(sys.stderr):
        assert main(command) == 0  # in this process: the forked ones need not import anything
    new = _contents(out)

    def state(folder: Path) -> str:
        if not folder.exists():
            return "absent"
        found = _contents(folder)
        return "new" if found == new else "old" if found == before else "broken"

    def tell(status: int, printed: str) -> None:
        replaced = (
            [state(path) for path in out.parent.glob(".*.writing-*/replaced")] if status == -signal.SIGKILL else []
        )
        left = sorted(path.name for path in out.parent.iterdir() if path != out)
        print(json.dumps(Outcome(status, printed[-300:], state(out), left, replaced)._asdict()), flush=True)  # noqa: T201

    ways = []
    for prepare in _ways_to_stop(how, out.parent):
        reset()
        status, printed = _fork(command, prepare)
        if status == 0:
            break
        tell(status, printed)
        ways.append(prepare)
    reset()
    _fork(command, ways[len(ways) // 2])
    tell(*_fork(command, lambda: None))


if __name__ == "__main__":
    _run()
