"""Pre-training by a recipe: masked language modelling on transformers' own trainer; killed runs are resumed."""

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from masked_lm_mote import MoTEForMaskedLM, native_with_head
from mote.checkpoints.cards import write_mote_card
from mote.checkpoints.provenance import command_line
from mote.checkpoints.reading import (
    Checkpoint,
    dense_without_weights,
    has_head,
    is_mote,
    load_dense,
    load_mote,
    load_tokenizer,
    mote_class,
    open_checkpoint,
)
from mote.checkpoints.sentence_transformers import max_seq_length, normalizes
from mote.checkpoints.tensors import parameter_counts
from mote.reporting import table
from mote.training.model import NO_FP16, check_mote, upcycling_options
from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.processes import processes, with_deepspeed, with_fsdp
from mote.training.progress import (
    NonFiniteError,
    RunCallback,
    TaskProgress,
    Tracker,
)
from mote.training.recipe import load_recipe
from mote.training.run_folder import RECIPE_FILE, RunFolder, as_yaml, fixed_settings, step_of
from mote.training.running import Run, restore
from mote.training.texts import Masking, NewMasks, TextData, TextRows, load_texts
from mote.upcycling import plan_upcycling

logger = logging.getLogger(__name__)

OBJECTIVE = "mlm"  # in the log


def pretrain(recipe: PretrainingRecipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Pre-train a MoTE by a recipe: masked language modelling, each text through the expert of its task.

    The same call resumes a killed run from its last checkpoint, with the same result.

    Args:
        recipe: A recipe, a recipe file, or the name of a shipped recipe.
        overrides: `key=value`, over the settings of the recipe.
        overwrite: Start again where a run has finished or was interrupted; its model stays until the new one replaces
            it.

    Returns:
        Folder of the model, which has a head (`AutoModelForMaskedLM`).

    Raises:
        FileNotFoundError: If recipe, source or data do not exist.
        FileExistsError: If the run has finished already, or its folder holds something else.
        BlockingIOError: If another process is running in the folder.
        ValueError: If a setting, the data, or a checkpoint is invalid, or the source has no head; `NonFiniteError` if
            training diverges.
    """
    state = processes()
    recipe = recipe if isinstance(recipe, PretrainingRecipe) else load_recipe(recipe, overrides, PretrainingRecipe)
    folder = RunFolder(Path(recipe.output))
    _check_settings(recipe)
    folder.check(recipe)
    with folder.lock() if state.is_main_process else contextlib.nullcontext():
        run = prepare(recipe, folder, overwrite)
        before = run.evaluate()
        run.train()
        after = run.evaluate()
        if state.is_main_process:
            run.finish({"before": before, "after": after})
        state.wait_for_everyone()
    return folder.model


def plan_pretraining(recipe: PretrainingRecipe | str | Path, overrides: Sequence[str] = ()) -> str:
    """Describe the run of a recipe: settings, data and steps. Raises what `pretrain` would raise; writes nothing."""
    recipe = recipe if isinstance(recipe, PretrainingRecipe) else load_recipe(recipe, overrides, PretrainingRecipe)
    folder = RunFolder(Path(recipe.output))
    _check_settings(recipe)
    folder.open(recipe, overwrite=False)
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    config = _config_of(recipe, source)
    if not is_mote(source.config):
        dense_without_weights(source, with_head=not recipe.model.new_head)
    Masking(load_tokenizer(source), recipe.masking)
    data, arguments = load_texts(recipe), _trainer_arguments(recipe, folder)
    experts = f"experts: {', '.join(config.experts)}"
    return "\n".join([as_yaml(recipe), experts, "", str(data), "", _describe(recipe, data, arguments)])


class TextTracker(Tracker):
    """Counts of the texts and tokens of each task.

    Args:
        tasks: Tasks, in the order of their `task_ids`.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__()
        self.names = tasks

    def observe(self, model: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record a batch of training: a forward hook of the model.

        Raises:
            NonFiniteError: If the loss is non-finite in any process.
        """
        if not model.training or out.loss is None:
            return
        tokens = kwargs["attention_mask"].sum(dim=1).cpu()  # [B]
        ids = kwargs.get("task_ids", torch.zeros_like(tokens)).cpu()
        counts = torch.stack([torch.bincount(ids, minlength=len(self.names)).double()] * 2)  # texts, tokens
        counts[1] = torch.bincount(ids, tokens.double(), minlength=len(self.names))
        values = torch.cat([out.loss.detach().cpu().double().reshape(1), counts.flatten()])
        state = processes()
        if state.num_processes > 1:
            values = reduce(values.to(state.device), "sum").cpu()
        loss = values[0].item() / state.num_processes
        texts_of, tokens_of = values[1:].view(2, -1).long().tolist()
        rows = sum(texts_of)
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss is {loss} at step {self.step + 1}, in a batch of {rows} texts")
        seen = self.training_sets.setdefault(OBJECTIVE, {"steps": 0, "rows": 0, "loss": 0.0})
        for key, value in (("steps", 1), ("rows", rows), ("loss", loss)):
            seen[key] += value
        for name, texts, count in zip(self.names, texts_of, tokens_of, strict=True):
            if not texts:
                continue
            of_task = self.tasks.setdefault(name, {"texts": 0, "tokens": 0})
            of_task["texts"] += texts
            of_task["tokens"] += count
        self.last = {"training_set": OBJECTIVE, "task": OBJECTIVE, "loss": loss, "rows": rows}


@dataclass
class PretrainingRun(Run):
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

    def finish(self, validation: dict[str, Any]) -> None:
        """Write the model's repository in place of an earlier one, and remove the checkpoints."""
        logger.info("Writing the model …")
        tracker = self.tracker
        record = {
            "recipe": self.recipe.name,
            "steps": tracker.step,
            "seconds": round(tracker.seconds, 1),
            "resumed_from_step": None if self.checkpoint is None else step_of(self.checkpoint),
            "processes": processes().num_processes,
            "tasks": tracker.tasks,
            "loss": validation,
            "data": [report.__dict__ for report in self.data.reports],
        }

        command = command_line("pretrain", RECIPE_FILE)

        def write_card(folder: Path, step: dict[str, Any]) -> None:
            made = f"pre-trained by masked language modelling (recipe `{self.recipe.name}`) from"
            counts, name = parameter_counts(self.model), self.folder.path.name
            common: dict[str, Any] = {"made": made, "fresh": False, "normalized": normalizes(self.source)}
            write_mote_card(folder, name, self.model.config, counts, self.source, command, **common)

        self.write("pretrain", record, "pre-trained from", write_card, self.tokenizer)
        seen = [(task, f"{count['texts']:,}", f"{count['tokens']:,}") for task, count in tracker.tasks.items()]
        logger.info("%d steps in %.0f s\n\n%s", tracker.step, tracker.seconds, table(["task", "texts", "tokens"], seen))
        if validation["before"]:
            losses = [
                (name, f"{loss:.4f}", f"{validation['after'][name]:.4f}") for name, loss in validation["before"].items()
            ]
            logger.info("%s", table(["held-out loss", "before", "after"], losses))


def prepare(recipe: PretrainingRecipe, folder: RunFolder, overwrite: bool = False) -> PretrainingRun:
    """Load everything that a run needs; only then does it change its folder. Raises what `pretrain` raises for it."""
    state = processes()
    checkpoint = folder.open(recipe, overwrite)
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    data = load_texts(recipe)
    logger.info("%s", data)
    torch.manual_seed(recipe.training.seed)  # for new weights: of a head, of routers
    model = build_masked_lm(recipe, source)
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = recipe.model.max_length or max_seq_length(model, source) or tokenizer.model_max_length
    metadata: dict[str, Any] = {
        "recipe": fixed_settings(recipe),
        "data": data.hashes(),
        "processes": state.num_processes,
    }
    tracker = TextTracker(list(model.config.tasks))
    if checkpoint is not None:
        restore(checkpoint, metadata, tracker)
    model.register_forward_hook(tracker.observe, with_kwargs=True)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = model.config
    instructions = {task: config.instruction_of(task) for task in recipe.tasks} if recipe.model.instructions else {}
    ids = {task: list(config.tasks).index(task) for task in recipe.tasks} if config.routes_by_task else None
    arguments: Any = (instructions, ids, tokenizer, recipe.training.seed, recipe.masking.whole_words)
    rows = TextRows(data.texts, *arguments)
    trainer_arguments = _trainer_arguments(recipe, folder)
    logger.info("%s", _describe(recipe, data, trainer_arguments))
    trainer = Trainer(
        model,
        trainer_arguments,
        data_collator=Masking(tokenizer, recipe.masking),
        train_dataset=rows,
        eval_dataset={task: TextRows({task: texts}, *arguments) for task, texts in data.held_out.items() if texts},
        callbacks=[
            NewMasks(rows),
            RunCallback(tracker, folder.path, {}, metadata, scaled=recipe.training.fp16, unit="texts"),
            TaskProgress(tracker),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        folder.begin(recipe, checkpoint)
    return PretrainingRun(recipe, folder, source, data, model, tracker, trainer, checkpoint, tokenizer=tokenizer)


def build_masked_lm(recipe: PretrainingRecipe, source: Checkpoint) -> MoTEForMaskedLM:
    """Build the model that a recipe pre-trains, in float32.

    Raises:
        ValueError: If the source does not suit the recipe, has no head, or the recipe names an unknown task.
    """
    settings, config = recipe.model, _config_of(recipe, source)
    if is_mote(source.config):
        model: Any = load_mote(source, with_head=True).float()
    else:
        config.dtype = torch.float32
        dense: Any
        if settings.new_head:
            dense = native_with_head(source.config).float()
            encoder = load_dense(source, torch.float32)[0].state_dict()
            missing, _ = dense.base_model.load_state_dict(encoder, strict=False)  # it may lack the pooler
            assert not missing, missing
        else:
            dense, _ = load_dense(source, torch.float32, with_head=True)
        model = mote_class(config.model_type, "masked_lm")(config, dense)
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)  # which a resumed trainer would miss
    if settings.attention is not None:
        model.set_attn_implementation(settings.attention)
    return model


def _config_of(recipe: PretrainingRecipe, source: Checkpoint) -> Any:
    """Return the config of the model that a recipe pre-trains; errors as in `build_masked_lm`."""
    settings, config = recipe.model, source.config
    if not is_mote(config):
        options = upcycling_options(settings)
        options.with_head = not settings.new_head
        config = plan_upcycling(source, options=options).config
    elif settings.new_head or not has_head(config):
        have = "has a head" if has_head(config) else "has no head"
        raise ValueError(
            f"{source.name} is a MoTE and {have}: a new one goes onto its dense source (model.new_head=true)"
        )
    else:
        check_mote(settings, config, source.is_local)  # type: ignore[arg-type]  # a MoTE's
    for task in recipe.tasks:
        config.expert_of(task)
    return config


def _check_settings(recipe: PretrainingRecipe) -> None:
    if with_fsdp() or with_deepspeed():
        raise ValueError("Pre-training runs on one device or under DDP: start it without FSDP and DeepSpeed")
    if recipe.model.kind == "token_routed" and recipe.training.fp16 and recipe.model.router_aux_loss_coef:
        raise ValueError(NO_FP16)


def _describe(recipe: PretrainingRecipe, data: TextData, arguments: TrainingArguments) -> str:
    texts = sum(map(len, data.texts.values()))
    per_epoch = math.ceil(texts / recipe.training.batch_size)
    steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(per_epoch * arguments.num_train_epochs)
    every = math.ceil(arguments.save_steps * (steps if arguments.save_steps < 1 else 1))
    warmup = arguments.get_warmup_steps(steps)
    return f"{texts:,} texts; {steps:,} steps, {warmup} of them warmup; a checkpoint every {every}"


def _trainer_arguments(recipe: PretrainingRecipe, folder: RunFolder) -> TrainingArguments:
    training, count = recipe.training, processes().num_processes
    if training.batch_size % count:
        raise ValueError(
            f"training.batch_size is that of all processes together: {training.batch_size} cannot be shared evenly "
            f"among {count}"
        )
    settings: dict[str, Any] = {
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": True,  # experts of other tasks get no gradient
        **training.trainer_arguments(),
        "output_dir": str(folder.checkpoints),
        "per_device_train_batch_size": training.batch_size // count,
        "per_device_eval_batch_size": training.batch_size // count,
        "eval_strategy": "no" if training.eval_steps is None else "steps",
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "disable_tqdm": True,  # `TaskProgress` shows the loss
    }
    try:
        return TrainingArguments(**settings)
    except (TypeError, NotImplementedError, ImportError, ValueError) as error:
        raise ValueError(f"The trainer refuses the settings of training: {error}") from error
