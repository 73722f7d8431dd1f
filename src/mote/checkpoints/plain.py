"""A dense model in files that every reader of a Sentence-Transformers folder accepts, old and new.

The libraries write what their newest version reads: Sentence-Transformers (5.4 and later) uses new module names and
settings, transformers (5 and later) new names in the config. Older releases, text-embeddings-inference, infinity, vLLM
and llama.cpp read the older names, some of them only those; and the newest libraries still read them, too.
"""

import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mote.checkpoints import nomic
from mote.checkpoints.st_settings import Pipeline
from mote.files import read_json, write_json

logger = logging.getLogger(__name__)

Settings = dict[str, Any]

# Modules in `sentence_transformers.models` of Sentence-Transformers 3; later releases still find them there.
_LONG_LIVED = "sentence_transformers.models."
_MODULES = (
    *("Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "CNN", "LSTM"),
    *("WeightedLayerPooling", "WordWeights", "WordEmbeddings", "BoW", "StaticEmbedding"),
)

# Name of a pooling since Sentence-Transformers 5.4 → its flag in earlier releases. Several are concatenated in this
# order.
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}

# Decoders whose `is_causal` transformers 4 does not read.
_CAUSAL_IN_TRANSFORMERS_4 = ("llama", "mistral", "qwen2", "qwen3", "gemma2")

# Settings that releases before Sentence-Transformers 5.4 refuse, with the values that have no effect.
_DEFAULTS: dict[str, Settings] = {
    "Transformer": {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "unpad_inputs": None,
        "processing_kwargs": {},
    },
    "Dense": {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
        "use_residual": False,
    },
}


def write_plainly(folder: Path, model: PreTrainedModel) -> None:
    """Rewrite the settings of a dense model under names that old and new readers know."""
    _edit(folder / "config.json", lambda settings: _plain_config(_without_lost_code(settings, folder), model))
    _edit(
        folder / "tokenizer_config.json",
        lambda settings: _plain_tokenizer_config(_without_lost_code(settings, folder), model),
    )
    pipeline = Pipeline.read(folder)
    for module in pipeline.modules:
        if module.type.startswith("sentence_transformers.") and module.name in _MODULES:
            module.type = _LONG_LIVED + module.name
            module.settings = _without_defaults(module.settings, module.name)
        if module.pools:
            module.settings = plain_pooling(module.settings)
    if pipeline.transformer:
        pipeline.transformer = _plain_transformer(pipeline.transformer, folder, model)
    pipeline.write(folder)


def pooling_modes(settings: Settings) -> list[str]:
    """Return the poolings of a Pooling module, given its settings in the old or the new form."""
    modes = settings.get("pooling_mode", [mode for mode, flag in POOLING_FLAGS.items() if settings.get(flag)])
    return [modes] if isinstance(modes, str) else list(modes) or ["mean"]


def plain_pooling(settings: Settings) -> Settings:
    """Name the poolings of a module by flags, which old and new releases of Sentence-Transformers read."""
    modes = pooling_modes(settings)
    if modes != [mode for mode in POOLING_FLAGS if mode in modes]:
        logger.warning("The poolings %s, in this order, are read by Sentence-Transformers 5.4 and later only", modes)
        return settings
    if not settings.get("include_prompt", True):
        logger.warning("The instruction is left out of the pooling: only Sentence-Transformers does that, no server")
    return {
        "word_embedding_dimension": settings.get("embedding_dimension", settings.get("word_embedding_dimension")),
        **{flag: mode in modes for mode, flag in POOLING_FLAGS.items()},
        "include_prompt": settings.get("include_prompt", True),
    }


def longest_sequence(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens: of learned positions, or by the config."""
    return learned_positions(model) or getattr(model.config, "max_position_embeddings", None)


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that have a learned position; None if positions are not learned.

    RoBERTa and similar models start positions after the padding index.
    """
    tables = [getattr(module, "position_embeddings", None) for module in model.modules()]
    limits = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
        if isinstance(table, nn.Embedding)
    ]
    return min(limits, default=None)


def _plain_transformer(settings: Settings, folder: Path, model: PreTrainedModel) -> Settings:
    others = _without_defaults(settings, "Transformer")
    length, lower = others.pop("max_seq_length", None), bool(others.pop("do_lower_case", False))
    if length is None:  # as in Sentence-Transformers
        tokenizer = read_json(folder / "tokenizer_config.json", missing_ok=True)
        lengths = [tokenizer.get("model_max_length"), longest_sequence(model)]
        length = min((one for one in lengths if one is not None), default=None)
    if "add_pooling_layer" in inspect.signature(type(model)).parameters:  # else its absence is reported at each loading
        others["model_args"] = {**others.get("model_args", {}), "add_pooling_layer": False}
    if newer := others.keys() - {"instruction_pooling", "model_args"}:  # of a module with code of its own
        logger.warning("%s are read by Sentence-Transformers 5.4 and later only", ", ".join(sorted(newer)))
    if lower:
        _edit(folder / "tokenizer.json", _lower_casing)
    return {"max_seq_length": length, "do_lower_case": lower, **others}


def _without_defaults(settings: Settings, module: str) -> Settings:
    default = _DEFAULTS.get(module, {})
    return {key: value for key, value in settings.items() if key not in default or value != default[key]}


def _lower_casing(tokenizer: Settings) -> Settings:
    """Let the tokenizer itself lower-case the texts, which servers do not do."""
    normalizer = tokenizer.get("normalizer")
    if '"Lowercase"' in json.dumps(normalizer) or (normalizer or {}).get("lowercase"):
        return tokenizer
    steps = [{"type": "Lowercase"}, *([normalizer] if normalizer else [])]
    return {**tokenizer, "normalizer": {"type": "Sequence", "normalizers": steps}}


def _without_lost_code(settings: Settings, folder: Path) -> Settings:
    """Leave out an `auto_map` that names code which is not in the folder: the source's, which loading does not need."""
    named = settings.get("auto_map", {}).values()
    references = [one for value in named for one in (value if isinstance(value, list) else [value]) if one]
    if all((folder / f"{reference.split('.')[0]}.py").is_file() for reference in references):
        return settings
    return {key: value for key, value in settings.items() if key != "auto_map"}


def _plain_tokenizer_config(settings: Settings, model: PreTrainedModel) -> Settings:
    """Use transformers 4's names of the generic tokenizer class, and of additional special tokens."""
    settings = dict(settings)
    if "token_type_ids" not in inspect.signature(model.forward).parameters:  # transformers 4 would pass them anyway
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    return settings


def _plain_config(config: Settings, model: PreTrainedModel) -> Settings:
    """Add the names of transformers 4 and of servers to those of transformers 5, which reads both."""
    config = _with_rope_of_transformers_4(dict(config))
    if config.get("is_causal") is False and config["model_type"] in _CAUSAL_IN_TRANSFORMERS_4:
        logger.warning(
            "Transformers 4 has no %s with attention in both directions, and silently computes other embeddings: "
            "load this model with transformers 5",
            config["model_type"],
        )
        if config["model_type"] in ("llama", "mistral", "qwen3"):
            config["use_bidirectional_attention"] = True  # as text-embeddings-inference calls it
    if config["model_type"] == "gte":  # text-embeddings-inference takes them from the published config
        config |= {"layer_norm_type": "layer_norm", "position_embedding_type": "rope"}
    if config["model_type"] == "nomic_bert":  # servers read only Nomic's own keys
        config |= nomic.published_settings(model.config)
    return config


def _with_rope_of_transformers_4(config: Settings) -> Settings:
    rope = config.get("rope_parameters")
    if not rope:
        return config
    nested = {name: dict(one) for name, one in rope.items() if isinstance(one, dict)}
    if not nested:
        flat = dict(rope)
        config |= {key: flat.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in flat}
        if flat.get("rope_type", "default") != "default":
            config["rope_scaling"] = flat
        return config
    if set(nested) != {"full_attention", "sliding_attention"}:
        return config
    full, sliding = nested["full_attention"], nested["sliding_attention"]
    thetas = full.pop("rope_theta"), sliding.pop("rope_theta")
    if config["model_type"] == "modernbert" and full == sliding == {"rope_type": "default"}:
        config["global_rope_theta"], config["local_rope_theta"] = thetas
    elif config["model_type"] == "gemma3_text" and sliding == {"rope_type": "default"}:
        del config["rope_parameters"]  # nested, it is an error in text-embeddings-inference; no reader needs it
        config["rope_theta"], config["rope_local_base_freq"] = thetas
        config["rope_scaling"] = None if full == {"rope_type": "default"} else full
    return config


def _edit(path: Path, change: Callable[[Settings], Settings]) -> None:
    content = read_json(path, missing_ok=True)
    if content and (changed := change(content)) != content:
        write_json(path, changed)
