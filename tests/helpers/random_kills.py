"""Runs a `mote` command that resumes, killed again and again at random moments, each time in a forked process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.paths import ROOT


def kill_at_random(whole: Path, killed: Path, kills: int, *command: str) -> list[float]:
    """Run a command undisturbed, and once more with as many kills, after which it is run to its end.

    Args:
        whole: Folder of the undisturbed run, which is put in place of `OUT` in the command.
        killed: Folder of the other one.
        kills: Number of kills.
        *command: Arguments of `mote`.

    Returns:
        The seconds after which each process was killed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    arguments = [sys.executable, "-m", "helpers.random_kills", str(whole), str(killed), str(kills), *command]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _start(command: list[str], out: Path) -> int:
    from mote.cli import main

    process = os.fork()
    if process == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os._exit(main([word.replace("OUT", str(out)) for word in command]))
    return process


def _run() -> None:
    import mote.training.pretraining  # noqa: F401  # once, for all that are forked

    whole, killed, kills, command = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    begun = time.monotonic()
    assert os.waitpid(_start(command, whole), 0)[1] == 0
    duration = time.monotonic() - begun
    drawn, moments = random.Random(0), []
    while len(moments) < kills:
        moment = drawn.uniform(0, duration / 3)
        process = _start(command, killed)
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL:
            moments.append(moment)
        else:  # it had come to its end
            shutil.rmtree(killed)
    status = os.waitstatus_to_exitcode(os.waitpid(_start(command, killed), 0)[1])
    assert status == 0 or (killed / "model").exists()
    print(json.dumps(moments))  # noqa: T201


if __name__ == "__main__":
    _run()
