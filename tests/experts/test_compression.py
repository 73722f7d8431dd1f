"""Experts as low-rank differences from their mean, and in 8 bits."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import files_in, trusted
from helpers.families import NOT_CHECKPOINTED, all_families, batch, dense_model, trained_mote
from helpers.on_disk import VERBS, compress, last_hidden
from helpers.paths import SMALL_ENCODER
from helpers.token_routing import trained_hierarchical
from torch import nn

import mote
from mote import estimate_memory
from mote.analysis.weight_change import weight_change_of
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts.compression import expert_bytes
from mote.remote.compression_mote import CompressedConfig, CompressedModel, Int8Linear, LowRankLinear
from mote.remote.modeling_mote import MoTEModel

EXPERTS = ["alpha", "beta", "gamma"]
TEXTS = ["whales breathe air", "a recipe for bread", "search_query: bread"]
FULL = 16  # rank of the matrices of tests/families.py
WAYS: list[dict[str, int]] = [{"rank": 3}, {"bits": 8}]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["rank", "bits"])


def three_experts(name: str = "bert", **settings: Any) -> MoTEModel:
    return trained_mote(name, experts=EXPERTS, **settings)


def matrices(model: MoTEModel) -> Iterator[tuple[str, str, list[nn.Linear]]]:
    """Of each block: path of the block, path in an expert, the linears of all experts."""
    for path, block in model.named_modules():
        if type(block).__name__ == "MoTEBlock":
            experts = list(block.experts.values())
            for name, module in experts[0].named_modules():
                if isinstance(module, nn.Linear):
                    yield path, name, [expert.get_submodule(name) for expert in experts]


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


@all_families
def test_full_rank_loses_nothing(name: str) -> None:
    whole = three_experts(name)
    full, low = (mote.experts.compress(whole, rank=rank) for rank in (FULL, 3))
    for task in (*EXPERTS, ["beta", "alpha", "beta", "gamma"]):
        assert off(last_hidden(full, task=task), last_hidden(whole, task=task)) <= 1e-5
    assert off(last_hidden(low, task="beta"), last_hidden(whole, task="beta")) > 1e-3


@pytest.mark.parametrize("rank", [1, 5, FULL])
@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
@torch.no_grad()
def test_no_difference_of_that_rank_is_nearer(name: str, rank: int) -> None:
    """The error is the tail of the singular values (Eckart and Young)."""
    whole = three_experts(name)
    compressed = mote.experts.compress(whole, rank=rank)
    for block, path, linears in matrices(whole):
        weights = torch.stack([linear.weight.double() for linear in linears])
        for expert, difference in zip(EXPERTS, weights - weights.mean(dim=0), strict=True):
            module = compressed.get_submodule(f"{block}.experts.{expert}.{path}")
            assert isinstance(module, LowRankLinear)
            assert module.down.weight.shape[0] == module.up.weight.shape[1] == rank
            error = module.to_linear().weight.double() - (difference + weights.mean(dim=0))
            tail = torch.linalg.svdvals(difference)[rank:].square().sum().sqrt()
            assert float(error.norm()) == pytest.approx(float(tail), rel=1e-4, abs=1e-6)


@all_families
def test_eight_bits_are_at_most_half_a_step_off(name: str) -> None:
    whole = three_experts(name)
    compressed = mote.experts.compress(whole, bits=8)
    for block, path, linears in matrices(whole):
        for expert, linear in zip(EXPERTS, linears, strict=True):
            module = compressed.get_submodule(f"{block}.experts.{expert}.{path}")
            assert isinstance(module, Int8Linear)
            assert module.weight.dtype == torch.int8
            error = (module.to_linear().weight - linear.weight).abs()
            assert (error <= 0.5001 * module.scale[:, None]).all()
            assert module.weight.abs().amax(dim=1).eq(127).all()  # the whole range is used
    found, expected = last_hidden(compressed, task="beta"), last_hidden(whole, task="beta")
    assert 1e-6 < (found - expected).norm() / expected.norm() < 0.02


def test_a_row_of_zeros_stays_one() -> None:
    linear = nn.Linear(4, 3)
    nn.init.zeros_(linear.weight)
    assert Int8Linear(linear).to_linear().weight.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_survive_every_change_of_type(dtype: torch.dtype, tmp_path: Path) -> None:
    compressed = mote.experts.compress(three_experts(), bits=8)
    compressed.save_pretrained(tmp_path)
    expected = last_hidden(compressed, task="beta")
    for model in (mote.load(tmp_path, dtype=dtype), copy.deepcopy(compressed).to(dtype)):
        assert model.dtype == dtype
        integers = {key: weight for key, weight in model.state_dict().items() if weight.dtype == torch.int8}
        assert len(integers) == sum(isinstance(module, Int8Linear) for module in model.modules())
        assert all(weight.equal(compressed.state_dict()[key]) for key, weight in integers.items())
        assert off(last_hidden(model, task="beta"), expected) < 0.1
    halved = mote.experts.compress(three_experts().to(dtype), bits=8)
    assert {weight.dtype for weight in halved.state_dict().values()} == {dtype, torch.int8}


@pytest.mark.long
@both_ways
def test_under_autocast_and_compile(way: dict[str, int]) -> None:
    compressed = mote.experts.compress(three_experts(), **way)
    expected = last_hidden(compressed, task="beta")
    with torch.autocast("cpu", torch.bfloat16):
        assert off(last_hidden(compressed, task="beta"), expected) < 0.1
    assert off(last_hidden(torch.compile(compressed, backend="eager"), task="beta"), expected) <= 1e-6


@pytest.mark.long
@all_families
@both_ways
def test_an_exported_expert_is_whole(name: str, way: dict[str, int]) -> None:
    compressed = mote.experts.compress(three_experts(name), **way)
    for expert in EXPERTS:
        assert off(last_hidden(mote.experts.export(compressed, expert)), last_hidden(compressed, task=expert)) <= 1e-5


@pytest.mark.parametrize("mote_layers", ["every", "every_other"])
def test_parameters_and_bytes_are_counted(mote_layers: str) -> None:
    whole = three_experts(mote_layers=mote_layers)
    blocks = len(whole.blocks)
    low, small = mote.experts.compress(whole, rank=3), mote.experts.compress(whole, bits=8)
    before, after = mote.experts.parameter_counts(whole), mote.experts.parameter_counts(low)
    saved, added = 2 * 16 * 32, 2 * 3 * (16 + 32)  # of an expert in each block: two matrices
    assert after["shared"] == before["shared"] + blocks * saved
    assert after["experts"]["beta"] == before["experts"]["beta"] + blocks * (added - saved)
    assert after["active"] == before["active"] + blocks * added
    assert after["total"] == sum(parameter.numel() for parameter in low.parameters())
    of_expert = sum(parameter.numel() for parameter in whole.blocks[0].experts["beta"].parameters())
    assert expert_bytes(whole) == 4 * 3 * blocks * of_expert
    assert expert_bytes(low) == expert_bytes(whole) + 4 * blocks * (3 * added - 2 * saved)
    assert expert_bytes(small) == expert_bytes(whole) + 3 * blocks * (-3 * saved + 4 * (16 + 32))


def test_a_low_rank_model_is_trained_further() -> None:
    compressed = mote.experts.compress(three_experts(), rank=3).train()
    compressed.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(compressed.parameters(), lr=0.1)
    before = {key: weight.clone() for key, weight in compressed.state_dict().items()}
    compressed(**batch(), task="beta").pooler_output.square().sum().backward()
    optimizer.step()
    moved = {key for key, weight in compressed.state_dict().items() if not weight.equal(before[key])}
    layer = "backbone.encoder.layer.0."
    assert {f"{layer}experts.beta.output.dense.{part}.weight" for part in ("up", "down")} <= moved
    assert f"{layer}shared.output.dense.weight" in moved  # the mean, for all experts
    assert not [key for key in moved if ".experts.alpha." in key]


@all_families
def test_eight_bits_are_not_trained(name: str) -> None:
    compressed = mote.experts.compress(three_experts(name), bits=8).train()
    with pytest.raises(ValueError, match=r"cannot be trained: their weights are integers\. Train the model as it was"):
        compressed(**batch(), task="beta")
    last_hidden(compressed, task="beta")  # without gradients
    for block in compressed.blocks:
        block.experts.requires_grad_(False)
    if name not in NOT_CHECKPOINTED:
        compressed.gradient_checkpointing_enable()
    compressed(**batch(), task="beta").pooler_output.square().sum().backward()
    trained = {key for key, weight in compressed.named_parameters() if weight.grad is not None}
    assert any(".0.shared." in key for key in trained)
    assert not [key for key in trained if ".experts." in key]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({}, "Set either expert_rank or expert_bits=8"),
        ({"rank": 2, "bits": 8}, "Set either expert_rank or expert_bits=8"),
        ({"bits": 4}, "Set either expert_rank or expert_bits=8, got expert_rank=None and expert_bits=4"),
        ({"rank": 0}, "expert_rank must be from 1 to 16, the full rank of the experts' matrices, got 0"),
        ({"rank": 17}, "must be from 1 to 16"),
    ],
)
def test_invalid_ranks_and_bits(way: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mote.experts.compress(three_experts(), **way)
    with pytest.raises(ValueError, match=message):
        CompressedModel(config_for(way))


def config_for(way: dict[str, int]) -> CompressedConfig:
    settings: dict[str, Any] = {f"expert_{key}": value for key, value in way.items()}
    return CompressedConfig(backbone_config=dense_model("bert").config, experts=EXPERTS, **settings)


@both_ways
def test_a_config_that_asks_for_it_builds_it(way: dict[str, int]) -> None:
    built = CompressedModel(config_for(way), dense_model("bert")).eval()
    found, expected = last_hidden(built, task="gamma"), last_hidden(dense_model("bert"))
    assert found.equal(last_hidden(built, task="alpha"))  # copies stay copies
    assert off(found, expected) <= (0 if "rank" in way else 0.05)  # which do not differ from their mean


@both_ways
def test_verbs_that_need_uncompressed_experts(way: dict[str, int]) -> None:
    compressed = mote.experts.compress(three_experts(), **way)
    for verb in ("add", "average", "compress", "interpolate", "merge", "weights"):
        with pytest.raises(ValueError, match=r"are compressed .* use the model as it was before `mote comp"):
            VERBS[verb](compressed)


def test_models_that_cannot_be_compressed(upcycled: Path) -> None:
    for value in (math.nan, math.inf):
        broken = three_experts()
        with torch.no_grad():
            broken.blocks[1].experts["beta"].output.dense.weight[2, 3] = value
        with pytest.raises(ValueError, match=r"beta\.output\.dense\.weight holds non-finite values"):
            mote.experts.compress(broken, bits=8)
    with pytest.raises(ValueError, match="Unknown expert"):
        mote.experts.compress(mote.load(upcycled, experts=["clustering"]), rank=1)
    with pytest.raises(ValueError, match="the experts are token-routed"):
        mote.experts.compress(trained_hierarchical(), bits=8)


@pytest.mark.long
@both_ways
def test_the_folder_is_a_whole_mote(
    way: dict[str, int], trained_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mote")
    out = compress(trained_folder, tmp_path / "out", **way)
    assert files_in(out) == files_in(trained_folder) | {"mote.json", "compression_mote.py"}
    before, after = trusted(trained_folder), trusted(out)
    assert after.prompts == before.prompts
    name = "differences of rank 3 from their mean" if "rank" in way else "8-bit integers"
    assert any(line.startswith(f"Experts as {name}: 12.7 MB → ") for line in caplog.messages)
    for expert in before[0].config.experts:
        cosine = np.sum(before.encode(TEXTS, prompt_name=expert) * after.encode(TEXTS, prompt_name=expert), axis=1)
        assert cosine.min() > (0.999 if "bits" in way else 0.1)
    command = f"mote compress small-mote --{'rank 3' if 'rank' in way else 'bits 8'} --out out"
    assert read_steps(out)[-1]["command"] == command
    card = (out / "README.md").read_text()
    assert command in card
    assert f"The experts are compressed: {name}." in card
    assert "as many as in the dense" not in card


def test_a_rank_that_saves_nothing_is_noted(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    mote.experts.compress(mote.load(trained), rank=FULL)
    assert "this saves no memory over uncompressed experts: choose a lower rank" in caplog.text


@pytest.mark.long
def test_models_in_memory_with_code_of_their_own(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was loaded as remote code is compressed by that code, and saves it."""
    loaded = trusted(trained_folder)
    before = loaded.encode(TEXTS, prompt_name="clustering")
    model: Any = loaded[0].model
    assert not isinstance(model, MoTEModel)
    loaded[0].model = mote.experts.compress(model, rank=256)
    loaded.save(str(tmp_path / "out"))
    assert np.abs(trusted(tmp_path / "out").encode(TEXTS, prompt_name="clustering") - before).max() <= 1e-5


@pytest.mark.long
def test_what_reads_weights_or_trains_them(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low, small = (str(compress(trained, tmp_path / next(iter(way)), **way)) for way in WAYS)
    with pytest.raises(ValueError, match=r"are compressed .* cannot be compared"):
        weight_change_of(low, str(trained))
    sizes = {model: estimate_memory(model, batch_size=8, length=16).weights for model in (low, str(trained))}
    assert sizes[low] < sizes[str(trained)]
    assert main(["memory", small, "--batch-size", "8", "--length", "16"]) == 1
    assert "8-bit experts cannot be trained" in capsys.readouterr().err
    settings = [f"model.source={small}", f"data.folder={SMALL_ENCODER.parent / 'data'}", f"output={tmp_path / 'run'}"]
    assert main(["train", "smoke", *settings]) == 1
    assert "8-bit experts cannot be trained" in capsys.readouterr().err
