"""Experts that take less memory: as low-rank differences from their mean, or in 8 bits."""

import copy
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from mote.experts.exporting import dequantized_state_dict
from mote.experts.merging import require_mergeable

if TYPE_CHECKING:
    from modeling_mote import MoTEModel

logger = logging.getLogger(__name__)


def compress(model: "MoTEModel", *, rank: int | None = None, bits: int | None = None) -> "MoTEModel":
    """Compress the matrices of the experts: to low-rank differences from their mean, or to 8 bits.

    Args:
        model: A MoTE with all its experts; not modified.
        rank: Rank of the differences, from 1 to the full rank of the matrices, which is exact but for rounding.
        bits: 8, for integers with a scale for each row of a matrix.

    Returns:
        A new model, whose config holds the compression.

    Raises:
        ValueError: Unless exactly one of `rank` and `bits` is given, and in range; if experts are not loaded,
            compressed already, token-routed, or have non-finite weights.
    """
    require_mergeable(model.config)
    if (rank is None) == (bits is None):
        raise ValueError("Pass either rank, as in rank=16, or bits=8")
    _require_finite(model)
    from compression_mote import CompressedConfig, CompressedModel, compress_block

    config = CompressedConfig(**{**model.config.to_dict(), "expert_rank": rank, "expert_bits": bits})
    compressed = copy.deepcopy(model).cpu()  # in float64, which not every device has
    for block in compressed.blocks:
        compress_block(block, rank)
    compressed.__class__ = CompressedModel  # which differs in the config alone once the experts are compressed
    config.backbone_config = compressed.backbone.config
    compressed.config = config
    before, after = expert_bytes(model), expert_bytes(compressed)
    logger.info(
        "Experts as %s: %.1f MB → %.1f MB (%.0f%%), relative error of their matrices %.2e",
        compressed.config.compression,
        before / 1e6,
        after / 1e6,
        100 * after / before,
        relative_error(model, compressed),
    )
    if after >= before:
        logger.warning("note: this takes no less memory than uncompressed experts; %s", _ranks_that_save(model))
    return compressed.to(model.device).train(model.training)  # type: ignore[arg-type]


def expert_bytes(model: "MoTEModel") -> int:
    """Count the bytes of all experts and, where they are differences from it, of their mean."""
    attention = tuple(f"{path}." for path in model.architecture.shared_modules)
    weights = [weight for block in model.blocks for weight in block.experts.parameters()]
    for block in model.blocks:
        weights += [weight for path, weight in block.shared.named_parameters() if not path.startswith(attention)]
    return sum(weight.nbytes for weight in weights)


def relative_error(model: "MoTEModel", compressed: "MoTEModel") -> float:
    """Compare the matrices of compressed experts with the original ones: relative Frobenius norm of the difference."""
    lost = total = 0.0
    before = model.state_dict()
    for expert in compressed.config.experts:
        after = dequantized_state_dict(compressed, expert)
        for path in (path for path in after if f".experts.{expert}." in path and after[path].dim() == 2):
            original = before[path].cpu().double()
            lost += float((after[path].cpu().double() - original).square().sum())
            total += float(original.square().sum())
    return (lost / total) ** 0.5 if total else 0.0


def _require_finite(model: "MoTEModel") -> None:
    """Raise `ValueError` if a weight is infinite or NaN: it has no decomposition and no scale."""
    for block in model.blocks:
        for key, weight in block.experts.named_parameters():
            if not torch.isfinite(weight).all():
                raise ValueError(f"The experts cannot be compressed: {key} holds non-finite values")


def _ranks_that_save(model: "MoTEModel") -> str:
    count = len(model.config.experts)
    experts = [block.experts[model.config.experts[0]] for block in model.blocks]
    shapes = [linear.weight.shape for expert in experts for linear in expert.modules() if isinstance(linear, nn.Linear)]
    full, by_rank = sum(rows * columns for rows, columns in shapes), sum(map(sum, shapes))
    largest = ((count - 1) * full - 1) // (count * by_rank)  # full + count * rank * by_rank < count * full
    return f"ranks up to {largest} do" if largest > 0 else "with so few experts, no rank does"
