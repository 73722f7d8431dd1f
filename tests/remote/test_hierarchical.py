"""Task experts that are token-routed themselves: equal to their source at first, then each on its own."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES, batch, difference, family, make_different, rows_of
from helpers.token_routing import (
    backward,
    fresh_hierarchical,
    gradients,
    same_gradients,
    trained,
    trained_hierarchical,
    without_dropout,
)

from mote.experts import add, parameter_counts
from mote.remote.hierarchical_mote import HierarchicalMoTEConfig, HierarchicalMoTEModel
from mote.remote.token_routing_mote import FeedForwardExperts, load_balancing_loss

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


@pytest.mark.parametrize("routed", ["every", [1]])
@pytest.mark.parametrize("name", [family(name, name in ("bert", "nomic_bert")) for name in FAMILIES])
def test_every_task_gives_the_source_exactly(name: str, routed: str | list[int], tmp_path: Path) -> None:
    source, inputs = trained(name, mote_layers=routed, norm_topk_prob=False), batch()
    model = fresh_hierarchical(source)
    model.save_pretrained(tmp_path)
    attention = source.backbone.config._attn_implementation
    reloaded = HierarchicalMoTEModel.from_pretrained(tmp_path, attn_implementation=attention)
    with torch.no_grad():
        expected = source(**inputs, output_router_logits=True)
        for one in (model, reloaded):
            for task in ("x", "y"):
                out = one(**inputs, task=task, output_router_logits=True)
                assert difference(out.last_hidden_state, expected.last_hidden_state) == 0.0
                for logits, other in zip(out.router_logits, expected.router_logits, strict=True):
                    assert difference(logits, other) == 0.0


@pytest.mark.parametrize("layer", [0, 1])
def test_blocks_without_task_experts_stay_as_they_are(layer: int) -> None:
    source = trained("bert", mote_layers=[1])
    model = make_different(fresh_hierarchical(source, mote_layers=[layer]))
    other = f"backbone.encoder.layer.{1 - layer}."
    found = {key for key in model.state_dict() if key.startswith(f"backbone.{other}")}
    assert found == {f"backbone.{key}" for key in source.state_dict() if key.startswith(other)}
    with torch.no_grad():
        assert difference(*(model(**batch(), task=task).pooler_output for task in ("x", "y"))) > 1e-3


def test_parameter_counts() -> None:
    source = trained("bert", mote_layers=[1])
    of_source, counts = parameter_counts(source), parameter_counts(fresh_hierarchical(source))
    assert counts["active"] == of_source["active"] < of_source["total"]  # 2 of the 4 networks of one task expert
    assert counts["shared"] + counts["experts"]["x"] == of_source["total"]
    assert counts["total"] == counts["shared"] + 2 * counts["experts"]["x"]


def test_a_router_decides_for_its_task_alone() -> None:
    model, inputs = trained_hierarchical(), batch()
    with torch.no_grad():
        before = {task: model(**inputs, task=task).last_hidden_state for task in ("x", "y")}
        model.blocks[1].experts["x"].feed_forward.router.weight.neg_()
        after = {task: model(**inputs, task=task).last_hidden_state for task in ("x", "y")}
    assert difference(before["x"], after["x"]) > 1e-3
    assert difference(before["y"], after["y"]) == 0.0
    assert difference(before["x"], before["y"]) > 1e-3


def test_implementations_agree_in_all_experts_also_in_copies(tmp_path: Path) -> None:
    model, inputs = trained_hierarchical("nomic_bert"), batch()
    model.save_pretrained(tmp_path)
    add(model, "z", "x")
    outputs = []
    for implementation in IMPLEMENTATIONS:
        loaded = HierarchicalMoTEModel.from_pretrained(tmp_path, experts_implementation=implementation)
        copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for one in copies:
            one.set_experts_implementation(implementation)
        for one in (loaded, *copies):
            stacks = [module for module in one.modules() if isinstance(module, FeedForwardExperts)]
            assert {stack.config._experts_implementation for stack in stacks} == {implementation}
            with torch.no_grad():
                outputs.append(one(**inputs, task="x" if one is loaded else "z").last_hidden_state)
    assert max(difference(out, outputs[0]) for out in outputs) <= 1e-5


def test_the_loss_reaches_the_router_in_use() -> None:
    """As plain autograd gives it to the formula, also for a batch of two tasks, whose groups make up one step."""
    model, inputs = without_dropout(trained_hierarchical(router_aux_loss_coef=3.0)), batch()
    without = copy.deepcopy(model)
    without.config.router_aux_loss_coef = 0.0
    for tasks, share, passes in (
        ("x", None, {"x": 1.0}),
        ("x", 0.125, {"x": 0.5}),
        (["x", "y"] * 2, None, {"x": 0.5, "y": 0.5}),
    ):
        rows = rows_of(inputs, 1, 1, 1, 1)  # of one length, so that each task is one group
        by_itself = backward(model, rows, task=tasks, balance_share=share)
        without.zero_grad()
        loss = without(**rows, task=tasks).pooler_output.square().sum()
        for task, weight in passes.items():
            logits = without(**rows, task=task, output_router_logits=True).router_logits
            loss = loss + 3.0 * weight * load_balancing_loss(logits, rows["attention_mask"])
        loss.backward()
        same_gradients(by_itself, gradients(without), 1e-4)
        assert {key.split(".experts.")[1][0] for key in by_itself if ".experts." in key} == {*passes}


def test_the_backbone_is_a_token_routed_model() -> None:
    with pytest.raises(ValueError, match="Unknown model_type of backbone_config: 'bert'"):
        HierarchicalMoTEConfig(backbone_config={"model_type": "bert"})
