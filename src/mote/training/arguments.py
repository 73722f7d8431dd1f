"""`SentenceTransformerTrainingArguments` and steps of a run."""

import math
import os
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments, SparseEncoderTrainingArguments
from sentence_transformers.base.training_args import BaseTrainingArguments
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import table
from mote.training.batches import EvenBatchSampler, TaskBatchSampler, even_batch_sampler
from mote.training.data import TrainingData, TrainingSet
from mote.training.processes import processes
from mote.training.recipe import Recipe
from mote.training.run_folder import RunFolder
from mote.training.trainer_settings import TrainerSettings
from mote.training.validation import Validation


def count_steps(training: TrainerSettings, per_epoch: int) -> int:
    """Count the steps of a run, given those of an epoch."""
    return training.max_steps if training.max_steps > 0 else math.ceil(per_epoch * training.num_train_epochs)


def rows_per_process(training: TrainerSettings, processes: int) -> int:
    """Return how many rows of a batch each process gets; raise `ValueError` if they cannot share it evenly."""
    if training.batch_size % processes:
        raise ValueError(
            f"training.batch_size is over all processes: {training.batch_size} cannot be divided evenly among "
            f"{processes}"
        )
    return training.batch_size // processes


def describe_steps(steps: int, arguments: TrainingArguments) -> str:
    """Describe the steps of a run."""
    every = math.ceil(arguments.save_steps * (steps if arguments.save_steps < 1 else 1))
    strategy = SaveStrategy(arguments.save_strategy)
    saved = f"every {every} steps" if strategy == SaveStrategy.STEPS else f"save_strategy={strategy.value}"
    return f"{steps:,} steps, {arguments.get_warmup_steps(steps)} of them warmup; checkpoints: {saved}"


def describe(recipe: Recipe, sets: dict[str, TrainingSet], arguments: BaseTrainingArguments) -> str:
    """Describe the steps of a run: a summary, and a table of the training sets.

    Raises:
        ValueError: If no training set fills a batch.
    """
    training, rows, per_epoch = recipe.training, [], 0
    for name, training_set in sets.items():
        sampler = EvenBatchSampler(training_set.rows, training.batch_size, processes().num_processes)
        per_epoch += len(sampler)
        dropped = f" ({sampler.dropped} rows dropped per epoch)" if sampler.dropped else ""
        tasks = ", ".join(training_set.tasks)
        rows.append([name, f"{len(training_set.rows):,}", f"{len(sampler):,}", tasks + dropped])
    if not per_epoch:
        raise ValueError("There are fewer rows than processes, so there is nothing to train on")
    summary = describe_steps(count_steps(training, per_epoch), arguments)
    return f"{summary}\n{table(['training set', 'rows', 'batches', 'tasks'], rows, align='lrrl')}"


def common_arguments(training: TrainerSettings, folder: RunFolder, **defaults: Any) -> dict[str, Any]:
    """Return the arguments of any trainer: the recipe's, over `defaults`, and those that follow from the run."""
    return {
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),  # explicit, so that bf16 is accepted on CPUs
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": True,  # experts of other tasks get no gradient
        **defaults,
        **training.trainer_arguments(),
        "output_dir": str(folder.checkpoints),
        "per_device_train_batch_size": rows_per_process(training, processes().num_processes),
        "eval_strategy": "no" if training.eval_steps is None else "steps",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,  # `TaskProgress` has a bar of its own
    }


# Arguments whose values need a score on held-out texts during the run.
BY_SCORE = {"load_best_model_at_end": True, "save_strategy": "best", "lr_scheduler_type": "reduce_lr_on_plateau"}


def trainer_arguments(
    recipe: Recipe, folder: RunFolder, data: TrainingData, names: MoTEConfig
) -> BaseTrainingArguments:
    """Build the training arguments: the recipe's, and those that follow from the rest of it and from its data.

    Raises:
        ValueError: If an argument needs held-out texts and there are none, or the run was launched with other settings;
            the trainer refuses arguments with errors of its own.
    """
    sets = data.sets
    training, count = recipe.training, processes().num_processes
    settings: dict[str, Any] = {
        **common_arguments(training, folder, lr_scheduler_type="linear", per_device_eval_batch_size=64),
        "batch_sampler": partial(even_batch_sampler, rows_of_a_batch=training.batch_size, processes=count),
        "multi_dataset_batch_sampler": TaskBatchSampler,
    }
    if not data.validation:
        settings["eval_strategy"] = "no"
    if by_score := [name for name, value in BY_SCORE.items() if getattr(training, name, None) == value]:
        if settings["eval_strategy"] == "no":
            raise ValueError(
                f"training.{by_score[0]}={str(BY_SCORE[by_score[0]]).lower()} needs scores on held-out texts during "
                "the run: set training.eval_steps, and validation.share above 0"
            )
        settings.setdefault("metric_for_best_model", Validation.primary_metric)
    if recipe.model.instructions:
        settings["prompts"] = {name: training_set.instructions(names) for name, training_set in sets.items()}
    if recipe.model.kind == "mote":
        settings["router_mapping"] = {name: training_set.column_tasks for name, training_set in sets.items()}
    dense = recipe.retrieval.kind == "dense"
    arguments = (SentenceTransformerTrainingArguments if dense else SparseEncoderTrainingArguments)(**settings)
    check_launch(arguments, training.precision, "train")
    return arguments


def check_launch(arguments: TrainingArguments, precision: str, verb: str) -> None:
    """Check that the processes were started for the settings of a recipe.

    Raises:
        ValueError: If the launcher's mixed precision is not `precision`, or one process has several GPUs.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", precision):
        raise ValueError(
            f"accelerate was launched with mixed precision {launched}, but the recipe says {precision}: set "
            f"training.{launched}=true, or remove it from accelerate's settings"
        )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one process per GPU with `accelerate launch "
            f"-m mote {verb} …`, or choose a GPU with CUDA_VISIBLE_DEVICES"
        )
