"""Settings of the model that a recipe trains, and of its vectors."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mote.data.settings import Settings


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

    @model_validator(mode="after")
    def _fits_kind(self) -> "ModelSettings":
        if self.kind == "dense" and (self.layers != "every" or self.shared_modules is not None):
            raise ValueError(
                "layers and shared_modules are for models with experts, but model.kind is dense. Set model.kind=mote, "
                "or leave them at their defaults (model.layers=every, model.shared_modules=null)"
            )
        return self


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
