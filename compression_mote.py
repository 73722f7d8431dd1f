"""Experts that take less memory: as low-rank differences from their mean, or in 8 bits.

What is compressed are the matrices of the experts, the weights of their `nn.Linear`s; norms and biases stay as they
are. Building a model whose config asks for it compresses the weights that it is built with, and on the device `meta`,
where `from_pretrained` builds, that costs nothing.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch
alone.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class LowRankLinear(nn.Module):
    """W x + b with W = M + U V, where M belongs to all experts of the block, and U and V to one.

    U and V are the truncated singular value decomposition of W - M, which no other matrix of that rank is nearer to.
    Their singular values are shared out between both, so that they can be trained further.

    Args:
        linear: The whole one.
        mean: Stands for the module with M, [out, in]: a `SharedModule`.
        rank: Of U V. Where a side of the matrix is shorter, that.
    """

    def __init__(self, linear: nn.Linear, mean: Any, rank: int) -> None:
        """Decompose."""
        super().__init__()
        self.mean = mean
        difference = linear.weight.double() - _module_of(mean).weight.double()
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        root = s[:rank].sqrt()
        self.down = _linear((root[:, None] * v[:rank]).to(linear.weight.dtype))
        self.up = _linear((u[:, :rank] * root).to(linear.weight.dtype), linear.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        return self.mean(hidden_states) + self.up(self.down(hidden_states))

    @torch.no_grad()
    def whole(self) -> nn.Linear:
        """Multiply out."""
        mean = _module_of(self.mean).weight
        return _linear((mean.double() + self.up.weight.double() @ self.down.weight.double()).to(mean), self.up.bias)


class Int8Linear(nn.Module):
    """W x + b with W in whole numbers from -127 to 127, and a scale for each row.

    Args:
        linear: The whole one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Round."""
        super().__init__()
        largest = linear.weight.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / 127, 1.0).to(largest)
        steps = (linear.weight.float() / scale[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(steps.to(torch.int8), requires_grad=False)  # no change of type touches integers
        self.scale = nn.Parameter(scale)
        self.bias = linear.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[…, in] → […, out]."""
        if self.training and self.scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "8-bit experts cannot be trained: their weights are whole numbers. Train the model as it was before "
                "`mote compress`, and compress the result; or, to train other parts (an adapter, say), freeze the "
                "experts with requires_grad_(False)"
            )
        return F.linear(hidden_states, self.weight * self.scale[:, None], self.bias)

    @torch.no_grad()
    def whole(self) -> nn.Linear:
        """Multiply out."""
        return _linear(self.weight * self.scale[:, None], self.bias)


@torch.no_grad()
def compress_block(block: Any, rank: int | None, bits: int | None) -> None:
    """Compress the experts of a block in place.

    Args:
        block: A `MoTEBlock`.
        rank: Of the differences from the mean; None: 8 bits.
        bits: 8, or None.

    Raises:
        ValueError: If the rank is none that the matrices can have, or there are no matrices.
    """
    experts = list(block.experts.values())
    matrices = {path: module for path, module in experts[0].named_modules() if isinstance(module, nn.Linear)}
    if not matrices:
        raise ValueError("The experts have no nn.Linear: there is nothing that could be compressed")
    full = max(min(linear.weight.shape) for linear in matrices.values())
    if rank is not None and (not isinstance(rank, int) or not 1 <= rank <= full):
        raise ValueError(f"expert_rank must be from 1 to {full}, the full rank of the experts' matrices, not {rank!r}")
    for path in matrices:
        linears = [expert.get_submodule(path) for expert in experts]
        if rank is not None:
            mean = torch.stack([linear.weight.double() for linear in linears]).mean(dim=0)
            shared = block.share(path, _linear(mean.to(linears[0].weight.dtype)))
        for expert, linear in zip(experts, linears, strict=True):
            expert.set_submodule(path, Int8Linear(linear) if rank is None else LowRankLinear(linear, shared, rank))


def whole_weights(model: nn.Module, expert: str) -> dict[str, torch.Tensor]:
    """Take a model's state dict, with the matrices of one expert multiplied out where they are compressed."""
    weights = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, LowRankLinear | Int8Linear) and f".experts.{expert}." in path:
            whole = {f"{path}.{name}": weight for name, weight in module.whole().state_dict().items()}
            weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{path}.")} | whole
    return weights


def _module_of(shared: Any) -> Any:
    return shared.container._modules[shared.name]


def _linear(weight: torch.Tensor, bias: nn.Parameter | None = None) -> nn.Linear:
    """Make an `nn.Linear` of its weights, with no random numbers drawn before."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous())
    linear.bias = bias  # type: ignore[assignment]
    return linear
