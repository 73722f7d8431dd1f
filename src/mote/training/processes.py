"""The processes that train together, and the arguments of their trainer."""

import logging
import os
import sys
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, reduce
from torch import Tensor
from transformers import TrainingArguments

from mote.training.run_folder import RunFolder
from mote.training.trainer_settings import TrainerSettings

Arguments = TypeVar("Arguments", bound=TrainingArguments)

logger = logging.getLogger(__name__)


def processes() -> PartialState:
    """Return accelerate's state of this process; without an accelerator, the processes run on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available())


def summed(values: Tensor) -> Tensor:
    """Sum a tensor on the CPU over all processes; all of them call this."""
    state = processes()
    return reduce(values.to(state.device), "sum").cpu() if state.num_processes > 1 else values


def with_deepspeed() -> bool:
    """Whether `accelerate launch` was configured for DeepSpeed."""
    return bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))


def with_fsdp() -> bool:
    """Whether `accelerate launch` was configured for FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def build_arguments(kind: type[Arguments], training: TrainerSettings, folder: RunFolder, **fixed: Any) -> Arguments:
    """Build the arguments of a trainer: the recipe's, and those that follow from the run and from `fixed`."""
    count = processes().num_processes
    own: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty() or not logger.isEnabledFor(logging.INFO),
        "use_cpu": not torch.accelerator.is_available(),  # explicit, so that bf16 is accepted on CPUs
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": True,  # experts of other tasks get no gradient
        **training.trainer_arguments(),
        "output_dir": str(folder.checkpoints),
        "per_device_train_batch_size": training.batch_size // count,
        "eval_strategy": "no" if training.eval_steps is None else "steps",
        "logging_nan_inf_filter": False,
    }
    arguments = kind(**{**own, **fixed})
    launched, precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), training.precision
    full = with_fsdp() and os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
    # All but the last would train, with other batches or another precision than the recipe's.
    problems = {
        f"training.batch_size is over all processes: {training.batch_size} cannot be divided evenly among {count}, in "
        f"mini-batches of {arguments.per_device_train_batch_size}": (
            training.batch_size != arguments.train_batch_size * arguments.gradient_accumulation_steps * count
        ),
        f"{arguments.n_gpu} GPUs are visible to one process: start one process per GPU with `accelerate launch -m mote "
        "…`, or choose a GPU with CUDA_VISIBLE_DEVICES": arguments.n_gpu > 1,
        f"accelerate was launched with mixed precision {launched}, but the recipe says {precision}: set "
        f"training.{launched}=true, or remove it from accelerate's settings": launched not in ("no", precision),
        "Under FSDP, set fsdp_state_dict_type to SHARDED_STATE_DICT: full checkpoints cannot be written": full,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)
    return arguments
