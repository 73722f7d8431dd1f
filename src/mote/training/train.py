"""Training from a recipe: data, model, losses and Sentence-Transformers' trainer; interrupted runs are resumed."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from torch import nn
from transformers import Trainer

from mote.checkpoints.models import load_tokenizer
from mote.checkpoints.reading import open_checkpoint
from mote.checkpoints.sentence_transformers import pipeline_of
from mote.checkpoints.tensors import token_routing, weight_name
from mote.remote.configuration_mote import MoTEConfig
from mote.training.adapters import AdapterCheckpoints, merge_adapters, network_of, trained_weights
from mote.training.batches import BlendedCollator, EvenBatchSampler, TaskBatchSampler
from mote.training.data import TrainingData, TrainingSet, load_data
from mote.training.losses import LoadBalancedLoss, build_loss, check_loss
from mote.training.model import SHARED, build_model, encodings, names_of
from mote.training.own_tasks import complete
from mote.training.processes import build_arguments, processes, with_fsdp
from mote.training.progress import LOSS_FILE, RunCallback, SparsitySchedule, TrackedLoss
from mote.training.recipe import Recipe, load_recipe
from mote.training.run import Run
from mote.training.teachers import TeacherEmbeddings, teachers_of
from mote.training.validation import Validation


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
    return open_run(recipe, overrides, overwrite=overwrite).run()


def open_run(recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Any:
    """Return the run of a recipe, with `plan` and `run`: one of all tasks together, or one for each."""
    from mote.training.separately import SeparateRuns

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    if not loaded.tasks:
        raise ValueError(f"The recipe {loaded.name} has no task: add NAME=FILE, as in tickets=tickets.csv")
    return (TrainingRun if loaded.together else SeparateRuns)(loaded, overwrite=overwrite)


class TrainingRun(Run):
    """The run of `mote train`."""

    verb = "train"
    recipe_class = Recipe

    recipe: Recipe
    names: MoTEConfig
    data: TrainingData
    teachers: dict[str, TeacherEmbeddings] | None = None  # if they are to embed the texts
    validation: Validation | None = None

    def _open(self) -> None:
        self._complete()
        super()._open()

    def is_done(self) -> bool:
        """Whether this very run has finished; one that another run of the folder began is to be replaced."""
        self._complete()
        return super().is_done()

    def _complete(self) -> None:
        """Complete tasks of one's own, from their data."""
        if not all(task.anchor for task in self.recipe.tasks.values()):
            self.recipe = complete(self.recipe, open_checkpoint(self.recipe.model.source, self.recipe.model.revision))

    def _check(self) -> None:
        for name, task in self.recipe.tasks.items():
            check_loss(name, task, sparse=self.recipe.retrieval.kind != "dense")
        self.names, self.tokenizer = names_of(self.recipe, self.source), load_tokenizer(self.source)
        teachers_of(self.recipe)

    def identify_models(self) -> dict[str, str]:
        """Identify the source and the teachers."""
        self.teachers = teachers_of(self.recipe)
        return {**super().identify_models(), **{one.name: one.identity for one in self.teachers.values()}}

    def _load_model(self) -> None:
        self.model, self.names = self._built(self.recipe)
        self.tokenizer = self.model.tokenizer

    def _load_data(self) -> int:
        longest = pipeline_of(self.source).transformer.get("max_seq_length") or self.tokenizer.model_max_length
        self.data = load_data(self.recipe, self.tokenizer, self.teachers, self.recipe.model.max_length or longest)
        recipe, sets, training = self.recipe, self.data.sets, self.recipe.training
        count = processes().num_processes
        own: dict[str, Any] = {
            "batch_sampler": partial(EvenBatchSampler, batch_rows=training.batch_size, processes=count),
            "multi_dataset_batch_sampler": TaskBatchSampler,
        }
        if not self.data.validation:
            own["eval_strategy"] = "no"
        elif training.eval_steps is not None and getattr(training, "metric_for_best_model", None) is None:
            own["metric_for_best_model"] = Validation.primary_metric
        if recipe.model.instructions:
            own["prompts"] = {name: training_set.instructions(self.names) for name, training_set in sets.items()}
        if recipe.model.kind == "mote":
            own["router_mapping"] = {name: training_set.column_tasks for name, training_set in sets.items()}
        dense = recipe.retrieval.kind == "dense"
        kind = SentenceTransformerTrainingArguments if dense else SparseEncoderTrainingArguments
        self.arguments = build_arguments(kind, training, self.folder, **own)
        return sum(len(EvenBatchSampler(one.rows, training.batch_size, count)) for one in sets.values())

    def _build_trainer(self) -> Trainer:
        recipe, model, sets = self.recipe, self.model, self.data.sets
        torch.manual_seed(recipe.training.seed)  # for a loss's own weights
        losses = {name: self._loss(training_set) for name, training_set in sets.items()}
        if self.checkpoint is not None:
            for name, weights in torch.load(self.checkpoint / LOSS_FILE, weights_only=True).items():
                losses[name].load_state_dict(weights, strict=False)
        if self.data.validation:
            how = encodings(self.names, recipe.model.kind)
            self.validation = Validation(self.data.validation, how, self.arguments.per_device_eval_batch_size)
        if with_fsdp():
            model.base_model_prefix = "0"  # accelerate cannot wrap `Normalize`
        return _trainer_class(recipe)(
            model=model,
            args=self.arguments,
            train_dataset={name: training_set.rows for name, training_set in sets.items()},
            loss=dict[str, nn.Module](losses),
            data_collator=self._collator(),
            evaluator=self.validation if recipe.training.eval_steps is not None else None,
            callbacks=[SparsitySchedule(recipe.retrieval, losses), RunCallback(self.tracker, losses)],
        )

    def _loss(self, training_set: TrainingSet) -> TrackedLoss:
        loss = build_loss(self.model, training_set, self.recipe)
        routed = self.recipe.model.kind == "mote"
        experts = {self.names.expert_of(task) for task in training_set.tasks} if routed else set()
        if len(experts) > 1 and training_set.parts and with_fsdp():  # gradients of unlike experts would be summed
            raise ValueError(f"FSDP cannot train {len(experts)} experts with several instructions in a batch: use DDP")
        if token_routing(self.names) is not None:
            loss = LoadBalancedLoss(loss)
        return TrackedLoss(self.model, loss, self.tracker, training_set.name, training_set.task)

    def _collator(self) -> BlendedCollator | None:
        """Build the collator of batches with several instructions; without any, the trainer uses its own."""
        model, in_parts = self.model, {name: one.parts for name, one in self.data.sets.items() if one.parts}
        if not in_parts:
            return None
        knows_instructions = hasattr(model[0], "instruction_pooling")
        if not knows_instructions and any(getattr(module, "include_prompt", True) is False for module in model):
            raise ValueError(
                "Blended batches: `include_prompt=False` of Sentence-Transformers' Pooling supports only one "
                "instruction per batch. Leave instructions out of the pooling with `mote set`, which supports one per "
                "row"
            )
        settings, instructed = self.recipe.model, {name: list[Any]() for name in in_parts}
        for name, part in ((name, part) for name, parts in in_parts.items() for part in parts):
            instructions = part.instructions(self.names) if settings.instructions else {}
            tasks = part.column_tasks if settings.kind == "mote" else {}
            own = {column: (instructions.get(column), tasks.get(column)) for column in part.column_tasks}
            # The placeholder of a negative belongs to the positives' task.
            columns = max((one.column_tasks for one in in_parts[name]), key=len)
            instructed[name].append({column: own.get(column, own["positive"]) for column in columns})
        return BlendedCollator(
            model.preprocess,
            router_mapping=self.arguments.router_mapping,
            prompts=self.arguments.prompts,
            parts=instructed,
            tasks=list(self.names.tasks),
            tokenizer=model.tokenizer,
        )

    def _built(self, recipe: Recipe) -> tuple[Any, MoTEConfig]:
        """Build the model of a recipe, and remove the start model when all processes have read it."""
        state = processes()
        try:
            model, names = build_model(recipe, self.source, self.folder.path)
            model.model_card_data.generate_widget_examples = False  # the library's card would embed without a task
            return model, names
        finally:
            state.wait_for_everyone()
            if state.is_main_process:
                shutil.rmtree(self.folder.start, ignore_errors=True)

    def scores(self) -> dict[str, float]:
        """Score the model on the held-out texts, in the main process."""
        return self.validation(self.model) if self.validation is not None and processes().is_main_process else {}

    def finish(self, before: dict[str, float]) -> None:
        """Score the model, write its repository, replacing an earlier one, and remove the checkpoints."""
        self._gather()
        self._interpolate()
        if not processes().is_main_process:
            return
        peft = self.recipe.training.peft
        if peft is not None and peft.merge:
            merge_adapters(network_of(self.model))
        self._write(before, self.scores(), "trained from")

    def _gather(self) -> None:
        """Load the trained weights into a new model if the current one cannot be written; all processes call this.

        This is needed if FSDP shards the weights, or if adapters to be merged were trained on rounded weights.
        """
        recipe, peft = self.recipe, self.recipe.training.peft
        rounded = peft is not None and peft.merge and peft.base_dtype != "float32"
        if not with_fsdp() and not rounded:
            return
        if with_fsdp():
            weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)
        else:
            weights = trained_weights(self.model)
            self.model.cpu()  # the accelerator need not hold both
        if peft is not None and rounded:
            recipe = recipe.updated(training=recipe.training.updated(peft=peft.updated(base_dtype="float32")))
        self.model, _ = self._built(recipe)
        if processes().is_main_process:
            own = trained_weights(self.model)
            self.model.load_state_dict({name: weights[name] for name in own}, strict=False)

    def _interpolate(self) -> None:
        """Move the trained weights towards the start by `start_weight`; all processes call this."""
        weight = self.recipe.training.start_weight
        if not weight:
            return
        start, _ = self._built(self.recipe)
        experts = {}
        if isinstance(weight, dict):
            network = network_of(self.model)
            experts = {id(one): weight_name(key, network.config).expert for key, one in network.named_parameters()}
        with torch.no_grad():
            for trained, initial in zip(self.model.parameters(), start.parameters(), strict=True):
                own = weight.get(experts.get(id(trained)) or SHARED, 0.0) if isinstance(weight, dict) else weight
                trained.lerp_(initial.to(trained), own)


def _trainer_class(recipe: Recipe) -> Any:
    base: type = SentenceTransformerTrainer if recipe.retrieval.kind == "dense" else SparseEncoderTrainer
    if with_fsdp():  # Sentence-Transformers (6.2) loads checkpoints as whole models only
        return type("ShardedTrainer", (base,), {"_load_from_checkpoint": Trainer._load_from_checkpoint})
    adapters = () if recipe.training.peft is None else (AdapterCheckpoints,)
    return type("OwnTrainer", (_SavesOnce, *adapters, base), {})


class _SavesOnce:
    """A trainer of which only one process saves; all of Sentence-Transformers' (6.2) do, into the same files."""

    args: Any

    def _save(self, *arguments: Any, **others: Any) -> None:
        if self.args.should_save:
            super()._save(*arguments, **others)  # type: ignore[misc]  # of the next class
