"""Estimates of memory against what is really there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.families import NOT_CHECKPOINTED, all_families, fresh_mote
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.token_routing import trained_hierarchical
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, BertConfig

from mote import estimate_memory
from mote.cli import main
from mote.remote.modeling_mote import MoTEConfig, MoTEModel
from mote.remote.token_routing_mote import TokenRoutedConfig
from mote.training.memory import SHARDED, Activations, empty_model, fake_model, measure_activations

ROWS, LENGTH = 8, 32
SMALL = {"batch_size": 16, "mini_batch_size": 8, "length": LENGTH}


def inputs(rows: int = ROWS, length: int = LENGTH) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(5, 60, (rows, length)), "attention_mask": mask}


def embed(model: MoTEModel, precision: str, expert: str = "alpha") -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return model(**inputs(), task=expert).last_hidden_state.float().mean(dim=1)


def really_kept(model: MoTEModel, precision: str) -> int:
    """Bytes that a real forward pass keeps for the backward pass."""
    ours = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = embed(model, precision)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def real_peak(model: MoTEModel, precision: str) -> int:
    """The most bytes that torch's allocator had handed out at a time, in a forward and backward pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        embed(model, precision).sum().backward()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def estimated(model: MoTEModel, precision: str, gradient_checkpointing: bool = False) -> Activations:
    empty = empty_model(model, device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_model(empty, gradient_checkpointing)
        return measure_activations(fake, ROWS, LENGTH, precision=precision)


# Activations ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels have work space for each thread, which the estimate does not count: for a tiny model it is much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@all_families
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.usefixtures("one_thread")
def test_activations_are_those_of_a_real_pass(name: str, precision: str) -> None:
    model = fresh_mote(name).train()
    told = estimated(model, precision)
    assert told.kept == pytest.approx(really_kept(model, precision), rel=0.02)
    assert told.peak == pytest.approx(real_peak(model, precision), rel=0.06)


@pytest.mark.long
@all_families
def test_gradient_checkpointing(name: str) -> None:
    if name in NOT_CHECKPOINTED:
        pytest.skip("transformers has no gradient checkpointing for it")
    model = fresh_mote(name).train()
    told = estimated(model, "fp32", gradient_checkpointing=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert told.peak == pytest.approx(real_peak(model, "fp32"), rel=0.06)
    assert told.kept < estimated(model, "fp32").kept / 2


def test_dropout_within_attention_costs_nothing_on_a_gpu() -> None:
    model = fresh_mote("bert")
    assert model.config.backbone_config.attention_probs_dropout_prob > 0
    on_gpu, on_cpu = (estimate_memory(model, **SMALL, device=device) for device in ("gpu", "cpu"))
    assert on_gpu.activations < on_cpu.activations
    assert on_gpu.weights == on_cpu.weights
    assert model.config.backbone_config.attention_probs_dropout_prob > 0  # the model is as it was


@pytest.mark.long
def test_activations_grow_with_the_mini_batch_and_not_with_the_batch() -> None:
    model = fresh_mote("nomic_bert")
    one, more, wider = (
        estimate_memory(model, batch_size=batch, mini_batch_size=mini, length=LENGTH)
        for batch, mini in ((64, 8), (640, 8), (64, 32))
    )
    assert one.activations == more.activations < wider.activations
    assert more.embeddings == 10 * one.embeddings == 2 * 2 * 640 * 16 * 4
    assert more.loss > one.loss
    plain = estimate_memory(model, batch_size=64, length=LENGTH)
    assert plain.embeddings == 0
    assert plain.activations > 10 * one.activations


# Weights, gradients, optimizer ---------------------------------------------------------------------------------------


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    "name", ["nomic_bert", *(pytest.param(n, marks=pytest.mark.long) for n in ("bert", "modernbert", "qwen3"))]
)
@pytest.mark.parametrize("frozen", ["", "embed", ".beta."])
def test_what_lasts_is_exact(name: str, frozen: str) -> None:
    model = fresh_mote(name).train()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in key)
    told = estimate_memory(model, **SMALL)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    for expert in ("alpha", "beta"):  # in one step, so that all have gradients
        embed(model, "fp32", expert).sum().backward()
    optimizer.step()
    states = [state for of_one in optimizer.state.values() for state in of_one.values()]
    assert told.weights == bytes_of(model.parameters())
    assert told.gradients == bytes_of(p.grad for p in model.parameters() if p.grad is not None)
    assert told.optimizer == bytes_of(states)


@pytest.mark.long
def test_adapters_of_several_experts_lie_on_one_model() -> None:
    """Four experts take the memory of one, and that of their adapters: r numbers for each input and each output."""
    config = fresh_mote("bert").config
    backbone: Any = config.backbone_config
    width, inner, layers = backbone.hidden_size, backbone.intermediate_size, backbone.num_hidden_layers
    settings: dict[str, Any] = {**SMALL, "peft": {"r": 4, "dropout": 0}}
    several = estimate_memory(config, **settings)
    dense = estimate_memory(MoTEConfig(backbone_config=backbone, experts=["alpha"]), **SMALL)
    attention, network = 4 * 2 * width, 2 * (width + inner)
    numbers = 4 * layers * (attention + len(config.experts) * network)
    assert several.gradients == 4 * numbers
    assert several.weights == dense.weights + several.gradients
    assert several.optimizer == 2 * several.gradients + 4 * 2 * layers * (4 + len(config.experts) * 2)
    settings["peft"]["base_dtype"] = "bfloat16"
    linear = layers * (4 * (width + 1) * width + 2 * width * inner + inner + width)
    assert several.weights - estimate_memory(config, **settings, precision="bf16").weights == 2 * linear
    alone = estimate_memory(config, **{**settings, "peft": {"r": 4, "targets": "experts"}})
    assert alone.gradients == 4 * 4 * layers * len(config.experts) * network


@pytest.mark.long
def test_the_command_with_adapters(capsys: pytest.CaptureFixture[str], fresh_folder: Any) -> None:
    totals = []
    for more in ([], ["--lora-rank", "4"], ["--lora-rank", "4", "--lora-targets", "shared"]):
        assert main(["memory", str(fresh_folder), "--batch-size", "8", "--length", "16", "--json", *more]) == 0
        totals.append(json.loads(capsys.readouterr().out)["gradients"])
    assert totals[0] > 10 * totals[1] > 10 * totals[2] > 0


def test_settings_of_adapters_need_a_rank(capsys: pytest.CaptureFixture[str], fresh_folder: Any) -> None:
    for given in (["--lora-targets", "shared"], ["--base-dtype", "bfloat16"]):
        assert main(["memory", str(fresh_folder), "--batch-size", "8", "--length", "16", *given]) == 2
        assert "are settings of adapters: add --lora-rank" in capsys.readouterr().err


@pytest.mark.long
def test_a_config_is_enough() -> None:
    model = fresh_mote("nomic_bert")
    assert estimate_memory(model.config, **SMALL) == estimate_memory(model, **SMALL)
    dense = estimate_memory(model.config.backbone_config, **SMALL)
    assert dense.weights < estimate_memory(model, **SMALL).weights
    half = fresh_mote("nomic_bert").to(torch.bfloat16)
    assert 2 * estimate_memory(half, **SMALL).weights == estimate_memory(model, **SMALL).weights


@pytest.mark.long
def test_what_is_cut_among_processes() -> None:
    config = MoTEConfig(
        backbone_config=BertConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, vocab_size=96
        ),
        experts=["a", "b"],
    )
    settings = {**SMALL, "processes": 4}
    ddp, fsdp, stage_1, deepspeed = (estimate_memory(config, **settings, sharding=how) for how in SHARDED)
    assert ddp.communication == ddp.gradients == ddp.weights
    assert fsdp.weights == pytest.approx(ddp.weights / 4, rel=0.01)  # tables with an odd number of rows are padded
    assert fsdp.gradients == pytest.approx(ddp.gradients / 4, rel=0.01)
    assert fsdp.optimizer == pytest.approx(ddp.optimizer / 4, rel=0.02)
    assert 0 < fsdp.communication < ddp.weights
    assert deepspeed.weights == ddp.weights
    assert (stage_1.gradients, deepspeed.gradients) == (ddp.gradients, ddp.gradients / 4)
    assert stage_1.optimizer == deepspeed.optimizer
    assert deepspeed.optimizer == ddp.optimizer / 4
    in_bf16 = estimate_memory(config, **settings, sharding="deepspeed-stage-2", precision="bf16")
    assert in_bf16.weights == ddp.weights / 2
    assert in_bf16.optimizer == 3 * ddp.gradients / 4


def test_a_token_router_is_refused() -> None:
    backbone = AutoConfig.from_pretrained(SMALL_ENCODER)
    with pytest.raises(ValueError, match="memory of a token-routed model depends on where the tokens go"):
        estimate_memory(TokenRoutedConfig(backbone_config=backbone), **SMALL)
    with pytest.raises(ValueError, match="memory of a token-routed model depends on where the tokens go"):
        estimate_memory(trained_hierarchical(), **SMALL)


def test_the_total_is_the_worst_moment() -> None:
    cached = estimate_memory(fresh_mote("bert"), **SMALL)
    lasting = cached.weights + cached.gradients + cached.optimizer + cached.communication + cached.embeddings
    assert cached.total == lasting + max(cached.activations, cached.loss)
    plain = estimate_memory(fresh_mote("bert"), batch_size=16, length=LENGTH)
    assert plain.total == plain.weights + plain.gradients + plain.optimizer + plain.activations + plain.loss


# The command and errors ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command(capsys: pytest.CaptureFixture[str], fresh_folder: Any) -> None:
    options = ["--batch-size", "32", "--mini-batch-size", "8", "--length", "32"]
    assert main(["memory", str(fresh_folder), *options, "--processes", "2", "--sharding", "fsdp2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["weights", "gradients", "optimizer", "communication", "activations", "embeddings", "loss", "total"]
    assert [line.split()[1] for line in lines[2:]] == names
    assert main(["memory", str(SMALL_ENCODER), *options]) == 0
    assert main(["memory", str(SMALL_ENCODER), *options, "--expert", "a", "--expert", "b"]) == 0
    assert main(["memory", str(fresh_folder), *options, "--expert", "a", "--expert", "b"]) == 1
    assert "is already a MoTE" in capsys.readouterr().err


def test_a_batch_that_the_processes_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 16 cannot be divided evenly among 3 processes"):
        estimate_memory(fresh_mote("bert"), **SMALL, processes=3)


# Real memory ---------------------------------------------------------------------------------------------------------

REAL_STEP = """
import json, resource, sys

sys.path[:0] = sys.argv[1:2]
import psutil, torch
from transformers import NomicBertConfig
from mote.remote.modeling_mote import MoTEConfig, MoTEModel
from mote import estimate_memory

torch.set_num_threads(1)
backbone = NomicBertConfig(
    hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536, vocab_size=8192
)
config = MoTEConfig(backbone_config=backbone, experts=["a", "b"])
model = MoTEModel(config).train()
rows, length = 32, 128
tokens = torch.randint(5, 8000, (rows, length))


def step(rows, length, optimizer):
    for expert in ("a", "b"):
        model(input_ids=tokens[:rows, :length], task=expert).pooler_output.sum().backward()
    optimizer.step()


optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step(1, 8, torch.optim.SGD(model.parameters(), lr=0))  # what torch sets up once
optimizer.zero_grad()
before = psutil.Process().memory_info().rss
step(1, 8, optimizer)  # from here on there are gradients and moments
step(rows, length, optimizer)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
told = estimate_memory(config, batch_size=rows, mini_batch_size=rows, length=length)
print(json.dumps({"grown": peak - before, "told": told.gradients + told.optimizer + told.activations}))
"""


@pytest.mark.slow
def test_the_process_grows_as_told() -> None:
    """Within 10 percent, where malloc gives back what is freed: the matrix kernels have work space of their own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL_STEP, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["grown"] == pytest.approx(measured["told"], rel=0.1), measured
