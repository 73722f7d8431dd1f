"""Weights of experts outside the model: in the CPU's memory, or in the files of its checkpoint.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch and
safetensors alone.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

SAVE_FIRST = "save it with save_pretrained(), then load it with offload_experts='disk'"


class Store(Protocol):
    """Where the weights of all experts are, by their keys in the model's state dict."""

    name: str

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Give some weights, on the CPU, which must not be written to."""


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

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Give some weights."""
        return {key: self.weights[key] for key in keys}


class DiskStore:
    """Weights in safetensors files, mapped into memory for as long as they are read.

    Args:
        files: Of the checkpoint.

    Raises:
        ValueError: If there are none, or they are of another format.
    """

    name = "disk"

    def __init__(self, files: Iterable[str]) -> None:
        """Note which file holds which weight, and how each file is now."""
        paths = [Path(file) for file in files]
        if not paths or any(path.suffix != ".safetensors" for path in paths):
            raise ValueError(
                "Experts are read from the safetensors files that the model was loaded from, and this one has none: "
                + SAVE_FIRST
            )
        self.states = {path: _state_of(path) for path in paths}
        self.file_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self.file_of.update(dict.fromkeys(file.keys(), path))

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Map some weights.

        Raises:
            ValueError: If a weight is not in the files, or a file was changed since.
            FileNotFoundError: If a file is gone.
        """
        keys_in: dict[Path, list[str]] = {}
        for key in keys:
            if key not in self.file_of:
                raise ValueError(f"{key} is not in the files that the model was loaded from: {SAVE_FIRST}")
            keys_in.setdefault(self.file_of[key], []).append(key)
        weights: dict[str, torch.Tensor] = {}
        for path, wanted in keys_in.items():
            try:
                with safe_open(path, framework="pt") as file:
                    if _state_of(path) != self.states[path]:
                        raise ValueError(_changed(path))
                    weights.update({key: file.get_tensor(key) for key in wanted})
            except SafetensorError as error:
                raise ValueError(_changed(path)) from error
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is gone, and with it the experts that are not in memory: put it back, or load the model "
                    "from where it is now"
                ) from error
        return weights


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


def _state_of(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _changed(path: Path) -> str:
    return f"{path} was changed since the model was loaded from it: put the former file back, or load the model anew"
