"""Time and memory of loading a model in a process that has not loaded it before."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

# A process imports and loads small models; each load is measured in a fork of it. The fork first loads the small models
# again, which brings what it shares with its parent into its own memory.
_CODE = """
import gc, json, os, sys, time
import torch
from transformers import AutoModel
from transformers.utils import logging
import mote
from mote.remote.modeling_mote import MoTEModel


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def use(model):
    ids = torch.full((1, 8), 7)
    with torch.no_grad():
        for task in getattr(model.config, "available_experts", [None]):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **({"task": task} if task else {}))
        for weight in model.parameters():  # mapped files take memory when they are read
            weight.sum()


def warm_up():
    for load in small:
        use(eval(load))


def measure(load):
    warm_up()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:  # the peak begins here; in `resource` it is that of the parent
        file.write("5")
    started = time.perf_counter()
    model = eval(load)
    seconds = time.perf_counter() - started
    use(model)
    return seconds, status("VmHWM") - before


logging.disable_progress_bar()
loads, small, rounds, limit = json.loads(sys.argv[1])
warm_up()
gc.freeze()  # a collection in a fork would copy what it shares
started, done = time.perf_counter(), 0
while done < rounds or time.perf_counter() - started < limit:
    for number in range(len(loads))[:: -1 if done % 2 else 1]:
        if not (child := os.fork()):
            print(json.dumps([number, *measure(loads[number])]), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"failed: {loads[number]}")
    done += 1
"""


class Load(NamedTuple):
    """Seconds of loading a model; bytes of memory beyond those before, at the peak of loading and using it."""

    seconds: float
    peak: int


def load_in_turn(loads: Sequence[str], small: Sequence[str], rounds: int, seconds: float = 0) -> list[list[Load]]:
    """Load models in turn, each in a process of its own, with one thread; the order is swapped from round to round.

    Args:
        loads: Expressions that load a model with `MoTEModel`, `AutoModel` or `mote`.
        small: Expressions that load small models, which are loaded and used first.
        rounds: Rounds, at least.
        seconds: Measuring time, at least.

    Returns:
        The results of each expression.
    """
    command = [sys.executable, "-c", _CODE, json.dumps([[*loads], [*small], rounds, seconds])]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "0"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settings)
    results: list[list[Load]] = [[] for _ in loads]
    for number, *values in map(json.loads, done.stdout.splitlines()):
        results[number].append(Load(*values))
    return results
