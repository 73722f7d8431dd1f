"""The arguments of a run's trainer, and its steps."""

import math
import os
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from mote.training.processes import processes
from mote.training.run_folder import RunFolder
from mote.training.trainer_settings import TrainerSettings

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def build_arguments(
    kind: type[Arguments], training: TrainerSettings, folder: RunFolder, verb: str, **fixed: Any
) -> Arguments:
    """Build the arguments of a trainer: the recipe's, and those that follow from the run.

    Args:
        kind: Their class.
        training: `training` of the recipe.
        folder: Folder of the run.
        verb: The command, `train` or `pretrain`.
        **fixed: Arguments that follow from the rest of the recipe.

    Raises:
        ValueError: If the processes cannot share a batch evenly, the launcher's mixed precision is not the recipe's, or
            one process has several GPUs; the trainer refuses arguments with errors of its own.
    """
    count = processes().num_processes
    if training.batch_size % count:
        raise ValueError(
            f"training.batch_size is over all processes: {training.batch_size} cannot be divided evenly among {count}"
        )
    launched, precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), training.precision
    if launched not in ("no", precision):
        raise ValueError(
            f"accelerate was launched with mixed precision {launched}, but the recipe says {precision}: set "
            f"training.{launched}=true, or remove it from accelerate's settings"
        )
    own: dict[str, Any] = {
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),  # explicit, so that bf16 is accepted on CPUs
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": True,  # experts of other tasks get no gradient
        **training.trainer_arguments(),
        "output_dir": str(folder.checkpoints),
        "per_device_train_batch_size": training.batch_size // count,
        "eval_strategy": "no" if training.eval_steps is None else "steps",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,  # `TaskProgress` has a bar of its own
    }
    arguments = kind(**{**own, **fixed})
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one process per GPU with `accelerate launch "
            f"-m mote {verb} …`, or choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return arguments


def describe_steps(training: TrainerSettings, per_epoch: int, arguments: TrainingArguments) -> str:
    """Describe the steps of a run, given those of an epoch."""
    steps = training.max_steps if training.max_steps > 0 else math.ceil(per_epoch * training.num_train_epochs)
    every = math.ceil(arguments.save_steps * (steps if arguments.save_steps < 1 else 1))
    strategy = SaveStrategy(arguments.save_strategy)
    saved = f"every {every} steps" if strategy == SaveStrategy.STEPS else f"save_strategy={strategy.value}"
    return f"{steps:,} steps, {arguments.get_warmup_steps(steps)} of them warmup; checkpoints: {saved}"
