"""Experts that take less memory: as low-rank differences from their mean, or in 8 bits."""

import logging

import torch

from mote.checkpoints.tensors import without_head
from mote.checkpoints.transform import Verb
from mote.experts.blocks import require_mergeable
from mote.experts.exporting import export
from mote.remote.compression_mote import CompressedConfig, CompressedModel, compress_block
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEModel
from mote.reporting import megabytes

logger = logging.getLogger(__name__)


@Verb("compress", "made by compressing the experts ({config.compression}) of")
def compress(model: MoTEModel, *, rank: int | None = None, bits: int | None = None) -> MoTEModel:
    """Compress the matrices of the experts: to low-rank differences from their mean, or to 8 bits.

    Args:
        model: A MoTE with all its experts; not modified.
        rank: Rank of the differences, from 1 to the full rank of the matrices, which is exact except for rounding.
        bits: 8, for integers with a scale for each row of a matrix.

    Returns:
        A new model, whose config holds the compression.
    """
    require_mergeable(model)
    for key, weight in (named for block in model.blocks for named in block.experts.named_parameters()):
        # Such a matrix has no decomposition and no scale; stacked ones are those of token-routed experts.
        if weight.dim() > 2 or not torch.isfinite(weight).all():
            raise ValueError(
                f"The experts cannot be compressed: {key} holds non-finite values, or is not a matrix or vector (the "
                "experts are token-routed)"
            )
    settings = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "auto_map")}
    config = CompressedConfig.from_dict({**settings, "expert_rank": rank, "expert_bits": bits})
    # Rebuilt from installed classes: the model's own classes may be remote code.
    compressed = MoTEModel(MoTEConfig.from_dict(settings), export(model, config.experts[0]))
    compressed.load_state_dict(without_head(model.state_dict()))
    compressed.cpu()  # in float64, which not every device supports
    for block in compressed.blocks:
        compress_block(block, rank)
    compressed.__class__ = CompressedModel  # differs only in the config once the experts are compressed
    config.backbone_config = compressed.backbone.config
    compressed.config = config
    before, after = expert_bytes(model), expert_bytes(compressed)
    logger.info("Experts as %s: %s → %s", compressed.config.compression, megabytes(before), megabytes(after))
    if after >= before:
        logger.warning("note: this saves no memory over uncompressed experts: choose a lower rank, or --bits 8")
    moved: CompressedModel = compressed.to(model.device)  # type: ignore[arg-type]
    return moved.train(model.training)


def expert_bytes(model: MoTEModel) -> int:
    """Count the bytes of all experts and, if they are stored as differences from their mean, of the mean."""
    attention = tuple(f"{path}." for path in model.config.architecture.shared_modules)
    weights = [weight for block in model.blocks for weight in block.experts.parameters()]
    for block in model.blocks:
        weights += [weight for path, weight in block.shared.named_parameters() if not path.startswith(attention)]
    return sum(weight.nbytes for weight in weights)
