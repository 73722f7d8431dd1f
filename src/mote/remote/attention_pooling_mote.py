"""Pooling that attends before it takes the mean: to trained latents, as in NV-Embed, or to the text's own tokens.

Both are one layer over the encoder's last hidden states: multi-head attention and a gated feed-forward network, each
with a norm before it and a residual around it, then the mean over the tokens to pool. Method: Lee et al., "NV-Embed:
Improved Techniques for Training LLMs as Generalist Embedding Models", section 3.2 (arXiv:2405.17428). Where NV-Embed's
code differs from the paper (norms, projections, the gate, wide heads), this file follows the code.

This file is only copied into saved models that pool in this way; their `auto_map` names it.
"""

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .configuration_mote import MoTEConfig
from .modeling_mote import MoTEModel, pool, require_tokens

try:
    from sentence_transformers.sentence_transformer.modules import Pooling
except ImportError:  # `AutoModel` does not need it
    Pooling: Any = nn.Module  # type: ignore[no-redef]


class AttentionPoolingConfig(MoTEConfig):
    """Configuration of an [`AttentionPoolingModel`]: that of a MoTE, and the sizes of its pooling.

    Args:
        pooling: `latent_attention` or `self_attention`.
        pooling_latents: Number of trained latents that tokens attend to, for `latent_attention`.
        pooling_heads: Number of heads.
        pooling_head_dim: Width of a head. Default: the hidden size, as in NV-Embed, so that all heads together are
            `pooling_heads` times as wide as the hidden states.
    """

    model_type = "mote_attention_pooling"
    pooling_modes: ClassVar[tuple[str, ...]] = ("latent_attention", "self_attention")

    pooling: str = "latent_attention"
    pooling_latents: int = 512
    pooling_heads: int = 8
    pooling_head_dim: int | None = None

    def validate(self) -> None:
        """Check the settings, and fill in the width of a head."""
        super().validate()
        self.pooling_head_dim = self.hidden_size if self.pooling_head_dim is None else self.pooling_head_dim


class AttentionLayer(nn.Module):
    """Multi-head attention to latents, or among the tokens, and a feed-forward network.

    Matrix products use the dtype of the weights; norms, residuals and everything after them use at least float32.
    Without latents, tokens attend to each other.
    """

    def __init__(self, width: int, heads: int, head_dim: int, latents: int | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.latents = None if latents is None else nn.Parameter(torch.randn(latents, width))
        self.norm, self.context_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q = nn.Linear(width, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(width, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 8 * width)  # values, and their gates
        self.feed_forward_out = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, L, H] → [B, L, H], in at least float32."""
        hidden = self.attend(hidden, attention_mask)
        values, gates = self._linear(self.feed_forward_in, _normed(self.feed_forward_norm, hidden)).chunk(2, dim=-1)
        return hidden + self._linear(self.feed_forward_out, values * F.gelu(gates))

    def attend(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Run the first half of the layer, [B, L, H] → [B, L, H]; the mask is only for attention among the tokens."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        context = hidden if self.latents is None else self.latents.to(hidden.dtype)[None]
        queries = self._heads(self._linear(self.to_q, _normed(self.norm, hidden)))  # [B, heads, L, D]
        keys, values = self._linear(self.to_kv, _normed(self.context_norm, context)).chunk(2, dim=-1)
        shape = (len(hidden), queries.shape[1], context.shape[1], self.head_dim)
        keys, values = self._heads(keys).expand(shape), self._heads(values).expand(shape)
        mask = None
        if self.latents is None and attention_mask is not None:
            mask = attention_mask[:, None, None].bool()
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=self.head_dim**-0.5)
        return hidden + self._linear(self.to_out, attended.transpose(1, 2).flatten(2))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, L, D]

    @staticmethod
    def _linear(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
        dtype = linear.weight.dtype  # an integer dtype means quantized weights, which handle the input's dtype
        return linear(inputs.to(dtype) if dtype.is_floating_point else inputs)


def _normed(norm: nn.LayerNorm, inputs: torch.Tensor) -> torch.Tensor:
    weight, bias = norm.weight.to(inputs.dtype), norm.bias.to(inputs.dtype)
    return F.layer_norm(inputs, norm.normalized_shape, weight, bias, norm.eps)


class AttentionPoolingModel(MoTEModel):
    """A `MoTEModel` whose `pooler_output` is the mean over the states of an [`AttentionLayer`]."""

    config: AttentionPoolingConfig
    config_class = AttentionPoolingConfig
    pools = True  # False in Sentence-Transformers, whose own module pools with the same layer

    def __init__(self, config: AttentionPoolingConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config, backbone)
        latents = config.pooling_latents if config.pooling == "latent_attention" else None
        self.pooling = AttentionLayer(
            config.hidden_size,
            config.pooling_heads,
            config.pooling_head_dim,  # type: ignore[arg-type]  # set by `validate`
            latents,
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AttentionLayer) and module.latents is not None:
            init.normal_(module.latents)

    def _run(self, sequences: dict[str, torch.Tensor], kwargs: dict) -> BaseModelOutputWithPooling:
        chosen = kwargs.pop("pooling_mask", None)
        out = super()._run(sequences, kwargs)  # its `pooler_output`, one token's state, is replaced below
        hidden: Any = out.last_hidden_state
        attention_mask = sequences.get("attention_mask")
        mask: Any = attention_mask if chosen is None else chosen[:, : hidden.shape[1]]
        require_tokens(mask)
        pooled = pool(self.pooling(hidden, attention_mask), mask, "mean").to(hidden.dtype) if self.pools else None
        out.pooler_output = pooled
        return out


class AttentionPooling(Pooling):
    """A `Pooling` of the states of the network's pooling layer, whose weights are saved and trained with the network.

    As in the base class, `include_prompt=False` leaves the prompt out of the mean. If the features have a
    `pooling_mask` [B, L], it determines which tokens of each row are pooled.
    """

    def on_model_ready(self, model: Any) -> None:
        """Find the network, without registering it a second time, and tell it not to pool as well."""
        object.__setattr__(self, "network", model[0].model)
        self.network.pools = False

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` [B, H] to the features; the mask for the mean does not affect the attention."""
        hidden, mask = features["token_embeddings"], features.get("attention_mask")
        layer = self.network.pooling
        if "cu_seq_lens_q" in features:  # flash attention: texts are concatenated in one row
            ends = features["cu_seq_lens_q"].tolist()
            states = torch.cat([layer(hidden[:, start:end]) for start, end in pairwise(ends)], dim=1)
        else:
            states = layer(hidden, mask)
        pooled = {**features, "token_embeddings": states}
        if not self.include_prompt and "pooling_mask" in features:
            mask = pooled["attention_mask"] = features["pooling_mask"]
        elif not self.include_prompt and "prompt_length" in features and mask is not None:
            mask = mask.cumsum(dim=1) > torch.as_tensor(features["prompt_length"], device=mask.device).view(-1)[:1]
        require_tokens(mask)
        features["sentence_embedding"] = super().forward(pooled, **kwargs)["sentence_embedding"].to(hidden.dtype)
        return features


AttentionPoolingConfig.register_for_auto_class()
AttentionPoolingModel.register_for_auto_class("AutoModel")
