"""Experts within a model: the modules of its blocks, and their weights under the names of the dense model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from mote.checkpoints.tensors import weight_name, without_head

if TYPE_CHECKING:
    from mote.remote.configuration_mote import MoTEConfig
    from mote.remote.modeling_mote import MoTEBlock


def set_experts(block: "MoTEBlock", experts: Mapping[str, nn.Module]) -> None:
    """Give a block its experts in a new dict, so that threads that iterate over the old one are not disturbed."""
    new = nn.ModuleDict(experts)
    new.training = block.training
    block.experts = new


def weights_by_expert(
    config: "MoTEConfig", state: Mapping[str, torch.Tensor]
) -> dict[str | None, dict[str, torch.Tensor]]:
    """Group the weights of a state dict by expert, under their names in the dense model; None: those that are shared.

    Those of a head for masked language modelling are left out.
    """
    found: dict[str | None, dict[str, torch.Tensor]] = {None: {}}
    for key, weight in without_head(state).items():
        name = weight_name(key, config)
        found.setdefault(name.expert, {})[name.dense] = weight
    return found


def mean(weights: Sequence[torch.Tensor], shares: Sequence[float] | None = None) -> torch.Tensor:
    """Average tensors of one shape, with shares that are scaled to sum to 1.

    The result is in float64 on the CPU, so that the mean of equal float32 weights is exactly these weights.
    """
    stacked = torch.stack([weight.to("cpu", torch.float64) for weight in weights])
    if shares is None or len(set(shares)) == 1:
        return stacked.mean(dim=0)
    return torch.tensordot(torch.tensor(shares, dtype=torch.float64) / sum(shares), stacked, dims=1)


def mean_of_experts(
    experts: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float] | None = None
) -> dict[str, torch.Tensor]:
    """Average the weights of several experts, in the dtype of the first; see `mean`."""
    return {key: mean([expert[key] for expert in experts], shares).to(first) for key, first in experts[0].items()}
