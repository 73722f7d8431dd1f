"""`mote train` under FSDP2 on CPUs, for which accelerate has none: it is told that gloo is a GPU."""

import os
import sys
from typing import Any

import torch
import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mote.cli import main
from mote.training import train
from mote.training.progress import Tracker


def for_gpu(trainer_arguments: type) -> type:
    """Change a class of arguments, which would leave out FSDP on a CPU."""

    class ForGpu(trainer_arguments):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "use_cpu": False})

    return ForGpu


def die_at_step(step: int) -> None:
    """Die at a step as a killed process does."""
    record = Tracker.record

    def dying(self: Tracker, *args: Any) -> None:
        if self.step + 1 == step:
            os._exit(9)
        record(self, *args)

    Tracker.record = dying  # type: ignore[method-assign]


torch.distributed.init_process_group("gloo")
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
train.SentenceTransformerTrainingArguments = for_gpu(train.SentenceTransformerTrainingArguments)  # type: ignore[misc]
die_at_step(int(os.environ.get("DIE_AT_STEP", "0")))
sys.exit(main(sys.argv[1:]))
