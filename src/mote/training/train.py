"""Training from a recipe: data, model, losses and Sentence-Transformers' trainer; interrupted runs are resumed."""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SparseEncoder,
    SparseEncoderTrainer,
)
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn
from transformers import PrinterCallback, Trainer

from mote.checkpoints.models import load_tokenizer
from mote.checkpoints.reading import Checkpoint, open_checkpoint
from mote.checkpoints.tensors import token_routing, weight_name
from mote.files import read_json
from mote.remote.configuration_mote import MoTEConfig
from mote.training.adapters import AdapterCheckpoints, merge_adapters, network_of, trained_weights
from mote.training.arguments import describe, trainer_arguments
from mote.training.blending import BlendedCollator
from mote.training.data import TrainingSet, load_data
from mote.training.losses import INFO_NCE, LoadBalancedLoss, build_loss, check_loss
from mote.training.model import build_model
from mote.training.names import SHARED, encodings, names_of
from mote.training.processes import (
    deepspeed_stage,
    processes,
    replicated,
    require_sharded_checkpoints,
    with_deepspeed,
    with_fsdp,
)
from mote.training.progress import (
    LOSS_FILE,
    AverageLossGradients,
    RunCallback,
    SparsitySchedule,
    TaskProgress,
    TrackedLoss,
    Tracker,
)
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from mote.training.record import build_record, scores_of_tasks, summary
from mote.training.run import BaseRun, identity_of
from mote.training.run_folder import (
    CHECKPOINT_FILE,
    CURVES_FILE,
    RECIPE_FILE,
    RunFolder,
    as_yaml,
    fixed_settings,
    step_of,
)
from mote.training.teachers import teacher_identities, teachers_of
from mote.training.validation import Validation, tune_weight

logger = logging.getLogger(__name__)


def train(recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Train a model from a recipe.

    The same call resumes an interrupted run from its last checkpoint, with the same result. Under `accelerate launch`,
    all processes call this together. Progress goes to the logger `mote.training`.

    Args:
        recipe: A recipe, a recipe file, or the name of a shipped recipe.
        overrides: `key=value` pairs that override settings of the recipe.
        overwrite: Discard a finished or interrupted run and start over; its model is kept until the new one replaces
            it.

    Returns:
        Folder of the trained model.

    Raises:
        FileNotFoundError: If recipe, source or data do not exist.
        FileExistsError: If the run has finished already, or its folder holds something else.
        BlockingIOError: If another process is running in the folder.
        ValueError: If a setting, the data, or a checkpoint is invalid; `NonFiniteError` if training diverges.
        OSError: If the disk is full or read-only.
    """
    state = processes()
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    folder = RunFolder(Path(recipe.output))
    check_recipe(recipe)
    folder.check(recipe)
    with folder.lock() if state.is_main_process else contextlib.nullcontext():
        run = prepare(recipe, folder, overwrite)
        before = run.validate() if state.is_main_process else None  # before a checkpoint is loaded
        state.wait_for_everyone()
        run.train()
        run.gather()
        run.interpolate()
        if state.is_main_process:
            run.finish(before)
        state.wait_for_everyone()
    return folder.model


def plan(recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> str:
    """Describe the run of a recipe: settings, data and steps. Raises the errors of `train`; writes nothing."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    folder = RunFolder(Path(recipe.output))
    check_recipe(recipe)
    folder.open(recipe, overwrite)
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    names = names_of(recipe, source)
    teachers_of(recipe)  # a missing teacher is an error here, too
    data = load_data(recipe, load_tokenizer(source))
    arguments = trainer_arguments(recipe, folder, data, names)
    return "\n".join([as_yaml(recipe), str(data), "", describe(recipe, data.sets, arguments)])


def check_recipe(recipe: Recipe) -> None:
    """Check the losses of a recipe before anything is read; raises `ValueError`."""
    for name, task in recipe.tasks.items():
        for dataset in task.datasets:
            check_loss(name, task.of(dataset), sparse=recipe.retrieval.kind != "dense")


@dataclass
class TrainingRun(BaseRun):
    """A run of training that is ready to start.

    Attributes:
        names: Tasks and instructions of the model.
        validation: Evaluator on the held-out texts.
    """

    names: MoTEConfig
    validation: Validation | None

    def validate(self) -> dict[str, float] | None:
        """Score the model on the held-out texts; None if there are none."""
        return self.validation(self.model) if self.validation is not None else None

    def gather(self) -> None:
        """Load the trained weights into a new model if the current one cannot be written; all processes call this.

        This is needed if FSDP shards the weights, or if adapters to be merged were trained on rounded weights.
        """
        training = self.recipe.training
        rounded = training.peft is not None and training.peft.merge and training.peft.base_dtype != "float32"
        if not with_fsdp() and not rounded:
            return
        if with_fsdp():
            weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)
        else:
            weights = trained_weights(self.model)
            self.model.cpu()  # the accelerator need not hold both
        recipe = self.recipe
        if rounded:
            peft = training.peft.model_copy(update={"base_dtype": "float32"})
            recipe = recipe.model_copy(update={"training": training.model_copy(update={"peft": peft})})
        model, _ = _load_model(recipe, self.source, self.folder)
        if processes().is_main_process:
            kept = {name: weights[name] for name in trained_weights(model)} if rounded else weights
            model.load_state_dict(kept, strict=not rounded)
        self.model = model

    def interpolate(self) -> None:
        """Move the trained weights towards the start by `start_weight`; all processes call this."""
        weight = self.recipe.training.start_weight
        if not weight:
            return
        start, _ = _load_model(self.recipe, self.source, self.folder)
        experts = {}
        if isinstance(weight, dict):
            network = network_of(self.model)
            experts = {id(one): weight_name(key, network.config).expert for key, one in network.named_parameters()}
        with torch.no_grad():
            for trained, initial in zip(self.model.parameters(), start.parameters(), strict=True):
                own = weight.get(experts.get(id(trained)) or SHARED, 0.0) if isinstance(weight, dict) else weight
                trained.lerp_(initial.to(trained), own)

    def finish(self, before: dict[str, float] | None) -> None:
        """Score the model, write its repository, replacing an earlier one, and remove the checkpoints."""
        logger.info("Scoring, and writing the model …")
        sizes = [(weight.numel(), weight.requires_grad) for weight in self.model.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        parameters = {"trained": trained, "all": sum(size for size, _ in sizes)}
        peft = self.recipe.training.peft
        if peft is not None and peft.merge:
            merge_adapters(network_of(self.model))
        tuned = {}
        if self.recipe.retrieval.weight == "tuned" and self.validation is not None:
            tuned = {"weights": tune_weight(self.validation, self.model)}
        record = build_record(
            self.recipe,
            self.names,
            self.data,
            self.tracker,
            parameters=parameters,
            resumed_from_step=None if self.checkpoint is None else step_of(self.checkpoint),
            validation={"before": before, "after": self.validate()},
        )
        self.write("train", {**record, **tuned}, "trained from", training=self._card_values(record))
        logger.info(summary(record))

    def _card_values(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the values for the card's section on training."""
        settings = ("batch_size", "learning_rate", "weight_decay", "seed", "start_weight")
        recipe = {key: getattr(self.recipe.training, key) for key in settings}
        if isinstance(recipe["start_weight"], dict):
            recipe["start_weight"] = ", ".join(f"{one} ({part})" for part, one in recipe["start_weight"].items())
        used = {one["name"]: one["used"] for one in record["data"]}
        datasets: dict[tuple[Any, ...], list[str]] = {}  # of a task, and an objective: some may have their own
        for training_set in self.data.sets.values():
            for part in training_set.parts or [training_set]:
                own = part.settings
                row = (part.task, own.batches, own.loss, own.temperature if own.loss == INFO_NCE else "")
                datasets.setdefault(row, []).extend(f"{name} ({used[name]:,})" for name in part.sources)
        return {
            "recipe": {"name": self.recipe.name, "description": self.recipe.description, **recipe},
            "run": record,
            "data": [(*row, ", ".join(names)) for row, names in datasets.items()],
            "seen": record["experts"] or record["tasks"],
            "scores": scores_of_tasks(record["validation"]),
            "recipe_file": RECIPE_FILE,
            "curves_file": CURVES_FILE,
        }


class _Sharded:
    """A trainer under FSDP: Sentence-Transformers (6.2) loads checkpoints as whole models only."""

    def _load_from_checkpoint(self, *args: Any) -> None:
        Trainer._load_from_checkpoint(self, *args)  # type: ignore[arg-type]  # the other base class is one


def _trainer_class(recipe: Recipe) -> Any:
    base: type = SentenceTransformerTrainer if recipe.retrieval.kind == "dense" else SparseEncoderTrainer
    if with_fsdp():
        return type("ShardedTrainer", (_Sharded, base), {})
    return base if recipe.training.peft is None else type("AdapterTrainer", (AdapterCheckpoints, base), {})


def prepare(recipe: Recipe, folder: RunFolder, overwrite: bool = False) -> TrainingRun:
    """Load everything that a run needs, and only then change its folder. Raises the errors of `train`."""
    state = processes()
    check_recipe(recipe)
    require_sharded_checkpoints()
    with state.main_process_first():
        checkpoint = folder.open(recipe, overwrite)
        if state.is_main_process:
            shutil.rmtree(folder.start, ignore_errors=True)  # left by a kill, perhaps of another source
    source = open_checkpoint(recipe.model.source, recipe.model.revision)
    teachers = teachers_of(recipe)
    models = {**identity_of(source), **teacher_identities(teachers)}
    if checkpoint is not None:
        folder.require_same(models=models)  # before another teacher embeds the texts
    model, names = _load_model(recipe, source, folder)
    with state.main_process_first():  # the others find teachers' embeddings in the cache
        data = load_data(recipe, model.tokenizer, teachers)
    logger.info(str(data))
    arguments = trainer_arguments(recipe, folder, data, names)
    logger.info(describe(recipe, data.sets, arguments))
    tracker = Tracker()
    torch.manual_seed(recipe.training.seed)  # for a loss's own weights
    losses = {name: _loss(recipe, model, names, training_set, tracker) for name, training_set in data.sets.items()}
    validation = None
    if data.validation:
        mixed = recipe.training.peft is not None and recipe.training.peft.base_dtype == "bfloat16"
        batch_size = arguments.per_device_eval_batch_size
        validation = Validation(data.validation, encodings(names, recipe.model.kind), batch_size, mixed=mixed)
    identity: dict[str, dict[str, Any]] = {
        "settings": fixed_settings(recipe),
        "models": models,
        "data": {name: training_set.rows_hash() for name, training_set in data.sets.items()},
        "processes": {"number": state.num_processes},
    }
    if checkpoint is not None:
        folder.require_same(**identity)
        tracker.restore(read_json(checkpoint / CHECKPOINT_FILE))
        for name, weights in torch.load(checkpoint / LOSS_FILE, weights_only=True).items():
            losses[name].load_state_dict(weights, strict=False)
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if with_fsdp():
        model.base_model_prefix = "0"  # type: ignore[assignment]  # accelerate cannot wrap `Normalize`
    trainer = _trainer_class(recipe)(
        model=model,
        args=arguments,
        train_dataset={name: training_set.rows for name, training_set in data.sets.items()},
        loss=dict[str, nn.Module](losses),
        data_collator=_collator(recipe, model, names, arguments, data.sets),
        evaluator=validation if recipe.training.eval_steps is not None else None,
        callbacks=[
            SparsitySchedule(recipe.retrieval, losses),
            AverageLossGradients(losses),
            RunCallback(tracker, folder.path, losses, scaled=recipe.training.fp16),
            TaskProgress(tracker),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    if state.is_main_process:
        folder.begin(recipe, identity, checkpoint)
    shared = (recipe, folder, source, data, model, tracker, trainer, checkpoint)
    return TrainingRun(*shared, names=names, validation=validation)


def _load_model(
    recipe: Recipe, source: Checkpoint, folder: RunFolder
) -> tuple[SentenceTransformer | SparseEncoder, MoTEConfig]:
    """Build the model, and remove the start model when all processes have read it."""
    state = processes()
    try:
        model, names = build_model(recipe, source, folder.path)
        model.model_card_data.generate_widget_examples = False  # the library's card would embed without a task
        return model, names
    finally:
        state.wait_for_everyone()
        if state.is_main_process:
            shutil.rmtree(folder.start, ignore_errors=True)


def _loss(
    recipe: Recipe,
    model: SentenceTransformer | SparseEncoder,
    names: MoTEConfig,
    training_set: TrainingSet,
    tracker: Tracker,
) -> TrackedLoss:
    """Build the loss of a training set, for the current processes."""
    loss = build_loss(model, training_set, recipe)
    is_cached = uses_gradient_cache(loss.loss if isinstance(loss, MatryoshkaLoss) else loss)
    if with_deepspeed() and deepspeed_stage() >= 2 and is_cached:
        raise ValueError(
            "DeepSpeed's stages from 2 allow one backward pass per step, but gradient caching needs several: set "
            "training.mini_batch_size=null, or use stage 1, DDP or FSDP2"
        )
    if recipe.model.kind == "mote":
        experts = {names.expert_of(name) for name in training_set.tasks}
        if training_set.parts and with_fsdp() and len(experts) > 1:
            raise ValueError(
                "Blended batches: under FSDP all processes must run the same expert at the same time, but their rows "
                "differ. Use DDP, a dense model (model.kind=dense), or batches of one task"
            )
        if replicated() and len(experts) > 1 and not is_cached:
            raise ValueError(
                f"{training_set.name}: under DDP, {training_set.settings.loss} cannot send the columns of a row "
                f"through {len(experts)} experts ({', '.join(sorted(experts))}). Use FSDP2, a loss that caches "
                "gradients, or one task for anchors and positives"
            )
    if token_routing(names) is not None:
        loss = LoadBalancedLoss(loss)
    column_tasks = [part.column_tasks for part in training_set.parts] or [training_set.column_tasks]
    return TrackedLoss(model, loss, tracker, training_set.name, training_set.task, column_tasks)


def _collator(
    recipe: Recipe, model: Any, names: MoTEConfig, arguments: Any, sets: dict[str, TrainingSet]
) -> BlendedCollator | None:
    """Build the collator of blended batches; without any, the trainer uses its own."""
    with_instructions, routed = recipe.model.instructions, recipe.model.kind == "mote"
    parts = {
        name: [
            {
                column: (instruction if with_instructions else None, part.column_tasks[column] if routed else None)
                for column, instruction in part.instructions(names).items()
            }
            for part in training_set.parts
        ]
        for name, training_set in sets.items()
        if training_set.parts
    }
    if not parts:
        return None
    knows_instructions = hasattr(model[0], "instruction_pooling")
    if not knows_instructions and any(getattr(module, "include_prompt", True) is False for module in model):
        raise ValueError(
            "Blended batches: `include_prompt=False` of Sentence-Transformers' Pooling supports only one instruction "
            "per batch. Leave instructions out of the pooling with `mote set`, which supports one per row"
        )
    for columns in parts.values():  # the placeholder of a negative belongs to the positives' task
        widest = max(columns, key=len)
        for part in columns:
            part |= {column: part["positive"] for column in widest if column not in part}
    return BlendedCollator(
        model.preprocess,
        router_mapping=arguments.router_mapping,
        prompts=arguments.prompts,
        parts=parts,
        tasks=list(names.tasks),
        tokenizer=model.tokenizer,
    )
