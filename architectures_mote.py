"""The model families that MoTE supports, one row each, and the names of a MoTE's weights.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`).
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import MPNetModel
from transformers.masking_utils import create_bidirectional_mask

if TYPE_CHECKING or not __package__:  # installed, as a top-level module
    try:  # transformers would take an import outside of `try` for a package that must be installed
        from configuration_mote import MoTEConfig, alternatives
    finally:
        pass
else:  # remote code
    from .configuration_mote import MoTEConfig, alternatives


class FeedForward(NamedTuple):
    """Paths of the feed-forward network in a dense layer; only `token_routing_mote.py` needs them.

    `module` holds the network. `up` are its projections from the hidden size (of a gated network the gate's first, or
    both in one), `down` is the one back, possibly outside of `module`.
    """

    module: str
    up: tuple[str, ...]
    down: str
    activation: str
    inner_dropout: str | None = None
    outer_dropout: str | None = None


class Architecture(NamedTuple):
    """What differs between model families."""

    layer_path: str  # of the list of layers in the model
    shared_modules: tuple[str, ...]  # paths, in a layer, of what all experts share: attention and its norms
    feed_forward: FeedForward | None  # None for an architecture that the config describes


_BERT_MLP = FeedForward("intermediate", ("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn")
_GATED_MLP = FeedForward("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn")
_TWO_LAYER_MLP = FeedForward("mlp", ("mlp.fc1",), "mlp.fc2", "mlp.activation_fn")
_DISTILBERT_FFN = FeedForward("ffn", ("ffn.lin1",), "ffn.lin2", "ffn.activation", outer_dropout="ffn.dropout")
_MODERNBERT_MLP = FeedForward("mlp", ("mlp.Wi",), "mlp.Wo", "mlp.act", inner_dropout="mlp.drop")

_BERT = Architecture("encoder.layer", ("attention.self", "attention.output.dense"), _BERT_MLP)
_POST_NORM = Architecture("layers", ("self_attn",), _GATED_MLP)
_PRE_NORM = Architecture("layers", ("self_attn", "input_layernorm"), _GATED_MLP)
_SANDWICH_NORM = Architecture("layers", ("self_attn", "input_layernorm", "post_attention_layernorm"), _GATED_MLP)

ARCHITECTURES = {
    "nomic_bert": _POST_NORM,
    "jina_embeddings_v3": _POST_NORM._replace(feed_forward=_TWO_LAYER_MLP),
    "gte": _POST_NORM._replace(feed_forward=_GATED_MLP._replace(inner_dropout="mlp.dropout")),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "mpnet": _BERT._replace(shared_modules=("attention.attn",)),
    "distilbert": Architecture("transformer.layer", ("attention",), _DISTILBERT_FFN),
    "modernbert": Architecture("layers", ("attn", "attn_norm"), _MODERNBERT_MLP),
    "eurobert": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "llama": _PRE_NORM,
    "gemma2": _SANDWICH_NORM,
    "gemma3_text": _SANDWICH_NORM,
}

REFUSED_ARCHITECTURES = {
    "albert": "it uses one layer again and again, so its blocks cannot have experts of their own",
    "deberta": "it does not hand keyword arguments down to its layers, so they cannot be told the expert",
    "deberta-v2": "it does not hand keyword arguments down to its layers, so they cannot be told the expert",
}


def architecture_of(config: MoTEConfig) -> Architecture:
    """Look up the row of the config's backbone; raise `ValueError`, which explains what to do, if there is none."""
    if config.layer_path is not None:
        return Architecture(config.layer_path, tuple(config.shared_modules or ()), None)
    model_type = config.backbone_config.model_type
    if model_type in REFUSED_ARCHITECTURES:
        raise ValueError(f"MoTE does not support {model_type!r}: {REFUSED_ARCHITECTURES[model_type]}.")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"MoTE does not know the architecture {model_type!r}." + alternatives(model_type, ARCHITECTURES) + " For "
            "another one, set both of these in MoTEConfig: layer_path (where its list of layers is, as in "
            f"{_BERT.layer_path!r}) and shared_modules (the submodules of a layer that make up its attention, as in "
            f"{list(_BERT.shared_modules)!r}); `mote upcycle` takes them as --layer-path and --shared-module."
        )
    return ARCHITECTURES[model_type]


class WeightName(NamedTuple):
    """What the key of a weight in a MoTE's state dict stands for."""

    expert: str | None  # None: shared by all experts, or outside of the blocks
    layer: int | None  # index of the block, from 0; None outside of the blocks
    dense: str  # the weight's name in the dense model


def weight_name(key: str, config: MoTEConfig) -> WeightName:
    """Parse the key of a weight: `backbone.<layers>.i.shared.<path>` or `backbone.<layers>.i.experts.<name>.<path>`.

    Args:
        key: A key of the state dict, as in `backbone.encoder.layer.0.experts.clustering.output.dense.weight`.
        config: The model's config.

    Returns:
        Here `("clustering", 0, "encoder.layer.0.output.dense.weight")`.
    """
    dense = key.removeprefix("backbone.")
    layers = architecture_of(config).layer_path
    found = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(?:shared|experts\.([^.]+))\.(.+)", dense)
    if found is None or int(found[1]) not in config.mote_layer_indices:
        return WeightName(None, None, dense)
    return WeightName(found[2], int(found[1]), f"{layers}.{found[1]}.{found[3]}")


class MPNetBackbone(MPNetModel):
    """MPNet, whose own forward drops the keyword arguments that its encoder would hand to the layers."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Embed, mask and encode, as in the base class."""
        embedded = self.embeddings(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=embedded, attention_mask=attention_mask)
        return self.encoder(embedded, attention_mask=mask, **kwargs, return_dict=True)


def attend_both_ways(backbone: nn.Module) -> None:
    """Make a decoder whose config says `is_causal=False` bidirectional: sdpa without a mask asks the module instead."""
    if getattr(backbone.config, "is_causal", True) is False:
        for module in backbone.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False  # type: ignore[assignment]
