"""Run a recipe: data, model, losses and Sentence-Transformers' own trainer; killed runs go on where they were."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
)
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn
from transformers import PrinterCallback, Trainer

from configuration_mote import MoTEConfig
from mote.checkpoints.reading import load_tokenizer, open_any
from mote.training.arguments import Schedule, check_arguments, describe, plan_schedule, trainer_arguments
from mote.training.data import TrainingData, TrainingSet, load_data
from mote.training.losses import build_loss, check_loss
from mote.training.model import START_FOLDER, build_model, encodings, is_mote, names_of
from mote.training.processes import deepspeed_stage, processes, replicated, with_deepspeed, with_fsdp
from mote.training.progress import (
    CHECKPOINT_FILE,
    LOSS_FILE,
    NonFiniteError,
    RunCallback,
    TrackedLoss,
    Tracker,
)
from mote.training.recipe import Recipe, load_recipe
from mote.training.record import finish
from mote.training.run_folder import RunFolder, as_yaml, fixed_settings
from mote.training.validation import Validation

Report = Callable[[str], None]


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
        finish(run, folder, before, say)
    state.wait_for_everyone()
    return folder.model


def plan(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> str:
    """Say what a run would do: its data and its steps. Raises what `train` raises for them; writes nothing."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    check_recipe(recipe)
    names_of(recipe)
    RunFolder(Path(recipe.output)).open(recipe, overwrite=False)
    tokenizer = load_tokenizer(open_any(recipe.model.source, recipe.model.revision))
    data = load_data(recipe, tokenizer, with_teachers=False)
    schedule = plan_schedule(recipe, data.sets, processes().num_processes)
    return "\n".join([as_yaml(recipe), str(data), describe(schedule, data.sets)])


def check_recipe(recipe: Recipe) -> None:
    """Find what does not hold in a recipe before anything is read.

    Raises:
        ValueError: If a loss, or an argument of the trainer, is unknown, or settings contradict each other.
    """
    for name, task in recipe.tasks.items():
        for dataset in task.datasets:
            check_loss(name, task.of(dataset))
    if recipe.model.kind == "token" and recipe.training.precision == "fp16" and recipe.model.load_balancing:
        raise ValueError(
            "The load-balancing loss of a token router is not scaled as gradients are in fp16, and would be lost: set "
            "training.precision to bf16"
        )
    check_arguments(recipe.training.arguments)


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
            raise KeyboardInterrupt(checkpoints.how_to_go_on()) from None
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error}. Nothing of it was kept. {checkpoints.how_to_go_on()} Try a lower training.learning_rate "
                "first."
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            if not _is_about_writing(error):
                raise
            raise OSError(f"A checkpoint could not be written: {error}. {checkpoints.how_to_go_on()}") from error
        finally:
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, RunCallback):
                    callback.close()

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
            folder.clean(checkpoint)
    model, names = _build_model(recipe, folder)
    with state.main_process_first():  # where there are teachers, the others find their embeddings in the cache
        data = load_data(recipe, model.tokenizer, report)
    report(str(data))
    schedule = plan_schedule(recipe, data.sets, state.num_processes)
    report(describe(schedule, data.sets))
    routed = recipe.model.kind == "mote"
    tracker = Tracker()
    torch.manual_seed(recipe.training.seed)  # for the weights that a loss may have
    losses = {name: _loss(recipe, model, part, tracker) for name, part in data.sets.items()}
    validation = Validation(data.validation, encodings(names, routed)) if data.validation else None
    seal = {
        "recipe": fixed_settings(recipe),
        "data": {name: part.fingerprint() for name, part in data.sets.items()},
        "processes": state.num_processes,
    }
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
        args=trainer_arguments(
            recipe, folder, data.sets, schedule, names if recipe.model.instructions else None, routed
        ),
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
    if state.is_main_process:
        folder.write_recipe(recipe)
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
            with suppress(OSError):  # a run that could not begin leaves nothing
                folder.path.rmdir()


def _restore(checkpoint: Path | None, seal: dict[str, Any], tracker: Tracker, losses: dict[str, TrackedLoss]) -> None:
    """Take over from a checkpoint what the trainer does not."""
    if checkpoint is None:
        return
    kept = json.loads((checkpoint / CHECKPOINT_FILE).read_text(encoding="utf-8"))
    if kept["processes"] != seal["processes"]:
        raise ValueError(
            f"{checkpoint} is of a run in {kept['processes']} processes, this one has {seal['processes']}: their "
            "batches differ"
        )
    if kept["data"] != seal["data"]:
        differing = ", ".join(key for key in seal["data"] if kept["data"].get(key) != seal["data"][key])
        raise ValueError(f"The data are not those that {checkpoint} was trained on: {differing or 'a set'} changed")
    tracker.restore(kept["tracker"])
    for name, weights in torch.load(checkpoint / LOSS_FILE, weights_only=True).items():
        own = dict(losses[name].named_parameters())
        with torch.no_grad():
            for key, value in weights.items():
                own[key].copy_(value)


def _loss(recipe: Recipe, model: SentenceTransformer, part: TrainingSet, tracker: Tracker) -> TrackedLoss:
    """Make the loss of a training set for the processes that there are."""
    training = recipe.training
    task = part.settings
    label_dim = part.teacher_dimension if part.form == "texts" else None
    loss = build_loss(model, task, training, processes().num_processes, replicated(), label_dim)
    if with_deepspeed() and deepspeed_stage() >= 2 and _is_cached(loss):
        raise ValueError(
            "DeepSpeed's stages from 2 take one backward pass per step, and gradient caching does several: set "
            "training.mini_batch_size=null, or use stage 1, DDP or FSDP2"
        )
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


def _is_about_writing(error: Exception) -> bool:
    """Tell a full disk from other errors: torch and safetensors raise their own, without a number."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return "inline_container" in str(error) or "os error" in str(error).lower() or "I/O error" in str(error)
