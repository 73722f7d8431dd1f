"""Experts that take less memory: as low-rank differences from their mean, or in 8 bits."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from compression_mote import decompressed_weights as whole_weights
from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote.checkpoints.reading import load_mote
from mote.experts.merging import open_to_change, require_mergeable, write_mote
from mote.upcycling import megabytes

Report = Callable[[str], None]


def compress_experts(model: MoTEModel, *, rank: int | None = None, bits: int | None = None) -> MoTEModel:
    """Compress the matrices of the experts: as low-rank differences from their mean, or in 8 bits.

    Args:
        model: A MoTE with all its experts. It stays as it is.
        rank: Of the differences, from 1 to the full rank of the matrices, at which nothing is lost but rounding.
        bits: 8, for whole numbers with a scale for each row of a matrix.

    Returns:
        A new model, whose config says how it is compressed.

    Raises:
        ValueError: If not one of `rank` and `bits` is given, or it is out of range; if experts were not loaded, are
            compressed already, hold what is no number, or a router picks them token by token.
    """
    if not hasattr(model.config, "compression"):
        raise ValueError(
            "This model runs code of an earlier version, which it was saved with: load it with "
            "mote.MoTEModel.from_pretrained, or compress its folder with `mote compress`"
        )
    require_mergeable(model.config, "compressed")
    if (rank is None) == (bits is None):
        raise ValueError("Pass either rank, as in rank=16, or bits=8")
    _require_numbers(model)
    compressed = copy.deepcopy(model).cpu()  # in float64, which not every device has
    for block in compressed.blocks:
        block.compress(rank, bits)
    compressed.config.expert_rank, compressed.config.expert_bits = rank, bits
    compressed.config.validate_names()
    return compressed.to(model.device).train(model.training)  # type: ignore[arg-type]


def compress(
    src: str,
    out: str | Path,
    *,
    rank: int | None = None,
    bits: int | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE with compressed experts, which loads wherever a MoTE loads.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write.
        rank: As in `compress_experts`.
        bits: As in `compress_experts`.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a model that was made of one.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, or as `compress_experts`.
    """
    source, out = open_to_change(src, Path(out), revision, overwrite, "compressed")
    model = load_mote(source)
    compressed = compress_experts(model, rank=rank, bits=bits)
    compression = compressed.config.compression
    before, after = expert_bytes(model), expert_bytes(compressed)
    report(f"Experts as {compression}: {megabytes(before)} → {megabytes(after)} ({after / before:.0%})")
    report(f"Relative error of their matrices: {relative_error(model, compressed):.2e}")
    if after >= before:
        report(f"note: this takes no less memory than whole experts; {_ranks_that_save(model)}")
    arguments = {"rank": rank} if rank is not None else {"bits": bits}
    made = f"made by compressing the experts ({compression}) of"
    write_mote(compressed, source, out, "compress", arguments, made, max_shard_size, overwrite)
    report(f"Wrote {out}")
    return out


def expert_bytes(model: MoTEModel) -> int:
    """Count the bytes of all experts and, where they are differences from it, of their mean."""
    attention = tuple(f"{path}." for path in model.architecture.shared_modules)
    weights = [weight for block in model.blocks for weight in block.experts.parameters()]
    for block in model.blocks:
        weights += [weight for path, weight in block.shared.named_parameters() if not path.startswith(attention)]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def relative_error(whole: MoTEModel, compressed: MoTEModel) -> float:
    """Compare the matrices of compressed experts with the whole ones: Frobenius norm of the difference, relative."""
    lost = in_all = 0.0
    for expert in compressed.config.experts:
        before, after = whole.state_dict(), whole_weights(compressed, expert)
        for path in (path for path in after if f".experts.{expert}." in path and after[path].dim() == 2):
            lost += float((after[path].double() - before[path].double()).square().sum())
            in_all += float(before[path].double().square().sum())
    return (lost / in_all) ** 0.5


def _require_numbers(model: MoTEModel) -> None:
    """Raise `ValueError` where a weight is infinite or not a number: there is no decomposition, and no scale."""
    for block in model.blocks:
        for key, weight in block.experts.named_parameters():
            if not torch.isfinite(weight).all():
                raise ValueError(
                    f"The experts cannot be compressed: {key} holds infinite values, or such as are not numbers. Was "
                    "the model's training broken off by them?"
                )


def _ranks_that_save(model: MoTEModel) -> str:
    config: MoTEConfig = model.config
    count = len(config.experts)
    experts = [block.experts[config.experts[0]] for block in model.blocks]
    shapes = [linear.weight.shape for expert in experts for linear in expert.modules() if isinstance(linear, nn.Linear)]
    whole, by_rank = sum(rows * columns for rows, columns in shapes), sum(map(sum, shapes))
    largest = ((count - 1) * whole - 1) // (count * by_rank)  # whole + count * rank * by_rank < count * whole
    return f"ranks up to {largest} do" if largest > 0 else "with so few experts, no rank does"
