"""Nomic's published checkpoints, whose config schema and key prefix transformers does not read.

`nomic-ai/nomic-bert-2048` and the `nomic-embed-text` models were published with a GPT-2-like schema (`n_embd`,
`rotary_emb_base` …). The native `NomicBertConfig` silently ignores those keys and takes its defaults. Here the
schema is translated, and settings that the native model cannot express are refused. The keys mean what they mean in
the original implementation (nomic-ai/contrastors, Apache-2.0).
"""

from collections.abc import Mapping
from typing import Any

from transformers import NomicBertConfig

# nomic-bert-2048 was trained with this model's vocabulary and is published without a tokenizer.
TOKENIZER = "google-bert/bert-base-uncased"

# Settings under which our models compute the same function; anything else is refused.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "causal": (False,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "use_rms_norm": (False, None),
}
_REQUIRED = {
    **REQUIRED,
    "activation_function": ("swiglu", "silu"),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0, -1, None),
    "num_experts": (0, 1, None),
    "qkv_proj_bias": (False,),
}

_RENAMED = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "attn_pdrop": "attention_probs_dropout_prob",
    "resid_pdrop": "hidden_dropout_prob",
    "pad_token_id": "pad_token_id",
}


def is_original(settings: Mapping[str, Any]) -> bool:
    """Whether a config is in the schema of Nomic's own code alone; exports are in transformers', too."""
    return settings.get("model_type") == "nomic_bert" and "n_embd" in settings and "rope_parameters" not in settings


def native_config(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> NomicBertConfig:
    """Translate the original schema; two sizes come from the shapes of the tensors."""
    require_settings(settings, _REQUIRED, name)
    rows = {key.removeprefix("bert."): shape[0] for key, shape in shapes.items() if shape}
    translated = translate(settings) | {
        "intermediate_size": rows.get("encoder.layers.0.mlp.fc11.weight"),  # the original rounds it up
        "vocab_size": rows.get("embeddings.word_embeddings.weight"),  # padded up to pad_vocab_size_multiple
    }
    trained = settings.get("max_trained_positions")  # ignored by the native model, but read by servers
    return NomicBertConfig(
        **translated, hidden_act="silu", **({} if trained is None else {"max_trained_positions": trained})
    )


def require_settings(settings: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]], name: str) -> None:
    """Raise `ValueError` if a setting has none of the values under which our model computes the same function."""
    for key, allowed in required.items():
        value = settings.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"{name} has {key}={value!r}; MoTE can express {' or '.join(map(repr, allowed))} only")


def translate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings that Nomic's dense and routed models share; sizes of tensors are not among them."""
    translated = {new: settings[old] for old, new in _RENAMED.items() if settings.get(old) is not None}
    rope = {"rope_type": "default", "rope_theta": float(settings["rotary_emb_base"])}
    return {**translated, "rope_parameters": rope}


def published_settings(config: Any) -> dict[str, Any]:
    """Translate a native config back into the original schema, which servers read; empty if that cannot express it.

    The native model writes its weights under the original names by itself. `n_inner` is the actual width of the
    feed-forward network, which the original code rounds up to a multiple of 256, so it can load real models but not
    tiny ones.
    """
    rope = config.rope_parameters or {}
    plain_rope = rope.get("rope_type") == "default" and rope.get("partial_rotary_factor", 1) == 1
    plain_heads = config.head_dim in (None, config.hidden_size // config.num_attention_heads)
    if config.hidden_act != "silu" or not plain_rope or not plain_heads:
        return {}
    return {
        **{key: allowed[0] for key, allowed in _REQUIRED.items() if "expert" not in key and "moe" not in key},
        **{old: getattr(config, new) for old, new in _RENAMED.items()},
        "embd_pdrop": config.hidden_dropout_prob,
        "max_trained_positions": getattr(config, "max_trained_positions", 2048),  # the default if the key is absent
        "n_inner": config.intermediate_size,
        "pad_vocab_size_multiple": 64 if config.vocab_size % 64 == 0 else 1,
        "rotary_emb_base": rope["rope_theta"],
    }


def key_mapping(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the renaming that removes the prefix of the pre-training model; the library does all other renamings."""
    return {r"^bert\.": ""} if any(key.startswith("bert.") for key in shapes) else {}
