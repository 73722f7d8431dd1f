"""Trained models moved towards the model that they started from."""

import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from mote.checkpoints.reading import is_mote, open_checkpoint
from mote.checkpoints.tensors import weight_name

WEIGHTS = "model.safetensors"


def towards_start(trained: Path, out: Path, start: Path, weight: float, pattern: str = "") -> Path:
    """Copy a model, and interpolate its weights with those that it started from, as `training.start_weight` does.

    Args:
        trained: A dense model, or a MoTE, also one with experts made of others, such as their mean: each expert starts
            as a copy of the dense blocks.
        out: Folder for the result.
        start: The dense model that it was trained from.
        weight: Interpolation weight of the start, from 0 (as trained) to 1 (as the start). What the start lacks, such
            as an unused pooler, stays as trained.
        pattern: Regular expression that is found in the names of the weights to interpolate. Default: all.

    Returns:
        `out`.
    """
    config, initial = open_checkpoint(str(trained)).config, load_file(start / WEIGHTS)
    moved = {}
    for name, one in load_file(trained / WEIGHTS).items():
        of_start = initial.get(weight_name(name, config).dense if is_mote(config) else name)
        stays = of_start is None or re.search(pattern, name) is None
        moved[name] = one if stays else one.lerp(of_start.to(one), weight)
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.copytree(trained, unfinished, dirs_exist_ok=True)
    save_file(moved, unfinished / WEIGHTS, metadata={"format": "pt"})
    return unfinished.replace(out)
