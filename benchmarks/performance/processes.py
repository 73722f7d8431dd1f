"""Memory of a process that loads one model, beyond its imports."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# The peak is read from /proc, because in `resource` it starts at the peak of the parent process.
_BEGIN = """
import sys
import torch
from transformers import AutoModel
from transformers.utils import logging
import mote
from mote.remote.modeling_mote import MoTEModel

logging.disable_progress_bar()


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def use(model, **task):
    ids = torch.full((1, 8), 7)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **task)
        for weight in model.parameters():  # mapped files take memory when they are read
            weight.sum()


dense, moted = sys.argv[1:3]  # warm-up: the first models of a process import code and start threads
use(AutoModel.from_pretrained(dense))
use(MoTEModel.from_pretrained(moted), task="search_query")
use(mote.load(moted, offload="disk"), task="search_query")
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:  # the peak begins here
    file.write("5")
"""
_END = """
print(status("VmHWM") - before, status("VmRSS") - before, status("VmHWM"))
"""


class Memory(NamedTuple):
    """Bytes of resident memory.

    Attributes:
        peak: Peak beyond the memory after the warm-up.
        after: Memory at the end beyond the memory after the warm-up.
        raw: Peak including Python, torch and transformers.
    """

    peak: int
    after: int
    raw: int


def memory_of(code: str, warm_up: tuple[Path, Path], *arguments: object) -> Memory:
    """Run code in a separate process, and return the memory it takes.

    Args:
        code: Code that can use `MoTEModel`, `AutoModel`, `use(model, **task)`, and its arguments from `sys.argv[3]` on.
        warm_up: A small dense checkpoint and a small MoTE, which are loaded and used first.
        *arguments: Arguments of the code.
    """
    command = [sys.executable, "-c", _BEGIN + code + _END, *map(str, warm_up), *map(str, arguments)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=settings)
    return Memory(*map(int, done.stdout.split()))
