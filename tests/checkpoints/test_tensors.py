"""Headers of safetensors files, and values that are not finite."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mote.checkpoints.tensors import is_finite, read_header, read_on_meta


def test_headers(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.tensor([1, 2, 3], dtype=torch.int8), "c": torch.ones(5).bfloat16()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, location in header.items():
        data = content[location.offset : location.offset + tensors[name].nbytes]
        assert bytes(tensors[name].view(torch.uint8).flatten().tolist()) == data
        assert (location.torch_dtype, location.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        found = read_on_meta([path])[name]
        assert (found.device.type, found.dtype, found.shape) == ("meta", tensors[name].dtype, tensors[name].shape)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 9]}}'])
def test_damaged_headers(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read, is it truncated\?"):
        read_header(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    fine = torch.tensor([[1.0, -2.0]])
    assert is_finite(fine.to(dtype))
    assert not is_finite(torch.tensor([[1.0, float("nan")]]).to(dtype))
    assert is_finite(torch.empty(0, 3, dtype=dtype))
    assert is_finite(fine.to(torch.int8))
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        assert not is_finite(torch.tensor([[1.0, float("-inf")]]).to(dtype))
