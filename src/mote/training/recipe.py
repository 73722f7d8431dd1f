"""Recipes: everything that determines a training run, in one short file.

A recipe is YAML. It may extend another one (`extends: mote`), and then holds only the differences; on the command line,
`key=value` changes single settings (`training.learning_rate=2e-5`). Unknown keys are errors.
"""

import difflib
import functools
import typing
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

import mote.data.settings
from mote.checkpoints.definitions import instruction_with
from mote.data.settings import Settings

SHIPPED = files("mote") / "recipes"
EXAMPLE_DATA = "examples/data"

_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)


class ModelSettings(Settings):
    """The model.

    Attributes:
        source: Dense checkpoint or MoTE: a folder, or an id on the Hub.
        kind: `mote` (an expert per task), `token_routed` (the same experts, routed token by token), or `dense`.
        revision: Branch, tag or commit of a source on the Hub.
        instructions: Whether texts are prefixed with the instruction of their task.
        instruction_texts: Task → instruction, overriding the paper's.
        definitions: Task → definition, which the template turns into an instruction. The paper's instructions are then
            not used.
        template: Template that turns a definition into an instruction. Default: `Instruct: {definition}`, and `Query: `
            on a second line.
        instruction_pooling: `included`: the instruction's tokens are pooled, too; `excluded`: they are attended to, but
            not pooled; `excluded_by_count`: as `excluded`, by NV-Embed's count of the tokens. Default: the source's.
        layers: Blocks with experts (`every`, `every_other`, or a list of indices), for `mote` and `token_routed`.
        shared_modules: Paths of the submodules of a block that all experts share; `[]`: none. Default: the attention.
        bidirectional: Whether a decoder attends in both directions; for every `kind`. Default: the source's setting.
        pooling: `mean`, `cls`, `last_token`, or, for `mote`, `latent_attention` or `self_attention`, which are trained.
            Default: the source's.
        pooling_latents: Number of latents, for `latent_attention`. Default: 512.
        pooling_heads: Number of heads, for attention pooling. Default: 8.
        pooling_head_dim: Dimension of a head, for attention pooling. Default: the hidden size.
        experts: Expert names. Default: the paper's four.
        tasks: Further task → the expert that serves it.
        num_experts: Experts per block, for `token_routed`. Default: as many as `experts`.
        num_experts_per_tok: Experts per token, for `token_routed`. Default: the source's, or 2.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1, for `token_routed`. Default:
            the source's, or true.
        router_aux_loss_coef: Weight of the load-balancing loss, for `token_routed`. Default: the source's, or 0.005.
        router_aux_loss_type: Formula of the load-balancing loss, for `token_routed`. Default: the source's, or
            `equation_1`.
        trust_remote_code: Whether to run the code that comes with a MoTE from the Hub.
        max_length: Maximum length of a text in tokens. Default: the source's.
        end_token: Token that the tokenizer appends to each text, after truncation; `eos`: its end-of-sequence token.
            Default: as in the source's settings.
        attention: Attention implementation, by its name in transformers. Default: transformers' choice.
        dropout: Dropout probability of hidden states and of attention in training. Default: the source's.
    """

    source: str
    kind: Literal["mote", "token_routed", "dense"] = "mote"
    revision: str | None = None
    instructions: bool = True
    instruction_texts: dict[str, str] = {}
    definitions: dict[str, str] = {}
    template: str | None = None
    instruction_pooling: Literal["included", "excluded", "excluded_by_count"] | None = None
    layers: str | list[int] = "every"
    shared_modules: list[str] | None = None
    bidirectional: bool = False
    pooling: Literal["mean", "cls", "last_token", "latent_attention", "self_attention"] | None = None
    pooling_latents: int | None = Field(default=None, ge=1)
    pooling_heads: int | None = Field(default=None, ge=1)
    pooling_head_dim: int | None = Field(default=None, ge=1)
    experts: list[str] | None = None
    tasks: dict[str, str] = {}
    num_experts: int | None = Field(default=None, ge=1)
    num_experts_per_tok: int | None = Field(default=None, ge=1)
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    router_aux_loss_type: Literal["equation_1", "megablocks"] | None = None
    trust_remote_code: bool = False
    max_length: int | None = Field(default=None, ge=4)
    end_token: str | None = None
    attention: str | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)

    @field_validator("layers")
    @classmethod
    def _known(cls, layers: str | list[int]) -> str | list[int]:
        if isinstance(layers, str) and layers not in ("every", "every_other"):
            raise ValueError(f"expected 'every', 'every_other', or a list of indices, got {layers!r}")
        return layers


class RetrievalSettings(Settings):
    """The model's vectors, and what keeps sparse ones sparse: the arguments of Sentence-Transformers' `SpladeLoss`.

    Attributes:
        kind: `dense`; `sparse`, with a weight for each token of the vocabulary; or `hybrid`, both from one pass.
        sparse_from: Source of sparse weights: the logits of the `head` (SPLADE), or hidden states times token
            `embeddings` (CoT-MoTE, Equation 4). Default: the source's, else `head`, or `embeddings` for hybrid vectors.
        weight: Weight of the sparse score in a hybrid score; `tuned`: 1 in training, then the best weight on held-out
            pairs. Default: the source's, or 1.
        max_active_dims: Number of largest weights that the trained model keeps. Default: all.
        query_regularizer_weight: Weight of the FLOPS loss on anchors.
        document_regularizer_weight: Weight of the FLOPS loss on all other texts.
        query_regularizer_threshold: Number of active dimensions up to which an anchor is not regularised.
        document_regularizer_threshold: The same for all other texts.
        scheduler_type: How the weights of the FLOPS losses rise from 0: `quadratic` or `linear`.
        warmup_ratio: Fraction of the steps in which the weights of the FLOPS losses rise.
    """

    kind: Literal["dense", "sparse", "hybrid"] = "dense"
    sparse_from: Literal["head", "embeddings"] | None = None
    weight: Annotated[float, Field(ge=0)] | Literal["tuned"] | None = None
    max_active_dims: int | None = Field(default=None, ge=1)
    query_regularizer_weight: float = Field(default=5e-5, ge=0)
    document_regularizer_weight: float = Field(default=3e-5, ge=0)
    query_regularizer_threshold: int | None = Field(default=None, ge=1)
    document_regularizer_threshold: int | None = Field(default=None, ge=1)
    scheduler_type: Literal["quadratic", "linear"] = "quadratic"
    warmup_ratio: float = Field(default=0.33, gt=0, le=1)

    @property
    def of_loss(self) -> dict[str, Any]:
        """The arguments of `SpladeLoss`."""
        return {name: value for name, value in self if "_regularizer_" in name}


class TeacherSettings(Settings):
    """A teacher, whose embeddings are the targets of a distillation loss.

    Attributes:
        source: Any Sentence-Transformers model: a folder, or an id on the Hub.
        prompts: Column (`anchor`, `positive`) → the teacher's prompt for it.
        batch_size: Batch size of the teacher.
        trust_remote_code: Whether to run code that comes with the teacher.
    """

    source: str
    prompts: dict[Literal["anchor", "positive"], str] = {}
    batch_size: int = Field(default=32, ge=1)
    trust_remote_code: bool = False


class DatasetSettings(mote.data.settings.DatasetSettings):
    """A dataset of a task, or all that match a pattern, and how it is trained on.

    Attributes:
        anchor: Task of the anchors. Default: `tasks.TASK.anchor`.
        positive: Task of the positives and negatives. Default: `tasks.TASK.positive`.
        instruction: Instruction of the anchors, and of all other texts with their task, replacing the task's. This and
            the next setting need homogeneous or blended batches.
        definition: The same as a definition, which `model.template` turns into an instruction.
        weight: How often each row is seen per epoch: 2 is twice, 0.5 a seeded half of the rows.
        limit: Maximum number of rows, a seeded sample.
        max_length: Maximum length of texts in tokens: one number, or one per column.
        negatives: Maximum number of hard negatives per row.
        label_texts: Label → text, for `pairs: label_text`. Default: the labels themselves.
        min_score: Score from which a scored pair becomes a positive pair in both directions, for InfoNCE.
        temperature: Temperature, replacing the task's. Needs homogeneous or blended batches.
        loss: Loss, replacing the task's. This and the following settings need homogeneous batches.
        loss_arguments: Arguments of the loss, replacing the task's.
        teacher: Teacher, in place of the task's.
    """

    anchor: str | None = None
    positive: str | None = None
    instruction: str | None = None
    definition: str | None = None
    weight: float = Field(default=1.0, gt=0)
    limit: int | None = Field(default=None, ge=1)
    max_length: int | dict[str, int] | None = None
    negatives: int | None = Field(default=None, ge=0)
    label_texts: dict[str, str] = {}
    min_score: float | None = None
    temperature: float | None = Field(default=None, gt=0)
    loss: str | None = None
    loss_arguments: dict[str, Any] | None = None
    teacher: TeacherSettings | None = None

    @property
    def own_objective(self) -> dict[str, Any]:
        """Settings in place of the task's; with a loss of its own, arguments and teacher are its own, too."""
        names = ("temperature", "loss", "loss_arguments", "teacher")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"loss_arguments": {}, "teacher": None, **given} if "loss" in given else given


class TaskSettings(Settings):
    """One task of the training: its data, and its settings for task-aware contrastive learning (paper, section 3).

    Attributes:
        datasets: Datasets of the task.
        anchor: Task (instruction and expert) of the first column.
        positive: Task of the other columns. Default: the same as `anchor`.
        batches: `homogeneous` (each batch from one dataset), `heterogeneous` (across the task's datasets) or `blended`
            (across all tasks with this setting).
        pairs: What a labelled text is paired with: another text with the `same_label`, or the `label_text`, with the
            texts of other labels as negatives.
        temperature: Temperature of InfoNCE.
        weight: Weight of all datasets of the task, multiplied by their own.
        in_batch_negatives: Whether the other rows of a batch are negatives. If not, only hard negatives are.
        symmetric: Whether positives must also find their anchors.
        loss: `InfoNCE`, or the name of a Sentence-Transformers loss.
        loss_arguments: Arguments of a Sentence-Transformers loss.
        teacher: Teacher of a distillation loss.
    """

    datasets: list[DatasetSettings]
    anchor: str
    positive: str = ""
    batches: Literal["homogeneous", "heterogeneous", "blended"]
    pairs: Literal["same_label", "label_text"] = "same_label"
    temperature: float = Field(default=0.03, gt=0)
    weight: float = Field(default=1.0, gt=0)
    in_batch_negatives: bool = True
    symmetric: bool = False
    loss: str = "InfoNCE"
    loss_arguments: dict[str, Any] = {}
    teacher: TeacherSettings | None = None

    @model_validator(mode="after")
    def _both_sides(self) -> "TaskSettings":
        self.positive = self.positive or self.anchor
        if not self.datasets:
            raise ValueError("the task has no data: name at least one dataset, or remove the task (`null`)")
        own = [dataset.path for dataset in self.datasets if dataset.own_objective]
        if own and self.batches == "heterogeneous":
            raise ValueError(
                f"{', '.join(own)}: a batch across datasets has one loss; make the task's batches homogeneous, or move "
                "the dataset into a task of its own"
            )
        instructed = [one.path for one in self.datasets if one.instruction is not None or one.definition is not None]
        if instructed and self.batches == "heterogeneous":
            raise ValueError(
                f"{', '.join(instructed)}: a batch across datasets has the instruction of its task; make the task's "
                "batches homogeneous"
            )
        others = {self.of(dataset).loss for dataset in self.datasets} - {"InfoNCE"}
        if others and self.batches == "blended":
            raise ValueError(f"blended batches have the loss InfoNCE, not {', '.join(sorted(others))}")
        if others and self.pairs == "label_text":
            raise ValueError(f"pairs=label_text is for InfoNCE, not for {', '.join(sorted(others))}")
        for dataset in self.datasets:
            if dataset.label_texts and self.pairs != "label_text":
                raise ValueError(f"{dataset.path}: label_texts need pairs=label_text, got pairs={self.pairs}")
            if dataset.min_score is not None and self.of(dataset).loss != "InfoNCE":
                raise ValueError(f"{dataset.path}: min_score is for InfoNCE, not for {self.of(dataset).loss}")
        return self

    def of(self, dataset: DatasetSettings) -> "TaskSettings":
        """Return the task's settings for one of its datasets."""
        return self.model_copy(update=dataset.own_objective)


class DataSettings(Settings):
    """Settings of all datasets.

    Attributes:
        folder: Folder that relative paths of datasets refer to. `examples/data` comes with the package.
        limit: Maximum number of rows of each dataset, a seeded sample; overridden by a dataset's own limit.
        max_invalid_fraction: Fraction of invalid rows (empty, wrong type, missing column) above which a dataset is
            refused.
    """

    folder: str = "."
    limit: int | None = Field(default=None, ge=1)
    max_invalid_fraction: float = Field(default=0.01, ge=0, le=1)

    @property
    def place(self) -> Path:
        """The folder; `examples/data` also works without a clone of the repository."""
        if self.folder == EXAMPLE_DATA and not Path(EXAMPLE_DATA).exists():
            return Path(str(files("mote.example_data")))
        return Path(self.folder)


class TrainerSettings(Settings):
    """Arguments of a trainer, by their own names, and the batch size.

    The trainer's arguments listed here have another default, or are checked more closely; all others are accepted,
    too, with the trainer's default.

    Attributes:
        batch_size: Rows per step, over all processes.
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
    """

    model_config = ConfigDict(extra="allow")

    batch_size: int = Field(default=6144, ge=2)
    num_train_epochs: float = Field(default=1, gt=0)
    max_steps: int = Field(default=-1, ge=-1)
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

    ARGUMENTS: ClassVar[str] = "transformers.TrainingArguments"
    OURS: ClassVar[tuple[str, ...]] = ("batch_size",)
    RESERVED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size"),
            "a step is one whole batch; set training.batch_size",
        ),
        **dict.fromkeys(("logging_strategy", "logging_nan_inf_filter"), "set training.logging_steps"),
        **dict.fromkeys(
            ("resume_from_checkpoint", "save_only_model"), "the same command resumes from the last checkpoint"
        ),
        "warmup_ratio": "set training.warmup_steps, where a number below 1 is a fraction of all steps",
        "eval_strategy": "set training.eval_steps",
        "data_seed": "set training.seed",
        "output_dir": "set output",
    }
    """Arguments of the trainer that the rest of the recipe determines → what to set instead."""

    @model_validator(mode="before")
    @classmethod
    def _check_trainer_arguments(cls, settings: Any) -> Any:
        """Check the arguments that are passed on to the trainer against its own types."""
        if not isinstance(settings, dict):
            return settings
        checked = dict(settings)
        for key, value in settings.items():
            if key in cls.model_fields:
                continue
            if key in cls.RESERVED:
                raise ValueError(f"{key!r} cannot be set here: {cls.RESERVED[key]}")
            known = _argument_types(cls.ARGUMENTS)
            if key not in known:
                nearest = difflib.get_close_matches(str(key), [*cls.model_fields, *known], n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(
                    f"unknown key {key!r}.{hint} Known keys: {', '.join(cls.OURS)}, and the arguments of "
                    f"{cls.ARGUMENTS.rpartition('.')[2]}"
                )
            try:
                checked[key] = TypeAdapter(known[key], config=_ANY_TYPE).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{key}: {error.errors()[0]['msg']}, found {value!r}") from None
        return checked

    @model_validator(mode="after")
    def _one_precision(self) -> "TrainerSettings":
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are mutually exclusive")
        return self

    @property
    def precision(self) -> Literal["bf16", "fp16", "no"]:
        """Mixed precision, as accelerate names it."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the settings that are passed to the trainer.

        They exclude `gradient_checkpointing`, which the trainer has under changing names: a run enables it on the
        model.
        """
        return {key: value for key, value in self if key not in (*self.OURS, "gradient_checkpointing")}


class PeftSettings(Settings):
    """Adapters of the library PEFT, trained in place of the model's own weights.

    Attributes:
        method: Adapter method, by its name in PEFT.
        r: Rank of LoRA.
        alpha: Scaling of LoRA: updates are multiplied by alpha / r.
        dropout: Dropout on LoRA's inputs.
        targets: What gets adapters: `all-linear` layers; in a MoTE, only those that the experts share (`shared`), or
            those of each expert (`experts`); or PEFT's `target_modules`: a list of name suffixes, or a pattern.
        in_full: Modules that are trained in full beside the adapters, by name endings, as PEFT's `modules_to_save`.
        arguments: Further arguments of the method's PEFT config (`use_dora`, `use_rslora` …).
        base_dtype: Dtype of the frozen linear layers; use `bfloat16` with `training.bf16`, which rounds them anyway.
        merge: Whether adapters are merged into the weights at the end. If not, `model/` contains only the adapters.
    """

    method: Literal["lora", "loha", "lokr", "ia3", "oft", "hra"] = "lora"
    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    targets: str | list[str] = "all-linear"
    in_full: list[str] = []
    arguments: dict[str, Any] = {}
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    merge: bool = True

    @model_validator(mode="after")
    def _of_lora(self) -> "PeftSettings":
        given = sorted(self.model_fields_set & {"r", "alpha", "dropout"})
        if self.method != "lora" and given:
            raise ValueError(f"{', '.join(given)}: settings of LoRA; put those of {self.method} into `arguments`")
        return self


class TrainingSettings(TrainerSettings):
    """`SentenceTransformerTrainingArguments`, by their own names, and eight settings of ours: `batch_size`, and these.

    Attributes:
        mini_batch_size: Rows per forward pass. Default: the whole batch.
        gradient_caching: Whether mini-batches are embedded twice (GradCache), so that only one at a time is in memory.
            Without it, a step of InfoNCE is faster, in the memory of the whole batch.
        only_experts: Experts to train; everything else is frozen. Default: the whole model.
        start_weight: Weight of the start in the final model, from 0 (the weights as trained) to below 1: less of what
            the start could do is lost (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", Section 3).
        peft: Adapters to train, with everything else frozen. Default: none.
        cross_device_negatives: Whether the rows of all processes are negatives of one another.
        matryoshka: Dimensions to which embeddings can be truncated, or `halves`: the model's own, half of it, and so on
            down to 64.
    """

    mini_batch_size: int | None = Field(default=None, ge=1)
    gradient_caching: bool = True
    only_experts: list[str] | None = Field(default=None, min_length=1)
    start_weight: float = Field(default=0.0, ge=0, lt=1)
    peft: PeftSettings | None = None
    cross_device_negatives: bool = True
    matryoshka: list[int] | Literal["halves"] | None = None

    ARGUMENTS: ClassVar[str] = "sentence_transformers.SentenceTransformerTrainingArguments"
    OURS: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "mini_batch_size",
        "gradient_caching",
        "only_experts",
        "start_weight",
        "peft",
        "cross_device_negatives",
        "matryoshka",
    )
    RESERVED: ClassVar[dict[str, str]] = {
        **TrainerSettings.RESERVED,
        **dict.fromkeys(
            ("per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size"),
            "a step is one whole batch; set training.batch_size, and training.mini_batch_size to save memory",
        ),
        **dict.fromkeys(("batch_sampler", "multi_dataset_batch_sampler"), "set tasks.NAME.batches"),
        **dict.fromkeys(
            ("prompts", "router_mapping"), "set model.instruction_texts, and tasks.NAME.anchor and positive"
        ),
    }


@functools.cache
def _argument_types(name: str) -> dict[str, Any]:
    """Return the arguments of a trainer → their types; importing them takes seconds."""
    arguments = resolve_name(name)
    hints = typing.get_type_hints(arguments)
    return {name: hints[name] for name in arguments.__dataclass_fields__}


class ValidationSettings(Settings):
    """Held-out texts, which are never trained on.

    Attributes:
        share: Fraction of the texts of each dataset, chosen by a hash of the text: the same for all recipes.
        limit: Maximum number of texts per dataset; in pre-training, per task.
    """

    share: float = Field(default=0.02, ge=0, lt=1)
    limit: int = Field(default=400, ge=2)


class Recipe(Settings):
    """A training run.

    Attributes:
        name: Recipe name.
        description: Purpose of the recipe.
        model: The model.
        tasks: Task → its data and settings.
        retrieval: The model's vectors.
        data: Settings of all datasets.
        training: `SentenceTransformerTrainingArguments`, and eight settings of ours.
        validation: Held-out texts.
        output: Folder of the run.
    """

    name: str = "custom"
    description: str = ""
    model: ModelSettings
    tasks: dict[str, TaskSettings]
    retrieval: RetrievalSettings = RetrievalSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    output: str = ""

    PLACE: ClassVar[Any] = SHIPPED

    @field_validator("tasks")
    @classmethod
    def _at_least_one(cls, tasks: dict[str, TaskSettings]) -> dict[str, TaskSettings]:
        if not tasks:
            raise ValueError("the recipe has no task")
        return tasks

    @model_validator(mode="after")
    def _one_way_to_instruct(self) -> "Recipe":
        for dataset in (dataset for task in self.tasks.values() for dataset in task.datasets):
            if dataset.instruction is not None and dataset.definition is not None:
                raise ValueError(f"{dataset.path} has an instruction and a definition: give one of the two")
            if self.instruction_of(dataset) and not self.model.instructions:
                raise ValueError(f"{dataset.path} has an instruction, but model.instructions is false")
        return self

    def instruction_of(self, dataset: DatasetSettings) -> str | None:
        """Return a dataset's own instruction; None: that of the task."""
        if dataset.definition is None:
            return dataset.instruction
        return instruction_with(dataset.definition, self.model.template)

    @model_validator(mode="after")
    def _fits_retrieval(self) -> "Recipe":
        if self.retrieval.kind != "dense" and self.model.kind == "dense":
            raise ValueError(
                f"retrieval.kind={self.retrieval.kind} needs a MoTE: with one expert (model.experts) it computes the "
                "same as a dense model"
            )
        if self.retrieval.kind != "hybrid" and self.retrieval.weight is not None:
            raise ValueError(f"retrieval.weight is for hybrid scores, got retrieval.kind={self.retrieval.kind}")
        if self.retrieval.weight == "tuned" and not self.validation.share:
            raise ValueError("retrieval.weight=tuned needs held-out pairs: set validation.share")
        if self.retrieval.kind != "dense" and self.training.matryoshka:
            raise ValueError(f"training.matryoshka is for dense vectors, got retrieval.kind={self.retrieval.kind}")
        return self

    @model_validator(mode="after")
    def _fits_blended(self) -> "Recipe":
        if self.retrieval.kind != "dense" and any(task.batches == "blended" for task in self.tasks.values()):
            raise ValueError(f"blended batches are for dense vectors, got retrieval.kind={self.retrieval.kind}")
        return self

    @model_validator(mode="after")
    def _fits_peft(self) -> "Recipe":
        peft = self.training.peft
        if peft is None:
            return self
        if self.model.kind == "token_routed":
            raise ValueError("training.peft: token-routed experts are stacked weights, which PEFT does not adapt here")
        if self.model.kind == "dense" and peft.targets in ("shared", "experts"):
            raise ValueError(f"training.peft.targets={peft.targets}: a dense model has no experts; try all-linear")
        if self.training.start_weight:
            raise ValueError(
                "training.start_weight moves the model's own weights, which adapters leave as they are: for weaker "
                "adapters, lower training.peft.alpha"
            )
        if peft.base_dtype == "bfloat16" and not self.training.bf16:
            raise ValueError("training.peft.base_dtype=bfloat16 needs mixed precision: set training.bf16=true")
        return self

    @model_validator(mode="after")
    def _default_output(self) -> "Recipe":
        self.output = self.output or f"runs/{self.name}"
        return self
