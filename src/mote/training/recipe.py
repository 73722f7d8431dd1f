"""Recipes: everything that determines a training run, in one short file.

A recipe is YAML. It may extend another one (`extends: mote`), and then holds only the differences; on the command line,
`key=value` changes single settings (`training.learning_rate=2e-5`). Unknown keys are errors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator
from typing_extensions import Self, TypeVar
from yaml import YAMLError  # type: ignore[import-untyped]

from mote.data.rows import ENDINGS, HUB
from mote.data.settings import DatasetSource
from mote.remote.configuration_mote import alternatives, require_known
from mote.settings import Settings, error_messages
from mote.training.trainer_settings import TrainerSettings, TrainingSettings
from mote.upcycling.options import POOLING_BY_ATTENTION, POOLING_SIZES, TOKEN_ROUTING, MoTESettings

SHIPPED = files("mote") / "recipes"
EXAMPLE_DATA = "examples/data"


class ModelSettings(MoTESettings):
    """The model.

    Attributes:
        source: Dense checkpoint or MoTE: a folder, or an id on the Hub.
        kind: `mote` (an expert per task), `token_routed` (the same experts, routed token by token), or `dense`.
        revision: Branch, tag or commit of a source on the Hub.
        trust_remote_code: Whether to run the source's code, also a folder's; a MoTE runs the installed code without it.
        max_length: Maximum length of a text in tokens. Default: the source's.
        attention: Attention implementation, by its name in transformers. Default: transformers' choice.
        dropout: Dropout probability of hidden states and of attention in training. Default: the source's.
    """

    source: str
    kind: Literal["mote", "token_routed", "dense"] = "mote"
    revision: str | None = None
    trust_remote_code: bool = False
    max_length: int | None = Field(default=None, ge=4)
    attention: str | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)

    def conflicts(self) -> Iterator[str]:
        """Name settings that a dense model does not have."""
        yield from super().conflicts()
        given = [name for name in ("shared_modules", *POOLING_SIZES, *TOKEN_ROUTING) if getattr(self, name) is not None]
        given += ["layers"] if self.layers not in (None, "every") else []
        given += ["pooling"] if self.pooling in POOLING_BY_ATTENTION else []
        if self.kind == "dense" and given:
            yield f"{', '.join(given)}: for models with experts, but model.kind is dense"


class RetrievalSettings(Settings):
    """The model's vectors, and what keeps sparse ones sparse.

    Attributes:
        kind: `dense`; `sparse`, with a weight for each token of the vocabulary; or `hybrid`, both from one pass.
        sparse_from: Source of sparse weights: the logits of the `head` (SPLADE), or hidden states times token
            `embeddings` (CoT-MoTE, Equation 4). Default: the source's, else `head`, or `embeddings` for hybrid vectors.
        weight: Weight of the sparse score in a hybrid score. Default: the source's, or 1.
        max_active_dims: Number of largest weights that the trained model keeps. Default: all.
        query_regularizer_weight: Weight of the FLOPS loss on anchors.
        document_regularizer_weight: Weight of the FLOPS loss on all other texts.
        warmup_ratio: Fraction of the steps in which the weights of the FLOPS losses rise quadratically from 0.
    """

    kind: Literal["dense", "sparse", "hybrid"] = "dense"
    sparse_from: Literal["head", "embeddings"] | None = None
    weight: float | None = Field(default=None, ge=0)
    max_active_dims: int | None = Field(default=None, ge=1)
    query_regularizer_weight: float = Field(default=5e-5, ge=0)
    document_regularizer_weight: float = Field(default=3e-5, ge=0)
    warmup_ratio: float = Field(default=0.33, gt=0, le=1)


class TeacherSettings(Settings):
    """A teacher, whose embeddings are the targets of a distillation loss.

    Attributes:
        source: Any Sentence-Transformers model: a folder, or an id on the Hub.
        revision: Branch, tag or commit of a teacher on the Hub.
        prompts: Column (`anchor`, `positive`) → the teacher's prompt for it.
        batch_size: Batch size of the teacher.
        trust_remote_code: Whether to run code that comes with the teacher.
    """

    source: str
    revision: str | None = None
    prompts: dict[Literal["anchor", "positive"], str] = {}
    batch_size: int = Field(default=32, ge=1)
    trust_remote_code: bool = False


class DatasetSettings(DatasetSource):
    """A dataset of a task, or all that match a pattern, and how it is trained on.

    Attributes:
        instruction: Instruction of the anchors, and of all other texts with their task, replacing the task's.
        definition: Definition that `model.template` turns into such an instruction.
        weight: How often each row is seen per epoch: 2 is twice, 0.5 a seeded half of the rows.
        limit: Maximum number of rows, a seeded sample.
        max_length: Maximum length of texts in tokens: one number, or one per column.
        negatives: Maximum number of hard negatives per row.
        min_score: Score from which a scored pair becomes a positive pair in both directions, for InfoNCE.
        max_negative_score: Highest score that a hard negative of `min_score` may be known to have with the anchor. BM25
            ranks them, from the second on. Default: any lower score, then random texts.
    """

    instruction: str | None = None
    definition: str | None = None
    weight: float = Field(default=1.0, gt=0, le=1000)
    limit: int | None = Field(default=None, ge=1)
    max_length: PositiveInt | dict[Literal["anchor", "positive", "negative"], PositiveInt] | None = None
    negatives: int | None = Field(default=None, ge=0)
    min_score: float | None = None
    max_negative_score: float | None = None

    def conflicts(self) -> Iterator[str]:
        """Name settings of which one would be ignored."""
        if self.instruction is not None and self.definition is not None:
            yield "a dataset has an instruction or a definition, not both"
        if self.max_negative_score is not None and self.min_score is None:
            yield "max_negative_score is for pairs made by min_score"


class TaskSettings(Settings):
    """One task of the training: its data, and its settings for task-aware contrastive learning (paper, section 3).

    A path, or a list of paths, stands for its datasets.

    Attributes:
        datasets: Datasets of the task.
        anchor: Task (instruction and expert) of the first column. Default: the task's own expert, of its name; its
            roles, its loss and settings of the training then follow from the data.
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

    datasets: list[DatasetSettings] = Field(min_length=1)
    anchor: str = ""
    positive: str = ""
    batches: Literal["homogeneous", "heterogeneous", "blended"] = "homogeneous"
    pairs: Literal["same_label", "label_text"] = "same_label"
    temperature: float = Field(default=0.03, gt=0)
    weight: float = Field(default=1.0, gt=0, le=1000)
    in_batch_negatives: bool = True
    symmetric: bool = False
    loss: str = "InfoNCE"
    loss_arguments: dict[str, Any] = {}
    teacher: TeacherSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_paths(cls, settings: Any) -> Any:
        paths = [settings] if isinstance(settings, str) else settings
        return {"datasets": paths} if isinstance(paths, list) else settings

    @model_validator(mode="after")
    def _same_positive(self) -> Self:
        if self.anchor and not self.positive:
            self.positive = self.anchor
        return self

    def conflicts(self) -> Iterator[str]:
        """Name what only InfoNCE takes."""
        own = any((one.instruction, one.definition) != (None, None) for one in self.datasets)
        for_info_nce = {
            "blended batches": self.batches == "blended",
            "instructions of datasets in heterogeneous batches": self.batches == "heterogeneous" and own,
            "pairs=label_text": self.pairs == "label_text",
            "min_score": any(dataset.min_score is not None for dataset in self.datasets),
        }
        given = [name for name, is_given in for_info_nce.items() if is_given]
        if given and self.loss != "InfoNCE":
            yield f"for {', '.join(given)} the loss must be InfoNCE, got {self.loss}"


class DataSettings(Settings):
    """Settings of all datasets.

    Attributes:
        folder: Folder that relative paths of datasets refer to. `examples/data` comes with the package.
        limit: Maximum number of rows of each dataset, a seeded sample; overridden by a dataset's own limit.
        max_invalid_fraction: Fraction of invalid rows (empty, wrong type, missing column) above which a dataset is
            refused.
        tests: Data folder with test sets (`mote evaluate`); how many rows have a text of one is reported. Default:
            `folder`, if it has any.
    """

    folder: str = "."
    limit: int | None = Field(default=None, ge=1)
    max_invalid_fraction: float = Field(default=0.01, ge=0, le=1)
    tests: str | None = None

    @property
    def place(self) -> Path:
        """The folder; `examples/data` also works without a clone of the repository."""
        if self.folder == EXAMPLE_DATA and not Path(EXAMPLE_DATA).exists():
            return Path(str(files("mote.example_data")))
        return Path(self.folder)


class ValidationSettings(Settings):
    """Held-out texts, which are never trained on.

    Attributes:
        share: Fraction of the texts of each dataset, chosen by a hash of the text: the same for all recipes.
        limit: Maximum number of texts per dataset; in pre-training, per task.
    """

    share: float = Field(default=0.02, ge=0, lt=1)
    limit: int = Field(default=400, ge=2)


class RunSettings(Settings):
    """What recipes of training and of pre-training have in common.

    Attributes:
        name: Recipe name.
        description: Purpose of the recipe.
        output: Folder of the run. Default: `runs/NAME`.
        model: The model.
        data: Settings of all datasets.
        training: Arguments of the trainer, and settings of ours.
        validation: Held-out texts.
    """

    name: str = "custom"
    description: str = ""
    output: str = ""
    model: ModelSettings
    data: DataSettings = DataSettings()
    training: TrainerSettings
    validation: ValidationSettings = ValidationSettings()

    PLACE: ClassVar[Any]
    """Folder of the shipped recipes of the kind."""

    @field_validator("tasks", mode="before", check_fields=False)
    @classmethod
    def _without_removed(cls, tasks: Any) -> Any:
        """Leave out tasks that are null."""
        return {name: task for name, task in tasks.items() if task is not None} if isinstance(tasks, dict) else tasks

    @model_validator(mode="after")
    def _default_output(self) -> Self:
        self.output = self.output or f"runs/{self.name}"
        return self


class Recipe(RunSettings):
    """A training run.

    Attributes:
        tasks: Task → its data and settings.
        together: Whether the tasks train one model. If not, each trains its own expert by itself, beside the expert
            `general`; everything else stays as in the source.
        queries_only: Whether an expert for search, trained by itself, embeds queries alone, and `general` the
            documents, whose index stays valid.
        engine: Where tasks are trained by themselves: one after another here (`local`), or through Ray (`ray`).
        retrieval: The model's vectors.
        training: `SentenceTransformerTrainingArguments`, and eight settings of ours.
    """

    tasks: dict[str, TaskSettings] = {}
    together: bool = True
    queries_only: bool = False
    engine: Literal["local", "ray"] = "local"
    retrieval: RetrievalSettings = RetrievalSettings()
    training: TrainingSettings = TrainingSettings()

    PLACE: ClassVar[Any] = SHIPPED

    def conflicts(self) -> Iterator[str]:
        """Name settings of different parts of the recipe that do not go together."""
        kind, vectors, training, peft = self.model.kind, self.retrieval.kind, self.training, self.training.peft
        if not self.together and (kind != "mote" or any(task.anchor for task in self.tasks.values())):
            yield "together=false is for model.kind=mote, and for tasks whose experts have their names (no `anchor`)"
        if self.queries_only and self.together and training.only_experts is None:
            yield "queries_only needs together=false: otherwise the documents' embeddings change, too"
        for dataset in (dataset for task in self.tasks.values() for dataset in task.datasets):
            if (dataset.instruction or dataset.definition) and not self.model.instructions:
                yield f"{dataset.path} has an instruction, but model.instructions is false"
        for_dense = {
            "model.kind=dense": kind == "dense",
            "training.matryoshka": training.matryoshka,
            "blended batches": any(task.batches == "blended" for task in self.tasks.values()),
        }
        given = [name for name, is_given in for_dense.items() if is_given]
        if given and vectors != "dense":
            yield f"{', '.join(given)}: for dense vectors, got retrieval.kind={vectors}"
        by_expert = {"only_experts": training.only_experts, "start_weight": training.start_weight}
        for name, value in by_expert.items():
            if isinstance(value, list | dict) and kind != "mote":
                yield f"training.{name}: a model of the kind {kind!r} has no task experts"
        if peft is not None and training.start_weight:
            # It moves the model's own weights, which adapters leave as they are.
            yield "training.start_weight is not for training.peft: for weaker adapters, lower training.peft.alpha"
        if peft is not None and peft.base_dtype == "bfloat16" and not training.bf16:
            yield "training.peft.base_dtype=bfloat16: set training.bf16=true, too"


AnyRecipe = TypeVar("AnyRecipe", bound=RunSettings, default=Recipe)


def shipped_recipes(place: Any = SHIPPED) -> list[str]:
    """List the recipes shipped with the package, for training or of another kind."""
    return sorted(entry.name.removesuffix(".yaml") for entry in place.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    kind: type[AnyRecipe] = Recipe,  # type: ignore[assignment]  # of the default
) -> AnyRecipe:
    """Read a recipe: a shipped one by its name, or a file. Overrides are `key=value`, a dotted key and a value in YAML.

    An error lists the shipped recipes if there is no such one, and all problems of an invalid one.
    """
    settings = _read(str(recipe), kind.PLACE)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ValueError(f"Override {override!r}: expected key=value, as in training.learning_rate=2e-5")
        if key not in kind.model_fields and "." not in key and (text.endswith(ENDINGS) or text.startswith(HUB)):
            key = f"tasks.{key}"  # a task of one's own, and its data
            override = f"{key}={text}"
        with _valid_yaml(f"The override {override!r}"):
            value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
            _require_tasks_to_remove(settings, OmegaConf.from_dotlist([override]))
            OmegaConf.update(settings, key, value["value"], merge=False)  # a mapping is replaced as a whole
    try:
        # `${…}` stays as it is: it is text, of an instruction perhaps.
        return kind.model_validate(OmegaConf.to_container(settings))
    except ValidationError as error:
        errors = [f"  {key or 'the recipe'}: {message}" for key, message in error_messages(error)]
        raise ValueError("\n".join([f"The recipe {recipe} is invalid:", *errors])) from None


def _read(recipe: str, place: Any, folder: Path = Path(), extended_by: tuple[Path, ...] = ()) -> DictConfig:
    """Read a recipe, shipped in `place` or a file in `folder`, merged into the one that it extends."""
    shipped = shipped_recipes(place)
    candidates = [place / f"{recipe}.yaml"] if recipe in shipped else [folder / recipe, folder / f"{recipe}.yaml"]
    file = next((path.resolve() for path in candidates if path.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"There is no recipe {recipe!r}." + alternatives(recipe, shipped))
    if file in extended_by:
        raise ValueError(f"The recipe {recipe} extends itself")
    with _valid_yaml(f"The recipe {recipe}"):
        settings = DictConfig(OmegaConf.load(file))
    if "extends" not in settings:
        return settings
    extended = _read(str(settings.pop("extends")), place, file.parent, (*extended_by, file))
    _require_tasks_to_remove(extended, settings)
    return OmegaConf.merge(extended, settings)  # type: ignore[return-value]  # of two mappings


@contextmanager
def _valid_yaml(what: str) -> Iterator[None]:
    """Name what is read in the message of an error in it."""
    try:
        yield
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{what} is invalid: {error}") from None


def _require_tasks_to_remove(settings: DictConfig, changes: DictConfig) -> None:
    """Raise `ValueError` if `null` is to remove a task that the settings do not name: probably it is misspelt."""
    tasks = changes.get("tasks")
    for name, task in tasks.items() if isinstance(tasks, DictConfig) else ():
        if task is None:
            require_known(name, settings.get("tasks") or {}, "task to remove:")
