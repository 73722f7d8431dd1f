"""Nomic's published formats: config schema, key prefix, tokenizer."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import NOMIC_EMBEDDINGS, NOMIC_WIDTH, published_nomic, tensors_of, tiny_tokenizer
from helpers.families import batch, real_difference, trained_mote
from helpers.inference_server import read_as_server
from helpers.nomic_reference import published_tensors, reference_forward
from safetensors.torch import load_file
from transformers import AutoModel

from mote import transform, upcycle
from mote.checkpoints import nomic
from mote.checkpoints.models import load_dense, load_tokenizer
from mote.checkpoints.reading import open_dense, stored_dtype
from mote.experts import export
from mote.remote.modeling_mote import MoTEModel

EXPERTS = ["classification", "clustering", "search_query", "search_document"]


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
            assert real_difference(out, expected, inputs["attention_mask"]) <= 1e-6


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


def test_what_the_native_nomic_cannot_express_is_refused(tmp_path: Path) -> None:
    for setting, value in {"activation_function": "gelu", "moe_every_n_layers": 2, "rotary_emb_fraction": 0.5}.items():
        folder = published_nomic(tmp_path / "nomic", False, **{setting: value})
        with pytest.raises(ValueError, match=f"nomic has {setting}={re.escape(repr(value))}; MoTE can express "):
            open_dense(str(folder))


def test_a_nomic_without_a_tokenizer_has_that_of_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomic, "TOKENIZER", str(tiny_tokenizer(tmp_path / "bert")))
    source = open_dense(str(published_nomic(tmp_path / "nomic", True, tokenizer=False)))
    assert len(load_tokenizer(source, None)) == 60


def exported_expert(source: Path, folder: Path, **upcycling: Any) -> Path:
    """An expert of an upcycled checkpoint, in Nomic's published format and the native one."""
    upcycle(str(source), folder / "mote", experts=["clustering"], **upcycling)
    return transform(folder / "mote", folder / "out", export, "clustering")


@pytest.mark.parametrize("prefix", [True, False])
def test_the_published_format_comes_back(prefix: bool, tmp_path: Path) -> None:
    source = published_nomic(tmp_path / "nomic", prefix, max_trained_positions=32, pad_token_id=3)
    out = exported_expert(source, tmp_path)
    tensors, expected = tensors_of(out), published_tensors(source)
    left_out = {key for key in expected if key.startswith("cls.")}
    assert tensors.keys() == expected.keys() - left_out
    assert all(tensors[key].equal(expected[key]) for key in tensors)
    settings, original = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
    differing = {key for key, value in original.items() if settings.get(key) != value}
    assert differing <= {
        *("architectures", "auto_map", "torch_dtype", "transformers_version", "tie_word_embeddings"),  # not of Nomic
        *("n_inner", "vocab_size"),  # as the weights have them
    }
    assert (settings["n_inner"], settings["vocab_size"]) == (NOMIC_WIDTH, NOMIC_EMBEDDINGS)
    assert "auto_map" not in settings  # it needs no code


def test_the_published_format_is_read_by_transformers_and_by_us(tmp_path: Path) -> None:
    out = exported_expert(published_nomic(tmp_path / "nomic", False), tmp_path)
    inputs = batch()
    mote = MoTEModel.from_pretrained(tmp_path / "mote")
    again = MoTEModel.from_pretrained(upcycle(str(out), tmp_path / "again", experts=["clustering"]))
    with torch.no_grad():
        expected = mote(**inputs, task="clustering").last_hidden_state
        assert AutoModel.from_pretrained(out)(**inputs).last_hidden_state.equal(expected)
        assert again(**inputs, task="clustering").last_hidden_state.equal(expected)
    assert open_dense(str(out)).format == "transformers"
    assert read_as_server(out)["pooling"] == "mean"


def test_what_the_published_format_cannot_express_is_native_only() -> None:
    config = trained_mote("nomic_bert").config.backbone_config
    assert nomic.published_settings(config)["n_embd"] == config.hidden_size
    rope = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
    for setting, value in {"hidden_act": "gelu", "rope_parameters": rope, "head_dim": 4}.items():
        other = copy.deepcopy(config)
        setattr(other, setting, value)
        assert nomic.published_settings(other) == {}


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
            # As for the reference below: kernels differ between processors (1.2e-6 on a Xeon with AVX-512).
            assert real_difference(found, expected, fixture["attention_mask"]) <= 2e-6
    settings = json.loads((folder / "config.json").read_text())
    reference = reference_forward(published_tensors(folder), settings, **fixture)
    assert real_difference(reference, expected, fixture["attention_mask"]) <= 2e-6
