"""Recipes of pre-training: masked language modelling on the texts of each task."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

import mote.data.settings
from mote.data.settings import Settings
from mote.training.recipe import (
    SHIPPED,
    DataSettings,
    ModelSettings,
    Recipe,
    TrainerSettings,
    ValidationSettings,
)


class PretrainedModelSettings(ModelSettings):
    """The model, which has a head for masked language modelling.

    Attributes:
        kind: `mote` (an expert per task) or `token_routed`. A `dense` model is a `mote` with one expert.
        instructions: Whether texts are prefixed with the instruction of their task.
        new_head: Whether a dense source without a head gets a new one, with random weights.
    """

    kind: Literal["mote", "token_routed"] = "mote"
    instructions: bool = False
    new_head: bool = False


class TextDatasetSettings(mote.data.settings.DatasetSettings):
    """A dataset of a task, or all that match a pattern, or plain text, a text on each line (`.txt`, `.txt.gz`).

    Attributes:
        limit: Maximum number of rows, a seeded sample.
    """

    limit: int | None = Field(default=None, ge=1)


class TextTaskSettings(Settings):
    """The texts of one task of the model.

    Attributes:
        datasets: Datasets with its texts.
        texts: Texts of a row that are its: `all`, or, of pairs, the `anchors` or the `positives`.
    """

    datasets: list[TextDatasetSettings] = Field(min_length=1)
    texts: Literal["all", "anchors", "positives"] = "all"


class MaskingSettings(Settings):
    """Which tokens are to be predicted.

    Attributes:
        rate: Fraction of the tokens, or words.
        whole_words: Whether all tokens of a word are masked together: a word ends where the text has a space. All are
            then replaced by the mask. Else 80 % are, 10 % by random tokens, and 10 % stay.
    """

    rate: float = Field(default=0.15, gt=0, lt=1)
    whole_words: bool = False


class PretrainingSettings(TrainerSettings):
    """`transformers.TrainingArguments`, by their own names, and `batch_size`."""

    batch_size: int = Field(default=256, ge=2)
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)


class PretrainingRecipe(Settings):
    """A run of pre-training.

    Attributes:
        name: Recipe name.
        description: Purpose of the recipe.
        model: The model.
        tasks: Task of the model → its texts.
        masking: Which tokens are to be predicted.
        data: Settings of all datasets.
        training: `transformers.TrainingArguments`, and `batch_size`.
        validation: Held-out texts, on which the loss is measured.
        output: Folder of the run.
    """

    name: str = "custom"
    description: str = ""
    model: PretrainedModelSettings
    tasks: dict[str, TextTaskSettings]
    masking: MaskingSettings = MaskingSettings()
    data: DataSettings = DataSettings()
    training: PretrainingSettings = PretrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    output: str = ""

    PLACE: ClassVar[Any] = SHIPPED / "pretraining"

    @field_validator("tasks")
    @classmethod
    def _at_least_one(cls, tasks: dict[str, TextTaskSettings]) -> dict[str, TextTaskSettings]:
        if not tasks:
            raise ValueError("the recipe has no task")
        return tasks

    @model_validator(mode="after")
    def _default_output(self) -> "PretrainingRecipe":
        self.output = self.output or f"runs/{self.name}"
        return self


AnyRecipe = Recipe | PretrainingRecipe
