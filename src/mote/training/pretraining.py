"""Pre-training from a recipe, on transformers' own trainer; interrupted runs are resumed."""

import contextlib
import logging
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mote.checkpoints.models import dense_without_weights, load_dense, load_mote, load_tokenizer
from mote.checkpoints.reading import Checkpoint, has_head, is_mote, mote_class, open_checkpoint
from mote.checkpoints.sentence_transformers import max_seq_length
from mote.experts.exporting import export
from mote.files import read_json
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.reporting import table
from mote.training.arguments import check_launch, common_arguments, count_steps, describe_steps, rows_per_process
from mote.training.masking import MaskedBatches, SetEpoch, TextRows
from mote.training.model import set_dropout
from mote.training.names import check_fit, matching_config, set_router_loss, tasks_of, upcycling_options
from mote.training.objectives import Pretraining
from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.processes import processes, require_sharded_checkpoints, summed, with_deepspeed, with_fsdp
from mote.training.progress import RunCallback, TaskProgress, Tracker
from mote.training.recipe_files import load_recipe
from mote.training.run import BaseRun, identity_of
from mote.training.run_folder import CHECKPOINT_FILE, RunFolder, as_yaml, fixed_settings, step_of
from mote.training.texts import TextData, load_texts
from mote.upcycling.options import UpcyclingOptions
from mote.upcycling.plan import plan_upcycling

logger = logging.getLogger(__name__)

OBJECTIVES = {  # in cards
    "mlm": "pre-trained by masked language modelling",
    "cot-mae": "pre-trained by contextual masked auto-encoding (CoT-MAE)",
}


def pretrain(recipe: PretrainingRecipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Pre-train a model from a recipe: a MoTE with each text through the expert of its task, or a dense model.

    The same call resumes an interrupted run from its last checkpoint, with the same result.

    Args:
        recipe: A recipe, a recipe file, or the name of a shipped recipe.
        overrides: `key=value` pairs that override settings of the recipe.
        overwrite: Discard a finished or interrupted run and start over; its model is kept until the new one replaces
            it.

    Returns:
        Folder of the model, which has a head (`AutoModelForMaskedLM`).

    Raises:
        FileNotFoundError: If recipe, source or data do not exist.
        FileExistsError: If the run has finished already, or its folder holds something else.
        BlockingIOError: If another process is running in the folder.
        ValueError: If a setting, the data, or a checkpoint is invalid, or the source has no head; `NonFiniteError` if
            training diverges.
        OSError: If the disk is full or read-only.
    """
    state = processes()
    recipe = recipe if isinstance(recipe, PretrainingRecipe) else load_recipe(recipe, overrides, PretrainingRecipe)
    folder = RunFolder(Path(recipe.output))
    _check_settings(recipe)
    folder.check(recipe)
    with folder.lock() if state.is_main_process else contextlib.nullcontext():
        run = prepare(recipe, folder, overwrite)
        before = None if with_fsdp() else run.evaluate_start()  # FSDP shards a model together with its optimizer
        run.train()
        after = run.evaluate()
        run.gather()
        if state.is_main_process:
            run.finish({"before": before, "after": after})
        state.wait_for_everyone()
    return folder.model


def plan_pretraining(
    recipe: PretrainingRecipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False
) -> str:
    """Describe the run of a recipe: settings, data and steps. Raises the errors of `pretrain`; writes nothing."""
    recipe = recipe if isinstance(recipe, PretrainingRecipe) else load_recipe(recipe, overrides, PretrainingRecipe)
    folder = RunFolder(Path(recipe.output))
    _check_settings(recipe)
    folder.open(recipe, overwrite)
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    config = _config_of(recipe, source)
    if not is_mote(source.config):
        dense_without_weights(source, with_head=not recipe.model.new_head)
    with torch.device("meta"):
        Pretraining(mote_class(config.model_type, "masked_lm")(config), recipe.decoder_settings)
    tokenizer = load_tokenizer(source)
    MaskedBatches(tokenizer, recipe)
    data, arguments = load_texts(recipe, tokenizer), _trainer_arguments(recipe, folder)
    experts = f"experts: {', '.join(config.experts)}"
    return "\n".join([as_yaml(recipe), experts, "", str(data), "", _describe(recipe, data, arguments)])


class TextTracker(Tracker):
    """Counts of the texts and tokens of each task.

    Args:
        objective: Name of the objective.
        tasks: Tasks, in the order of their `task_ids`.
    """

    def __init__(self, objective: str, tasks: Sequence[str]) -> None:
        super().__init__()
        self.objective, self.names = objective, tasks

    def observe(self, model: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record a batch of training, as a forward hook of the model; raise `NonFiniteError` as `record` does."""
        if not model.training or out.loss is None:
            return
        ids = kwargs.get("task_ids", torch.zeros(len(kwargs["input_ids"]), device=out.loss.device))
        self.record(self.objective, self.objective, [[name] for name in self.names], [kwargs], out.loss, ids)
        losses = summed(torch.stack([loss.detach().cpu().double() for loss in out.values()]))
        self.last |= dict(zip(out, (losses / processes().num_processes).tolist(), strict=True))


class UnusedExperts(TrainerCallback):
    """Removes the gradients of experts without a text in any process, which are zeros if all run the same passes.

    So the step leaves these experts unchanged: no weight decay, and no momentum.
    """

    def __init__(self, model: MoTEForMaskedLM, tracker: Tracker) -> None:
        self.model, self.tracker = model, tracker
        self.texts: dict[str, int] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember the number of texts of each task."""
        self.texts = {task: seen["texts"] for task, seen in self.tracker.tasks.items()}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the gradients of experts whose tasks have no new texts."""
        config = self.model.config
        seen = self.tracker.tasks
        used = {config.expert_of(task) for task in seen if seen[task]["texts"] > self.texts.get(task, 0)}
        unused = tuple(f".experts.{expert}." for expert in config.experts if expert not in used)
        for name, weight in self.model.named_parameters():
            if any(part in name for part in unused):
                weight.grad = None


@dataclass
class PretrainingRun(BaseRun):
    """A run of pre-training that is ready to start.

    Attributes:
        tokenizer: Tokenizer of the model.
    """

    tokenizer: Any

    def evaluate(self) -> dict[str, float] | None:
        """Return the loss on the held-out texts of each task; None if there are none."""
        if not self.trainer.eval_dataset:
            return None
        found = self.trainer.evaluate()
        names = {f"eval_{name}_loss": name for name in self.trainer.eval_dataset}  # type: ignore[union-attr]
        return {name: round(found[key], 4) for key, name in names.items()}

    def evaluate_start(self) -> dict[str, float] | None:
        """Return these losses before the run, measured on a copy with the same weights.

        accelerate (1.15) treats a model that it has prepared for evaluation as ready for training, too, so that each
        process of DDP would train a model of its own.
        """
        trainer: Any = self.trainer
        trained = trainer.model
        trainer.model = trainer.model_wrapped = copy(trained)
        try:
            return self.evaluate()
        finally:
            trainer.model = trainer.model_wrapped = trained

    def gather(self) -> None:
        """Gather the weights of the trained model, which FSDP shards; all processes call this."""
        if not with_fsdp():
            return
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)
        self.model = build_masked_lm(self.recipe, self.source)
        if processes().is_main_process:
            own = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.")}
            self.model.load_state_dict(own)

    def finish(self, validation: dict[str, Any]) -> None:
        """Write the model's repository, replacing an earlier one, and remove the checkpoints."""
        logger.info("Writing the model …")
        tracker = self.tracker
        record = {
            "recipe": self.recipe.name,
            "objective": self.recipe.objective,
            "steps": tracker.step,
            "seconds": round(tracker.seconds, 1),
            "resumed_from_step": None if self.checkpoint is None else step_of(self.checkpoint),
            "processes": processes().num_processes,
            "tasks": tracker.tasks,
            "loss": validation,
            "data": [report.__dict__ for report in self.data.reports],
        }
        made = f"{OBJECTIVES[self.recipe.objective]} (recipe `{self.recipe.name}`) from"
        names = self.model.config
        if self.recipe.model.kind == "dense":
            self.model = dense_with_head(self.model)
        self.write("pretrain", record, made, tokenizer=self.tokenizer, names=names)
        before, after = (validation[when] or {} for when in ("before", "after"))
        rows = [
            (name, *(f"{seen[unit]:,}" for unit in ("texts", "tokens")), before.get(name, ""), after.get(name, ""))
            for name, seen in tracker.tasks.items()
        ]
        header = ["task", "texts", "tokens", "held-out loss before", "after"]
        logger.info("%d steps in %.0f s\n\n%s", tracker.step, tracker.seconds, table(header, rows))


def prepare(recipe: PretrainingRecipe, folder: RunFolder, overwrite: bool = False) -> PretrainingRun:
    """Load everything that a run needs, and only then change its folder. Raises the errors of `pretrain`."""
    state = processes()
    checkpoint = folder.open(recipe, overwrite)
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    tokenizer = load_tokenizer(source)
    data = load_texts(recipe, tokenizer)
    logger.info("%s", data)
    torch.manual_seed(recipe.training.seed)  # for the new weights of a head, of routers, of a decoder
    model = build_masked_lm(recipe, source)
    trained = Pretraining(model, recipe.decoder_settings, same_passes=with_fsdp())
    if recipe.model.dropout is not None:
        set_dropout(trained, recipe.model.dropout)
    tokenizer.model_max_length = recipe.model.max_length or max_seq_length(model, source) or tokenizer.model_max_length
    identity: dict[str, dict[str, Any]] = {
        "settings": fixed_settings(recipe),
        "models": identity_of(source),
        "data": data.hashes(),
        "processes": {"number": state.num_processes},
    }
    tracker = TextTracker(recipe.objective, list(model.config.tasks))
    if checkpoint is not None:
        folder.require_same(**identity)
        tracker.restore(read_json(checkpoint / CHECKPOINT_FILE))
    trained.register_forward_hook(tracker.observe, with_kwargs=True)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = TextRows(data.texts, recipe, model.config, tokenizer)
    held_out = {task: {task: texts} for task, texts in data.held_out.items() if texts}
    trainer_arguments = _trainer_arguments(recipe, folder)
    logger.info("%s", _describe(recipe, data, trainer_arguments))
    trainer = PretrainingTrainer(
        trained,
        trainer_arguments,
        data_collator=MaskedBatches(tokenizer, recipe),
        train_dataset=rows,
        eval_dataset={task: TextRows(texts, recipe, model.config, tokenizer) for task, texts in held_out.items()},
        callbacks=[
            SetEpoch(rows),
            RunCallback(tracker, folder.path, {}, scaled=recipe.training.fp16),
            TaskProgress(tracker),
            *([UnusedExperts(model, tracker)] if with_fsdp() and model.config.routes_by_task else []),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        folder.begin(recipe, identity, checkpoint)
    return PretrainingRun(recipe, folder, source, data, model, tracker, trainer, checkpoint, tokenizer=tokenizer)


class PretrainingTrainer(Trainer):
    """A trainer that leaves tied weights out of checkpoints, as it does by itself for a `PreTrainedModel`."""

    model: Pretraining

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        weights, tied = state_dict or self.model.state_dict(), self.model._keys_to_ignore_on_save
        super()._save(output_dir, {name: weight for name, weight in weights.items() if name not in tied})


def build_masked_lm(recipe: PretrainingRecipe, source: Checkpoint) -> MoTEForMaskedLM:
    """Build the model that a recipe pre-trains, in float32.

    Raises:
        ValueError: If the source does not suit the recipe, has no head, or the recipe names an unknown task.
    """
    settings, config = recipe.model, _config_of(recipe, source)
    if is_mote(source.config):
        model: Any = load_mote(source, with_head=True).float()
        set_router_loss(model.config, settings)
    else:
        config.dtype = torch.float32
        dense: Any
        if settings.new_head:
            dense = AutoModelForMaskedLM.from_config(source.config).float()
            encoder = load_dense(source, torch.float32)[0].state_dict()
            missing, _ = dense.base_model.load_state_dict(encoder, strict=False)  # it may lack the pooler
            assert not missing, missing
        else:
            dense, _ = load_dense(source, torch.float32, with_head=True)
        model = mote_class(config.model_type, "masked_lm")(config, dense)
    if settings.attention is not None:
        model.set_attn_implementation(settings.attention)
    return model


def _config_of(recipe: PretrainingRecipe, source: Checkpoint) -> Any:
    """Return the config of the model that a recipe pre-trains; errors as in `build_masked_lm`."""
    settings, config = recipe.model, source.config
    if not is_mote(config):
        config = plan_upcycling(source, options=_upcycling_options(recipe)).config
    elif settings.new_head or not has_head(config):
        have = "has a head" if has_head(config) else "has no head"
        raise ValueError(
            f"{source.name} is a MoTE and {have}: a new head has to be added to its dense source (model.new_head=true)"
        )
    else:
        config = matching_config(settings, source)
    contexts = [task.context_task for task in recipe.tasks.values() if task.context_task]
    check_fit(recipe, source, config, [*recipe.tasks, *contexts])
    return config


def _upcycling_options(recipe: PretrainingRecipe) -> UpcyclingOptions:
    """Return the settings of upcycling; a dense model is trained as a MoTE with one expert, which computes the same."""
    settings = recipe.model
    options = upcycling_options(settings)
    options.with_head, options.pooling = not settings.new_head, settings.pooling
    if settings.kind == "dense":
        names = tasks_of(settings)
        options.experts = names.experts[:1]
        options.tasks = dict.fromkeys(names.tasks, names.experts[0])
        if options.instructions:
            papers = {task: names.instruction_of(task) for task in names.tasks}
            options.instructions = {**papers, **options.instruction_texts}
    return options


def dense_with_head(model: MoTEForMaskedLM) -> PreTrainedModel:
    """Turn a MoTE with one expert into the native model with its head; the weights are copies."""
    encoder = export(model, model.config.experts[0])
    native = AutoModelForMaskedLM.from_config(encoder.config)
    prefix = f"{native.base_model_prefix}."
    weights = {f"{prefix}{name}": weight for name, weight in encoder.state_dict().items()} | model.head.state_dict()
    native.load_state_dict(weights)
    return native.eval()


def _check_settings(recipe: PretrainingRecipe) -> None:
    if with_deepspeed():
        raise ValueError("Pre-training runs on one device, under DDP or FSDP2: start it without DeepSpeed")
    require_sharded_checkpoints()


def _describe(recipe: PretrainingRecipe, data: TextData, arguments: TrainingArguments) -> str:
    texts = sum(map(len, data.texts.values()))
    steps = count_steps(recipe.training, math.ceil(texts / recipe.training.batch_size))
    return f"{texts:,} texts; {describe_steps(steps, arguments)}"


def _trainer_arguments(recipe: PretrainingRecipe, folder: RunFolder) -> TrainingArguments:
    training = recipe.training
    rows = rows_per_process(training, processes().num_processes)
    settings = common_arguments(training, folder, per_device_eval_batch_size=rows)
    arguments = TrainingArguments(**settings, label_names=["labels"], remove_unused_columns=False)
    check_launch(arguments, training.precision, "pretrain")
    return arguments
