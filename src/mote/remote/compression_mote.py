"""Experts that take less memory: as low-rank differences from their mean, or in 8 bits.

The matrices of the experts are compressed, the weights of their `nn.Linear`s; norms and biases are unchanged. Building
a model from a `CompressedConfig` compresses the weights that it is built with. On the device `meta`, where
`from_pretrained` builds, that costs nothing.

This file is only copied into saved models whose `auto_map` names it.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from .configuration_mote import MoTEConfig
from .modeling_mote import MoTEBlock, MoTEModel, SharedModule


class CompressedConfig(MoTEConfig):
    """Configuration of a [`CompressedModel`]: that of a MoTE, and one of two settings.

    Args:
        expert_rank: Rank of the experts' differences from their mean.
        expert_bits: 8: the experts' matrices are stored as 8-bit integers.
    """

    model_type = "mote_compressed"
    has_no_defaults_at_init: ClassVar[bool] = True  # to print a config, the library would build one without settings

    expert_rank: int | None = None
    expert_bits: int | None = None

    @property
    def compression(self) -> str | None:  # type: ignore[override]
        """How the experts are compressed, in words."""
        return (
            "8-bit integers" if self.expert_rank is None else f"differences of rank {self.expert_rank} from their mean"
        )

    def validate(self) -> None:
        """Check the settings; raise `ValueError` on the first invalid one."""
        super().validate()
        if (self.expert_rank, self.expert_bits).count(None) != 1 or self.expert_bits not in (None, 8):
            raise ValueError(
                f"Set either expert_rank or expert_bits=8, got expert_rank={self.expert_rank} and "
                f"expert_bits={self.expert_bits}"
            )


class LowRankLinear(nn.Module):
    """W x + b with W = M + U V, where M is shared by all experts of the block, and U and V belong to one expert.

    U V is the truncated singular value decomposition of W - M, the nearest matrix of that rank (Eckart-Young).
    Each factor takes the square roots of the singular values, so that both can be trained further. The rank is capped
    at the full rank of the matrix.
    """

    def __init__(self, linear: nn.Linear, mean: SharedModule, rank: int) -> None:
        super().__init__()
        self.mean = mean
        difference = linear.weight.double() - mean.module.weight.double()
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        root = s[:rank].sqrt()
        self.down = _linear((root[:, None] * v[:rank]).to(linear.weight.dtype))
        self.up = _linear((u[:, :rank] * root).to(linear.weight.dtype), linear.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        return self.mean(hidden_states) + self.up(self.down(hidden_states))

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the `nn.Linear` with the merged matrix M + U V."""
        mean = self.mean.module.weight
        return _linear((mean.double() + self.up.weight.double() @ self.down.weight.double()).to(mean), self.up.bias)


class Int8Linear(nn.Module):
    """W x + b with W stored as integers from -127 to 127, and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        largest = linear.weight.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / 127, 1.0).to(largest)
        steps = (linear.weight.float() / scale[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(steps.to(torch.int8), requires_grad=False)  # `.half()` and the like skip integers
        self.scale = nn.Parameter(scale)
        self.bias = linear.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        if self.training and self.scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "8-bit experts cannot be trained: their weights are integers. Train the model as it was before "
                "`mote compress`, and compress the result; or, to train other parts (an adapter, say), freeze the "
                "experts with requires_grad_(False)"
            )
        return F.linear(hidden_states, self.weight * self.scale[:, None], self.bias)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the dequantized `nn.Linear`."""
        return _linear(self.weight * self.scale[:, None], self.bias)


class CompressedModel(MoTEModel):
    """A `MoTEModel` whose experts are compressed."""

    config: CompressedConfig
    config_class = CompressedConfig

    def __init__(self, config: CompressedConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config, backbone)
        for block in self.blocks:
            compress_block(block, config.expert_rank)


@torch.no_grad()
def compress_block(block: MoTEBlock, rank: int | None) -> None:
    """Compress the experts of a block in place, as differences of this rank from their mean or, without one, in 8 bits.

    A rank that is higher than the matrices' full rank is a `ValueError`.
    """
    experts = list(block.experts.values())
    matrices = {path: module for path, module in experts[0].named_modules() if isinstance(module, nn.Linear)}
    full = max((min(linear.weight.shape) for linear in matrices.values()), default=0)
    if rank is not None and not 1 <= rank <= full:
        raise ValueError(f"expert_rank must be from 1 to {full}, the full rank of the experts' matrices, got {rank}")
    for path in matrices:
        linears: list[Any] = [expert.get_submodule(path) for expert in experts]
        if rank is not None:
            mean = torch.stack([linear.weight.double() for linear in linears]).mean(dim=0)
            shared = block.share(path, _linear(mean.to(linears[0].weight.dtype)))
        for expert, linear in zip(experts, linears, strict=True):
            expert.set_submodule(path, Int8Linear(linear) if rank is None else LowRankLinear(linear, shared, rank))


def _linear(weight: torch.Tensor, bias: nn.Parameter | None = None) -> nn.Linear:
    """Make an `nn.Linear` from its weights, without initialising random ones first."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous())
    linear.bias = bias  # type: ignore[assignment]
    return linear


CompressedConfig.register_for_auto_class()
CompressedModel.register_for_auto_class("AutoModel")
