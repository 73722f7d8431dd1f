"""PEFT adapters that become experts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.families import all_families, batch, dense_model, difference, mote_config
from helpers.on_disk import hidden
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedModel

import mote
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts import open_expert
from mote.remote.configuration_mote import ARCHITECTURES
from mote.remote.modeling_mote import MoTEModel


def adapter(dense: PreTrainedModel, folder: Path, **settings: Any) -> PeftModel:
    """Save a random adapter, and return the dense model with it."""
    torch.manual_seed(3)
    adapted = get_peft_model(copy.deepcopy(dense), LoraConfig(r=2, init_lora_weights=False, **settings)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder)
    return adapted


@all_families
def test_each_layer_computes_what_the_dense_model_with_the_adapter_does(name: str, tmp_path: Path) -> None:
    dense = dense_model(name)
    dense.save_pretrained(tmp_path / "dense")
    dense.config._name_or_path = dense.name_or_path = str(tmp_path / "dense")
    path = ARCHITECTURES[name].layer_path
    model = MoTEModel(mote_config(dense), copy.deepcopy(dense)).eval()
    whole = MoTEModel(mote_config(dense, layer_path=path, shared_modules=[]), copy.deepcopy(dense)).eval()
    parts = {
        f"{path}.{i}.{key}": part for i in (0, 1) for key, part in model.blocks[i].experts["alpha"].named_modules()
    }
    linear = [key for key, part in parts.items() if isinstance(part, nn.Linear)]
    norms = [key for key, part in parts.items() if "norm" in type(part).__name__.lower()]
    attention = [key for key, part in dense.named_modules() if isinstance(part, nn.Linear) and key.startswith(path)]
    own = adapter(dense, tmp_path / "own", target_modules=linear, modules_to_save=norms)
    every = adapter(dense, tmp_path / "every", target_modules=attention)
    for mixture, adapted, folder in ((model, own, "own"), (whole, own, "own"), (whole, every, "every")):
        mote.experts.add(mixture, f"{folder}_expert", open_expert(tmp_path / folder))
        found = mixture(**batch(), task=f"{folder}_expert", output_hidden_states=True).hidden_states
        unmerged = adapted(**batch(), output_hidden_states=True).hidden_states
        merged = copy.deepcopy(adapted).merge_and_unload()(**batch(), output_hidden_states=True).hidden_states
        start = dense(**batch(), output_hidden_states=True).hidden_states
        assert len(found) == len(merged) == 3
        for layer, (one, other, third) in enumerate(zip(found, merged, unmerged, strict=True)):
            assert one.equal(other)
            assert difference(one, third) <= 3e-5  # of two matrices instead of their sum
            assert (difference(one, start[layer]) > 1e-3) == (layer > 0)
    with pytest.raises(ValueError, match=rf"what the experts of the model share \({path}.* --shared-module '\[\]'`"):
        mote.experts.add(model, "other", open_expert(tmp_path / "every"))
    assert "other" not in model.config.tasks


@pytest.fixture
def jina(tmp_path: Path) -> Path:
    """A dense model with an adapter for a task in a subfolder, as jina-embeddings-v3-hf is published."""
    folder = dense_checkpoint(tmp_path / "jina", "jina_embeddings_v3", sentence_transformers={"normalize": True})
    dense = AutoModel.from_pretrained(folder)
    adapter(dense, folder / "retrieval_query", target_modules=["fc1", "fc2", "q_proj"])
    return folder


def test_an_adapter_in_a_subfolder(jina: Path, tmp_path: Path) -> None:
    words = ["--src", str(jina), "--shared-module", "[]", "--expert", "general", "--out", str(tmp_path / "mote")]
    assert main(["upcycle", *words]) == 0
    words = ["experts", "add", str(tmp_path / "mote"), f"{jina}:retrieval_query"]
    assert main([*words, "--name", "classification", "--task", "topics", "--out", str(tmp_path / "out")]) == 0
    dense = PeftModel.from_pretrained(AutoModel.from_pretrained(jina), jina / "retrieval_query").merge_and_unload()
    with torch.no_grad():
        expected = dense(**batch()).last_hidden_state
        assert hidden(tmp_path / "out", "topics").equal(expected)
        assert not hidden(tmp_path / "out", "general").equal(expected)
    config = mote.load(tmp_path / "out").config
    assert config.instruction_of("classification") == ""  # not the paper's: the adapter was trained without
    step = read_steps(tmp_path / "out")[-1]
    assert [source["name"] for source in step["sources"]] == ["mote", "retrieval_query"]
    assert step["sources"][1]["weights"].keys() == {"adapter_model.safetensors"}
    assert "experts add mote retrieval_query --name classification" in step["command"]
    with pytest.raises(ValueError, match=r"is an adapter, which is added as it is: `mote experts add MODEL "):
        mote.experts.extract(str(jina), "retrieval_query", tmp_path / "one.safetensors")


def test_adapters_that_cannot_become_experts(jina: Path, tmp_path: Path) -> None:
    model = mote.load(mote.upcycle(str(jina), tmp_path / "mote", experts=["general"]))
    dense = AutoModel.from_pretrained(jina)
    adapter(dense, tmp_path / "embeddings", target_modules=["fc1", "word_embeddings"])
    adapter(dense, tmp_path / "wrapped", target_modules=["fc1"])
    file = tmp_path / "wrapped/adapter_model.safetensors"
    save_file({key.replace("model.layers", "model.roberta.layers"): one for key, one in load_file(file).items()}, file)
    for folder, problem in (
        ("embeddings", r"outside of the blocks, such as embeddings \(embeddings.word_embeddings.weight\)$"),
        ("wrapped", "are not those of an adapter of JinaEmbeddingsV3Model .*roberta"),
    ):
        with pytest.raises(ValueError, match=problem):
            mote.experts.add(model, "new", open_expert(tmp_path / folder))
    with torch.no_grad():
        next(iter(model.blocks[0].shared.parameters())).add_(1e-3)
    with pytest.raises(ValueError, match=r"was not made from .*jina, or what its experts share has been trained"):
        mote.experts.add(model, "new", open_expert(jina, "retrieval_query"))
