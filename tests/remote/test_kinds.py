"""Properties that every kind of model has, in every family."""

import copy
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import tensors_of
from helpers.families import EAGER_ONLY, NOT_CHECKPOINTED, assert_threads_agree, batch, dense_model, difference, rows_of
from helpers.kinds import (
    GRAPHS,
    HIERARCHICAL,
    KINDS,
    MOTE,
    ONE_PASS,
    TOKEN_ROUTED,
    Kind,
    every_kind,
    every_kind_and_family,
    in_families,
)
from helpers.token_routing import gradients, same_gradients
from torch import nn
from transformers import PreTrainedModel

from mote.experts import parameter_counts
from mote.remote.configuration_mote import ARCHITECTURES


def saved_and_loaded(model: PreTrainedModel, name: str, folder: Path, **settings: Any) -> Any:
    model.save_pretrained(folder)
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    again = type(model).from_pretrained(folder, attn_implementation=attention, **settings)
    for way in ("one_pass", "graphs"):  # which are no part of what is saved
        if getattr(model, way, None) is not None:
            setattr(again, way, type(getattr(model, way))(again))
    return again


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) == 0.0


@every_kind_and_family
@torch.no_grad()
def test_rows_of_a_mixed_batch_are_as_if_alone(kind: Kind, name: str) -> None:
    model, inputs, tolerance = kind.trained(name), batch(), kind.tolerance or 1e-6
    mixed = model(**inputs, task=kind.tasks, **kind.flags)
    ids = torch.tensor([list(model.config.tasks).index(task) for task in kind.tasks])
    assert difference(model(**inputs, task_ids=ids).last_hidden_state, mixed.last_hidden_state) == 0.0
    for row, task in enumerate(kind.tasks):
        length = int(inputs["attention_mask"][row].sum())
        alone = {key: value[:, :length] for key, value in rows_of(inputs, row).items()}
        out = model(**alone, task=task, **kind.flags)
        assert difference(mixed.pooler_output[row], out.pooler_output[0]) <= tolerance
        assert difference(mixed.last_hidden_state[row, :length], out.last_hidden_state[0]) <= tolerance
        for of_all, of_row in zip(mixed.get("router_logits", ()), out.get("router_logits", ()), strict=True):
            assert difference(of_all[row, :length], of_row[0]) <= tolerance
    assert (mixed.get("router_logits") is not None) == bool(kind.flags)
    assert model(**inputs, task=kind.tasks).get("router_logits") is None


@every_kind_and_family
@torch.no_grad()
def test_hidden_states_and_attentions(kind: Kind, name: str) -> None:
    model, inputs = kind.trained(name), batch()
    of_one_task = model(**inputs, task=kind.tasks[0], output_hidden_states=True).hidden_states
    model.config.output_hidden_states = True
    mixed = model(**inputs, task=kind.tasks).hidden_states
    assert [tuple(state.shape) for state in of_one_task + mixed] == [(4, 9, 16)] * 6
    assert difference(mixed[1][0], of_one_task[1][0]) <= (kind.tolerance or 1e-6)
    assert (difference(mixed[1][1, :7], of_one_task[1][1, :7]) > 1e-3) == (kind is not TOKEN_ROUTED)
    assert model(**inputs, task=kind.tasks[0], output_hidden_states=False).hidden_states is None
    model.set_attn_implementation("eager")
    model.config.output_hidden_states, model.config.output_attentions = False, True
    out = model(**inputs, task=kind.tasks[0])
    assert (len(out.attentions), out.hidden_states) == (2, None)


@every_kind_and_family
@torch.no_grad()
def test_a_pooling_mask(kind: Kind, name: str) -> None:
    """It is the mask of the mean alone: hidden states do not change, in a batch of one task or of several."""
    model, inputs = kind.trained(name), batch()
    mask = inputs["attention_mask"].clone()
    mask[:, :2] = 0
    mask[0] = inputs["attention_mask"][0]
    for task in (kind.tasks[0], kind.tasks):
        plain, masked = model(**inputs, task=task), model(**inputs, task=task, pooling_mask=mask)
        states, weights = plain.last_hidden_state, (mask / mask.sum(dim=1, keepdim=True))[..., None]
        assert torch.equal(masked.last_hidden_state, states)
        assert torch.allclose(masked.pooler_output, (states * weights).sum(dim=1), atol=1e-6)
        assert torch.allclose(masked.pooler_output[0], plain.pooler_output[0], atol=1e-6)
        assert not torch.allclose(masked.pooler_output[1:], plain.pooler_output[1:], atol=1e-3)
        with pytest.raises(ValueError, match=r"No token to pool in the rows \[\d"):
            model(**inputs, task=task, pooling_mask=mask * (torch.arange(4) != 1)[:, None])


@every_kind_and_family
@torch.no_grad()
def test_bfloat16(kind: Kind, name: str) -> None:
    model, inputs = kind.fresh(name).to(torch.bfloat16), batch()
    expected = dense_model(name).to(torch.bfloat16)(**inputs).last_hidden_state
    tokens = inputs["attention_mask"].bool()
    for task in (kind.tasks[1], kind.tasks):
        out = model(**inputs, task=task)
        assert out.last_hidden_state.dtype == out.pooler_output.dtype == torch.bfloat16
        assert difference(out.last_hidden_state[tokens].float(), expected[tokens].float()) <= 0.05
        assert out.pooler_output.isfinite().all()


@every_kind
@torch.no_grad()
def test_threads_do_not_interfere(kind: Kind) -> None:
    model = kind.trained("bert")
    tasks: list[Any] = [*kind.tasks, kind.tasks]
    batches = [batch(seed=seed) for seed in range(8)]

    def embed(thread: int, turn: int) -> list[torch.Tensor]:
        task = tasks[(thread + turn) % 5]
        out = model(**batches[thread], task=task, output_hidden_states=turn % 3 == 0, **kind.flags)
        return [out.pooler_output, *out.get("router_logits", ())]

    assert_threads_agree(embed, turns=30)


@in_families([MOTE, TOKEN_ROUTED])
def test_half_of_the_blocks_stay_dense(kind: Kind, name: str) -> None:
    inputs = batch()
    model = kind.fresh(name, mote_layers="every_other")
    assert list(model.backbone.get_submodule(ARCHITECTURES[name].layer_path))[1:] == model.blocks
    expected = dense_model(name)(**inputs).last_hidden_state
    assert difference(model(**inputs, task=kind.tasks[1]).last_hidden_state, expected) <= kind.tolerance


ATTENTION_OF_BERT = "attention.{self.query,self.key,self.value,output.dense}.{weight,bias}"
NORMS_OF_BERT = "{attention.output,output}.LayerNorm.{weight,bias}"
STACKS_OF_BERT = "{up_proj,up_proj_bias,down_proj,down_proj_bias}"
KEYS = [
    (MOTE, "nomic_bert", [
        "shared.self_attn.{q,k,v,o}_proj.weight",
        "experts.{alpha,beta}.post_{attention,mlp}_layernorm.{weight,bias}",
        "experts.{alpha,beta}.mlp.{up,gate,down}_proj.weight",
    ]),
    (TOKEN_ROUTED, "bert", [
        f"shared.{ATTENTION_OF_BERT}", f"shared.{NORMS_OF_BERT}",
        f"feed_forward.experts.{STACKS_OF_BERT}", "feed_forward.router.weight",
    ]),
    (HIERARCHICAL, "bert", [
        f"shared.shared.{ATTENTION_OF_BERT}", f"experts.{{x,y}}.shared.{NORMS_OF_BERT}",
        f"experts.{{x,y}}.feed_forward.experts.{STACKS_OF_BERT}", "experts.{x,y}.feed_forward.router.weight",
    ]),
]  # fmt: skip


def expanded(pattern: str) -> set[str]:
    """Expand braces as a shell does."""
    choices = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return {"".join(parts) for parts in itertools.product(*choices)}


@pytest.mark.parametrize(("kind", "name", "patterns"), KEYS)
def test_keys_on_disk(kind: Kind, name: str, patterns: list[str], tmp_path: Path) -> None:
    kind.trained(name, **({} if kind is HIERARCHICAL else {"mote_layers": [1]})).save_pretrained(tmp_path)
    keys = {key.replace("backbone.backbone.", "backbone.") for key in tensors_of(tmp_path)}
    block = f"backbone.{ARCHITECTURES[name].layer_path}.1."
    assert {key.removeprefix(block) for key in keys if key.startswith(block)} == set().union(*map(expanded, patterns))
    if kind is not HIERARCHICAL:
        in_dense = {f"backbone.{key}" for key in dense_model(name).state_dict() if not key.startswith("pooler.")}
        assert {key for key in keys if not key.startswith(block)} == {k for k in in_dense if not k.startswith(block)}


@in_families([MOTE, TOKEN_ROUTED])
def test_parameter_counts(kind: Kind, name: str) -> None:
    in_dense = sum(p.numel() for key, p in dense_model(name).named_parameters() if not key.startswith("pooler."))
    in_routers = biases = 0
    if kind is TOKEN_ROUTED:
        in_routers = 2 * 16 * 3
        biases = 2 * 2 * 32 if name == "gte" else 0  # of zeros, which only the other projection has
    model = kind.fresh(name, experts=["a", "b", "c"])
    counts = parameter_counts(model)
    of_experts = list(counts["experts"].values())
    one = of_experts[0]
    assert of_experts == [one] * 3
    assert counts["total"] == sum(p.numel() for p in model.parameters()) == counts["shared"] + 3 * one
    assert counts["shared"] + one == in_dense + in_routers + biases
    assert counts["active"] == counts["shared"] + (2 if kind is TOKEN_ROUTED else 1) * one


@pytest.mark.parametrize("reentrant", [True, False])
@in_families([kind for kind in KINDS if kind.is_trained])
def test_gradients_with_checkpointing_are_the_same(kind: Kind, name: str, reentrant: bool) -> None:
    settings = {"router_aux_loss_coef": 3.0} if kind.flags else {}
    plain = kind.trained(name, **settings).train()
    checkpointed = copy.deepcopy(plain)
    if name in NOT_CHECKPOINTED:
        with pytest.raises(ValueError, match="gradient checkpointing"):
            checkpointed.gradient_checkpointing_enable()
        return
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    passes, results = [], []
    for model in (plain, checkpointed):
        calls: list[int] = []
        linear = next(module for module in model.blocks[-1].modules() if isinstance(module, nn.Linear))
        linear.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(0)  # the same dropout
        query, document, _ = kind.outputs(model)
        (query * document).sum().backward()
        passes.append(len(calls))
        results.append(gradients(model))
    assert passes[1] - passes[0] == 2  # both texts' passes again
    same_gradients(*results, 1e-7 if kind.flags else 0.0)
    of_routers = [gradient.abs().max().item() for key, gradient in results[0].items() if "router" in key]
    assert not kind.flags or max(of_routers) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        (MOTE, "nomic_bert", {"backend": "aot_eager"}),
        pytest.param(MOTE, "bert", {"backend": "aot_eager", "fullgraph": True}, marks=pytest.mark.slow),
        (TOKEN_ROUTED, "nomic_bert", {"backend": "aot_eager", "fullgraph": True}),
        *[pytest.param(MOTE, name, {"backend": "inductor"}, marks=pytest.mark.slow) for name in ("nomic_bert", "bert")],
        pytest.param(TOKEN_ROUTED, "bert", {"backend": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param(HIERARCHICAL, "nomic_bert", {"backend": "eager"}, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_compiled_equals_eager(kind: Kind, name: str, settings: dict[str, Any]) -> None:
    model, inputs = kind.trained(name), batch()
    compiled = torch.compile(model, **settings)
    for task in kind.tasks[1:2] if settings.get("fullgraph") else [*kind.tasks[:2], kind.tasks]:
        expected = model(**inputs, task=task).pooler_output
        assert difference(compiled(**inputs, task=task).pooler_output, expected) <= 1e-6


@pytest.mark.parametrize("kind", [MOTE, TOKEN_ROUTED])
def test_a_backbone_that_does_not_hand_arguments_down(kind: Kind) -> None:
    with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: '(expert|routing)'"):
        kind.fresh("bert").backbone(**batch())


@every_kind_and_family
@torch.no_grad()
def test_deepcopy_and_pickle(kind: Kind, name: str) -> None:
    model = kind.trained(name)
    expected = kind.outputs(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(kind.outputs(copied), expected)
        for parameter in copied.parameters():
            parameter.zero_()
    assert_equal(kind.outputs(model), expected)


@every_kind_and_family
@torch.no_grad()
def test_save_and_load(kind: Kind, name: str, tmp_path: Path) -> None:
    model = kind.trained(name, **kind.settings)
    again = saved_and_loaded(model, name, tmp_path)
    assert_equal(kind.outputs(again), kind.outputs(model))
    assert list(again.config.tasks) == list(model.config.tasks)  # task_ids mean the same
    assert {key: getattr(again.config, key) for key in kind.settings} == kind.settings


@in_families([kind for kind in KINDS if kind is not TOKEN_ROUTED])
@torch.no_grad()
def test_only_the_experts_asked_for_are_loaded(kind: Kind, name: str, tmp_path: Path) -> None:
    model, inputs = kind.trained(name), batch()
    other, task = kind.tasks[:2]
    one = saved_and_loaded(model, name, tmp_path, experts=[task])
    assert list(one.state_dict()) == [key for key in model.state_dict() if f".experts.{other}." not in key]
    expected = model(**inputs, task=task).last_hidden_state
    assert difference(one(**inputs, task=task).last_hidden_state, expected) == 0.0
    assert list(one.config.tasks) == list(model.config.tasks)
    with pytest.raises(ValueError, match=f"needs the expert '{other}', which was not loaded"):
        one(**inputs, task=other)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (ONE_PASS, GRAPHS)])
@torch.no_grad()
def test_blocks_on_disk(kind: Kind, tmp_path: Path) -> None:
    model = kind.trained("bert")
    backbone = "backbone.backbone" if kind is HIERARCHICAL else "backbone"
    places = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk"}
    where = {"device_map": {f"{backbone}.{name}": place for name, place in places.items()}}
    again = saved_and_loaded(model, "bert", tmp_path / "model", **where, offload_folder=tmp_path / "offloaded")
    assert_equal(kind.outputs(again), kind.outputs(model))
    out = again(**batch(), task=kind.tasks[0], **kind.flags)
    assert len(out.get("router_logits", ())) == {TOKEN_ROUTED.name: 2, HIERARCHICAL.name: 1}.get(kind.name, 0)


@every_kind
@torch.no_grad()
def test_resized_token_embeddings_are_saved(kind: Kind, tmp_path: Path) -> None:
    model = kind.trained("bert")
    size = model.config.vocab_size + 5
    model.resize_token_embeddings(size)
    again = saved_and_loaded(model, "bert", tmp_path)
    assert again.config.vocab_size == again.backbone.config.vocab_size == size
    inputs = {"input_ids": torch.tensor([[5, size - 1]] * 4)}
    assert_equal(kind.outputs(again, inputs), kind.outputs(model, inputs))
