"""Stores: weights of experts outside the model, in CPU memory or in the files of its checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from mote.checkpoints.tensors import read_header

SAVE_FIRST = "save it with save_pretrained(), then load it with mote.load(folder, offload='disk')"


class Store(Protocol):
    """Weights of all experts, by their keys in the model's state dict."""

    name: str

    def require(self, keys: Iterable[str]) -> None:
        """Raise an error if some weights are missing."""

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return some weights, on the CPU, read-only."""

    def write_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights into tensors, by their keys; on a GPU asynchronously, on the current stream."""


class CpuStore:
    """Weights in the CPU's memory, pinned if there is a GPU to copy them to.

    Args:
        weights: Key and weight of all experts. They are copied.
    """

    name = "cpu"

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pin = torch.cuda.is_available()
        self.weights = {
            key: torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pin).copy_(weight.detach())
            for key, weight in weights
        }

    def require(self, keys: Iterable[str]) -> None:
        """No effect: all weights are in memory."""

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return some weights."""
        return {key: self.weights[key] for key in keys}

    def write_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights into tensors."""
        for key, tensor in tensors.items():
            tensor.copy_(self.weights[key], non_blocking=True)


class DiskStore:
    """Weights in safetensors files, of which nothing stays in memory.

    Headers are read once. Weights are then read straight into their slot: the pages of a memory map would also count as
    memory of the process.

    Args:
        files: Weight files of the checkpoint.

    Raises:
        ValueError: If there are none, or they are in another format.
    """

    name = "disk"

    def __init__(self, files: Iterable[str]) -> None:
        paths = [Path(file) for file in files]
        if not paths or any(path.suffix != ".safetensors" for path in paths):
            raise ValueError(
                "Experts are read from the safetensors files that the model was loaded from, but it has none: "
                + SAVE_FIRST
            )
        self.states = {path: _state_of(path) for path in paths}
        self.locations = {key: entry for path in paths for key, entry in read_header(path).items()}

    def require(self, keys: Iterable[str]) -> None:
        """Check that some weights are in the files, and that these have not changed.

        Raises:
            ValueError: If a weight is not in the files, or a file has changed since.
            FileNotFoundError: If a file is gone.
        """
        self._by_file(keys)

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Memory-map some weights.

        Raises:
            ValueError: If a weight is not in the files, or a file has changed since.
            FileNotFoundError: If a file is gone.
        """
        weights: dict[str, torch.Tensor] = {}
        for path, wanted in self._by_file(keys).items():
            with safe_open(path, framework="pt") as file:
                weights.update({key: file.get_tensor(key) for key in wanted})
        return weights

    def write_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read weights into tensors.

        Raises:
            ValueError: If a weight is not in the files, or a file has changed since.
            FileNotFoundError: If a file is gone.
        """
        for path, keys in self._by_file(tensors).items():
            with path.open("rb") as file:
                for key in keys:
                    tensor, entry = tensors[key], self.locations[key]
                    if tensor.dtype != entry.torch_dtype:  # the model's dtype has changed
                        tensor.copy_(self.read([key])[key])
                        continue
                    on_cpu = tensor.device.type == "cpu" and tensor.is_contiguous()
                    part = tensor.detach() if on_cpu else torch.empty(tensor.shape, dtype=tensor.dtype)
                    file.seek(entry.offset)
                    if file.readinto(part.view(-1).view(torch.uint8).numpy().data) != entry.size:
                        raise ValueError(_changed(path))
                    if not on_cpu:
                        tensor.copy_(part)

    def _by_file(self, keys: Iterable[str]) -> dict[Path, list[str]]:
        """Group keys by file, and check that the files have not changed."""
        found: dict[Path, list[str]] = {}
        for key in keys:
            if key not in self.locations:
                raise ValueError(f"{key} is not in the files that the model was loaded from: {SAVE_FIRST}")
            found.setdefault(self.locations[key].path, []).append(key)
        for path in found:
            try:
                unchanged = _state_of(path) == self.states[path]
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is gone, and with it the offloaded experts: put it back, or load the model from its new "
                    "location"
                ) from error
            if not unchanged:
                raise ValueError(_changed(path))
        return found


def _state_of(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _changed(path: Path) -> str:
    return f"{path} has changed since the model was loaded: restore the original file, or load the model again"
