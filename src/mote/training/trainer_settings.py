"""Settings of the trainer: the host's own arguments, checked by its types, and those that are ours."""

import difflib
import functools
import typing
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError, model_validator

from mote.settings import Settings

_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)


class TrainerSettings(Settings):
    """Arguments of a trainer, by their own names, and the batch size.

    The trainer's arguments listed here have another default, or are checked more closely; all others are accepted,
    too, with the trainer's default.

    Attributes:
        batch_size: Rows per step, over all processes.
        mini_batch_size: Rows per forward pass. Default: the whole batch.
        num_train_epochs: Passes over the data.
        max_steps: Number of steps, in place of the epochs; -1: determined by the epochs.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of AdamW.
        optim: Optimizer.
        warmup_steps: Steps in which the learning rate rises; below 1, a fraction of all steps.
        bf16: Mixed precision in bfloat16; weights stay in float32.
        fp16: Mixed precision in float16; weights stay in float32.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        seed: Seed of the order of the data, new weights, and dropout.
        save_steps: Steps between checkpoints; below 1, a fraction of all steps.
        save_total_limit: Checkpoints to keep: at least two, because the last one must stay until the next is complete.
        logging_steps: Steps between log lines; below 1, a fraction of all steps.
        eval_steps: Steps between validations; below 1, a fraction of all steps. Default: only before and after
            training.
        per_device_eval_batch_size: Rows per pass in validation, per process.
    """

    model_config = ConfigDict(extra="allow")

    batch_size: int = Field(default=6144, ge=2)
    mini_batch_size: int | None = Field(default=None, ge=1)
    num_train_epochs: float = Field(default=1, gt=0)
    max_steps: PositiveInt | Literal[-1] = -1
    learning_rate: float = Field(default=5e-6, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    optim: str = "adamw_torch"
    warmup_steps: float = Field(default=0.1, ge=0)
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    seed: int = Field(default=42, ge=0, lt=2**32)
    save_steps: float = Field(default=0.1, gt=0)
    save_total_limit: int = Field(default=2, ge=2)
    logging_steps: float = Field(default=1, gt=0)
    eval_steps: float | None = Field(default=None, gt=0)
    per_device_eval_batch_size: int = Field(default=64, ge=1)

    ARGUMENTS: ClassVar[str] = "transformers.TrainingArguments"
    RESERVED: ClassVar[dict[str, str]] = {
        "per_device_train_batch_size": "set training.batch_size",
        "gradient_accumulation_steps": "a step is one whole batch; set training.mini_batch_size to save memory",
        "auto_find_batch_size": "set training.batch_size",
        "logging_strategy": "set training.logging_steps",
        "logging_nan_inf_filter": "a run stops at the first non-finite value",
        "resume_from_checkpoint": "the same command resumes from the last checkpoint",
        "save_only_model": "the same command resumes from the last checkpoint",
        "warmup_ratio": "set training.warmup_steps, where a number below 1 is a fraction of all steps",
        "eval_strategy": "set training.eval_steps",
        "data_seed": "set training.seed",
        "output_dir": "set output",
        "hub_token": "recipes are kept beside the model; log in with `hf auth login`, or set HF_TOKEN",
    }
    """Arguments of the trainer that the rest of the recipe determines → what to set instead."""

    @model_validator(mode="before")
    @classmethod
    def _check_trainer_arguments(cls, settings: Any) -> Any:
        """Check the arguments that are passed on to the trainer against its own types."""
        if not isinstance(settings, dict):
            return settings
        checked = dict(settings)
        for key in settings.keys() - cls.model_fields.keys():
            if key in cls.RESERVED:
                raise ValueError(f"{key!r} cannot be set here: {cls.RESERVED[key]}")
            known = _argument_types(cls.ARGUMENTS)
            if key not in known:
                nearest = difflib.get_close_matches(str(key), [*cls.model_fields, *known], n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"unknown key {key!r}.{hint} See the documentation of {cls.ARGUMENTS}")
            # YAML reads `no` as false.
            value = "no" if settings[key] is False and key.endswith("_strategy") else settings[key]
            try:
                checked[key] = TypeAdapter(known[key], config=_ANY_TYPE).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{key}: {error.errors()[0]['msg']}, got {value!r}") from None
        return checked

    @classmethod
    def ours(cls) -> list[str]:
        """Name the settings that are not arguments of the trainer."""
        return [
            "batch_size",
            "mini_batch_size",
            *(name for name in cls.model_fields if name not in TrainerSettings.model_fields),
        ]

    @property
    def precision(self) -> Literal["bf16", "fp16", "no"]:
        """Mixed precision, as accelerate names it."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the settings that are passed to the trainer, whose `gradient_checkpointing` a run enables itself."""
        return {key: value for key, value in self if key not in (*self.ours(), "gradient_checkpointing")}


class PeftSettings(Settings):
    """LoRA adapters of the library PEFT, trained in place of the model's own weights.

    Attributes:
        r: Rank.
        alpha: Scaling: updates are multiplied by alpha / r.
        dropout: Dropout on the adapters' inputs.
        targets: What gets adapters: `all-linear` layers; in a MoTE, only those that the experts share (`shared`), or
            those of each expert (`experts`); or PEFT's `target_modules`: a list of name suffixes, or a pattern.
        arguments: Further arguments of PEFT's `LoraConfig` (`use_dora`, `use_rslora`, `modules_to_save` …).
        base_dtype: Dtype of the frozen linear layers; use `bfloat16` with `training.bf16`, which rounds them anyway.
        merge: Whether adapters are merged into the weights at the end. If not, `model/` contains only the adapters.
    """

    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    targets: str | list[str] = "all-linear"
    arguments: dict[str, Any] = {}
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    merge: bool = True


class TrainingSettings(TrainerSettings):
    """`SentenceTransformerTrainingArguments`, by their own names, and eight of ours: sizes of batches, and these.

    Attributes:
        gradient_caching: Whether mini-batches are embedded twice (GradCache), so that only one at a time is in memory.
            Without it, a step of InfoNCE is faster, in the memory of the whole batch.
        only_experts: Experts to train; everything else is frozen. Default: the whole model.
        start_weight: Weight of the start in the final model, from 0 (the weights as trained) to below 1: less of what
            the start could do is lost (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", Section 3). In a
            MoTE also by part: `shared` weights, or an expert → weight, negative to move away from the start.
        peft: Adapters to train, with everything else frozen. Default: none.
        cross_device_negatives: Whether the rows of all processes are negatives of one another.
        matryoshka: Dimensions to which embeddings can be truncated, or `halves`: the model's own, half of it, and so on
            down to 64.
    """

    gradient_caching: bool = True
    only_experts: list[str] | None = Field(default=None, min_length=1)
    start_weight: (
        Annotated[float, Field(ge=0, lt=1)]
        | Annotated[dict[str, Annotated[float, Field(gt=-1, lt=1)]], Field(min_length=1)]
    ) = 0.0
    peft: PeftSettings | None = None
    cross_device_negatives: bool = True
    matryoshka: Annotated[list[PositiveInt], Field(min_length=1)] | Literal["halves"] | None = None

    ARGUMENTS: ClassVar[str] = "sentence_transformers.SentenceTransformerTrainingArguments"
    RESERVED: ClassVar[dict[str, str]] = {
        **TrainerSettings.RESERVED,
        "batch_sampler": "set tasks.NAME.batches",
        "multi_dataset_batch_sampler": "set tasks.NAME.batches",
        "train_sampling_strategy": "set tasks.NAME.batches",
        "dataloader_drop_last": "batches of a training set have nearly equal sizes, so that there is no small last one",
        "prompts": "set model.instructions",
        "router_mapping": "set tasks.NAME.anchor and positive",
    }


@functools.cache
def _argument_types(name: str) -> dict[str, Any]:
    """Return the arguments of a trainer → their types; importing them takes seconds."""
    arguments = resolve_name(name)
    hints = typing.get_type_hints(arguments)
    return {field: hints[field] for field in arguments.__dataclass_fields__}
