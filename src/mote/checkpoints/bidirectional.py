"""Decoders that attend in both directions: the settings that make transformers' native classes do so."""

import copy
from typing import Any

from transformers import PreTrainedConfig

DECODERS = ("mistral", "qwen2", "qwen3", "llama", "gemma2", "gemma3_text")
_NATIVE = ("gemma2", "gemma3_text")  # know `use_bidirectional_attention` themselves


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Whether a decoder's config asks for both directions by servers' name for it, which its native class ignores."""
    asked: Any = getattr(config, "use_bidirectional_attention", None)
    return asked is True and config.model_type in DECODERS and config.model_type not in _NATIVE


def make_bidirectional(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Return a copy of a decoder's config in which every token attends to every other, without window and cache."""
    if config.model_type not in DECODERS:
        raise ValueError(
            f"{name} is a {config.model_type!r}: encoders are already bidirectional, this setting is for decoders "
            f"({', '.join(DECODERS)})"
        )
    changed: Any = copy.deepcopy(config)
    changed.is_causal = changed.use_cache = False
    if config.model_type == "gemma3_text":  # the type of a layer also determines its rotary positions
        changed.sliding_window = changed.max_position_embeddings
    elif getattr(config, "layer_types", None) is not None:
        changed.layer_types = ["full_attention"] * config.num_hidden_layers
    if config.model_type in ("mistral", "qwen2", "qwen3"):
        changed.sliding_window = None
    if hasattr(config, "use_sliding_window"):
        changed.use_sliding_window = False
    return changed
