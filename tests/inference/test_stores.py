"""Stores: weights of experts in the CPU's memory, or in the files of a checkpoint."""

import os
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import to_bin
from helpers.families import trained_mote

from mote.inference.stores import CpuStore, DiskStore, Store, _state_of

KEY = "backbone.encoder.layer.0.experts.alpha.output.dense.weight"


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """All weights of a model that is saved in `tmp_path`, in shards."""
    model = trained_mote("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    return model.state_dict()


@pytest.fixture(params=["cpu", "disk"])
def store(request: pytest.FixtureRequest, weights: dict[str, torch.Tensor], tmp_path: Path) -> Store:
    if request.param == "cpu":
        return CpuStore(weights.items())
    return DiskStore(map(str, tmp_path.glob("*.safetensors")))


def test_weights_are_read(store: Store, weights: dict[str, torch.Tensor]) -> None:
    store.require(weights)
    found = store.read(weights)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_written_into_tensors(
    dtype: torch.dtype, transposed: bool, store: Store, weights: dict[str, torch.Tensor]
) -> None:
    target = (
        torch.empty(weights[KEY].shape[::-1], dtype=dtype).T if transposed else torch.empty_like(weights[KEY]).to(dtype)
    )
    store.write_to({KEY: target})
    assert torch.equal(target, weights[KEY].to(dtype))


def test_copies_in_memory_are_independent(weights: dict[str, torch.Tensor]) -> None:
    store, before = CpuStore(weights.items()), weights[KEY].clone()
    weights[KEY].add_(1)
    assert torch.equal(store.read([KEY])[KEY], before)


def test_a_key_that_is_not_in_the_files(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    store = DiskStore(map(str, tmp_path.glob("*.safetensors")))
    with pytest.raises(ValueError, match=r"nothing is not in the files .* save it with save_pretrained"):
        store.require([KEY, "nothing"])


def test_pickles_are_refused(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    to_bin(tmp_path)
    for files in ([], map(str, tmp_path.glob("*.bin"))):
        with pytest.raises(ValueError, match=r"safetensors files .* but it has none"):
            DiskStore(files)


def test_a_file_that_is_truncated_later(tmp_path: Path) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    store, shape = DiskStore([str(path)]), (16, 32)
    os.truncate(path, 3000)
    for read in (lambda: store.read([KEY]), lambda: store.write_to({KEY: torch.empty(shape)})):
        with pytest.raises(ValueError, match="has changed since"):
            read()
    store.states[path] = _state_of(path)  # as if it were truncated after the check, while it is read
    with pytest.raises(ValueError, match="has changed since"):
        store.write_to({KEY: torch.empty(shape)})
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is gone, and with it the offloaded experts"):
        store.require([KEY])
