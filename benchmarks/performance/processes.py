"""Memory of a process that does one thing: what it takes at most, beyond what its imports took."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# The peak is read off /proc: that of `resource` begins with the peak of the process which started this one.
_BEGIN = """
import sys
import torch
from transformers import AutoModel
from transformers.utils import logging
import mote
from modeling_mote import MoTEModel

logging.disable_progress_bar()


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def use(model, **task):
    ids = torch.full((1, 8), 7)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **task)
        for weight in model.parameters():  # a file that is mapped takes memory when it is read
            weight.sum()


for path in sys.argv[1:3]:  # the first model of a process loads code and starts threads: not what is measured
    use(MoTEModel.from_pretrained(path), task="search_query") if path == sys.argv[2] else use(
        AutoModel.from_pretrained(path)
    )
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
        peak: The most, beyond what there was before.
        after: What is left at the end, beyond what there was before.
        raw: The most, with Python, torch and transformers.
    """

    peak: int
    after: int
    raw: int


def memory_of(code: str, warm_up: tuple[Path, Path], *arguments: object) -> Memory:
    """Run some code in a process of its own.

    Args:
        code: Sees `MoTEModel`, `AutoModel`, `use(model, **task)`, and its arguments from `sys.argv[3]` on.
        warm_up: A small dense checkpoint and a small MoTE, which are loaded and used before.
        *arguments: Of the code.
    """
    command = [sys.executable, "-c", _BEGIN + code + _END, *map(str, warm_up), *map(str, arguments)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=settings)
    return Memory(*map(int, done.stdout.split()))
