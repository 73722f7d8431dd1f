"""Small dense checkpoints on disk, in the formats in which people publish them."""

import json
import re
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.families import VOCAB_SIZE, dense_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertTokenizer, LlamaTokenizer, PreTrainedModel

HEADS = {
    "mlm": transformers.AutoModelForMaskedLM,
    "causal": transformers.AutoModelForCausalLM,
    "pretraining": transformers.AutoModelForPreTraining,
    "classification": transformers.AutoModelForSequenceClassification,
}

# The code of a model with task experts in Sentence-Transformers.
_FILES = ("configuration", "mixed_batch", "modeling", "sentence_transformer", "weights")
TASK_MOTE = {f"{name}_mote.py" for name in _FILES}

_LETTERS = list(string.ascii_lowercase)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *("##" + letter for letter in _LETTERS), *":_."]


def tiny_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """A WordPiece tokenizer, lower-casing, that spells every word of Latin letters; [PAD] is 0."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(VOCABULARY[:vocab_size])}
    BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=512).save_pretrained(folder)
    return folder


def dense_checkpoint(
    folder: Path,
    family: str = "bert",
    head: str | None = None,
    format: str = "safetensors",  # noqa: A002
    shards: bool = False,
    sentence_transformers: dict[str, Any] | None = None,
    tokenizer: bool = True,
    **settings: Any,
) -> Path:
    """A checkpoint of `families.dense_model(family, **settings)`, with a head of `HEADS` if one is named.

    `format` is "safetensors", "bin", or "legacy-bin", that of torch before 1.6. With `sentence_transformers`, any of
    `prompts`, `pooling`, `normalize` and `max_seq_length`, it is a Sentence-Transformers model.
    """
    model = dense_model(family, **settings)
    if head is not None:
        model = _with_head(model, head)
    model.save_pretrained(folder, max_shard_size="5KB" if shards else "5GB")
    if format != "safetensors":
        to_bin(folder, legacy=format == "legacy-bin")
    if tokenizer:
        tiny_tokenizer(folder, min(VOCAB_SIZE, model.config.vocab_size))
    if sentence_transformers is not None:
        _as_sentence_transformer(folder, **sentence_transformers)
    return folder


def e5_checkpoint(folder: Path) -> Path:
    """A Sentence-Transformers checkpoint with everything that carries over into a MoTE."""
    prompts = {"query": "query: ", "passage": "passage: "}
    settings = {"prompts": prompts, "pooling": "cls", "normalize": True, "max_seq_length": 11}
    return dense_checkpoint(folder, sentence_transformers=settings)


def _with_head(base: PreTrainedModel, head: str) -> PreTrainedModel:
    model = HEADS[head].from_config(base.config, attn_implementation=base.config._attn_implementation).eval()
    result = getattr(model, model.base_model_prefix).load_state_dict(base.state_dict(), strict=False)
    assert result.missing_keys == []
    assert all(key.startswith("pooler.") for key in result.unexpected_keys)
    return model


def to_bin(folder: Path, legacy: bool = False) -> None:
    """Turn safetensors files into pickles, the index included."""
    for path in sorted(folder.glob("model*.safetensors")):
        name = path.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
        torch.save(load_file(path), folder / name, _use_new_zipfile_serialization=not legacy)
        path.unlink()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        text = index.read_text().replace('"model-', '"pytorch_model-').replace('.safetensors"', '.bin"')
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


def _as_sentence_transformer(
    folder: Path,
    prompts: dict[str, str] | None = None,
    pooling: str = "mean",
    normalize: bool = False,
    max_seq_length: int | None = None,
) -> None:
    transformer = Transformer(str(folder), max_seq_length=max_seq_length)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
    SentenceTransformer(modules=modules + [Normalize()] * normalize, prompts=prompts).save(str(folder))
    if max_seq_length is not None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=max_seq_length, do_lower_case=False)
        edit_json(folder / "tokenizer_config.json", model_max_length=512)  # older versions left it as it was


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys() != set()
    assert all(weight.equal(others[key]) for key, weight in weights.items())


def code_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.py")}


def files_in(folder: Path) -> set[str]:
    """The names of its files, those of weights without their ids."""
    return {re.sub(r"-[0-9a-f]{16}(?=\.safetensors)", "", name) for name in contents(folder)}


def contents(folder: Path | str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def trusted(folder: Path, **settings: Any) -> SentenceTransformer:
    return SentenceTransformer(str(folder), trust_remote_code=True, **settings)


def trusted_sparse(folder: Path, **settings: Any) -> SparseEncoder:
    return SparseEncoder(str(folder), trust_remote_code=True, **settings)


def edit_json(path: Path, **changes: Any) -> None:
    """Set some keys of a JSON object; None takes a key out."""
    content = {**(json.loads(path.read_text()) if path.is_file() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in all safetensors files of a model."""
    return {key: value for file in sorted(folder.glob("model*.safetensors")) for key, value in load_file(file).items()}


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or take out (None) tensors, and write all into one file; `__` in a keyword stands for a dot."""
    weights = tensors_of(folder) | {key.replace("__", "."): value for key, value in changes.items()}
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    kept = {key: value for key, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


# As in nomic-ai/nomic-bert-2048, with other numbers than the native config's defaults.
NOMIC_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(["causal", "mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"], False),
    **dict.fromkeys(["parallel_block", "prenorm", "rotary_emb_interleaved", "use_rms_norm"], False),
    **dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0),
    **dict.fromkeys(["rotary_emb_scale_base", "rotary_scaling_factor"]),
    "activation_function": "swiglu",
    "architectures": ["NomicBertForPreTraining"],
    "auto_map": {
        "AutoConfig": "configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "modeling_hf_nomic_bert.NomicBertModel",
    },
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "model_type": "nomic_bert",
    "n_embd": 16,
    "n_head": 2,
    "n_inner": 40,
    "n_layer": 2,
    "n_positions": 64,
    "pad_vocab_size_multiple": 64,
    "rotary_emb_base": 300,
    "rotary_emb_fraction": 1.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.37.2",
    "type_vocab_size": 2,
    "vocab_size": 60,
}
NOMIC_WIDTH = 48  # of the feed-forward network: the original rounds n_inner up, and so do we, to multiples of 16
NOMIC_EMBEDDINGS = 64  # vocab_size, rounded up to pad_vocab_size_multiple


def published_nomic(folder: Path, prefix: bool, tokenizer: bool = True, **changes: Any) -> Path:
    """A checkpoint in one of Nomic's two published formats, made without transformers; `changes` are to its settings.

    With a prefix it is as nomic-bert-2048: keys under `bert.` next to a `cls` head, in pytorch_model.bin. Without, as
    nomic-embed-text: no head, safetensors, and `n_inner` a float.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**NOMIC_SETTINGS, **changes}
    weights = _nomic_weights(NOMIC_SETTINGS)
    if prefix:
        head = {"cls.predictions.decoder.weight": weights["embeddings.word_embeddings.weight"]}
        head["cls.predictions.transform.dense.weight"] = torch.randn(16, 16)
        torch.save({**{"bert." + key: value for key, value in weights.items()}, **head}, folder / "pytorch_model.bin")
    else:
        settings["n_inner"] = float(settings["n_inner"])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    if tokenizer:
        tiny_tokenizer(folder)
    return folder


# As in nomic-ai/nomic-embed-text-v2-moe, with other numbers.
NOMIC_MOE_SETTINGS: dict[str, Any] = {
    **{key: value for key, value in NOMIC_SETTINGS.items() if key != "architectures"},
    "activation_function": "gelu",
    "expert_choice_router": False,
    "ffn_div": 1,
    **dict.fromkeys(["mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"], True),
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_inner": 24,
    "n_layer": 4,
    "n_positions": 2048,
    "num_experts": 8,
    "num_shared_experts": 0,
    "pad_token_id": 0,
    "router_aux_loss_coef": 0.1,
    "type_vocab_size": 1,
}


def published_nomic_moe(folder: Path, files: bool = True, **changes: Any) -> Path:
    """A checkpoint in the format of Nomic Embed v2, made without transformers; `changes` do not affect its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_nomic_weights(NOMIC_MOE_SETTINGS), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**NOMIC_MOE_SETTINGS, **changes}))
    if files:
        tiny_tokenizer(folder)
        _write_modules(folder, 512, word_embedding_dimension=16)
        prompts = {"query": "search_query: ", "passage": "search_document: ", "Clustering": "clustering: "}
        settings = {"prompts": prompts, "default_prompt_name": None}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


NV_EMBED_DECODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}
_LATENTS = {"cross_dim_head": 5, "hidden_dim": 16, "latent_dim": 16, "num_cross_heads": 2, "num_latents_value": 6}


def llama_tokenizer(folder: Path) -> Path:
    """A tokenizer of Mistral's class that spells texts of Latin letters, begins them with <s>, and ends none."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", *string.ascii_letters, *":?,"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True, add_eos_token=False)
    tokenizer.save_pretrained(folder)
    return folder


def published_nv_embed(folder: Path, files: bool = True, **changes: Any) -> Path:
    """A checkpoint in the format of NV-Embed, in two shards, made without its code.

    `files` are a card, definitions, and Sentence-Transformers'. `changes` to the decoder's settings do not affect its
    weights.
    """
    llama_tokenizer(folder)
    decoder, width = dense_model("mistral", **NV_EMBED_DECODER, head_dim=8), NV_EMBED_DECODER["hidden_size"]
    attention, network = (f"latent_attention_model.cross_attend_blocks.{index}" for index in (0, 1))
    shapes: dict[str, tuple[int, ...]] = {
        "latent_attention_model.latents": (6, width),
        **{f"{attention}.{norm}.{kind}": (width,) for norm in ("norm", "norm_context") for kind in ("weight", "bias")},
        f"{attention}.fn.to_q.weight": (10, width),
        f"{attention}.fn.to_kv.weight": (20, width),
        f"{attention}.fn.to_out.weight": (width, 10),
        **{f"{network}.norm.{kind}": (width,) for kind in ("weight", "bias")},
        **{f"{network}.fn.net.0.weight": (8 * width, width), f"{network}.fn.net.0.bias": (8 * width,)},
        **{f"{network}.fn.net.2.weight": (width, 4 * width), f"{network}.fn.net.2.bias": (width,)},
    }
    weights = {f"embedding_model.{key}": value.clone() for key, value in decoder.state_dict().items()}
    weights |= _random_weights(shapes)
    names = sorted(weights)
    files_of = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, keys in files_of.items():
        save_file({key: weights[key] for key in keys}, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, keys in files_of.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    of_decoder = {"head_dim": 8, "model_type": "bidir_mistral", "rope_theta": 10000.0, "sliding_window": 4096}
    settings = {
        "architectures": ["NVEmbedModel"],
        "auto_map": {"AutoModel": "modeling_nvembed.NVEmbedModel"},
        "is_mask_instruction": True,
        "latent_attention_config": {**_LATENTS, "model_type": "latent_attention"},
        "model_type": "nvembed",
        "text_config": {**NV_EMBED_DECODER, **of_decoder, **changes},
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    if files:
        _write_modules(folder, 128, word_embedding_dimension=width, include_prompt=False)
        definitions = {"FEVER": {"query": "find facts", "corpus": ""}, "Banking": {"query": "name", "corpus": "name"}}
        (folder / "instructions.json").write_text(json.dumps(definitions))
        (folder / "README.md").write_text("---\nlicense: cc-by-nc-4.0\nlanguage: [en]\n---\n# NV-Embed\n")
    return folder


def _write_modules(folder: Path, max_seq_length: int, **pooling: Any) -> None:
    """The files of Sentence-Transformers for mean pooling and normalised vectors, as of older versions."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    edit_json(folder / "1_Pooling/config.json", pooling_mode_mean_tokens=True, **pooling)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=max_seq_length, do_lower_case=False)


def _nomic_weights(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, moe = settings["n_embd"], settings["n_inner"], "num_experts" in settings
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (NOMIC_EMBEDDINGS, hidden),
        "embeddings.token_type_embeddings.weight": (settings["type_vocab_size"], hidden),
        **{f"emb_ln.{kind}": (hidden,) for kind in ("weight", "bias")},
    }
    for layer in range(settings["n_layer"]):
        of_layer: dict[str, tuple[int, ...]] = {
            **{f"norm{i}.{kind}": (hidden,) for i in (1, 2) for kind in ("weight", "bias")},
            **{"attn.Wqkv.weight": (3 * hidden, hidden), "attn.out_proj.weight": (hidden, hidden)},
        }
        if moe:
            of_layer |= {"attn.Wqkv.bias": (3 * hidden,), "attn.out_proj.bias": (hidden,)}
        if not moe:
            of_layer |= {f"mlp.{name}.weight": (NOMIC_WIDTH, hidden) for name in ("fc11", "fc12")}
            of_layer |= {"mlp.fc2.weight": (hidden, NOMIC_WIDTH)}
        elif layer % 2:
            of_layer |= {f"mlp.experts.mlp.{name}": (8 * inner, hidden) for name in ("w1", "w2")}
            of_layer |= {"mlp.experts.bias": (hidden,), "mlp.router.layer.weight": (8, hidden)}
        else:
            of_layer |= {"mlp.fc1.weight": (inner, hidden), "mlp.fc1.bias": (inner,)}
            of_layer |= {"mlp.fc2.weight": (hidden, inner), "mlp.fc2.bias": (hidden,)}
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return _random_weights(shapes)


def _random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        key: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
        for key, shape in shapes.items()
    }
