"""Faster ways to run a model that are off by default: one pass for several tasks, and CUDA graphs."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import token_routing
from helpers.families import EXPERTS, assert_threads_agree, batch, difference, trained_mote
from helpers.kinds import OnTheCpu
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModel

import mote
from mote.inference import cuda_graphs
from mote.inference.one_pass import SHARED_TOKEN, OnePass, Parts, cost
from mote.remote.mixed_batch_mote import groups_of
from mote.remote.modeling_mote import MoTEBlock

CPU = torch.device("cpu")
TASKS = ["alpha", "beta", "beta", "alpha"]


def passes(model: Any, tasks: Any = TASKS, **inputs: Any) -> tuple[int, torch.Tensor]:
    """The number of passes through the backbone, and the embeddings."""
    calls: list[int] = []
    hook = model.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    out = model(**(inputs or batch()), task=tasks).pooler_output
    hook.remove()
    return len(calls), out


@torch.no_grad()
def test_rows_of_several_tasks_share_a_pass() -> None:
    model = trained_mote("bert")
    apart, expected = passes(model)
    mote.speed_up(model, one_pass=True)
    together, found = passes(model)
    assert (apart, together) == (2, 1)
    assert difference(found, expected) <= 1e-6
    assert passes(model, "beta")[0] == 1
    mote.speed_up(model)
    assert passes(model)[0] == 2


@pytest.mark.parametrize("several", [1.0, 1.15])
def test_each_row_is_in_one_part_of_its_expert(several: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARED_TOKEN, "cpu", several)
    group_rows, draw, mixed = OnePass(trained_mote("bert")), random.Random(0), 0
    for _ in range(100):
        count, length = draw.randint(1, 12), draw.randint(1, 60)
        experts, lengths = draw.choices("abcd", k=count), [draw.randint(1, length) for _ in range(count)]
        with torch.no_grad():
            groups = group_rows(experts, lengths, CPU)
        seen = []
        for group in groups:
            rows = torch.arange(count)[group.rows].tolist()
            of_group: Any = group.expert
            parts = of_group.parts if isinstance(of_group, Parts) else [(of_group, slice(0, len(rows)))]
            assert [row for _, part in parts for row in rows[part]] == rows
            assert all(experts[row] == name for name, part in parts for row in rows[part])
            assert group.length == max(lengths[row] for row in rows)
            assert len({name for name, _ in parts}) == len(parts)
            mixed += len(parts) > 1
            seen += rows
        assert sorted(seen) == list(range(count))
        assert sum(cost(group, "cpu") for group in groups) <= sum(
            cost(group, "cpu") for group in groups_of(experts, lengths, CPU)
        )
    assert mixed > 5
    with torch.no_grad():  # many tokens run faster apart
        assert len(group_rows([*"ab"] * 16, [64] * 32, CPU)) == (1 if several == 1 else 2)


@pytest.mark.parametrize("change", ["gradients", "training", "hook", "compiled"])
def test_what_keeps_a_pass_for_each_expert_has_its_bits(change: str) -> None:
    """In training, the first pass of gradient caching, without gradients, has to equal the second with its dropout."""
    model = trained_mote("bert", **({"hidden_dropout_prob": 0.5} if change == "training" else {}))
    model.train(change == "training")
    if change == "hook":
        model.blocks[1].experts["beta"].register_forward_hook(lambda *_: _[-1] * 2)
    if change == "compiled":
        model.compile(backend="eager")
    results = []
    for way in (None, OnePass(model)):
        model.one_pass = way
        with torch.set_grad_enabled(change == "gradients"):
            torch.manual_seed(0)
            count, out = passes(model)
        assert count == 2
        results.append(out)
    assert torch.equal(*results)


@torch.no_grad()
def test_adapters_act_in_one_pass() -> None:
    config = LoraConfig(r=2, target_modules=["query", "dense"], init_lora_weights=False)
    model = trained_mote("bert")
    adapted = get_peft_model(model, config).eval()
    _, expected = passes(model)
    mote.speed_up(model, one_pass=True)
    count, found = passes(model)
    assert count == 1
    assert difference(found, expected) <= 1e-6
    with adapted.disable_adapter():
        assert difference(passes(model)[1], expected) > 1e-3


@torch.no_grad()
def test_graphs_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 7)  # fewer than there are sizes
    model = trained_mote("bert", max_position_embeddings=64)
    eager = copy.deepcopy(model)
    model.graphs = OnTheCpu(model)
    batches = {
        (rows, length): {name: value[:rows] for name, value in batch(rows=rows, length=length).items()}
        for rows in (1, 3, 40)
        for length in (5, 17, 60)
    }

    def embed(thread: int, turn: int) -> list[torch.Tensor]:
        rows, length = draw = random.Random(thread * 1000 + turn).choice(list(batches))
        inputs = batches[draw]
        task: Any = [EXPERTS[thread % 2], (TASKS * 10)[:rows]][turn % 2]
        out = model(**inputs, task=task).pooler_output
        assert difference(out, eager(**inputs, task=task).pooler_output) <= 2e-6, (rows, length)
        return [out]

    assert_threads_agree(embed, turns=63)  # 1,008 calls, after as many one by one
    assert len(model.graphs.captured) == 7


@torch.no_grad()
def test_graphs_follow_the_weights() -> None:
    model = trained_mote("bert")
    model.graphs = OnTheCpu(model)
    model(**batch(), task="beta")
    (first,) = model.graphs.captured.values()
    for parameter in model.blocks[0].experts["beta"].parameters():
        parameter.mul_(2)  # in place: the graph reads it
    assert to_eager(model) <= 1e-6
    assert first in model.graphs.captured.values()
    model.to(torch.float64)
    assert model(**batch(), task="beta").pooler_output.dtype == torch.float64
    assert first not in model.graphs.captured.values()
    get_peft_model(model, LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    assert to_eager(model) == 0  # not replayed


def to_eager(model: Any) -> float:
    """The difference to the same model without graphs."""
    eager = copy.deepcopy(model)
    eager.graphs = None
    return difference(*(one(**batch(), task="beta").pooler_output for one in (model, eager)))


class WithWeights(nn.Module):
    """A layer with a weight beside its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.feed_forward, self.attention = (
            nn.Parameter(torch.ones(16)),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[B, L, 16] → [B, L, 16]."""
        return self.scale * self.feed_forward(self.attention(hidden))


def test_what_cannot_be_sped_up(tmp_path: Path) -> None:
    model = trained_mote("bert")
    with pytest.raises(ValueError, match=r"need an NVIDIA GPU.* but the model is on cpu"):
        mote.speed_up(model, cuda_graphs=True)
    layers: Any = model.backbone.encoder.layer
    layers[1] = MoTEBlock(WithWeights(), EXPERTS, ("attention",))
    with pytest.raises(ValueError, match=r"one_pass=True.*weights, or a forward of its own"):
        mote.speed_up(model, one_pass=True)
    assert model.one_pass is None
    with pytest.raises(ValueError, match="no experts for tasks"):
        mote.speed_up(token_routing.trained("bert"), one_pass=True)
    trained_mote("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mote\.restore"):
        mote.load(tmp_path, offload="cpu", one_pass=True)


@torch.no_grad()
def test_loaded_models_installed_and_remote(tmp_path: Path) -> None:
    trained_mote("nomic_bert").save_pretrained(tmp_path)
    remote = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    _, expected = passes(remote)
    mote.speed_up(remote, one_pass=True)
    for model in (remote, mote.load(tmp_path, one_pass=True)):
        count, found = passes(model)
        assert count == 1
        assert difference(found, expected) <= 1e-6
