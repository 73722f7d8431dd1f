"""What a new MoTE looks like, and how `upcycle` makes it."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from mote.checkpoints.options import WriteOptions
from mote.settings import Settings

TOKEN_ROUTING = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "router_aux_loss_type",
)
"""Settings of token routing."""
POOLING_BY_ATTENTION = ("latent_attention", "self_attention")
POOLING_SIZES = ("pooling_latents", "pooling_heads", "pooling_head_dim")
"""Settings of pooling by attention."""


class MoTESettings(Settings):
    """What a new MoTE looks like, for `mote upcycle` and for the model of a recipe.

    Attributes:
        experts: Expert names. Default: the paper's four; for a token-routed source, its own names and tasks.
        layers: Blocks with experts: `every` (the default), `every_other` (the 2nd, 4th, …), or indices from 0.
        tasks: Additional task → the expert that serves it.
        instructions: Task → instruction in front of its texts, overriding the source's prompts; or `false` for no
            instructions.
        paper_instructions: Whether tasks get the paper's instructions if the source has no prompts. A source that is
            not an embedding model yet gets them anyway.
        definitions: Task → definition, which the template turns into an instruction. The paper's instructions are then
            not used.
        template: Template that turns a definition into an instruction. Default: `Instruct: {definition}`, and `Query: `
            on a second line.
        instruction_pooling: `included`: the instruction's tokens are pooled, too; `excluded`: they are attended to, but
            not pooled; `excluded_by_count`: as `excluded`, by NV-Embed's count of the tokens. Default: the source's.
        pooling: `mean`, `cls`, `last_token`, or, with weights to train, `latent_attention` or `self_attention`.
            Default: the source's, or `mean`.
        pooling_latents: Number of latents, for `latent_attention`. Default: 512.
        pooling_heads: Number of heads, for attention pooling. Default: 8.
        pooling_head_dim: Dimension of a head, for attention pooling. Default: the hidden size.
        default_task: Task of texts without one; `none`: such texts are an error. Default: that of the expert `general`,
            else of the one that serves documents, else of the first.
        bidirectional: Whether each token of a decoder attends to all others. Default: the source's setting.
        shared_modules: Paths of the submodules of a block that all experts share; `[]`: none. Default: the attention.
        num_experts: Experts per block, for token routing. Default: as many as `experts`.
        num_experts_per_tok: Experts per token, for token routing. Default: the source's, or 2.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1, for token routing; keeps the
            dense model's output. Default: the source's, or true.
        router_aux_loss_coef: Weight of the load-balancing loss, for token routing. Default: the source's, or 0.005.
        router_aux_loss_type: Formula of the load-balancing loss, for token routing. Default: the source's, or
            `equation_1`.
        end_token: Token that the tokenizer appends to each text, after truncation; `eos`: its end-of-sequence token.
            Default: as in the source's settings.
    """

    experts: list[str] | None = None
    layers: Literal["every", "every_other"] | list[int] | None = None
    tasks: dict[str, str] = {}
    instructions: bool | dict[str, str] = True
    paper_instructions: bool = False
    definitions: dict[str, str] = {}
    template: str | None = None
    instruction_pooling: Literal["included", "excluded", "excluded_by_count"] | None = None
    pooling: Literal["mean", "cls", "last_token", "latent_attention", "self_attention"] | None = None
    pooling_latents: int | None = Field(default=None, ge=1)
    pooling_heads: int | None = Field(default=None, ge=1)
    pooling_head_dim: int | None = Field(default=None, ge=1)
    default_task: str | None = None
    bidirectional: bool = False
    shared_modules: list[str] | None = None
    num_experts: int | None = Field(default=None, ge=1)
    num_experts_per_tok: int | None = Field(default=None, ge=1)
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    router_aux_loss_type: Literal["equation_1", "megablocks"] | None = None
    end_token: str | None = None

    @field_validator("instructions")
    @classmethod
    def _truthy(cls, instructions: bool | dict[str, str]) -> bool | dict[str, str]:
        return True if instructions == {} else instructions

    def conflicts(self) -> Iterator[str]:
        """Name tasks with an instruction, perhaps none, and a definition; and a template without definitions."""
        for task in self.definitions:
            if task in self.instruction_texts or not self.instructions:
                yield f"The task {task!r} has an instruction and a definition: give one of the two"
        if self.template is not None and not self.definitions:
            yield "The template is for definitions, but there are none"

    @property
    def instruction_texts(self) -> dict[str, str]:
        """The instructions that are given by task."""
        return self.instructions if isinstance(self.instructions, dict) else {}


class UpcyclingOptions(WriteOptions, MoTESettings):
    """Settings of upcycling, and how its result is written.

    Attributes:
        layer_path: Path of the list of layers, for an architecture that is not in MoTE's table.
        routing: What picks the expert: the `task` of a text, or a learned router for each `token`.
        with_head: Keep the source's head for masked language modelling: the result is a `MoTEForMaskedLM`.
        retrieval: Vectors of the result: `dense`, `sparse` (a Sentence-Transformers `SparseEncoder`), or `hybrid`, both
            from one pass. Default: the source's.
        sparse_from: Source of sparse weights: the logits of the `head` (SPLADE), which is then kept, or the hidden
            states times the token `embeddings` (CoT-MoTE, Equation 4). Default: the source's, else `head`, or
            `embeddings` for hybrid vectors.
        max_active_dims: Number of weights to keep in a sparse vector, the largest. Default: all.
        tokenizer: Folder or Hub id of a tokenizer. Default: the source's own.
        dtype: Data type of the weights; `auto`: the source's.
        revision: Branch, tag or commit of a source on the Hub.
    """

    layer_path: str | None = None
    routing: Literal["task", "token"] = "task"
    with_head: bool = False
    retrieval: Literal["dense", "sparse", "hybrid"] | None = None
    sparse_from: Literal["head", "embeddings"] | None = None
    max_active_dims: int | None = Field(default=None, ge=1)
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    revision: str | None = None

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()} | {"layers": "every"}
        return {name: value for name, value in self if value not in (defaults[name], None)}
