"""Stores: weights of experts outside the model, in CPU memory or in the files of its checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mote.checkpoints.tensors import read_header


class CpuStore:
    """Copies of weights in CPU memory, by their keys in the model; pinned if there is a GPU to copy them to."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        pin = torch.cuda.is_available()
        self.weights = {
            key: torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pin).copy_(weight.detach())
            for key, weight in weights.items()
        }

    def check(self, keys: Iterable[str]) -> None:
        """No effect: all weights are in memory."""

    def copy_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy weights into tensors, by their keys."""
        for key, tensor in tensors.items():
            tensor.copy_(self.weights[key])


class DiskStore:
    """Weights in safetensors files, of which nothing stays in memory.

    Headers are read once. Weights are then read straight into their tensors: the pages of a memory map would also count
    as memory of the process. Files in other formats are left out.
    """

    def __init__(self, files: Iterable[str | Path]) -> None:
        paths = [Path(file) for file in files if Path(file).suffix == ".safetensors"]
        self.states = {path: _state_of(path) for path in paths}
        self.locations = {key: entry for path in paths for key, entry in read_header(path).items()}

    def check(self, keys: Iterable[str]) -> None:
        """Raise an error if a file with one of these weights has changed since it was opened, or is gone."""
        for path in {self.locations[key].path for key in keys}:
            if _state_of(path) != self.states[path]:
                raise ValueError(
                    f"{path} has changed since the model was loaded: restore the original file, or load the model again"
                )

    def copy_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read weights into tensors; errors as from `check`."""
        self.check(tensors)
        for path in self.states:
            with path.open("rb") as file:
                for key, tensor in tensors.items():
                    entry = self.locations[key]
                    if entry.path != path:
                        continue
                    direct = tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == entry.torch_dtype
                    read = tensor.detach() if direct else torch.empty(entry.shape, dtype=entry.torch_dtype)
                    file.seek(entry.offset)
                    file.readinto(read.view(-1).view(torch.uint8).numpy().data)
                    if not direct:
                        tensor.copy_(read)


def _state_of(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns
