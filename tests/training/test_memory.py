"""Estimates of memory against what is really there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.families import EXPERTS, NOT_CHECKPOINTED, all_families, dense_model, mote_config
from helpers.paths import SMALL_ENCODER
from helpers.token_routing import trained_hierarchical
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from mote import estimate_memory
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel
from mote.remote.token_routing_mote import TokenRoutedConfig
from mote.training.memory import ATTENTION_DROPOUT, empty_model, measure_activations

ROWS, LENGTH = 8, 32
SMALL = {"batch_size": 16, "mini_batch_size": 8, "length": LENGTH}


def family_config(name: str) -> Any:
    """The config of a MoTE, without dropout of attention probabilities, which CPUs keep."""
    config: Any = mote_config(dense_model(name))
    for setting in ATTENTION_DROPOUT:
        if hasattr(config.backbone_config, setting):
            setattr(config.backbone_config, setting, 0.0)
    return config


def embed(model: MoTEModel, precision: str, expert: str) -> torch.Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        states = model(torch.randint(5, 60, (ROWS, LENGTH)), attention_mask=mask, task=expert).last_hidden_state
    return states.float().mean(dim=1)


def real_peak(model: MoTEModel, precision: str) -> int:
    """The most bytes that torch's allocator had handed out at a time, in a forward and backward pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        embed(model, precision, EXPERTS[0]).sum().backward()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels have work space for each thread, which the estimate does not count: for a tiny model it is much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@all_families
@pytest.mark.parametrize("how", ["fp32", *(pytest.param(n, marks=pytest.mark.long) for n in ("bf16", "checkpointing"))])
@pytest.mark.usefixtures("one_thread")
def test_activations_are_those_of_a_real_pass(name: str, how: str) -> None:
    checkpointing = how == "checkpointing"
    if checkpointing and name in NOT_CHECKPOINTED:
        pytest.skip("transformers has no gradient checkpointing for it")
    config = family_config(name)
    model = MoTEModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    told = measure_activations(empty_model(config, checkpointing), ROWS, LENGTH, precision=how)
    assert told == pytest.approx(real_peak(model, how), rel=0.06)


def test_dropout_within_attention_costs_nothing() -> None:
    config: Any = mote_config(dense_model("bert"))
    assert config.backbone_config.attention_probs_dropout_prob > 0
    assert estimate_memory(config, **SMALL) == estimate_memory(family_config("bert"), **SMALL)
    assert config.backbone_config.attention_probs_dropout_prob > 0  # it is as it was


@pytest.mark.long
def test_activations_grow_with_the_mini_batch_and_not_with_the_batch() -> None:
    config = family_config("nomic_bert")
    one, more, wider = (
        estimate_memory(config, batch_size=batch, mini_batch_size=mini, length=LENGTH)
        for batch, mini in ((64, 8), (640, 8), (64, 32))
    )
    assert one.activations == more.activations < wider.activations
    assert more.loss == 10 * one.loss < 10 * wider.loss
    assert estimate_memory(config, batch_size=64, length=LENGTH).activations > 10 * one.activations


@pytest.mark.parametrize(
    "name", ["nomic_bert", *(pytest.param(n, marks=pytest.mark.long) for n in ("bert", "modernbert", "qwen3"))]
)
def test_weights_gradients_and_optimizer_are_exact(name: str) -> None:
    """Also those of a checkpoint in half precision, which is trained in float32; and those of the dense model."""
    config = family_config(name)
    model = MoTEModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for expert in EXPERTS:  # in one step, so that all have gradients
        embed(model, "fp32", expert).sum().backward()
    optimizer.step()
    states = [state for of_one in optimizer.state.values() for state in of_one.values()]
    told = estimate_memory(config, **SMALL)
    assert told.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert told.gradients == sum(
        parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None
    )
    assert told.optimizer == sum(state.nbytes for state in states)
    assert estimate_memory(model.to(torch.bfloat16), **SMALL) == told
    assert estimate_memory(config.backbone_config, **SMALL).weights < told.weights


def test_a_text_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="A text of 4,096 tokens is too long for the model"):
        estimate_memory(family_config("bert"), **{**SMALL, "length": 4096})


def test_a_token_router_is_refused() -> None:
    backbone = AutoConfig.from_pretrained(SMALL_ENCODER)
    for model in (TokenRoutedConfig(backbone_config=backbone), trained_hierarchical()):
        with pytest.raises(ValueError, match="memory of a token-routed model depends on where the tokens go"):
            estimate_memory(model, **SMALL)


@pytest.mark.long
def test_the_command(capsys: pytest.CaptureFixture[str], fresh_folder: Any) -> None:
    options = ["--batch-size", "32", "--mini-batch-size", "8", "--length", "32"]
    assert main(["memory", str(fresh_folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["weights", "gradients", "optimizer", "activations", "loss", "total"]
    assert [line.split()[1] for line in lines[2:]] == names
    assert main(["memory", str(SMALL_ENCODER), *options]) == 0
