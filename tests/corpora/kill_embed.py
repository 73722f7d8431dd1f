"""Kills `mote embed` at random moments, in forked processes, and lets each resume."""

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from helpers.checkpoints import contents

from mote.cli import main


def _begin(command: list[str]) -> int:
    process = os.fork()
    if process == 0:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            os._exit(main(command))
    return process


def _end(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_and_resume(out: Path, kills: int, command: list[str]) -> str:
    """Run a command that writes `out` undisturbed, then again and again, killed at a random moment and resumed.

    Returns:
        How many shards were finished at each kill.
    """
    with contextlib.redirect_stdout(sys.stderr):
        assert main(command) == 0  # in this process: the forked ones need not import anything
    whole = contents(out)
    shutil.rmtree(out)
    begun = time.perf_counter()
    assert _end(_begin(command)) == 0
    duration = time.perf_counter() - begun
    assert contents(out) == whole
    finished = []
    moments = random.Random(0)
    for _ in range(kills):
        shutil.rmtree(out)
        process = _begin(command)
        time.sleep(moments.uniform(0, duration))
        os.kill(process, signal.SIGKILL)
        _end(process)
        finished.append(len(list(out.glob("shard-*.parquet"))))
        assert _end(_begin(command)) == 0
        assert contents(out) == whole
    return " ".join(map(str, finished))


if __name__ == "__main__":
    print(kill_and_resume(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))  # noqa: T201
