"""The experts of a block."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEBlock


def set_experts(block: "MoTEBlock", experts: Mapping[str, nn.Module]) -> None:
    """Give a block its experts in a new dict, so that threads that iterate over the old one are not disturbed."""
    new = nn.ModuleDict(experts)
    new.training = block.training
    block.experts = new
