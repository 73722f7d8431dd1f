"""Stores: weights of experts in CPU memory, or in the files of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import trained_mote

from mote.inference.stores import CpuStore, DiskStore

KEY = "backbone.encoder.layer.0.experts.alpha.output.dense.weight"


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """All weights of a model that is saved in `tmp_path`, in shards."""
    model = trained_mote("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    return model.state_dict()


@pytest.fixture(params=["cpu", "disk"])
def store(request: pytest.FixtureRequest, weights: dict[str, torch.Tensor], tmp_path: Path) -> Any:
    return CpuStore(weights) if request.param == "cpu" else DiskStore(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_copied_into_tensors(
    dtype: torch.dtype, transposed: bool, store: Any, weights: dict[str, torch.Tensor]
) -> None:
    store.check(weights)
    found = {key: torch.empty_like(weight).to(dtype) for key, weight in weights.items()}
    if transposed:
        found[KEY] = torch.empty(weights[KEY].shape[::-1], dtype=dtype).T
    store.copy_into(found)
    assert all(torch.equal(found[key], weight.to(dtype)) for key, weight in weights.items())
