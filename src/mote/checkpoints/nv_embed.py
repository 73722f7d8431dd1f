"""NV-Embed as published: `nvidia/NV-Embed-v2` and `nvidia/NV-Embed-v1`.

A Mistral that attends in both directions, and latent attention over its last hidden states, in a schema that
transformers does not have; the original code breaks with new releases of transformers. The keys mean what they mean in
that code (`modeling_nvembed.py` and `configuration_nvembed.py` of nvidia/NV-Embed-v2 on the Hub). It omits settings at
their defaults from the config, so the sizes of the pooling come from the weights.
Method: Lee et al., "NV-Embed", arXiv:2405.17428.
"""

from collections.abc import Mapping
from typing import Any

from transformers import MistralConfig, PreTrainedConfig

from mote.checkpoints.bidirectional import make_bidirectional
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.nomic import require_settings

LICENSE = "cc-by-nc-4.0"
# What the original truncates texts to unless told otherwise; it was trained with 512, its card says 32,768.
MAX_SEQ_LENGTH = 4096

# The one expert of the model as published, and the task of texts for which none is given: it has no instruction.
EXPERT = "text"
# From the model's card: the only definition that is not for a dataset.
DEFINITION = "Given a question, retrieve passages that answer the question"

_HEADS = 8  # of the latent attention, unless the config says otherwise

KEY_MAPPING = {r"^embedding_model\.": ""}

_MISTRAL = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)

# Names in our pooling → names in the original.
_ATTENTION, _FEED_FORWARD = (f"latent_attention_model.cross_attend_blocks.{index}." for index in (0, 1))
_POOLING = {
    "latents": "latent_attention_model.latents",
    **{f"norm.{kind}": f"{_ATTENTION}norm.{kind}" for kind in ("weight", "bias")},
    **{f"context_norm.{kind}": f"{_ATTENTION}norm_context.{kind}" for kind in ("weight", "bias")},
    **{f"{name}.weight": f"{_ATTENTION}fn.{name}.weight" for name in ("to_q", "to_kv", "to_out")},
    **{f"feed_forward_norm.{kind}": f"{_FEED_FORWARD}norm.{kind}" for kind in ("weight", "bias")},
    **{f"feed_forward_in.{kind}": f"{_FEED_FORWARD}fn.net.0.{kind}" for kind in ("weight", "bias")},
    **{f"feed_forward_out.{kind}": f"{_FEED_FORWARD}fn.net.2.{kind}" for kind in ("weight", "bias")},
}
POOLING_WEIGHTS = {f"pooling.{ours}": theirs for ours, theirs in _POOLING.items()}


def is_original(settings: Mapping[str, Any]) -> bool:
    """Whether a config is in the schema of NV-Embed's own code."""
    return settings.get("model_type") == "nvembed"


def native_config(settings: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Translate the decoder's part of the config, which attends in both directions, without a window."""
    decoder = settings["text_config"]
    require_settings(decoder, {"rope_scaling": (None,)}, name)
    translated = {key: decoder[key] for key in _MISTRAL if key in decoder}
    rope = {"rope_type": "default", "rope_theta": float(decoder.get("rope_theta", 10_000))}
    return make_bidirectional(MistralConfig(**translated, rope_parameters=rope), name)


def pooling_settings(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> dict[str, Any]:
    """Return the settings of `AttentionPoolingConfig` for the original's latent attention, in the weights' sizes."""
    given = settings.get("latent_attention_config") or {}
    require_settings(given, {"output_normalize": (True,)}, name)
    heads = given.get("num_cross_heads", _HEADS)
    # Weights that are missing are named when the model is loaded.
    latents, queries = (shapes.get(_POOLING[tensor], (heads,))[0] for tensor in ("latents", "to_q.weight"))
    return {
        "pooling": "latent_attention",
        "pooling_latents": latents,
        "pooling_heads": heads,
        "pooling_head_dim": queries // heads,
    }


def prompts(definitions: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompts of the model as published, under mteb's names, given the content of `instructions.json`."""
    found = {"query": instruction_with(DEFINITION), "document": ""}
    for dataset, given in definitions.items():
        sides = given if isinstance(given, dict) else {"query": given}
        texts = {side: text for side, text in sides.items() if side in ("query", "corpus") and isinstance(text, str)}
        if texts.get("query"):
            found[dataset] = instruction_with(texts["query"])
        if "corpus" in texts:
            found[f"{dataset}-document"] = instruction_with(texts["corpus"]) if texts["corpus"] else ""
    return found


def padded(tokenizer: Any) -> Any:
    """Let a tokenizer pad on the right, as the original does."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    return tokenizer
