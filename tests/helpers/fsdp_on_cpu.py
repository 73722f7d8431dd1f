"""`mote train` under FSDP2 on CPUs, for which accelerate has none: it is told that gloo is a GPU."""

import os
import sys
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from sentence_transformers import SentenceTransformerTrainingArguments

from mote.cli import main
from mote.training import arguments
from mote.training import train as run


class _ArgumentsForGpu(SentenceTransformerTrainingArguments):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "use_cpu": False})


def die_at_step(step: int) -> None:
    """Die at a step as a killed process does."""
    record = run.Tracker.record

    def dying(tracker: Any, *args: Any) -> None:
        if tracker.step + 1 == step:
            os._exit(9)
        record(tracker, *args)

    run.Tracker.record = dying  # type: ignore[method-assign]


torch.distributed.init_process_group("gloo")
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
arguments.SentenceTransformerTrainingArguments = _ArgumentsForGpu  # type: ignore[misc]
die_at_step(int(os.environ.get("DIE_AT_STEP", "0")))
sys.exit(main(sys.argv[1:]))
