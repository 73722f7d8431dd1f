"""Recipes: everything that determines a training run, in one short file.

A recipe is YAML. It may extend another one (`extends: mote`), and then holds only the differences; on the command line,
`key=value` changes single settings (`training.learning_rate=2e-5`). Unknown keys are errors.
"""

from importlib.resources import files
from typing import Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from mote.checkpoints.definitions import instruction_with
from mote.settings import Settings
from mote.training.model_settings import ModelSettings, RetrievalSettings
from mote.training.task_settings import DatasetSettings, DataSettings, TaskSettings, ValidationSettings
from mote.training.trainer_settings import TrainerSettings, TrainingSettings

SHIPPED = files("mote") / "recipes"


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

    @model_validator(mode="after")
    def _default_output(self) -> Self:
        self.output = self.output or f"runs/{self.name}"
        return self


class Recipe(RunSettings):
    """A training run.

    Attributes:
        tasks: Task → its data and settings.
        retrieval: The model's vectors.
        training: `SentenceTransformerTrainingArguments`, and eight settings of ours.
    """

    tasks: dict[str, TaskSettings] = Field(min_length=1)
    retrieval: RetrievalSettings = RetrievalSettings()
    training: TrainingSettings = TrainingSettings()

    PLACE: ClassVar[Any] = SHIPPED

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
        for_dense = {
            "model.kind=dense": self.model.kind == "dense",
            "training.matryoshka": self.training.matryoshka,
            "blended batches": any(task.batches == "blended" for task in self.tasks.values()),
        }
        given = [name for name, is_given in for_dense.items() if is_given]
        if given and self.retrieval.kind != "dense":
            raise ValueError(f"{', '.join(given)}: for dense vectors, got retrieval.kind={self.retrieval.kind}")
        return self

    @model_validator(mode="after")
    def _fits_peft(self) -> "Recipe":
        if self.training.peft is not None:
            rounded = self.training.peft.base_dtype == "bfloat16"
            needed = {
                # It moves the model's own weights, which adapters leave as they are.
                "training.start_weight=0 (for weaker adapters, lower training.peft.alpha)": self.training.start_weight,
                "training.bf16=true, for training.peft.base_dtype=bfloat16": rounded and not self.training.bf16,
            }
            if missing := [setting for setting, is_missing in needed.items() if is_missing]:
                raise ValueError(f"training.peft: set {' and '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _experts_need_a_mote(self) -> "Recipe":
        by_expert = {"only_experts": self.training.only_experts, "start_weight": self.training.start_weight}
        for name, value in by_expert.items():
            if isinstance(value, list | dict) and self.model.kind != "mote":
                raise ValueError(f"training.{name}: a model of the kind {self.model.kind!r} has no task experts")
        return self
