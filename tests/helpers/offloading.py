"""Models with experts that are not in use on the CPU or on disk."""

from pathlib import Path
from typing import Any

import torch
from helpers.families import batch, trained_mote

import mote
from mote.remote.modeling_mote import MoTEModel

FOUR = ["a", "b", "c", "d"]


def saved(folder: Path, name: str = "bert", shards: bool = False, **settings: Any) -> MoTEModel:
    """A model of four different experts, as it is in memory, and in a folder."""
    model = trained_mote(name, experts=FOUR, **settings)
    model.save_pretrained(folder, max_shard_size="5KB" if shards else "5GB")
    return model


def offloaded(folder: Path, to: str = "disk", keep: int = 1, **kwargs: Any) -> MoTEModel:
    return mote.load(folder, offload=to, keep=keep, **kwargs)


def outputs(model: MoTEModel, tasks: list[Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**batch(), task=task).pooler_output for task in tasks]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def experts_in(model: MoTEModel) -> int:
    """How many experts' worth of weights the model's blocks hold."""
    one = max(mote.experts.parameter_counts(model)["experts"].values()) // len(model.blocks)
    return max(sum(p.numel() for p in block.experts.parameters()) for block in model.blocks) // one
