"""Stores: weights of experts in CPU memory, or in the files of a checkpoint."""

from pathlib import Path

import pytest
import torch
from helpers.families import trained_mote

from mote.inference.stores import CpuStore, DiskStore

KEY = "backbone.encoder.layer.0.experts.alpha.output.dense.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_copied_into_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    weights = model.state_dict()
    for store in (CpuStore(weights), DiskStore(tmp_path.glob("*.safetensors"))):
        store.check(weights)
        found = {key: torch.empty_like(weight).to(dtype) for key, weight in weights.items()}
        found[KEY] = torch.empty(weights[KEY].shape[::-1], dtype=dtype).T  # not contiguous
        store.copy_into(found)
        assert all(torch.equal(found[key], weight.to(dtype)) for key, weight in weights.items())
