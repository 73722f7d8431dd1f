"""Nomic's published formats: config schema, key prefix, tokenizer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import (
    NOMIC_EMBEDDINGS,
    NOMIC_WIDTH,
    edit_json,
    edit_weights,
    published_nomic,
    tiny_tokenizer,
)
from helpers.families import batch
from helpers.nomic_reference import published_tensors, reference_forward
from safetensors.torch import load_file

from modeling_mote import MoTEModel
from mote import upcycle
from mote.checkpoints import nomic
from mote.checkpoints.reading import load_dense, load_tokenizer, open_dense, stored_dtype

EXPERTS = ["classification", "clustering", "search_query", "search_document"]


def difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest difference where the mask is 1."""
    return (one - other)[mask.bool()].abs().max().item()


@pytest.mark.parametrize("prefix", [True, False])
def test_every_expert_of_a_published_nomic_computes_the_reference(prefix: bool, tmp_path: Path) -> None:
    folder = published_nomic(tmp_path / "nomic", prefix)
    model = MoTEModel.from_pretrained(upcycle(str(folder), tmp_path / "mote")).double()
    settings = json.loads((folder / "config.json").read_text())
    tensors = {key: value.double() for key, value in published_tensors(folder).items()}
    inputs = batch()
    expected = reference_forward(tensors, settings, **inputs)
    with torch.no_grad():
        for expert in EXPERTS:
            out = model(**inputs, task=expert).last_hidden_state
            assert difference(out, expected, inputs["attention_mask"]) <= 1e-6


@pytest.mark.parametrize("prefix", [True, False])
def test_the_schema_of_a_published_nomic_is_translated(prefix: bool, tmp_path: Path) -> None:
    source = open_dense(str(published_nomic(tmp_path, prefix, pad_token_id=3)))
    config = source.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 2, 2)
    assert (config.intermediate_size, config.vocab_size) == (NOMIC_WIDTH, NOMIC_EMBEDDINGS)  # off the tensors
    assert (config.max_position_embeddings, config.pad_token_id) == (64, 3)
    assert config.rope_parameters["rope_theta"] == 300.0
    assert config.layer_norm_eps == 1e-5
    assert stored_dtype(source) is torch.float32
    left_out = ["cls.predictions.decoder.weight", "cls.predictions.transform.dense.weight"]
    assert load_dense(source)[1] == (left_out if prefix else [])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("activation_function", "gelu"),
        ("causal", True),
        ("mlp_fc1_bias", True),
        ("mlp_fc2_bias", True),
        ("moe_every_n_layers", 2),
        ("parallel_block", True),
        ("prenorm", True),
        ("qkv_proj_bias", True),
        ("rotary_emb_fraction", 0.5),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_scale_base", 512),
        ("rotary_scaling_factor", 2),
        ("use_rms_norm", True),
    ],
)
def test_what_the_native_nomic_cannot_express_is_refused(setting: str, value: Any, tmp_path: Path) -> None:
    folder = published_nomic(tmp_path / "nomic", False, **{setting: value})
    with pytest.raises(ValueError, match=f"nomic has {setting}={re.escape(repr(value))}, which the native NomicBERT"):
        open_dense(str(folder))


@pytest.mark.parametrize("key", ["n_layer", "n_head", "rotary_emb_base", "vocab_size"])
def test_a_nomic_whose_config_lacks_a_key(key: str, tmp_path: Path) -> None:
    folder = published_nomic(tmp_path, False)
    edit_json(folder / "config.json", **{key: None})
    with pytest.raises(ValueError, match=f"not a NomicBERT in its published format: config lacks .*'{key}'"):
        open_dense(str(folder))


def test_a_nomic_with_other_weights(tmp_path: Path) -> None:
    folder = published_nomic(tmp_path, False)
    edit_weights(folder, encoder__layers__1__mlp__fc11__weight=torch.zeros(32, 16))
    with pytest.raises(ValueError, match=r"1 word embeddings and feed-forward widths \[32, 48\]"):
        open_dense(str(folder))
    edit_weights(folder, embeddings__word_embeddings__weight=None)
    with pytest.raises(ValueError, match="0 word embeddings"):
        open_dense(str(folder))


def test_a_nomic_without_a_tokenizer_has_that_of_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomic, "TOKENIZER", str(tiny_tokenizer(tmp_path / "bert")))
    source = open_dense(str(published_nomic(tmp_path / "nomic", True, tokenizer=False)))
    assert len(load_tokenizer(source, None)) == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nomic-bert-original", "nomic-embed-original"])
def test_every_expert_of_the_fixtures_computes_the_original(name: str, shared: Path, tmp_path: Path) -> None:
    folder = shared / "fixtures" / name
    out = upcycle(str(folder), tmp_path / "mote", tokenizer=str(tiny_tokenizer(tmp_path / "tokenizer")))
    model = MoTEModel.from_pretrained(out)
    fixture = load_file(folder / "expected.safetensors")
    expected = fixture.pop("last_hidden_state")
    with torch.no_grad():
        for expert in EXPERTS:
            found = model(**fixture, task=expert).last_hidden_state
            assert difference(found, expected, fixture["attention_mask"]) <= 1e-6
    settings = json.loads((folder / "config.json").read_text())
    reference = reference_forward(published_tensors(folder), settings, **fixture)
    assert difference(reference, expected, fixture["attention_mask"]) <= 2e-6
