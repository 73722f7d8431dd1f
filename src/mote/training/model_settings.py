"""Settings of the model that a recipe trains, and of its vectors."""

from typing import Any, Literal

from pydantic import Field, model_validator

from mote.settings import Settings
from mote.upcycling.options import POOLING_BY_ATTENTION, POOLING_SIZES, TOKEN_ROUTING, MoTESettings


class ModelSettings(MoTESettings):
    """The model.

    Attributes:
        source: Dense checkpoint or MoTE: a folder, or an id on the Hub.
        kind: `mote` (an expert per task), `token_routed` (the same experts, routed token by token), or `dense`.
        revision: Branch, tag or commit of a source on the Hub.
        trust_remote_code: Whether to run the code that comes with a MoTE from the Hub.
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

    @model_validator(mode="after")
    def _fits_kind(self) -> "ModelSettings":
        given = [name for name in ("shared_modules", *POOLING_SIZES, *TOKEN_ROUTING) if getattr(self, name) is not None]
        given += ["layers"] if self.layers not in (None, "every") else []
        given += ["pooling"] if self.pooling in POOLING_BY_ATTENTION else []
        if self.kind == "dense" and given:
            raise ValueError(f"{', '.join(given)}: for models with experts, but model.kind is dense")
        return self


class RetrievalSettings(Settings):
    """The model's vectors, and what keeps sparse ones sparse: the arguments of Sentence-Transformers' `SpladeLoss`.

    Attributes:
        kind: `dense`; `sparse`, with a weight for each token of the vocabulary; or `hybrid`, both from one pass.
        sparse_from: Source of sparse weights: the logits of the `head` (SPLADE), or hidden states times token
            `embeddings` (CoT-MoTE, Equation 4). Default: the source's, else `head`, or `embeddings` for hybrid vectors.
        weight: Weight of the sparse score in a hybrid score. Default: the source's, or 1.
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
    weight: float | None = Field(default=None, ge=0)
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
