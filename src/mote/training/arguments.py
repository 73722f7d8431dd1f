"""What the trainer is told: how many steps, and every argument."""

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments

from configuration_mote import MoTEConfig, alternatives
from mote.training.batches import EvenBatchSampler, TaskBatchSampler, even_batch_sampler
from mote.training.data import TrainingSet
from mote.training.processes import processes
from mote.training.recipe import Recipe
from mote.training.run_folder import RunFolder

# Arguments of the trainer that would contradict what the recipe says, or what a run takes for granted.
OWN_ARGUMENTS = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size"),
        "a step is one whole batch; set training.batch_size, and training.mini_batch_size to save memory",
    ),
    **dict.fromkeys(("num_train_epochs", "max_steps"), "set training.epochs and training.max_steps"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "set training.warmup"),
    **dict.fromkeys(("bf16", "fp16"), "set training.precision"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "set training.gradient_checkpointing"),
    **dict.fromkeys(("seed", "data_seed"), "set training.seed"),
    **dict.fromkeys(("batch_sampler", "multi_dataset_batch_sampler"), "set tasks.NAME.batches"),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_nan_inf_filter"), "set training.log_every"),
    **dict.fromkeys(("eval_strategy", "eval_steps"), "set validation.every"),
    **dict.fromkeys(("prompts", "router_mapping"), "they are those of the tasks"),
    "learning_rate": "set training.learning_rate",
    "weight_decay": "set training.weight_decay",
    "optim": "set training.optimizer",
    "lr_scheduler_type": "set training.schedule",
    "max_grad_norm": "set training.max_grad_norm",
    "torch_compile": "set training.compile",
    "dataloader_num_workers": "set training.workers",
    "save_steps": "set training.save_every",
    "save_total_limit": "set training.keep",
    "output_dir": "set output",
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Make sure that the trainer knows the arguments that a recipe hands on to it, and that the recipe has no own ones.

    Raises:
        ValueError: If not; the message says what to set instead.
    """
    known = SentenceTransformerTrainingArguments.__dataclass_fields__
    for argument, value in arguments.items():
        if argument in OWN_ARGUMENTS:
            raise ValueError(f"training.arguments: {argument!r} cannot be set here: {OWN_ARGUMENTS[argument]}")
        if argument not in known:
            raise ValueError(f"training.arguments: the trainer has no {argument!r}." + alternatives(argument, known))
        if isinstance(known[argument].default, float | int) and not isinstance(value, float | int):
            raise ValueError(  # noqa: TRY004
                f"training.arguments: {argument!r} is a number or true or false, not {value!r}"
            )


@dataclass
class Schedule:
    """How many steps a run has.

    Attributes:
        batches: Training set → batches per epoch.
        left_out: Training set → rows that an epoch leaves out, because the processes cannot share them evenly.
        steps: Of the run.
        warmup: Steps in which the learning rate rises.
        save_every: Steps between checkpoints.
    """

    batches: dict[str, int]
    left_out: dict[str, int]
    steps: int
    warmup: int
    save_every: int


def plan_schedule(recipe: Recipe, sets: dict[str, TrainingSet], processes: int) -> Schedule:
    """Count the steps of a run.

    Raises:
        ValueError: If the processes cannot share out a batch, or no set fills one.
    """
    training = recipe.training
    if training.batch_size % processes:
        raise ValueError(
            f"training.batch_size is that of all processes together: {training.batch_size} cannot be shared out among "
            f"{processes}"
        )
    samplers = {name: EvenBatchSampler(part.rows, training.batch_size, processes) for name, part in sets.items()}
    batches = {name: len(sampler) for name, sampler in samplers.items()}
    if not any(batches.values()):
        raise ValueError("There are fewer rows than processes: nothing to train on")
    steps = math.ceil(sum(batches.values()) * training.epochs)
    steps = steps if training.max_steps is None else min(steps, training.max_steps)
    return Schedule(
        batches=batches,
        left_out={name: sampler.left_out for name, sampler in samplers.items() if sampler.left_out},
        steps=steps,
        warmup=round(training.warmup * steps),
        save_every=training.save_every or max(1, steps // 10),
    )


def describe(schedule: Schedule, sets: dict[str, TrainingSet]) -> str:
    """Lay the steps out for people."""
    lines = [
        f"{schedule.steps} steps, the first {schedule.warmup} to warm up; a checkpoint every {schedule.save_every}"
    ]
    lines.append(f"{'training set':<40}{'rows':>10}{'batches':>9}  tasks")
    for name, part in sets.items():
        tasks = ", ".join(dict.fromkeys(part.column_tasks.values()))
        left_out = f" ({schedule.left_out[name]} rows left out of an epoch)" if name in schedule.left_out else ""
        lines.append(f"{name:<40}{len(part.rows):>10,}{schedule.batches[name]:>9,}  {tasks}{left_out}")
    return "\n".join(lines)


def trainer_arguments(
    recipe: Recipe,
    folder: RunFolder,
    sets: dict[str, TrainingSet],
    schedule: Schedule,
    instructions: MoTEConfig | None,
    routed: bool,
) -> SentenceTransformerTrainingArguments:
    """Say all of it in the trainer's words."""
    training, count = recipe.training, processes().num_processes
    settings: dict[str, Any] = {
        "per_device_train_batch_size": training.batch_size // count,
        "num_train_epochs": training.epochs,
        "max_steps": schedule.steps if training.max_steps is not None else -1,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "optim": training.optimizer,
        "lr_scheduler_type": training.schedule,
        "warmup_steps": schedule.warmup,
        "max_grad_norm": training.max_grad_norm,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "torch_compile": training.compile,
        "use_cpu": not torch.accelerator.is_available(),  # asked for, where bf16 is to run there
        "seed": training.seed,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "batch_sampler": partial(even_batch_sampler, rows_of_a_batch=training.batch_size, processes=count),
        "multi_dataset_batch_sampler": TaskBatchSampler,
        "save_strategy": "steps",
        "save_steps": schedule.save_every,
        "save_total_limit": training.keep,
        "logging_steps": 1,  # a gradient that is no number must be seen before it is saved
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,  # ours shows what a run of tasks is about
        "ddp_find_unused_parameters": True,  # experts of other tasks get no gradient
    }
    if recipe.validation.every:
        settings |= {"eval_strategy": "steps", "eval_steps": recipe.validation.every}
    if instructions is not None:
        settings["prompts"] = {
            name: {column: instructions.instruction_of(task) for column, task in part.column_tasks.items()}
            for name, part in sets.items()
        }
    if routed:
        settings["router_mapping"] = {name: part.column_tasks for name, part in sets.items()}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder.checkpoints), **{**settings, **training.arguments}
    )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched != "no" and launched != training.precision:
        raise ValueError(
            f"accelerate was launched with mixed precision {launched}, and the recipe says {training.precision}: set "
            f"training.precision={launched}, or leave it out of accelerate's settings"
        )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one process per GPU with `accelerate launch "
            "-m mote train …`, or choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return arguments
