"""Batches of several tasks in one pass: all rows go through the shared attention together.

By default, such a batch takes a pass for each expert (`mixed_batch_mote.py`). Here its rows are sorted by expert, and
each block runs one native layer in which stand-ins for the experts' own submodules apply every expert to its rows. That
saves the start of the other passes, which is most of the time of short rows.
"""

import copy
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mote.remote.mixed_batch_mote import PADDING_PER_GROUP, Group, groups_of, positions, split

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEBlock, MoTEModel

# Costs that fit what docs/performance.md lists; on other devices the second is not measured.
ANOTHER_EXPERT = 0.5  # cost of one more expert in a pass, in passes
SHARED_TOKEN = defaultdict(lambda: 1.0, cpu=1.15)  # cost of a token in a pass of several experts, in tokens
_running = threading.local()  # `.parts` of the layer that the thread runs


class OnePass:
    """Groups the rows of batches as `groups_of` does, but with several experts in a group where that costs less.

    Gradients, training mode, and experts that are offloaded, compiled or hooked keep the passes for each expert.
    """

    def __init__(self, model: "MoTEModel") -> None:
        self.model = model
        self.layers: dict[MoTEBlock, tuple[nn.Module, nn.Module]] = {}  # block → its first expert, layer made of that

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the layers, as the blocks of a copied model are others."""
        return {"model": self.model, "layers": {}}

    def __call__(self, experts: list[str], lengths: list[int], device: torch.device) -> list[Group]:
        """Group rows with these experts and lengths, [B]."""
        apart, model = groups_of(experts, lengths, device), self.model
        layers = [layer for block in model.blocks for layer in block.experts.values()]
        # Gradient caching runs a training model without gradients first, and again with them: both must be equal.
        unusual = torch.is_grad_enabled() or model.training or model.offloading is not None
        unusual |= any(
            layer._compiled_call_impl or layer._forward_hooks or layer._forward_pre_hooks for layer in layers
        )
        if unusual or (model.graphs is not None and model.graphs.bucket(len(experts), max(lengths))):
            return apart
        parts = split([*range(len(experts))], lengths, PADDING_PER_GROUP[device.type])
        together = [self._group(part, experts, lengths, device) for part in parts]
        return min(apart, together, key=lambda groups: sum(cost(group, device.type) for group in groups))

    def _group(self, rows: list[int], experts: list[str], lengths: list[int], device: torch.device) -> Group:
        rows = sorted(rows, key=lambda row: experts.index(experts[row]))
        parts: list[tuple[str, slice]] = []
        for at, row in enumerate(rows):
            start = parts.pop()[1].start if parts and parts[-1][0] == experts[row] else at
            parts.append((experts[row], slice(start, at + 1)))
        expert: Any = Parts(self, parts) if len(parts) > 1 else parts[0][0]
        return Group(expert, positions(rows, device), max(lengths[row] for row in rows))

    def layer_of(self, block: "MoTEBlock") -> nn.Module:
        """Return the layer of a block in which all experts act."""
        first, layer = self.layers.get(block, (None, None))
        if layer is None or first is not next(iter(block.experts.values())):
            first = next(iter(block.experts.values()))
            layer = _without_experts(first, block, self.model._shared_modules(first))
            self.layers[block] = first, layer
        return layer


class Parts(NamedTuple):
    """What blocks get in place of an expert's name: the experts of a pass, and the rows of each, in order."""

    one_pass: OnePass
    parts: list[tuple[str, slice]]

    def layer_of(self, block: "MoTEBlock") -> Any:
        """Return a function that runs the block with these experts."""
        layer = self.one_pass.layer_of(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            _running.parts = self.parts
            try:
                return layer(*args, **kwargs)
            finally:
                del _running.parts

        return run


def cost(group: Group, device: str) -> float:
    """Estimate the cost of a pass on a kind of device, in tokens."""
    others = len(group.expert.parts) - 1 if isinstance(group.expert, Parts) else 0
    rows = group.rows.stop - group.rows.start if isinstance(group.rows, slice) else len(group.rows)
    tokens = rows * group.length * (SHARED_TOKEN[device] if others else 1)
    return PADDING_PER_GROUP[device] * (1 + ANOTHER_EXPERT * others) + tokens


class EachExpert:
    """Stands in a layer for a submodule that every expert has: applies each expert's to the rows of that expert."""

    def __init__(self, block: "MoTEBlock", path: str) -> None:
        self.block, self.path = block, path.split(".")

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[B, L, …] → [B, L, …], also with other arguments of B rows."""
        outputs = []
        for name, rows in _running.parts:
            part = Group(name, rows, 0)
            module: Any = self.block.experts[name]
            for child in self.path:
                module = module._modules[child]
            others = {key: part.select(value, len(hidden)) for key, value in kwargs.items()}
            outputs.append(module(hidden[rows], *(part.select(value, len(hidden)) for value in args), **others))
        return torch.cat(outputs)


def _without_experts(module: Any, block: "MoTEBlock", shared: tuple[str, ...], prefix: str = "") -> nn.Module:
    """Copy a layer, sharing its state, with stand-ins for the largest submodules that hold nothing shared."""
    if {*module._parameters, *module._buffers} or "forward" in vars(module):
        raise ValueError("has weights, or a forward of its own, beside its submodules")
    layer = copy.copy(module)
    layer._modules = {}
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if any(other.startswith(f"{path}.") for other in shared):
            layer._modules[name] = _without_experts(child, block, shared, f"{path}.")
        elif next(child.parameters(), None) is None and next(child.buffers(), None) is None:  # an activation, dropout
            layer._modules[name] = child
        else:
            vars(layer)[name] = EachExpert(block, path)
    return layer
