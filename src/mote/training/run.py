"""Run a recipe: data, model, losses and Sentence-Transformers' own trainer; killed runs go on where they were."""

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from safetensors import SafetensorError
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn
from transformers import PrinterCallback, Trainer

from configuration_mote import MoTEConfig, alternatives
from mote.files import Staging
from mote.sources import load_tokenizer, open_any
from mote.training import card
from mote.training.card import CURVES_FILE, RECIPE_FILE, RECORD_FILE
from mote.training.data import TrainingData, TrainingSet, load_data
from mote.training.losses import build_loss, check_loss
from mote.training.models import START_FOLDER, build_model, encodings, is_mote
from mote.training.processes import processes, replicated, with_deepspeed, with_fsdp
from mote.training.progress import (
    CHECKPOINT_FILE,
    LOG_FILE,
    LOSS_FILE,
    NonFiniteError,
    RunCallback,
    TrackedLoss,
    Tracker,
    draw_curves,
    read_log,
)
from mote.training.recipe import Recipe, load_recipe
from mote.training.sampling import EvenBatchSampler, TaskBatchSampler, even_batch_sampler
from mote.training.validation import Validation

# Settings that a run may go on with when they have changed: they do not touch what is learned.
FREE_SETTINGS = (
    "output",
    "description",
    "training.save_every",
    "training.keep",
    "training.log_every",
    "training.workers",
)

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

Report = Callable[[str], None]


@dataclass
class RunFolder:
    """The folder of a run: `checkpoints/` and `log.jsonl` while it trains, `model/` when it has ended.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def model(self) -> Path:
        """Where the trained model goes."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """Find the newest checkpoint that is whole."""
        whole = [folder for folder in self.checkpoints.glob("checkpoint-*") if (folder / CHECKPOINT_FILE).is_file()]
        return max(whole, key=_step_of, default=None)

    def open(self, recipe: Recipe, overwrite: bool) -> Path | None:
        """Get ready to run a recipe here.

        Returns:
            The checkpoint to go on from, if there is one.

        Raises:
            FileExistsError: If a run has ended here, or something else is here.
            ValueError: If the checkpoints here are those of another recipe; the message says what differs.
        """
        if overwrite:
            self._clear()
        if self.model.exists():
            raise FileExistsError(
                f"{self.path} holds a run that has ended: its model is in {self.model}. Choose another `output`, or "
                "start again with `--overwrite`"
            )
        is_ours = not self.path.exists() or not any(self.path.iterdir()) or (self.path / RECIPE_FILE).is_file()
        if not is_ours:
            raise FileExistsError(f"{self.path} holds something other than a run: choose another `output`")
        checkpoint = self.last_checkpoint()
        if checkpoint is not None:
            theirs = json.loads((checkpoint / CHECKPOINT_FILE).read_text(encoding="utf-8"))["recipe"]
            differing = _differences(theirs, _fixed_settings(recipe))
            if differing:
                raise ValueError(
                    f"{checkpoint} is of another recipe; it differs in {', '.join(differing)}. Go on with that recipe, "
                    "choose another `output`, or start again with `--overwrite`"
                )
        return checkpoint

    def prepare(self, recipe: Recipe, checkpoint: Path | None) -> None:
        """Write the recipe, and remove what a kill has left: a model on its way, checkpoints that were cut short."""
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.path / START_FOLDER, ignore_errors=True)  # it may be of another recipe
        (self.path / RECIPE_FILE).write_text(_as_yaml(recipe), encoding="utf-8")
        for folder in self.checkpoints.glob("checkpoint-*"):
            if checkpoint is None or _step_of(folder) > _step_of(checkpoint):
                shutil.rmtree(folder)

    def _clear(self) -> None:
        if (self.path / RECIPE_FILE).is_file():  # which stays, as the mark of a run's folder
            for folder in (self.model, self.checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
            (self.path / LOG_FILE).unlink(missing_ok=True)


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


def train(
    recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False, report: Report | None = None
) -> Path:
    """Train a model as a recipe says.

    Running the same recipe again after a kill goes on from the last checkpoint, as if nothing had happened. Under
    `accelerate launch`, all processes call this together.

    Args:
        recipe: A recipe, a file with one, or the name of a shipped one.
        overrides: `key=value`, over those of the recipe.
        overwrite: Start again where a run has ended or was broken off.
        report: Called with each line of progress. Default: nothing is said, but for the progress bar.

    Returns:
        The folder of the trained model.

    Raises:
        FileNotFoundError: If recipe, source or data are not there.
        FileExistsError: If the run has ended already.
        ValueError: If a setting, the data, or a checkpoint does not fit; `NonFiniteError` if the loss is no number.
        OSError: If nothing can be written any more.
    """
    state = processes()
    say: Report = report if report is not None and state.is_main_process else lambda line: None
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    folder = RunFolder(Path(recipe.output))
    run = prepare(recipe, folder, overwrite, say)
    before = run.validate() if state.is_main_process else None  # a checkpoint is loaded when training goes on
    state.wait_for_everyone()
    run.train()
    run.gather()
    if state.is_main_process:
        say("Scoring, and writing the model …")
        _finish(run, folder, before, say)
    state.wait_for_everyone()
    return folder.model


def plan(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> str:
    """Say what a run would do: its data and its steps. Raises what `train` raises for them; writes nothing."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    check_recipe(recipe)
    tokenizer = load_tokenizer(open_any(recipe.model.source, recipe.model.revision))
    data = load_data(recipe, tokenizer, with_teachers=False)
    schedule = plan_schedule(recipe, data.sets, processes().num_processes)
    return "\n".join([_as_yaml(recipe), str(data), _describe(schedule, data.sets)])


def check_recipe(recipe: Recipe) -> None:
    """Find what does not hold in a recipe before anything is read.

    Raises:
        ValueError: If a loss, or an argument of the trainer, is unknown, or settings contradict each other.
    """
    for name, task in recipe.tasks.items():
        check_loss(name, task)
    if recipe.model.kind == "token" and recipe.training.precision == "fp16" and recipe.model.load_balancing:
        raise ValueError(
            "The load-balancing loss of a token router is not scaled as gradients are in fp16, and would be lost: set "
            "training.precision to bf16"
        )
    known = SentenceTransformerTrainingArguments.__dataclass_fields__
    for argument in recipe.training.arguments:
        if argument in OWN_ARGUMENTS:
            raise ValueError(f"training.arguments: {argument!r} cannot be set here: {OWN_ARGUMENTS[argument]}")
        if argument not in known:
            raise ValueError(f"training.arguments: the trainer has no {argument!r}." + alternatives(argument, known))


@dataclass
class Run:
    """A run that is ready to start.

    Attributes:
        recipe: The recipe.
        data: What it trains and validates on.
        schedule: Its steps.
        model: The model.
        names: The model's tasks and their instructions.
        tracker: What it has seen.
        trainer: Sentence-Transformers' own.
        validation: Scores the model.
        checkpoint: Where it goes on from.
    """

    recipe: Recipe
    data: TrainingData
    schedule: Schedule
    model: SentenceTransformer
    names: MoTEConfig
    tracker: Tracker
    trainer: SentenceTransformerTrainer
    validation: Validation | None
    checkpoint: Path | None

    def validate(self) -> dict[str, float] | None:
        """Score the model as it is; None where nothing is held out."""
        return self.validation(self.model) if self.validation is not None else None

    def train(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: If the loss or a gradient is no number.
            OSError: If nothing can be written any more.
        """
        checkpoints = RunFolder(Path(self.recipe.output))
        try:
            self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_how_to_go_on(checkpoints)) from None
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error}. Nothing of it was kept. {_how_to_go_on(checkpoints)} Try a lower training.learning_rate "
                "first."
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            if not _is_about_writing(error):
                raise
            raise OSError(f"A checkpoint could not be written: {error}. {_how_to_go_on(checkpoints)}") from error

    def gather(self) -> None:
        """Make the trained model whole again where FSDP has cut its weights among the processes; all call this."""
        if not with_fsdp():
            return
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)
        model, _ = _build_model(self.recipe, RunFolder(Path(self.recipe.output)))
        if processes().is_main_process:
            model.load_state_dict(weights)
        self.model = model


class _ShardedTrainer(SentenceTransformerTrainer):
    """For FSDP: Sentence-Transformers (6.2) replaces how a checkpoint is loaded by what knows of whole models alone."""

    def _load_from_checkpoint(self, *args: Any) -> None:
        Trainer._load_from_checkpoint(self, *args)


def prepare(recipe: Recipe, folder: RunFolder, overwrite: bool = False, report: Report = lambda line: None) -> Run:
    """Load everything that a run needs. Raises what `train` raises for it."""
    state = processes()
    check_recipe(recipe)
    with state.main_process_first():
        checkpoint = folder.open(recipe, overwrite and state.is_main_process)
        if state.is_main_process:
            folder.prepare(recipe, checkpoint)
    model, names = _build_model(recipe, folder)
    data = load_data(recipe, model.tokenizer, report)
    report(str(data))
    schedule = plan_schedule(recipe, data.sets, state.num_processes)
    report(_describe(schedule, data.sets))
    routed = is_mote(model) and recipe.model.kind == "mote"
    tracker = Tracker()
    torch.manual_seed(recipe.training.seed)  # for the weights that a loss may have
    losses = {name: _loss(recipe, model, part, tracker) for name, part in data.sets.items()}
    validation = Validation(data.validation, encodings(names, routed)) if data.validation else None
    seal = {"recipe": _fixed_settings(recipe), "rows": {name: len(part.rows) for name, part in data.sets.items()}}
    _restore(checkpoint, seal, tracker, losses)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if with_fsdp():
        if os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT":
            raise ValueError(
                "Under FSDP, set fsdp_state_dict_type to SHARDED_STATE_DICT: whole checkpoints cannot be written"
            )
        model.base_model_prefix = "0"  # type: ignore[assignment]  # of Sentence-Transformers' modules; accelerate cannot wrap `Normalize`
    trainer = (_ShardedTrainer if with_fsdp() else SentenceTransformerTrainer)(
        model=model,
        args=_arguments(recipe, folder, data.sets, schedule, names if recipe.model.instructions else None, routed),
        train_dataset={name: part.rows for name, part in data.sets.items()},
        loss=dict[str, nn.Module](losses),
        evaluator=validation if recipe.validation.every else None,
        callbacks=[
            RunCallback(
                tracker, folder.path, losses, seal, recipe.training.log_every, recipe.training.precision == "fp16"
            )
        ],
    )
    trainer.remove_callback(PrinterCallback)  # the bar and the log say it
    return Run(recipe, data, schedule, model, names, tracker, trainer, validation, checkpoint)


def _build_model(recipe: Recipe, folder: RunFolder) -> tuple[SentenceTransformer, MoTEConfig]:
    """Build the model, and clean up behind it when all processes have read it."""
    state = processes()
    try:
        return build_model(recipe, folder.path)
    finally:
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(folder.path / START_FOLDER, ignore_errors=True)


def _arguments(
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
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one process per GPU with `accelerate launch "
            "-m mote train …`, or choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return arguments


def _restore(checkpoint: Path | None, seal: dict[str, Any], tracker: Tracker, losses: dict[str, TrackedLoss]) -> None:
    """Take over from a checkpoint what the trainer does not."""
    if checkpoint is None:
        return
    kept = json.loads((checkpoint / CHECKPOINT_FILE).read_text(encoding="utf-8"))
    if kept["rows"] != seal["rows"]:
        differing = ", ".join(_differences(kept["rows"], seal["rows"]))
        raise ValueError(f"The data are not those that {checkpoint} was trained on; it differs in rows of {differing}")
    tracker.restore(kept["tracker"])
    for name, weights in torch.load(checkpoint / LOSS_FILE, weights_only=True).items():
        own = dict(losses[name].named_parameters())
        with torch.no_grad():
            for key, value in weights.items():
                own[key].copy_(value)


def _finish(run: Run, folder: RunFolder, before: dict[str, float] | None, report: Report) -> None:
    """Score the model, write it with all that belongs to it, and sum the run up."""
    after = run.validate()
    log = read_log(folder.path)
    rates = [line["pairs_per_second"] for line in log if "pairs_per_second" in line]
    record = {
        "recipe": run.recipe.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "steps": run.trainer.state.global_step,
        "seconds": round(run.tracker.seconds, 1),
        "went_on_from_step": None if run.checkpoint is None else _step_of(run.checkpoint),
        "pairs_per_second": rates[-1] if rates else None,
        "processes": processes().num_processes,
        "device": _device_name(),
        "tasks": run.tracker.tasks,
        "sets": run.tracker.sets,
        "experts": _texts_of_experts(run),
        "validation": {"before": before, "after": after},
        "data": [report_of.__dict__ for report_of in run.data.reports],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("mote", "torch", "transformers", "sentence-transformers", "datasets")},
        },
    }
    with Staging(folder.model) as staged:
        run.model.save(str(staged), create_model_card=False)
        (staged / RECIPE_FILE).write_text(_as_yaml(run.recipe), encoding="utf-8")
        (staged / RECORD_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draw_curves(log, staged / CURVES_FILE, f"{run.recipe.name}: {record['steps']} steps")
        card.write(run.recipe, run.names, record, staged)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    report(summary(record))
    report(f"Wrote {folder.model}")


def _texts_of_experts(run: Run) -> dict[str, dict[str, int]]:
    """Count what each expert has seen: the texts of the tasks that go to it."""
    if run.recipe.model.kind != "mote":
        return {}
    experts = {expert: {"texts": 0, "tokens": 0} for expert in run.names.experts}
    for task, seen in run.tracker.tasks.items():
        for key, count in seen.items():
            experts[run.names.tasks[task]][key] += count
    return experts


def summary(record: dict[str, Any]) -> str:
    """Sum a run up for people: what each expert saw, the losses, the scores before and after."""
    lines = [f"{record['steps']} steps in {record['seconds']:,.0f} s on {record['device']}"]
    kind = "expert" if record["experts"] else "task"
    lines.append(f"{kind:<24}{'texts':>12}{'tokens':>14}")
    for name, seen in (record["experts"] or record["tasks"]).items():
        lines.append(f"{name:<24}{seen['texts']:>12,}{seen['tokens']:>14,}")
    lines.append(f"{'training set':<40}{'steps':>8}{'rows':>10}{'mean loss':>11}")
    for name, seen in record["sets"].items():
        lines.append(f"{name:<40}{seen['steps']:>8,}{seen['rows']:>10,}{seen['loss'] / seen['steps']:>11.4f}")
    before, after = record["validation"]["before"] or {}, record["validation"]["after"] or {}
    if after:
        lines.append(f"{'validation, x 100':<40}{'before':>9}{'after':>9}")
        for name, value in after.items():
            if "/" not in name:
                shown = f"{before[name]:>9.2f}" if name in before else f"{'-':>9}"
                lines.append(f"{name.removeprefix('validation_'):<40}{shown}{value:>9.2f}")
    return "\n".join(lines)


def _describe(schedule: Schedule, sets: dict[str, TrainingSet]) -> str:
    lines = [
        f"{schedule.steps} steps, the first {schedule.warmup} to warm up; a checkpoint every {schedule.save_every}"
    ]
    lines.append(f"{'training set':<40}{'rows':>10}{'batches':>9}  tasks")
    for name, part in sets.items():
        tasks = ", ".join(dict.fromkeys(part.column_tasks.values()))
        left_out = f" ({schedule.left_out[name]} rows left out of an epoch)" if name in schedule.left_out else ""
        lines.append(f"{name:<40}{len(part.rows):>10,}{schedule.batches[name]:>9,}  {tasks}{left_out}")
    return "\n".join(lines)


def _loss(recipe: Recipe, model: SentenceTransformer, part: TrainingSet, tracker: Tracker) -> TrackedLoss:
    """Make the loss of a training set for the processes that there are."""
    training = recipe.training
    if with_deepspeed() and training.mini_batch_size is not None:
        raise ValueError(
            "DeepSpeed's stage 2 takes one backward pass per step, and gradient caching does several: set "
            "training.mini_batch_size=null, or use DDP or FSDP2"
        )
    task = recipe.tasks[part.task]
    label_dim = part.teacher_dimension if part.form == "texts" else None
    loss = build_loss(model, task, training, processes().num_processes, replicated(), label_dim)
    config: Any = model[0].config if is_mote(model) else None
    experts = {config.expert_of(name) for name in part.column_tasks.values()} if config is not None else set()
    if replicated() and recipe.model.kind == "mote" and len(experts) > 1 and not _is_cached(loss):
        raise ValueError(
            f"{part.name}: in several processes with the whole model each (DDP), {task.loss} cannot send the columns "
            f"of a row through {len(experts)} experts ({', '.join(sorted(experts))}). Use FSDP2, a loss that caches "
            "gradients, or one task for anchors and positives"
        )
    return TrackedLoss(model, loss, tracker, part.name, part.task, part.column_tasks)


def _is_cached(loss: nn.Module) -> bool:
    return uses_gradient_cache(loss.loss if isinstance(loss, MatryoshkaLoss) else loss)


def _fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that a run must not change midway, flat."""
    flat = _flat(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in FREE_SETTINGS}


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name what differs, with both values where they are short."""
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    shown = [f"{key} ({theirs.get(key)!r} there, {ours.get(key)!r} here)" for key in keys]
    return [text if len(text) < 120 else key for key, text in zip(keys, shown, strict=True)]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _how_to_go_on(folder: RunFolder) -> str:
    checkpoint = folder.last_checkpoint()
    if checkpoint is None:
        return "There is no checkpoint yet."
    return f"The last good checkpoint is {checkpoint}; the same command goes on from there."


def _is_about_writing(error: Exception) -> bool:
    """Tell a full disk from other errors: torch and safetensors raise their own."""
    return isinstance(error, OSError | SafetensorError) or "inline_container" in str(error)


def _device_name() -> str:
    device = processes().device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def _as_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
