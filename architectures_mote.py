"""One row for each model family that MoTE supports.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`).
"""

from typing import NamedTuple

try:
    from .configuration_mote import MoTEConfig, alternatives  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from configuration_mote import MoTEConfig, alternatives


class Architecture(NamedTuple):
    """What differs between model families: where the layers are, and which of their submodules the experts share."""

    layer_path: str
    shared_modules: tuple[str, ...]


_BERT = Architecture("encoder.layer", ("attention.self", "attention.output.dense"))
_POST_NORM = Architecture("layers", ("self_attn",))
_PRE_NORM = Architecture("layers", ("self_attn", "input_layernorm"))
_SANDWICH_NORM = Architecture("layers", ("self_attn", "input_layernorm", "post_attention_layernorm"))

ARCHITECTURES = {
    "nomic_bert": _POST_NORM,
    "jina_embeddings_v3": _POST_NORM,
    "gte": _POST_NORM,
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "mpnet": Architecture("encoder.layer", ("attention.attn",)),
    "distilbert": Architecture("transformer.layer", ("attention",)),
    "modernbert": Architecture("layers", ("attn", "attn_norm")),
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
    """Look up where the backbone keeps its layers and what their experts share.

    Raises:
        ValueError: If the architecture is not supported; the message says which are, and how to describe another.
    """
    if config.layer_path is not None:
        return Architecture(config.layer_path, tuple(config.shared_modules))
    model_type = config.backbone_config.model_type
    if model_type in REFUSED_ARCHITECTURES:
        raise ValueError(f"MoTE does not support {model_type!r}: {REFUSED_ARCHITECTURES[model_type]}.")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"MoTE does not know the architecture {model_type!r}." + alternatives(model_type, ARCHITECTURES) + " For "
            "another one, set both of these in MoTEConfig: layer_path (where its list of layers is, as in "
            f"{_BERT.layer_path!r}) and shared_modules (the submodules of a layer that make up its attention, as in "
            f"{list(_BERT.shared_modules)!r}); `mote upcycle` takes them as --layer-path and --shared-modules."
        )
    return ARCHITECTURES[model_type]
