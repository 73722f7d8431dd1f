"""Pre-training from a recipe, on transformers' own trainer; interrupted runs are resumed."""

import math
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedModel, Trainer, TrainingArguments

from mote.checkpoints.models import load_dense, load_mote, load_tokenizer
from mote.checkpoints.reading import Checkpoint, has_head, is_mote, mote_class
from mote.checkpoints.sentence_transformers import max_seq_length
from mote.experts.exporting import export
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.training.model import check_fit, matching_config, set_dropout, set_router_loss, tasks_of, upcycling_options
from mote.training.objectives import Pretraining
from mote.training.pretraining_recipe import PretrainedModelSettings, PretrainingRecipe
from mote.training.processes import build_arguments, processes, with_deepspeed, with_fsdp
from mote.training.progress import RunCallback
from mote.training.run import Run
from mote.training.texts import MaskedBatches, SetEpoch, TextData, TextRows, load_texts
from mote.upcycling.options import UpcyclingOptions
from mote.upcycling.plan import plan_upcycling


def pretrain(recipe: PretrainingRecipe | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Pre-train a model from a recipe: a MoTE with each text through the expert of its task, or a dense model.

    Arguments and errors are those of `mote.train`, and it resumes as that does; the source needs a head.

    Returns:
        Folder of the model, which has a head (`AutoModelForMaskedLM`).
    """
    return PretrainingRun(recipe, overrides, overwrite=overwrite).run()


class PretrainingRun(Run):
    """The run of `mote pretrain`."""

    verb = "pretrain"
    recipe_class = PretrainingRecipe

    recipe: PretrainingRecipe
    data: TextData
    mini_batches: list[dict[str, Any]]  # of the batch that is not complete yet: losses and rows

    def _check(self) -> None:
        if with_deepspeed() or with_fsdp():
            raise ValueError("Pre-training runs on one device or under DDP: start it without DeepSpeed and FSDP")
        self.names, self.tokenizer = _config_of(self.recipe, self.source), load_tokenizer(self.source)

    def _load_model(self) -> None:
        recipe = self.recipe
        torch.manual_seed(recipe.training.seed)  # for the new weights of a head, of routers, of a decoder
        self.model = build_masked_lm(recipe.model, self.source, self.names)
        self.names = self.model.config
        self.trained = Pretraining(self.model, recipe.decoder if recipe.objective == "cot-mae" else None)
        if recipe.model.dropout is not None:
            set_dropout(self.trained, recipe.model.dropout)

    def _load_data(self) -> int:
        self.data = load_texts(self.recipe, self.tokenizer)
        self.data.fill_rows(self.recipe, self.names, self.tokenizer)
        training, own = self.recipe.training, {"label_names": ["labels"], "remove_unused_columns": False}
        if training.mini_batch_size is not None:
            steps = training.batch_size // (training.mini_batch_size * processes().num_processes)
            own |= {"per_device_train_batch_size": training.mini_batch_size, "gradient_accumulation_steps": steps}
        self.arguments = build_arguments(TrainingArguments, training, self.folder, **own)
        return math.ceil(sum(map(len, self.data.texts.values())) / training.batch_size)

    def _build_trainer(self) -> Trainer:
        recipe, tokenizer = self.recipe, self.tokenizer
        own_length = max_seq_length(self.model, self.source) or tokenizer.model_max_length
        tokenizer.model_max_length = recipe.model.max_length or own_length
        self.mini_batches = []
        self.trained.register_forward_hook(self._observe, with_kwargs=True)
        rows = TextRows(self.data.texts, recipe, self.names, tokenizer)
        held_out = {
            task: TextRows({task: texts}, recipe, self.names, tokenizer)
            for task, texts in self.data.held_out.items()
            if texts
        }
        return PretrainingTrainer(
            self.trained,
            self.arguments,
            data_collator=MaskedBatches(tokenizer, recipe),
            train_dataset=rows,
            eval_dataset=held_out,
            callbacks=[SetEpoch(rows), RunCallback(self.tracker, {})],
        )

    def _observe(self, model: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record a batch of training after its last mini-batch, as a forward hook of the model."""
        if model.training:
            self.mini_batches.append({**out, "rows": len(kwargs["input_ids"])})
            if self.trainer.accelerator.sync_gradients:
                sums = {name: sum(one[name] for one in self.mini_batches) for name in self.mini_batches[0]}
                self.mini_batches, rows = [], sums.pop("rows")
                losses = {name: loss * processes().num_processes for name, loss in sums.items()}
                self.tracker.record(self.recipe.objective, self.recipe.objective, losses, rows)

    def scores(self) -> dict[str, float]:
        """Return the loss on the held-out texts of each task."""
        trainer: Any = self.trainer
        tasks = [task for task, texts in self.data.held_out.items() if texts]
        # On a copy with the same weights: accelerate (1.15) treats a model that it has prepared for evaluation as ready
        # for training, too, so that each process of DDP would train a model of its own.
        trainer.model = trainer.model_wrapped = copy(self.trained)
        found = trainer.evaluate() if tasks else {}
        trainer.model = trainer.model_wrapped = self.trained
        return {task: round(found[f"eval_{task}_loss"], 4) for task in tasks}

    def finish(self, before: dict[str, float]) -> None:
        """Score the trained model, and write its repository, replacing an earlier one."""
        after = self.scores()
        if not processes().is_main_process:
            return
        if self.recipe.model.kind == "dense":
            self.model = dense_with_head(self.model)
        made = f"pre-trained by `{self.recipe.objective}` (recipe `{self.recipe.name}`) from"
        self._write(before, after, made, tokenizer=self.tokenizer, names=self.names)


class PretrainingTrainer(Trainer):
    """A trainer that leaves tied weights out of checkpoints, as it does by itself for a `PreTrainedModel`."""

    model: Pretraining

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        weights, tied = state_dict or self.model.state_dict(), self.model._keys_to_ignore_on_save
        super()._save(output_dir, {name: weight for name, weight in weights.items() if name not in tied})


def build_masked_lm(settings: PretrainedModelSettings, source: Checkpoint, config: MoTEConfig) -> MoTEForMaskedLM:
    """Build the model that a recipe pre-trains, in float32, with its config from `_config_of`."""
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
    """Return the config of the model that a recipe pre-trains; the source must suit it, and know its tasks."""
    settings, config = recipe.model, source.config
    if not is_mote(config):
        config = plan_upcycling(source, options=_upcycling_options(recipe)).config
    elif settings.new_head or not has_head(config):
        raise ValueError(f"{source.name} is a MoTE: only its dense source can get a new head (model.new_head=true)")
    else:
        config = matching_config(settings, source)
    contexts = [task.context_task for task in recipe.tasks.values() if task.context_task]
    check_fit(recipe, source, config, [*recipe.tasks, *contexts])
    return config


def _upcycling_options(recipe: PretrainingRecipe) -> UpcyclingOptions:
    """A dense model is trained as a MoTE with one expert, which computes the same."""
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
