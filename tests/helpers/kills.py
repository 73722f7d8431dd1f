"""Stops a `mote` command at every moment at which it touches the disk, or at random, each time in a forked process."""

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mote.cli import main

RECORDS = {"mote.json"}  # holds dates, so two runs never write the same
FILE_SIZES = (0, 400, 5_000, 15_000, 40_000)  # limits in bytes, for `how="file size"`


class Outcome(NamedTuple):
    """What a stopped process left. The state of a folder is "absent", "old", "new", or "broken"."""

    status: int  # negative: the signal that ended it
    printed: str  # the end
    out: str  # state of the output folder
    left: list[str]  # names next to the output folder
    replaced: list[str]  # states of older outputs that were moved aside and not yet removed


def stop_everywhere(out: Path, *command: object, how: str = "SIGKILL", old: Path | None = None) -> list[Outcome]:
    """Run a command that writes `out`, first undisturbed, then stopped at its first, second, … change on disk.

    Each starts with nothing but `old` in the place, so that the changes are the same ones in the same order. One more
    run, after one that was stopped half-way, must succeed, write the same as the first, and leave nothing next to it.
    `out` is in a folder of its own; `how` is the name of the signal, or "file size" to limit that of written files.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = _in_a_process(_stop_everywhere, out, old or "-", how, *command)
    *stopped, last = [Outcome(**json.loads(line)) for line in lines]
    assert (last.status, last.out, last.left) == (0, "new", []), last
    return stopped


def kill_at_random(whole: Path, killed: Path, kills: int, *command: str) -> list[float]:
    """Run a command that resumes undisturbed, and once more with as many kills, after which it is run to its end.

    The folders of the two runs are put in place of `OUT` in the command. Returns the seconds before each kill.
    """
    return json.loads(_in_a_process(_kill_at_random, whole, killed, kills, *command)[-1])


def _in_a_process(function: Callable[..., None], *arguments: object) -> list[str]:
    words = [sys.executable, "-P", __file__, function.__name__, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


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


def _fork(command: Sequence[str], prepare: Callable[[], None], output: int) -> int:
    process = os.fork()
    if process == 0:
        os.dup2(output, 1)
        os.dup2(output, 2)
        prepare()
        status = main(command)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return process


def _status(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _run(command: Sequence[str], prepare: Callable[[], None] = lambda: None) -> tuple[int, str]:
    reading, writing = os.pipe()
    process = _fork(command, prepare, writing)
    os.close(writing)
    with open(reading, errors="replace") as pipe:  # noqa: PTH123 - a file descriptor
        printed = pipe.read()
    return _status(process), printed


def _ways_to_stop(how: str, place: Path) -> Iterator[Callable[[], None]]:
    if how == "file size":
        for limit in FILE_SIZES:
            yield partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    else:
        for moment in itertools.count(1):
            yield partial(_stop_at, moment, getattr(signal, how), place)


def _stop_everywhere(*words: str) -> None:
    out, old, how, command = Path(words[0]), Path(words[1]), words[2], words[3:]
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
        status, printed = _run(command, prepare)
        if status == 0:
            break
        tell(status, printed)
        ways.append(prepare)
    reset()
    _run(command, ways[len(ways) // 2])
    tell(*_run(command))


def _kill_at_random(*words: str) -> None:
    import mote.training.pretraining  # noqa: F401  # once, for all that are forked

    def start(out: str) -> int:
        return _fork([word.replace("OUT", out) for word in words[3:]], lambda: None, sys.stderr.fileno())

    whole, killed, kills = words[0], words[1], int(words[2])
    begun = time.monotonic()
    assert _status(start(whole)) == 0
    duration = time.monotonic() - begun
    drawn, moments = random.Random(0), []
    while len(moments) < kills:
        moment = drawn.uniform(0, duration / 3)
        process = start(killed)
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
        if _status(process) == -signal.SIGKILL:
            moments.append(moment)
        else:  # it had come to its end
            shutil.rmtree(killed)
    assert _status(start(killed)) == 0 or Path(killed, "model").exists()
    print(json.dumps(moments))  # noqa: T201


if __name__ == "__main__":
    {"_stop_everywhere": _stop_everywhere, "_kill_at_random": _kill_at_random}[sys.argv[1]](*sys.argv[2:])
