"""Recipes: everything that decides a training run, in one short file.

A recipe is YAML. It may extend another one (`extends: mote`), and then holds only what differs; on the command line,
`key=value` changes single settings (`training.learning_rate=2e-5`). Unknown keys are refused.
"""

import copy
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import Field, ValidationError, field_validator, model_validator

import mote.data.settings
from configuration_mote import alternatives
from mote.data.settings import Settings

SHIPPED = files("mote") / "recipes"


class ModelSettings(Settings):
    """What is trained.

    Attributes:
        source: A dense checkpoint or a MoTE: a folder, or an id on the Hub.
        kind: `mote` (an expert per task), `token` (the same experts, routed token by token), or `dense`.
        revision: Branch, tag or commit of a source on the Hub.
        instructions: Whether texts get the instruction of their task in front.
        instruction_texts: Task → instruction, over the paper's.
        layers: Of `mote` and `token`: the blocks with experts, as for `mote upcycle`.
        experts: Their names. Default: the paper's four.
        tasks: Further tasks → the expert that serves each.
        experts_per_token: Of `token`: how many experts a token goes through.
        load_balancing: Of `token`: weight of the load-balancing loss.
        trust_remote_code: Whether to run the code that comes with a MoTE from the Hub.
        max_length: Tokens after which texts are cut. Default: the source's.
        attention: Attention implementation, as transformers names it. Default: its own choice.
    """

    source: str
    kind: Literal["mote", "token", "dense"] = "mote"
    revision: str | None = None
    instructions: bool = True
    instruction_texts: dict[str, str] = {}
    layers: str | list[int] = "every"
    experts: list[str] | None = None
    tasks: dict[str, str] = {}
    experts_per_token: int = Field(default=2, ge=1)
    load_balancing: float = Field(default=0.01, ge=0)
    trust_remote_code: bool = False
    max_length: int | None = Field(default=None, ge=4)
    attention: str | None = None

    @field_validator("layers")
    @classmethod
    def _known(cls, layers: str | list[int]) -> str | list[int]:
        if isinstance(layers, str) and layers not in ("every", "every_other"):
            raise ValueError(f"{layers!r} is not 'every', 'every_other', or a list of indices")
        return layers


class TeacherSettings(Settings):
    """A model whose embeddings are to be learned (with a distillation loss).

    Attributes:
        source: Any Sentence-Transformers model: a folder, or an id on the Hub.
        prompts: Column (`anchor`, `positive`) → the teacher's own prompt for it.
        batch_size: Of encoding.
        trust_remote_code: Whether to run code that comes with the teacher.
    """

    source: str
    prompts: dict[str, str] = {}
    batch_size: int = Field(default=32, ge=1)
    trust_remote_code: bool = False


class DatasetSettings(mote.data.settings.DatasetSettings):
    """A dataset of a task, or several of a kind, and how it is trained on.

    Attributes:
        anchor: Task of the anchors. Default: that of the recipe's task.
        positive: Task of the positives and the negatives. Default: that of the recipe's task.
        weight: How often each row is seen per epoch: 2 is twice, 0.5 a seeded half of the rows.
        limit: Rows to take at most, a seeded sample.
        max_length: Tokens after which texts of this dataset are cut, one number or one for each column.
        negatives: Hard negatives per row at most, where the dataset has lists of them.
        temperature: In place of the task's; this and the following ones need homogeneous batches.
        loss: In place of the task's.
        loss_arguments: In place of the task's.
        teacher: In place of the task's.
    """

    anchor: str | None = None
    positive: str | None = None
    weight: float = Field(default=1.0, gt=0)
    limit: int | None = Field(default=None, ge=1)
    max_length: int | dict[str, int] | None = None
    negatives: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, gt=0)
    loss: str | None = None
    loss_arguments: dict[str, Any] | None = None
    teacher: TeacherSettings | None = None

    @property
    def own_objective(self) -> dict[str, Any]:
        """What this dataset has in place of its task's; with a loss of its own come its own arguments and teacher."""
        names = ("temperature", "loss", "loss_arguments", "teacher")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"loss_arguments": {}, "teacher": None, **given} if "loss" in given else given


class TaskSettings(Settings):
    """One task of the training, and its part of task-aware contrastive learning (TA-CL, section 3 of the paper).

    Attributes:
        datasets: Of the task.
        anchor: Task (instruction and expert) of the first column of its pairs.
        positive: Task of the other columns. Default: that of the anchors.
        batches: `homogeneous`, each from one dataset, or `heterogeneous`, across the task's datasets.
        temperature: Of InfoNCE.
        weight: Of all its datasets, multiplied with theirs.
        in_batch_negatives: Whether the other rows of a batch are negatives; if not, only given ones are.
        symmetric: Whether positives also have to find their anchors.
        loss: `InfoNCE`, or the name of a loss of Sentence-Transformers.
        loss_arguments: For a loss of Sentence-Transformers: its arguments.
        teacher: For a distillation loss: the model to learn from.
    """

    datasets: list[DatasetSettings]
    anchor: str
    positive: str = ""
    batches: Literal["homogeneous", "heterogeneous"]
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
            raise ValueError("the task has no data: name at least one dataset, or leave the task out (`null`)")
        own = [dataset.path for dataset in self.datasets if dataset.own_objective]
        if own and self.batches == "heterogeneous":
            raise ValueError(
                f"{', '.join(own)}: a batch across datasets has one loss; make the task's batches homogeneous, or give "
                "the dataset a task of its own"
            )
        return self

    def of(self, dataset: DatasetSettings) -> "TaskSettings":
        """Return the task's settings as they hold for one of its datasets."""
        return self.model_copy(update=dataset.own_objective)


class DataSettings(Settings):
    """What holds for all datasets.

    Attributes:
        folder: Where relative paths of datasets begin.
        limit: Rows of each dataset at most, a seeded sample; a dataset's own limit wins.
        max_bad_share: Share of rows with a fault (empty, wrong type, missing column) from which a dataset is refused.
    """

    folder: str = "."
    limit: int | None = Field(default=None, ge=1)
    max_bad_share: float = Field(default=0.01, ge=0, le=1)


class TrainingSettings(Settings):
    """Optimisation.

    Attributes:
        batch_size: Rows of a step, over all processes.
        mini_batch_size: Rows of a forward pass, with gradient caching around it; none: no caching.
        epochs: Passes over the data.
        max_steps: Ends the run earlier.
        learning_rate: Peak.
        weight_decay: Of AdamW.
        optimizer: As transformers names it.
        schedule: Of the learning rate, as transformers names it.
        warmup: Share of the steps in which the learning rate rises.
        max_grad_norm: Gradients are scaled down to it; 0: never.
        precision: Of the computation: `fp32`, `bf16` or `fp16` (mixed, weights stay in fp32).
        gradient_checkpointing: Recompute activations in the backward pass.
        compile: Run the model through `torch.compile`.
        only_experts: Experts that are trained, everything else stays as it is, bit for bit. Default: all is trained.
        cross_device_negatives: Whether the rows of all processes are negatives of one another.
        matryoshka: Dimensions that should also work by themselves.
        seed: Of the order of the data, new weights, and dropout.
        workers: Processes that tokenize.
        save_every: Steps between checkpoints. Default: a tenth of the run.
        keep: Checkpoints to keep, at least two: the one before must be there until the new one is known to be whole.
        log_every: Steps between lines of the log.
        arguments: Any other of `SentenceTransformerTrainingArguments`.
    """

    batch_size: int = Field(default=6144, ge=2)
    mini_batch_size: int | None = Field(default=None, ge=1)
    epochs: float = Field(default=1, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-6, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    optimizer: str = "adamw_torch"
    schedule: str = "linear"
    warmup: float = Field(default=0.1, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    compile: bool = False
    only_experts: list[str] | None = Field(default=None, min_length=1)
    cross_device_negatives: bool = True
    matryoshka: list[int] | None = None
    seed: int = 42
    workers: int = Field(default=0, ge=0)
    save_every: int | None = Field(default=None, ge=1)
    keep: int = Field(default=2, ge=2)
    log_every: int = Field(default=1, ge=1)
    arguments: dict[str, Any] = {}


class ValidationSettings(Settings):
    """What is cut from the training parts, never trained on, and measured.

    Attributes:
        share: Of the texts of each dataset, chosen by a hash of the text: the same for all recipes.
        limit: Texts per dataset at most.
        every: Steps between evaluations. Default: only at the end.
    """

    share: float = Field(default=0.02, ge=0, lt=1)
    limit: int = Field(default=400, ge=2)
    every: int | None = Field(default=None, ge=1)


class Recipe(Settings):
    """A training run.

    Attributes:
        name: Of the recipe.
        description: What it is for.
        model: What is trained.
        tasks: Task → its data and its settings.
        data: What holds for all datasets.
        training: Optimisation.
        validation: What is held out and measured.
        output: Folder of the run.
    """

    name: str = "custom"
    description: str = ""
    model: ModelSettings
    tasks: dict[str, TaskSettings]
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    output: str = ""

    @field_validator("tasks")
    @classmethod
    def _at_least_one(cls, tasks: dict[str, TaskSettings]) -> dict[str, TaskSettings]:
        if not tasks:
            raise ValueError("the recipe has no task")
        return tasks

    @model_validator(mode="after")
    def _default_output(self) -> "Recipe":
        self.output = self.output or f"runs/{self.name}"
        return self


def shipped_recipes() -> list[str]:
    """Name the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in SHIPPED.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: A file, or the name of a shipped one.
        overrides: `key=value`, with dots between the parts of the key and YAML as the value.

    Returns:
        The recipe, complete.

    Raises:
        FileNotFoundError: If there is no such recipe; the message lists the shipped ones.
        ValueError: If a key is unknown or a value does not fit.
    """
    settings = _read(str(recipe))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        _set(settings, key.split("."), _parse_yaml(value, f"override {override!r}"))
    return parse_recipe(settings, str(recipe))


def parse_recipe(settings: dict[str, Any], name: str = "recipe") -> Recipe:
    """Check settings, and fill in the defaults.

    Raises:
        ValueError: If a key is unknown or a value does not fit; every fault is listed.
    """
    settings = copy.deepcopy(settings)
    settings.pop("extends", None)
    if isinstance(settings.get("tasks"), dict):  # `null` takes out a task of the recipe that is extended
        settings["tasks"] = {task: value for task, value in settings["tasks"].items() if value is not None}
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        faults = [
            f"  {'.'.join(map(str, fault['loc'])) or 'the recipe'}: {fault['msg'].removeprefix('Value error, ')}"
            f"{_found(fault)}"
            for fault in error.errors()
        ]
        raise ValueError("\n".join([f"The recipe {name} does not hold:", *faults])) from None


def _found(fault: Any) -> str:
    """Name the value that does not fit, where the message does not and it is short."""
    value = fault["input"]
    return f", found {value!r}" if fault["type"] != "value_error" and isinstance(value, str | int | float) else ""


def _read(recipe: str, base: Path | None = None, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a recipe's settings over those that it extends, which are looked for beside it first."""
    path = Path(recipe) if base is None else base / recipe
    found = next((candidate for candidate in (path, path.with_name(path.name + ".yaml")) if candidate.is_file()), None)
    if found is not None:
        text, folder = found.read_text(encoding="utf-8"), found.parent
    elif recipe in shipped_recipes():
        text, folder = (SHIPPED / f"{recipe}.yaml").read_text(encoding="utf-8"), None
    else:
        raise FileNotFoundError(f"There is no recipe {recipe!r}." + alternatives(recipe, shipped_recipes()))
    settings = _parse_yaml(text, f"recipe {recipe}")
    if not isinstance(settings, dict):
        raise ValueError(f"The recipe {recipe} is no mapping of keys to values")  # noqa: TRY004
    if "extends" in settings:
        extended = str(settings["extends"])
        if extended in extended_by:
            raise ValueError(f"The recipe {extended} extends itself, by way of {', '.join(extended_by)}")
        settings = _merged(_read(extended, folder, (*extended_by, extended)), settings)
    return settings


def _parse_yaml(text: str, what: str) -> Any:
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"The {what} is no YAML: {error}") from None


def _numbers(value: Any) -> Any:
    """Read `5e-6` as a number, which YAML 1.1 takes for a text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and value[:1].isdigit() and "e-" in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Lay changes over a base: mappings key by key, anything else as a whole."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _set(settings: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(settings.get(key), dict):
            settings[key] = {}
        settings = settings[key]
    settings[path[-1]] = value
