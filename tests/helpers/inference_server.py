"""The files of a model as text-embeddings-inference reads them: which keys it requires, and of which type.

Stated from its source at version 1.9.3, commit 0d124dc: router/src/lib.rs, backends/src/lib.rs and
backends/candle/src/models. What is optional there is left out. Keys that it does not know are ignored.
"""

from pathlib import Path
from typing import Any

from helpers.checkpoints import read_json

_SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"
_BERT = {
    "int": f"{_SIZES} type_vocab_size pad_token_id",
    "float": "hidden_dropout_prob initializer_range layer_norm_eps",
    "act": "hidden_act",
}
_DECODER = {"int": f"{_SIZES} num_key_value_heads", "float": "rms_norm_eps rope_theta", "act": "hidden_act"}
_LLAMA = {**_DECODER, "float": "rms_norm_eps rope_theta initializer_range"}

# Model type → kind of value → keys.
ARCHITECTURES: dict[str, dict[str, str]] = {
    **dict.fromkeys(["bert", "camembert", "roberta", "xlm-roberta"], _BERT),
    "distilbert": {
        "int": "vocab_size dim n_layers n_heads hidden_dim max_position_embeddings pad_token_id",
        "act": "activation",
    },
    "mpnet": {
        "int": f"{_SIZES} relative_attention_num_buckets",
        "float": "hidden_dropout_prob attention_probs_dropout_prob initializer_range layer_norm_eps",
        "act": "hidden_act",
    },
    "modernbert": {
        "int": f"{_SIZES} pad_token_id eos_token_id bos_token_id cls_token_id sep_token_id "
        "global_attn_every_n_layers local_attention",
        "float": "initializer_range initializer_cutoff_factor norm_eps global_rope_theta local_rope_theta "
        "attention_dropout",
        "bool": "norm_bias attention_bias",
        "act": "hidden_activation classifier_activation",
    },
    "gte": {
        "int": f"{_SIZES} type_vocab_size",
        "float": "layer_norm_eps rope_theta",
        "str": "layer_norm_type position_embedding_type",
        "act": "hidden_act",
    },
    "nomic_bert": {
        "int": "n_embd n_head n_inner n_layer n_positions vocab_size type_vocab_size",
        "float": "rotary_emb_fraction rotary_emb_base layer_norm_epsilon",
        "bool": "prenorm qkv_proj_bias rotary_emb_interleaved mlp_fc1_bias mlp_fc2_bias",
        "act": "activation_function",
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_DECODER, "bool": "use_sliding_window"},
    "qwen3": {
        **_DECODER,
        "int": f"{_SIZES} num_key_value_heads eos_token_id",
        "bool": "attention_bias use_sliding_window",
    },
    "gemma3_text": {
        "int": f"{_SIZES} num_key_value_heads pad_token_id query_pre_attn_scalar _sliding_window_pattern",
        "float": "rms_norm_eps rope_local_base_freq rope_theta",
        "bool": "attention_bias use_bidirectional_attention",
        "act": "hidden_activation",
    },
}
_ACTIVATIONS = {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swiglu", "tanh"}
_MODULES = {f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize", "Dense")}


def read_as_server(folder: Path) -> dict[str, Any]:
    """Read a folder's settings, and fail where the server would, with a ValueError if config.json lacks something."""
    config = read_json(folder / "config.json")
    assert config["architectures"], "architectures"
    architecture = ARCHITECTURES[config["model_type"]]
    problems = [
        f"{key}={config.get(key)!r} is not a valid {kind}"
        for kind, keys in architecture.items()
        for key in keys.split()
        if not _is(kind, config.get(key))
    ]
    rope = config.get("rope_parameters")
    if rope is not None and config["model_type"] != "modernbert" and not {"rope_theta", "rope_type"} <= rope.keys():
        problems.append(f"rope_parameters={rope}")
    if problems:
        raise ValueError(f"Failed to parse config.json: {'; '.join(problems)}")
    assert isinstance(config.get("max_position_embeddings", config.get("max_trained_positions")), int)
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
    flags = read_json(folder / "1_Pooling" / "config.json")
    pooling = {
        name: flags[f"pooling_mode_{key}"]
        for name, key in {"cls": "cls_token", "mean": "mean_tokens", "last-token": "lasttoken"}.items()
    }
    assert all(_is("bool", flag) for flag in pooling.values())
    length = read_json(folder / "sentence_bert_config.json")["max_seq_length"]
    assert _is("int", length)
    prompts = read_json(folder / "config_sentence_transformers.json")["prompts"]
    assert all(_is("str", text) for text in prompts.values())
    modules = read_json(folder / "modules.json")
    assert {module["type"] for module in modules} <= _MODULES
    dense = [module["path"] for module in modules if module["type"].endswith(".Dense")]
    first = next((name for name, chosen in pooling.items() if chosen), None)
    return {"pooling": first, "max_input_length": length, "prompts": prompts, "dense": dense}


def _is(kind: str, value: Any) -> bool:
    if kind == "act":
        return value in _ACTIVATIONS
    if kind == "float":
        return type(value) in (int, float)
    return type(value).__name__ == kind and not (kind == "int" and value < 0)
