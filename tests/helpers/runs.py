"""Small training runs."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mote.checkpoints.provenance import read_steps


def overrides(source: Path, data: Path, out: Path, *more: str) -> list[str]:
    """A small run: two steps of 16 rows unless `more` says otherwise."""
    return [
        f"model.source={source}",
        f"data.folder={data}",
        f"output={out}",
        "data.limit=40",
        "training.batch_size=16",
        "training.mini_batch_size=8",
        "training.max_steps=2",
        "training.learning_rate=1e-3",
        "training.warmup_steps=0",
        "training.save_steps=1",
        "validation.share=0.1",
        "validation.limit=8",
        "training.eval_steps=null",
        *more,
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def train_step(folder: Path) -> dict[str, Any]:
    """The record of the run that trained a model."""
    step = read_steps(folder)[-1]
    assert step["step"] == "train"
    return step
