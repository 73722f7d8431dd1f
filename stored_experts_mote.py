"""Weights of experts outside the model: in the CPU's memory, or in the files of its checkpoint.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch and
safetensors alone.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open

_TYPES = {  # as the header of a file calls them; what is of another type is read by the library
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}

SAVE_FIRST = "save it with save_pretrained(), then load it with offload_experts='disk'"


class Store(Protocol):
    """Where the weights of all experts are, by their keys in the model's state dict."""

    name: str

    def require(self, keys: Iterable[str]) -> None:
        """Raise an error where some weights are not there."""

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Give some weights, on the CPU, which must not be written to."""

    def write_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write weights into tensors, by their keys; on a GPU, it may go on afterwards on the current stream."""


class CpuStore:
    """Weights in the CPU's memory, pinned where there is a GPU to copy them to.

    Args:
        weights: Those of all experts. They are copied.
    """

    name = "cpu"

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights."""
        pin = torch.cuda.is_available()
        self.weights = {
            key: torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pin).copy_(weight.detach())
            for key, weight in weights
        }

    def require(self, keys: Iterable[str]) -> None:
        """Do nothing: all weights are there."""

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Give some weights."""
        return {key: self.weights[key] for key in keys}

    def write_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write weights into tensors."""
        for key, tensor in tensors.items():
            tensor.copy_(self.weights[key], non_blocking=True)


class DiskStore:
    """Weights in safetensors files, of which nothing stays in memory.

    A file is looked at once, for where each weight is in it. Weights are then read straight into their place: through a
    memory map, the pages of the file would count as memory of the process beside it until all are read.

    Args:
        files: Of the checkpoint.

    Raises:
        ValueError: If there are none, or they are of another format.
    """

    name = "disk"

    def __init__(self, files: Iterable[str]) -> None:
        """Note what is where, and how each file is now."""
        paths = [Path(file) for file in files]
        if not paths or any(path.suffix != ".safetensors" for path in paths):
            raise ValueError(
                "Experts are read from the safetensors files that the model was loaded from, and this one has none: "
                + SAVE_FIRST
            )
        self.states = {path: _state_of(path) for path in paths}
        self.entries = {key: entry for path in paths for key, entry in _entries(path).items()}

    def require(self, keys: Iterable[str]) -> None:
        """Make sure that some weights are in the files, and these as they were.

        Raises:
            ValueError: If a weight is not in the files, or a file was changed since.
            FileNotFoundError: If a file is gone.
        """
        self._by_file(keys)

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Map some weights.

        Raises:
            ValueError: If a weight is not in the files, or a file was changed since.
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
            ValueError: If a weight is not in the files, or a file was changed since.
            FileNotFoundError: If a file is gone.
        """
        for path, keys in self._by_file(tensors).items():
            with path.open("rb") as file:
                for key in keys:
                    tensor, entry = tensors[key], self.entries[key]
                    if _TYPES.get(tensor.dtype) != entry.type:  # the model's type was changed since
                        tensor.copy_(self.read([key])[key])
                        continue
                    on_cpu = tensor.device.type == "cpu" and tensor.is_contiguous()
                    part = tensor.detach() if on_cpu else torch.empty(tensor.shape, dtype=tensor.dtype)
                    file.seek(entry.begin)
                    if file.readinto(part.view(-1).view(torch.uint8).numpy().data) != entry.end - entry.begin:
                        raise ValueError(_changed(path))
                    if not on_cpu:
                        tensor.copy_(part)

    def _by_file(self, keys: Iterable[str]) -> dict[Path, list[str]]:
        """Sort keys by their files, which must be as they were."""
        found: dict[Path, list[str]] = {}
        for key in keys:
            if key not in self.entries:
                raise ValueError(f"{key} is not in the files that the model was loaded from: {SAVE_FIRST}")
            found.setdefault(self.entries[key].path, []).append(key)
        for path in found:
            try:
                unchanged = _state_of(path) == self.states[path]
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is gone, and with it the experts that are not in memory: put it back, or load the model "
                    "from where it is now"
                ) from error
            if not unchanged:
                raise ValueError(_changed(path))
        return found


@contextmanager
def weights_without(experts: Collection[str], files: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Open a checkpoint for `from_pretrained`, without some experts, whose keys it need not look at.

    Args:
        experts: Names of those to leave out.
        files: Of the checkpoint.

    Yields:
        Key → what gives the weight when it is sliced, for the time of the block; None, for the library to do it
        itself, where nothing is left out, or the files are not read through a memory map.
    """
    files = list(files)
    if not experts or sys.platform == "win32" or not all(file.endswith(".safetensors") for file in files):
        yield None
        return
    with ExitStack() as opened:
        handles = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
        keys = [(file, key) for file in handles for key in file.keys() if _expert_of(key) not in experts]  # noqa: SIM118
        yield {key: file.get_slice(key) for file, key in keys}


def _expert_of(key: str) -> str | None:
    """Read the expert's name off a key, as in `backbone.encoder.layer.0.experts.NAME.output.dense.weight`."""
    _, _, rest = key.partition(".experts.")
    return rest.partition(".")[0] or None


class _Entry(NamedTuple):
    """Where a weight is, in bytes from the beginning of the file, and its type."""

    path: Path
    begin: int
    end: int
    type: str


def _entries(path: Path) -> dict[str, _Entry]:
    """Read the header of a safetensors file: its length in 8 bytes, then JSON. The library keeps offsets to itself."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    first = 8 + length
    return {
        key: _Entry(path, first + entry["data_offsets"][0], first + entry["data_offsets"][1], entry["dtype"])
        for key, entry in header.items()
    }


def _state_of(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _changed(path: Path) -> str:
    return f"{path} was changed since the model was loaded from it: put the former file back, or load the model anew"
