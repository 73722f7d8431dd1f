"""Nomic's published checkpoints, whose config schema and key prefix transformers does not read.

`nomic-ai/nomic-bert-2048` and the `nomic-embed-text` models were published with a GPT-2-like schema (`n_embd`,
`rotary_emb_base` …). The native `NomicBertConfig` silently ignores those keys and takes its defaults. Here the
schema is translated, and settings that the native model cannot express are refused. The keys mean what they mean in
the original implementation (nomic-ai/contrastors, Apache-2.0).
"""

from typing import Any

from transformers import NomicBertConfig

# nomic-bert-2048 was trained with the vocabulary of this one and is published without a tokenizer.
TOKENIZER = "google-bert/bert-base-uncased"

# Settings under which the native model computes the same function; anything else is refused.
_REQUIRED = {
    "activation_function": ("swiglu", "silu"),
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0, -1, None),
    "num_experts": (0, 1, None),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "use_rms_norm": (False, None),
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


def is_original(settings: dict[str, Any]) -> bool:
    """Whether a config is in the schema of Nomic's own code rather than transformers'."""
    return settings.get("model_type") == "nomic_bert" and "n_embd" in settings


def native_config(settings: dict[str, Any], shapes: dict[str, tuple[int, ...]], name: str) -> NomicBertConfig:
    """Translate the original schema.

    Args:
        settings: The original config.
        shapes: Shapes of the tensors. The original rounds the feed-forward width up, so it is taken from these.
        name: Name of the checkpoint, for errors.

    Raises:
        ValueError: If the native model cannot express a setting, or a key is missing.
    """
    for key, allowed in _REQUIRED.items():
        value = settings.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{name} has {key}={value!r}, which the native NomicBERT cannot express (it can: "
                f"{' or '.join(map(repr, allowed))})"
            )
    lacking = sorted({"n_embd", "n_layer", "n_head", "rotary_emb_base", "vocab_size"} - set(settings))
    widths = {shape[0] for key, shape in shapes.items() if key.endswith("mlp.fc11.weight")}
    embeddings = [shape[0] for key, shape in shapes.items() if key.endswith("word_embeddings.weight")]
    if lacking or len(widths) != 1 or len(embeddings) != 1:
        raise ValueError(
            f"{name} is not a NomicBERT in its published format: config lacks {lacking or 'nothing'}; the weights "
            f"have {len(embeddings)} word embeddings and feed-forward widths {sorted(widths)} (expected one of each)"
        )
    translated = {new: settings[old] for old, new in _RENAMED.items() if settings.get(old) is not None}
    translated.update(
        intermediate_size=widths.pop(),
        vocab_size=embeddings[0],  # padded, in the original, up to pad_vocab_size_multiple
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": float(settings["rotary_emb_base"])},
    )
    return NomicBertConfig(**translated)


def key_mapping(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the renaming that removes the prefix of the pre-training model; the library does all others."""
    return {r"^bert\.": ""} if any(key.startswith("bert.") for key in shapes) else {}
