"""`mote train` and `pretrain` under FSDP2 on CPUs, for which accelerate has none: it is told that gloo is a GPU."""

import os
import sys
from typing import Any

import torch
import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mote.cli import main
from mote.training import arguments, pretraining
from mote.training import train as run


def for_gpu(trainer_arguments: type) -> type:
    """Change a class of arguments, which would leave out FSDP on a CPU."""

    class ForGpu(trainer_arguments):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "use_cpu": False})

    return ForGpu


def die_at_step(step: int, tracker: type, method: str) -> None:
    """Die at a step as a killed process does."""
    record = getattr(tracker, method)

    def dying(self: Any, *args: Any) -> None:
        if self.step + 1 == step:
            os._exit(9)
        record(self, *args)

    setattr(tracker, method, dying)


torch.distributed.init_process_group("gloo")
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
arguments.SentenceTransformerTrainingArguments = for_gpu(arguments.SentenceTransformerTrainingArguments)  # type: ignore[misc]
pretraining.TrainingArguments = for_gpu(pretraining.TrainingArguments)  # type: ignore[misc]
for tracker, method in ((run.Tracker, "record"), (pretraining.TextTracker, "observe")):
    die_at_step(int(os.environ.get("DIE_AT_STEP", "0")), tracker, method)
sys.exit(main(sys.argv[1:]))
