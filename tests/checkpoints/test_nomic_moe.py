"""Nomic Embed v2 in its published format: every tensor, exactly, or an error that names what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import edit_weights, published_nomic_moe, tiny_tokenizer
from helpers.families import batch, real_difference
from helpers.nomic_reference import published_tensors, reference_forward
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import open_checkpoint, open_mote
from mote.experts import parameter_counts
from mote.remote.token_routing_mote import TokenRoutedModel, load_balancing_loss
from mote.upcycling.plan import plan_upcycling

IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]
EXPERTS_OF_1 = "encoder__layers__1__mlp__experts__mlp__w1"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_nomic_moe(tmp_path_factory.mktemp("published") / "nomic-v2")


@pytest.fixture(scope="module")
def converted(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycle(str(published), tmp_path_factory.mktemp("converted") / "mote")


def reference(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    settings = json.loads((folder / "config.json").read_text())
    tensors = {key: value.double() for key, value in published_tensors(folder).items()}
    return reference_forward(tensors, settings, **inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_computes_the_reference(published: Path, converted: Path, implementation: str, tmp_path: Path) -> None:
    inputs = batch()
    expected = reference(published, inputs)
    model = TokenRoutedModel.from_pretrained(converted, experts_implementation=implementation)
    model.save_pretrained(tmp_path)
    saved = TokenRoutedModel.from_pretrained(tmp_path, experts_implementation=implementation)
    with torch.no_grad():
        for one in (model, saved):
            assert real_difference(one(**inputs).last_hidden_state, expected, inputs["attention_mask"]) <= 1e-5


def test_sentence_transformers_embeds_with_the_published_prompts(published: Path, converted: Path) -> None:
    model = SentenceTransformer(str(converted), trust_remote_code=True)
    assert (model.max_seq_length, model.similarity_fn_name) == (512, "cosine")
    prompts = {"query": "search_query: ", "document": "search_document: ", "passage": "search_document: "}
    assert {name: model.prompts[name] for name in prompts} == prompts
    text = "a b c"
    inputs = model.preprocess(["search_query: " + text])
    hidden = reference(published, {name: inputs[name] for name in ("input_ids", "attention_mask")})
    expected = torch.nn.functional.normalize(hidden.mean(dim=1)).float()
    assert torch.allclose(model.encode_query([text], convert_to_tensor=True), expected, atol=1e-6)
    assert not torch.allclose(model.encode_document([text], convert_to_tensor=True), expected, atol=1e-3)
    short = SentenceTransformer(str(converted), trust_remote_code=True, truncate_dim=5)
    cut = torch.nn.functional.normalize(expected[:, :5])
    assert torch.allclose(short.encode_query([text], convert_to_tensor=True, normalize_embeddings=True), cut, atol=1e-6)


def test_without_the_files_of_sentence_transformers_the_length_is_512_as_well(tmp_path: Path) -> None:
    folder = published_nomic_moe(tmp_path / "bare", files=False)
    out = upcycle(str(folder), tmp_path / "out", tokenizer=str(tiny_tokenizer(tmp_path / "tokenizer")))
    model = SentenceTransformer(str(out), trust_remote_code=True)
    assert model.max_seq_length == 512
    assert model.prompts["query"] == "search_query: "


def test_the_config_says_what_was_published(converted: Path) -> None:
    source = open_mote(str(converted))
    config: Any = source.config
    assert (config.mote_layer_indices, config.num_experts, config.num_experts_per_tok) == ([1, 3], 8, 2)
    assert (config.norm_topk_prob, config.shared_expert_bias) == (False, True)
    assert (config.router_aux_loss_coef, config.router_aux_loss_type) == (0.1, "megablocks")
    assert config.backbone_config.rope_parameters["rope_theta"] == 300.0
    counts = parameter_counts(AutoModel.from_pretrained(converted, trust_remote_code=True))
    assert counts["experts"] == {str(index): 2 * 2 * 24 * 16 for index in range(8)}
    assert counts["total"] - counts["active"] == 6 * 2 * 2 * 24 * 16
    (step,) = read_steps(converted)
    assert step["command"] == "mote upcycle --src nomic-v2 --out mote"
    card = (converted / "README.md").read_text()
    assert "converted from" in card
    assert "Not trained yet" not in card


@pytest.mark.parametrize(
    ("changes", "edit", "message"),
    [
        ({"moe_top_k": 9}, {}, "num_experts_per_tok must be from 1 to 8"),
        ({"activation_function": "swiglu"}, {}, "activation_function='swiglu'; MoTE can express 'gelu' only"),
        ({"expert_choice_router": True}, {}, "expert_choice_router=True"),
        ({"num_shared_experts": 1}, {}, "num_shared_experts=1"),
        ({}, {EXPERTS_OF_1: torch.zeros(7 * 24, 16)}, r"1 mismatched keys .*1\.feed_forward\.experts\.up_proj"),
        ({}, {EXPERTS_OF_1: None}, r"1 missing keys \(backbone\.layers\.1\.feed_forward\.experts\.up_proj"),
        ({}, {"emb_ln__bias": None}, r"1 missing keys \(backbone\.embeddings\.LayerNorm\.bias"),
        ({}, {"encoder__layers__0__mlp__experts__bias": torch.zeros(16)}, r"1 unexpected keys \(.*0\.mlp\.experts\.b"),
        ({}, {"encoder__layers__3__mlp__router__layer__weight": torch.zeros(7, 16)}, r"1 mismatched keys .*3.*router"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = published_nomic_moe(tmp_path / "nomic", **changes)
    edit_weights(folder, **edit)
    with pytest.raises(ValueError, match=message):
        upcycle(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [{"experts": ["a"]}, {"layers": "every_other"}, {"norm_topk_prob": False}])
def test_its_routing_cannot_be_chosen(option: dict[str, Any], published: Path) -> None:
    told = f"{next(iter(option))} cannot be chosen, .* For task experts, convert it first, and upcycle the result"
    with pytest.raises(ValueError, match=told):
        plan_upcycling(str(published), **option)
    with pytest.raises(ValueError, match=f"not a MoTE but a 'nomic_moe': `mote upcycle --src {published}`"):
        open_checkpoint(str(published))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_original(shared: Path, implementation: str, tmp_path: Path) -> None:
    folder = shared / "fixtures/nomic-embed-v2-moe-original"
    out = upcycle(str(folder), tmp_path / "mote", tokenizer=str(tiny_tokenizer(tmp_path / "tokenizer")))
    model = AutoModel.from_pretrained(out, trust_remote_code=True, experts_implementation=implementation).eval()
    expected = load_file(folder / "expected.safetensors")
    mask = expected["attention_mask"]
    inputs = {"input_ids": expected["input_ids"], "attention_mask": mask}
    with torch.no_grad():
        found = model(**inputs, output_hidden_states=True, output_router_logits=True)
    states = ["emb_ln", *(f"layers.{layer}.hidden_state" for layer in range(4))]
    for state, name in zip(found.hidden_states, states, strict=True):
        assert real_difference(state, expected[name], mask) <= 1e-5, name
    assert real_difference(found.last_hidden_state, expected["last_hidden_state"], mask) <= 1e-5
    for logits, layer in zip(found.router_logits, (1, 3), strict=True):
        weights, index = logits.softmax(dim=-1).topk(2)
        assert real_difference(logits.softmax(dim=-1), expected[f"layers.{layer}.router_probs"], mask) <= 1e-5
        assert real_difference(weights, expected[f"layers.{layer}.top_weights"], mask) <= 1e-5
        assert real_difference(index, expected[f"layers.{layer}.top_experts"], mask) == 0
    losses = json.loads((folder / "expected.json").read_text())["load_balancing_loss"]
    for formula, value in {
        "megablocks": losses["megablocks_alpha_1"]["real_tokens_only"],
        "equation_1": sum(losses["paper_equation_1_alpha_1_per_moe_layer_real_tokens"]),
    }.items():
        assert load_balancing_loss(found.router_logits, mask, 2, formula).item() == pytest.approx(value, abs=1e-5)
    assert torch.allclose(found.pooler_output, expected["mean_pooled"], atol=1e-5)
    normalized = torch.nn.functional.normalize(found.pooler_output)
    assert torch.allclose(normalized, expected["embedding"], atol=1e-5)
    cut = torch.nn.functional.normalize(found.pooler_output[:, :16])
    assert torch.allclose(cut, expected["embedding_matryoshka_16"], atol=1e-5)
