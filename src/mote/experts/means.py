"""Means of weights, in float64, so that the mean of equal float32 weights is exactly these weights."""

from collections.abc import Mapping, Sequence

import torch


def mean(weights: Sequence[torch.Tensor], shares: Sequence[float] | None = None) -> torch.Tensor:
    """Average tensors of one shape, with shares that are scaled to sum to 1; the result is in float64 on the CPU."""
    stacked = torch.stack([weight.to("cpu", torch.float64) for weight in weights])
    if shares is None or len(set(shares)) == 1:
        return stacked.mean(dim=0)
    return torch.tensordot(torch.tensor(shares, dtype=torch.float64) / sum(shares), stacked, dims=1)


def mean_of_experts(
    experts: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float] | None = None
) -> dict[str, torch.Tensor]:
    """Average the weights of several experts, in the dtype of the first; see `mean`."""
    return {key: mean([expert[key] for expert in experts], shares).to(first) for key, first in experts[0].items()}
