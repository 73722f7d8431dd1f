"""Settings of upcycling."""

from dataclasses import dataclass, fields, replace
from typing import Any

from mote.checkpoints.writing import WriteOptions
from mote.remote.configuration_mote import alternatives


@dataclass(kw_only=True)
class UpcyclingOptions(WriteOptions):
    """Settings of upcycling, and how its result is written.

    Attributes:
        experts: Expert names. Default: the paper's four; for a token-routed source, its own names and tasks.
        layers: Blocks that get experts: `"every"`, `"every_other"`, or indices from 0. None, here and below: as in
            `preset`, or else in `DEFAULTS`.
        tasks: Task → expert, in addition to the defaults of `MoTEConfig`.
        instructions: Task → instruction. They override the source's prompts, which override the paper's.
        definitions: Task → definition, which the template turns into an instruction. The paper's instructions are then
            not used: a task without its own definition or instruction, such as documents, has none.
        template: The instruction around a definition, `Instruct: {definition}` and `Query: ` in two lines by default.
        instruction_pooling: `included`: instruction tokens are pooled, too. `excluded`: they are read, but left out of
            the pooling; `excluded_by_count`: the same, by NV-Embed's own token count. Default: as in the source.
        default_task: Task of texts without one.
        pooling: `mean`, `cls`, `last_token`, or, with their own weights, `latent_attention` or `self_attention` (see
            `AttentionPoolingConfig`). Default: the source's, or `mean`.
        pooling_latents: Number of latents, for `latent_attention`. Default: 512.
        pooling_heads: Number of heads, for these two. Default: 8.
        pooling_head_dim: Width of a head, for these two. Default: the hidden size.
        bidirectional: Let every token of a decoder attend to every other: no causal mask, no sliding window, no cache.
            Default: as in the source.
        layer_path: Path of the list of layers, for an architecture that is not in MoTE's table.
        shared_modules: Paths of the submodules of a layer that the experts share. With `layer_path`: the attention. For
            an architecture in the table: other modules than the table's, or `[]` for none.
        routing: What picks the expert: the `"task"` of a text, or a learned router for each `"token"`.
        num_experts: Experts per block. Default: the number of names. Token routing only, as are the next four.
        num_experts_per_tok: Experts per token.
        norm_topk_prob: Scale the weights of a token's experts to sum to 1, which keeps the dense model's output.
        router_aux_loss_coef: Factor of the load-balancing loss in training.
        router_aux_loss_type: Formula of this loss, `equation_1` or `megablocks`, see `TokenRoutedConfig`.
        preset: Key of `PRESETS`, a set of defaults for settings that are not given.
        with_head: Keep the source's head for masked language modelling: the result is a `MoTEForMaskedLM`.
        retrieval: Vectors of the result: `dense`, `sparse` (a Sentence-Transformers `SparseEncoder`), or `hybrid`, both
            from one pass. Default: the source's.
        sparse_from: Source of sparse weights: the logits of the `head` (SPLADE), which is then kept, or the hidden
            states times the token `embeddings` (CoT-MoTE, Equation 4). Default: the source's, else `head`, or
            `embeddings` for hybrid vectors.
        max_active_dims: Number of weights to keep in a sparse vector, the largest. Default: all.
        tokenizer: Folder or Hub id of a tokenizer. Default: the source's own.
        end_token: Token that the tokenizer appends to each text, after truncation; `eos`: its end-of-sequence token.
            Default: as in the source's settings, even if transformers ignores their `add_eos_token`.
        dtype: Dtype of the weights: `float32`, `float16`, `bfloat16`, or `auto` for the source's.
        revision: Branch, tag or commit of a source on the Hub.
    """

    experts: list[str] | None = None
    layers: str | list[int] | None = None
    tasks: dict[str, str] | None = None
    instructions: dict[str, str] | None = None
    definitions: dict[str, str] | None = None
    template: str | None = None
    instruction_pooling: str | None = None
    default_task: str | None = None
    pooling: str | None = None
    pooling_latents: int | None = None
    pooling_heads: int | None = None
    pooling_head_dim: int | None = None
    bidirectional: bool = False
    layer_path: str | None = None
    shared_modules: list[str] | None = None
    routing: str | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool = True
    router_aux_loss_coef: float | None = None
    router_aux_loss_type: str | None = None
    preset: str | None = None
    with_head: bool = False
    retrieval: str | None = None
    sparse_from: str | None = None
    max_active_dims: int | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    dtype: str = "auto"
    revision: str | None = None

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {each.name: (getattr(self, each.name), DEFAULTS.get(each.name, each.default)) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value not in (default, None)}

    def complete(self) -> "UpcyclingOptions":
        """Return the settings, completed from the preset, then from the defaults.

        Raises:
            ValueError: If there is no such preset.
        """
        if self.preset not in (None, *PRESETS):
            raise ValueError(f"Unknown preset {self.preset!r}." + alternatives(str(self.preset), PRESETS))
        filled: dict[str, Any] = DEFAULTS | PRESETS.get(str(self.preset), {})
        missing = {name: value for name, value in filled.items() if getattr(self, name) is None}
        return replace(self, preset=None, **missing)


DEFAULTS: dict[str, Any] = {
    "routing": "task",
    "layers": "every",
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.005,
    "router_aux_loss_type": "equation_1",
}
# Nomic Embed v2 as it was trained (arXiv:2502.07972, section 4.3), except for its upcycling, which drops biases and
# does not scale the experts' weights, so that it does not start as the dense model; here it does. A step there adds the
# load-balancing losses of queries and documents, each times 1; here it has their mean, times 2.
PRESETS: dict[str, dict[str, Any]] = {
    "nomic-v2": {
        "routing": "token",
        "layers": "every_other",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 2.0,
        "router_aux_loss_type": "megablocks",
    }
}
TOKEN_ROUTING = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "router_aux_loss_type",
)
"""Options of token routing."""
POOLING_BY_ATTENTION = ("latent_attention", "self_attention")
POOLING_SIZES = ("pooling_latents", "pooling_heads", "pooling_head_dim")
"""Options of pooling by attention."""
