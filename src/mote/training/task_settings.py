"""Settings of the tasks that a recipe trains: their datasets, losses and teachers, and what is held out."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from mote.data.settings import DatasetSource
from mote.settings import Settings

EXAMPLE_DATA = "examples/data"


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
    weight: float = Field(default=1.0, gt=0, le=1000)
    limit: int | None = Field(default=None, ge=1)
    max_length: PositiveInt | dict[Literal["anchor", "positive", "negative"], PositiveInt] | None = None
    negatives: int | None = Field(default=None, ge=0)
    label_texts: dict[str, Annotated[str, Field(pattern=r"\S")]] = {}
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

    datasets: list[DatasetSettings] = Field(min_length=1)
    anchor: str
    positive: str = ""
    batches: Literal["homogeneous", "heterogeneous", "blended"]
    pairs: Literal["same_label", "label_text"] = "same_label"
    temperature: float = Field(default=0.03, gt=0)
    weight: float = Field(default=1.0, gt=0, le=1000)
    in_batch_negatives: bool = True
    symmetric: bool = False
    loss: str = "InfoNCE"
    loss_arguments: dict[str, Any] = {}
    teacher: TeacherSettings | None = None

    @model_validator(mode="after")
    def _both_sides(self) -> "TaskSettings":
        self.positive = self.positive or self.anchor
        own = [
            one.path
            for one in self.datasets
            if one.own_objective or one.instruction is not None or one.definition is not None
        ]
        if own and self.batches == "heterogeneous":
            raise ValueError(
                f"{', '.join(own)}: a batch across datasets has the loss and the instruction of its task; make the "
                "task's batches homogeneous, or move the dataset into a task of its own"
            )
        for dataset in self.datasets:
            loss = self.of(dataset).loss
            for_info_nce = {
                "blended batches": self.batches == "blended",
                "pairs=label_text": self.pairs == "label_text",
                "min_score": dataset.min_score is not None,
            }
            given = [name for name, is_given in for_info_nce.items() if is_given]
            if given and loss != "InfoNCE":
                raise ValueError(f"{dataset.path}: for {', '.join(given)} the loss must be InfoNCE, got {loss}")
            if dataset.label_texts and self.pairs != "label_text":
                raise ValueError(f"{dataset.path}: label_texts need pairs=label_text, got pairs={self.pairs}")
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


class ValidationSettings(Settings):
    """Held-out texts, which are never trained on.

    Attributes:
        share: Fraction of the texts of each dataset, chosen by a hash of the text: the same for all recipes.
        limit: Maximum number of texts per dataset; in pre-training, per task.
    """

    share: float = Field(default=0.02, ge=0, lt=1)
    limit: int = Field(default=400, ge=2)
