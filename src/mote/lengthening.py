"""Lengthening: replaces the learned positions of a dense encoder by rotary ones, so that it accepts longer texts."""

import logging
from pathlib import Path
from typing import Any

from transformers import (
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForMaskedLM,
    JinaEmbeddingsV3Model,
    PreTrainedModel,
)

from mote.checkpoints.models import load_dense, load_tokenizer, positions_of, quiet_transformers
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step
from mote.checkpoints.reading import open_checkpoint
from mote.checkpoints.tensors import read_shapes
from mote.checkpoints.writing import Repository, require_writable
from mote.files import read_json, write_json

logger = logging.getLogger(__name__)

# Encoders that differ from JinaEmbeddingsV3 only in their positions.
LENGTHENED = ("bert", "roberta", "xlm-roberta", "camembert")

ROPE_THETA = 10_000.0  # as in mNomic-BERT (arXiv:2502.07972, section 4.1), where larger values were worse

# Parts of weight names, in the source → in the result, in the order in which they are replaced.
_NAMES = {
    "encoder.layer.": "layers.",
    **{f"attention.self.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "post_mlp_layernorm",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions": "lm_head",
}
_POSITIONS = "embeddings.position_embeddings.weight"
_BERT_HEAD = "cls.predictions.transform.dense."

_SETTINGS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "initializer_range", "layer_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "classifier_dropout", "tie_word_embeddings", "dtype"),
)


def lengthen(
    src: str | Path,
    out: str | Path | None = None,
    *,
    length: int,
    revision: str | None = None,
    options: WriteOptions | None = None,
) -> Path:
    """Replace the learned positions of a dense encoder by rotary ones, so that it accepts longer texts.

    XLM-R became mNomic-BERT in this way (arXiv:2502.07972, section 4.1). All weights but the positions are the source's
    and not adapted to the new positions until the model is pre-trained on texts of the new length. The result is a
    `jina_embeddings_v3`, XLM-R's architecture with rotary positions, which Transformers has natively. The source's head
    for masked language modelling, its Sentence-Transformers modules and its prompts are kept.

    Args:
        src: A BERT, RoBERTa, XLM-R or CamemBERT: a folder or an id on the Hub.
        out: Folder to write. Default: the source's name with the length, in the current folder.
        length: Maximum length of a text, in tokens.
        revision: Branch, tag or commit of a source on the Hub.
        options: How the result is written.

    Returns:
        The folder.
    """
    options = options or WriteOptions()
    source = open_checkpoint(str(src), revision)
    source.warn_of_code()
    target = Path(out) if out is not None else Path(f"{source.short_name}-{length}")
    kind = "decoder" if getattr(source.config, "is_decoder", False) else source.config.model_type
    if kind not in LENGTHENED:
        raise ValueError(
            f"{source.name} is a {kind!r}, but `mote lengthen` takes encoders with learned positions, of the types "
            f"{', '.join(LENGTHENED)}"
        )
    positions: Any = positions_of(source)
    if length <= positions:  # which are trained, and would be lost
        raise ValueError(f"{source.name} already takes texts of {positions:,} tokens: `--length` must be above that")
    repo_id = require_writable(target, options, source.folder)
    tokenizer = load_tokenizer(source)
    keys = read_shapes(source.weights)
    # The result's head always has the activation "gelu", whatever the encoder's is, as RoBERTa's has.
    with_head = any(
        "lm_head.dense." in key or (_BERT_HEAD in key and source.config.hidden_act == "gelu") for key in keys
    )
    dense, dropped = load_dense(source, with_head=with_head)
    model = with_rotary_positions(dense, length)
    place = {} if out is None else {"out": target.resolve()}
    step = new_step(
        "lengthen",
        command=command_line("lengthen", source.public_name, length=length, **place),
        settings={"length": length},
        made=f"rotary positions, for texts of up to {length:,} tokens, in place of the learned ones of",
        dropped=dropped,
        parameters=model.num_parameters(),
    )

    def raise_limits(folder: Path) -> dict[str, Any]:
        limits = {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}
        for name, key in limits.items():
            write_json(folder / name, {**read_json(folder / name), key: length})
        return {}

    repository = Repository(model, source, [step], tokenizer=tokenizer, after=raise_limits)
    repository.write(target, options, repo_id)
    logger.info("Its positions are not trained yet: `mote pretrain mlm model.source=%s`, on long texts", target)
    return target


def with_rotary_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return the encoder, perhaps with its head, with rotary positions in place of learned ones; other weights stay."""
    settings = {name: getattr(model.config, name) for name in _SETTINGS if hasattr(model.config, name)}
    config = JinaEmbeddingsV3Config(
        **settings,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    native: Any = JinaEmbeddingsV3Model if model.base_model is model else JinaEmbeddingsV3ForMaskedLM
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    weights = {}
    for key, weight in model.state_dict().items():
        name = key.replace(prefix, "roberta.", 1) if prefix and key.startswith(prefix) else key
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if not name.endswith(_POSITIONS) and "pooler." not in name:
            weights[name] = weight
    with quiet_transformers():
        result, info = native.from_pretrained(
            None, config=config, state_dict=weights, dtype=model.dtype, output_loading_info=True
        )
    result.base_model.pooler = None
    missing = {key for key in info["missing_keys"] if "pooler." not in key}
    assert not missing | info["unexpected_keys"] | info["mismatched_keys"], info
    result.config._name_or_path = model.config._name_or_path
    return result.eval()
