"""Recipes for pre-training on the texts of each task: masked language modelling, and CoT-MAE."""

import random
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from mote.data.settings import DatasetSource
from mote.settings import Settings
from mote.training.recipe import SHIPPED, ModelSettings, RunSettings
from mote.training.trainer_settings import TrainerSettings


class PretrainedModelSettings(ModelSettings):
    """The model, which has a head for masked language modelling.

    Attributes:
        instructions: Whether texts are prefixed with the instruction of their task.
        new_head: Whether a dense source without a head gets a new one, with random weights.
        pooling: Pooling of the model (`mean`, `cls` or `last_token`). Default: the source's.
    """

    instructions: bool = False
    new_head: bool = False
    pooling: Literal["mean", "cls", "last_token"] | None = None
    # Without effect in pre-training: settings of `mote train`.
    instruction_pooling: None = None
    pooling_latents: None = None
    pooling_heads: None = None
    pooling_head_dim: None = None
    end_token: None = None


class TextDatasetSettings(DatasetSource):
    """A dataset of a task, all datasets that match a pattern, or plain text with one text per line (`.txt`, `.txt.gz`).

    Attributes:
        limit: Maximum number of texts, a seeded sample.
        weight: How often each text is seen per epoch: 2 is twice, 0.5 a seeded half of the texts.
    """

    limit: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0, le=1000)


class TextTaskSettings(Settings):
    """The texts of one task of the model.

    Attributes:
        datasets: Datasets with its texts.
        texts: Texts to use from each row: `all`, or, for pairs, the `anchors` or the `positives`.
        temperature: Power of its size by which a dataset is sampled, the number of texts in all being the same: below
            1, small datasets, such as those of rare languages, are seen more often (Conneau et al. 2020, "Unsupervised
            Cross-lingual Representation Learning at Scale", Section 3.1: 0.3).
        rows: How texts become rows of `model.max_length` tokens, for `mlm`: each is one row, without the rest
            (`truncated`), or as many as it needs (`segmented`); or texts follow one another, after a separator, in
            rows that are all full (`packed`; they see one another: Liu et al. 2019, "RoBERTa", Section 4.2).
        context: Context to rebuild from a text, for `cot-mae`: the other side of a `pair`, or a span of the same text:
            `nearby`, `random`, `overlap`, or `mixed`, one of the three at random.
        context_task: Task of the contexts. Default: the same as the texts'.
    """

    datasets: list[TextDatasetSettings] = Field(min_length=1)
    texts: Literal["all", "anchors", "positives"] = "all"
    temperature: float = Field(default=1.0, ge=0, le=1)
    rows: Literal["truncated", "segmented", "packed"] = "truncated"
    context: Literal["pair", "nearby", "random", "overlap", "mixed"] = "mixed"
    context_task: str | None = None

    def conflicts(self) -> Iterator[str]:
        """Rows that give all their texts have no other side."""
        if self.context == "pair" and self.texts == "all":
            yield "context: pair needs `texts: anchors` or `texts: positives`, and takes the other side"


class MaskingSettings(Settings):
    """Which tokens are to be predicted.

    Attributes:
        rate: Fraction of the tokens, or words, to mask.
        whole_words: Whether all tokens of a word are masked together, where words are separated by spaces. All are
            then replaced by the mask token. Otherwise 80 % are, 10 % become random tokens, and 10 % stay unchanged.
    """

    rate: float = Field(default=0.15, gt=0, lt=1)
    whole_words: bool = False


class SpanSettings(Settings):
    """Spans of a text, of whole sentences, for contexts that are spans.

    Attributes:
        length: Target length in tokens; a span ends with the sentence that reaches it.
        short: Fraction of spans that end earlier, at a random number of tokens.
    """

    length: int = Field(default=128, ge=2)
    short: float = Field(default=0.15, ge=0, le=1)

    def draw_length(self, rng: random.Random) -> int:
        """Draw the length of the next span."""
        return rng.randint(2, self.length) if rng.random() < self.short else self.length


class DecoderSettings(Settings):
    """The decoder of `cot-mae`, which rebuilds a context from the vector of a text, and is not part of the result.

    Attributes:
        kind: `bidirectional` (predicts masked tokens) or `autoregressive` (predicts each next token).
        layers: Number of layers.
        masking_rate: Fraction of the context's tokens, or words, to mask, if `bidirectional`.
        attention_window: Number of tokens that a position attends to besides the vector, itself included, if
            `autoregressive`. Default: all before it.
        both_sides: Whether contexts are encoded, too, and texts rebuilt from them.
        weight: Weight of the decoder's loss.
    """

    kind: Literal["bidirectional", "autoregressive"] = "bidirectional"
    layers: int = Field(default=2, ge=1)
    masking_rate: float = Field(default=0.45, gt=0, lt=1)
    attention_window: int | None = Field(default=None, ge=1)
    both_sides: bool = True
    weight: float = Field(default=1.0, gt=0)


class PretrainingSettings(TrainerSettings):
    """`transformers.TrainingArguments`, by their own names, `batch_size` and `mini_batch_size`."""

    RESERVED: ClassVar[dict[str, str]] = {
        **TrainerSettings.RESERVED,
        "dataloader_persistent_workers": "workers draw new masks only if they restart in each epoch",
    }

    batch_size: int = Field(default=256, ge=2)
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)


class PretrainingRecipe(RunSettings):
    """A run of pre-training.

    Attributes:
        objective: `mlm` (masked language modelling), or `cot-mae` (which adds a decoder that rebuilds contexts).
        tasks: Task of the model → its texts.
        masking: Which tokens are to be predicted.
        spans: Contexts that are spans, for `cot-mae`.
        decoder: The decoder, for `cot-mae`.
        training: `transformers.TrainingArguments`, `batch_size` and `mini_batch_size`.
    """

    objective: Literal["mlm", "cot-mae"] = "mlm"
    model: PretrainedModelSettings
    tasks: dict[str, TextTaskSettings] = Field(min_length=1)
    masking: MaskingSettings = MaskingSettings()
    spans: SpanSettings = SpanSettings()
    decoder: DecoderSettings = DecoderSettings()
    training: PretrainingSettings = PretrainingSettings()

    PLACE: ClassVar[Any] = SHIPPED / "pretraining"

    def conflicts(self) -> Iterator[str]:
        """Rows are filled with texts up to a length that is set."""
        for name, task in self.tasks.items():
            if task.rows != "truncated" and (self.objective != "mlm" or self.model.max_length is None):
                yield f"tasks.{name}.rows: {task.rows} needs `objective: mlm` and `model.max_length`"
