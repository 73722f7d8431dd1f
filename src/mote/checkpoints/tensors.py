"""Tensors of checkpoints: headers of safetensors files, pickles, tensors without data, counts."""

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_utils import load_state_dict

from mote.files import refuse_pointer
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.weights_mote import HEAD

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel
    from mote.remote.token_routing_mote import TokenRoutedConfig


class WeightName(NamedTuple):
    """What the key of a weight in a MoTE's state dict stands for."""

    expert: str | None  # None: shared by all experts, or outside of the blocks
    layer: int | None  # index of the block, from 0; None outside of the blocks
    dense: str  # the weight's name in the dense model


def weight_name(key: str, config: MoTEConfig) -> WeightName:
    """Parse a key such as `backbone.encoder.layer.0.experts.clustering.output.dense.weight`.

    This one is `("clustering", 0, "encoder.layer.0.output.dense.weight")`; of shared weights, `.shared.` for
    `.experts.NAME.`.
    """
    dense = key.removeprefix("backbone.")
    layers = config.architecture.layer_path
    found = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(?:shared|experts\.([^.]+))\.(.+)", dense)
    if found is None or int(found[1]) not in config.mote_layer_indices:
        return WeightName(None, None, dense)
    return WeightName(found[2], int(found[1]), f"{layers}.{found[1]}.{found[3]}")


def without_head(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a MoTE without those of its head, if it has one."""
    return {key: weight for key, weight in weights.items() if not key.startswith(HEAD)}


def token_routing(config: Any) -> "TokenRoutedConfig | None":
    """Return the settings of token routing, of the whole model or within its task experts; None without it."""
    while config is not None and getattr(config, "routes_by_task", True):
        config = getattr(config, "backbone_config", None)
    return config


class TensorLocation(NamedTuple):
    """Where a tensor is in a safetensors file."""

    path: Path
    offset: int
    torch_dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Read where the tensors of a safetensors file are; errors as from `read_on_meta`."""
    stored = read_on_meta([path])  # checks the header
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name in stored}
    return {name: TensorLocation(path, starts[name], one.dtype, tuple(one.shape)) for name, one in stored.items()}


def read_on_meta(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read the tensors of some files without data, on the device `meta`; a damaged file is a `ValueError`."""
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        refuse_pointer(path)
        try:
            is_pickle = path.suffix != ".safetensors"
            tensors |= load_pickle(path, "meta") if is_pickle else load_state_dict(str(path), map_location="meta")
        except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, AttributeError, OSError) as error:
            # torch's own message proposes to run the code
            not_only_tensors = "it is damaged, or holds more than tensors, such as code, which is not run"
            problem = not_only_tensors if isinstance(error, pickle.UnpicklingError) else f"is it truncated? {error}"
            raise ValueError(f"{path} cannot be read, {problem}") from error
    return tensors


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of the tensors of some files; errors as from `read_on_meta`."""
    return {key: tuple(tensor.shape) for key, tensor in read_on_meta(files).items()}


def load_pickle(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Load the tensors of a pickle, memory-mapped unless it is in the format of torch before 1.6."""
    state = torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if state and not tensors:
        raise ValueError(f"{path} holds no weights, but {', '.join(map(repr, state))}: save the weights on their own")
    return tensors


class MappedFiles(Mapping[str, torch.Tensor]):
    """The tensors of some weight files. One file is open at a time, memory-mapped if its format allows."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.file_of: dict[str, Path] = {}
        self.stored: dict[str, torch.Tensor] = {}  # without weights
        for path in paths:
            tensors = read_on_meta([path])
            self.stored |= tensors
            self.file_of |= dict.fromkeys(tensors, path)
        self.opened: Path | None = None
        self.read: Callable[[str], torch.Tensor] = self.stored.__getitem__

    def __getitem__(self, key: str) -> torch.Tensor:
        path = self.file_of[key]
        if self.opened != path:
            self.read = self.stored.__getitem__  # closes one file before the next is opened
            is_pickle = path.suffix != ".safetensors"
            self.read = load_pickle(path).__getitem__ if is_pickle else safe_open(path, "pt").get_tensor
            self.opened = path
        return self.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinite values."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, most = (tensor if tensor.element_size() > 1 else tensor.float()).aminmax()
    return math.isfinite(least) and math.isfinite(most)


def require_unquantised(model: nn.Module) -> None:
    """Raise `ValueError` if Transformers or `torch.ao` has quantised a model (`mote compress` does not count)."""
    by_torch = any(type(module).__module__.startswith("torch.ao.") for module in model.modules())
    if by_torch or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("The weights of a quantised model cannot be read, moved or saved: use it as it was before")


def parameter_counts(model: "MoTEModel") -> dict[str, Any]:
    """Count the parameters of a MoTE.

    Args:
        model: A MoTE in memory, or on the meta device. Offloaded experts count as if they were on the device.

    Returns:
        `total`; `active`, those that a sequence passes through, as many as in the dense model without its pooler
        (token-routed: those that a token passes through); `shared`, those shared by all experts, including routers;
        `experts`: name (token-routed: index) → parameters of this expert alone. A task expert that is token-routed
        counts with its router and all its feed-forward networks.
    """
    with nullcontext() if model.offloading is None else model.offloading.all_experts():
        counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total, routing = sum(counts.values()), token_routing(model.config)
    experts = dict.fromkeys(model.config.available_experts, 0)
    routed = dict.fromkeys([None, *experts], 0)  # by task expert (None: of none), in stacks of feed-forward networks
    for name, count in counts.items():
        expert = weight_name(name, model.config).expert
        if expert is not None:
            experts[expert] += count
        if routing is not None and ".feed_forward.experts." in name:
            routed[expert] += count
    largest = max(experts, key=experts.__getitem__)
    active = total - sum(experts.values()) + experts[largest]
    if routing is not None:
        idle = routing.num_experts - routing.num_experts_per_tok
        active -= (routed[None] + routed[largest]) // routing.num_experts * idle
        if not model.config.routes_by_task:
            experts = dict.fromkeys(map(str, range(routing.num_experts)), routed[None] // routing.num_experts)
    return {"total": total, "active": active, "shared": total - sum(experts.values()), "experts": experts}


def experts_are_copies(weights: list[Path], config: Any) -> bool:
    """Whether the experts of a MoTE are equal, as upcycling leaves them; compressed ones count as different."""
    if config.compression is not None:
        return False
    files = MappedFiles(weights)
    first: dict[tuple[Any, str], str] = {}
    for key in files.stored:
        if ".feed_forward.experts." in key and not config.routes_by_task:
            stack = files[key]  # [E, …]
            if not torch.equal(stack, stack[:1].expand_as(stack)):
                return False
        name = weight_name(key, config)
        if name.expert is not None:
            other = first.setdefault((name.layer, name.dense), key)
            if other != key and not torch.equal(files[other], files[key]):
                return False
    return len(config.experts) > 1
