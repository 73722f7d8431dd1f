"""Nomic Embed v2 as published: `nomic-ai/nomic-embed-text-v2-moe` and its `-unsupervised` sibling.

A token-routed encoder in the schema of Nomic's own code, which transformers' native `nomic_bert` loads without an
error, but also without its experts. Its dense parts are those of transformers' `jina_embeddings_v3`: post-norm, biases,
rotary positions, token types, a norm after the embeddings. The keys mean what they mean in the original code
(`modeling_hf_nomic_bert.py` of nomic-ai/nomic-bert-2048 on the Hub, Apache-2.0).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import JinaEmbeddingsV3Config

from mote.checkpoints import nomic
from mote.remote.token_routing_mote import TokenRoutedConfig, TokenRoutedModel

# The original accepts 2,048 positions, but was trained, and is published, with texts of at most 512 tokens.
MAX_SEQ_LENGTH = 512

_REQUIRED = {
    **nomic.REQUIRED,
    "activation_function": ("gelu",),
    "expert_choice_router": (False,),
    "ffn_div": (1,),
    "mlp_fc1_bias": (True,),
    "mlp_fc2_bias": (True,),
    "num_shared_experts": (0,),
    "qkv_proj_bias": (True,),
}

# Names in the original → names in our model; the blocks are added by `_renamed`.
_EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "emb_ln": "embeddings.LayerNorm",
}
_LAYER = {
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def is_original(settings: Mapping[str, Any]) -> bool:
    """Whether a config is that of a mixture of experts in the schema of Nomic's own code."""
    return nomic.is_original(settings) and (settings.get("num_experts") or 0) > 1


def native_config(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> TokenRoutedConfig:
    """Translate the original schema; the size of the vocabulary comes from the shapes of the tensors."""
    nomic.require_settings(settings, _REQUIRED, name)
    every, layers = settings["moe_every_n_layers"], range(settings["n_layer"])
    routed = [index for index in layers if index % every == 1]
    translated = nomic.translate(settings) | {
        "vocab_size": shapes["embeddings.word_embeddings.weight"][0],
        "intermediate_size": settings["n_inner"],
        "max_position_embeddings": min(settings.get("n_positions", MAX_SEQ_LENGTH), MAX_SEQ_LENGTH),
    }
    backbone = JinaEmbeddingsV3Config(**translated, hidden_act="gelu")
    return TokenRoutedConfig(
        backbone_config=backbone,
        mote_layers=routed,
        num_experts=settings["num_experts"],
        num_experts_per_tok=settings["moe_top_k"],
        norm_topk_prob=bool(settings.get("moe_normalize_expert_weights", False)),
        router_aux_loss_coef=settings.get("router_aux_loss_coef", 0.0),
        router_aux_loss_type="megablocks",
        shared_expert_bias=True,
    )


def load(
    config: TokenRoutedConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | str = "auto"
) -> TokenRoutedModel:
    """Build the model from all of the original's weights; one that is missing, unknown or misshapen is an error."""
    converted: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items():
        # An unknown one keeps its name, by which the model refuses it.
        converted |= {f"backbone.{ours}": part for ours, part in _parts(key, tensor, config).items()} or {key: tensor}
    loaded = TokenRoutedModel.from_pretrained(None, config=config, state_dict=converted, dtype=dtype)
    return loaded.eval()


def _parts(key: str, tensor: torch.Tensor, config: TokenRoutedConfig) -> dict[str, torch.Tensor]:
    """Convert one tensor into ours, by their names; empty if its name is unknown."""
    module, _, kind = key.rpartition(".")
    if module in _EMBEDDINGS:
        return {f"{_EMBEDDINGS[module]}.{kind}": tensor}
    found = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", key)
    if found is None:
        return {}
    layer, name = int(found[1]), found[2]
    module, _, kind = name.rpartition(".")
    block = f"layers.{layer}"
    if layer in config.mote_layer_indices:
        if name in _EXPERTS:
            ours, convert = _EXPERTS[name]
            return {f"{block}.feed_forward.{ours}": convert(tensor, config)}
        block += ".shared"
    if module == "attn.Wqkv":
        projections = (f"{block}.self_attn.{one}_proj.{kind}" for one in "qkv")
        return dict(zip(projections, tensor.chunk(3), strict=False))
    return {f"{block}.{_LAYER[module]}.{kind}": tensor} if module in _LAYER else {}


def _by_expert(tensor: torch.Tensor, config: TokenRoutedConfig) -> torch.Tensor:
    """Split a tensor in which the original stacks the experts one below the other: [E I, H] → [E, I, H]."""
    return tensor.unflatten(0, (-1, config.backbone_config.intermediate_size))


# Both matrices of the original's experts are [E I, H]; the second multiplies from the right.
_EXPERTS: dict[str, tuple[str, Callable[[torch.Tensor, TokenRoutedConfig], torch.Tensor]]] = {
    "mlp.experts.mlp.w1": ("experts.up_proj", _by_expert),
    "mlp.experts.mlp.w2": ("experts.down_proj", lambda tensor, config: _by_expert(tensor, config).mT.contiguous()),
    "mlp.experts.bias": ("bias", lambda tensor, config: tensor),
    "mlp.router.layer.weight": ("router.weight", lambda tensor, config: tensor),
}
