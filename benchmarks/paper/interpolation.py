"""Trained models moved towards the model that they started from."""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

import mote
from mote.checkpoints.reading import is_mote, open_checkpoint
from mote.checkpoints.tensors import weight_name

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

WEIGHTS = "model.safetensors"


def towards_start(trained: Path, out: Path, start: Path, weight: float, unmoved: str | None = None) -> Path:
    """Copy a model, and interpolate its weights with those that it started from, as `training.start_weight` does.

    Args:
        trained: A dense model, or a MoTE, also one with experts made of others, such as their mean: each expert starts
            as a copy of the dense blocks.
        out: Folder for the result.
        start: The dense model that it was trained from.
        weight: Interpolation weight of the start, from 0 (as trained) to 1 (as the start). What the start lacks, such
            as an unused pooler, stays as trained.
        unmoved: Regular expression of names of weights that stay as trained, too.

    Returns:
        `out`.

    Raises:
        ValueError: If the start has none of the model's weights.
    """
    config, initial = open_checkpoint(str(trained)).config, load_file(start / WEIGHTS)
    weights, moved = load_file(trained / WEIGHTS), {}
    for name, one in weights.items():
        dense = weight_name(name, config).dense if is_mote(config) else name
        of_start = None if unmoved and re.search(unmoved, name) else initial.get(dense)
        moved[name] = one if of_start is None else one.lerp(of_start.to(one), weight)
    if not any(moved[name] is not one for name, one in weights.items()):
        raise ValueError(f"{start} has none of the weights of {trained}: it is not what this model was trained from")
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.copytree(trained, unfinished, dirs_exist_ok=True)
    save_file(moved, unfinished / WEIGHTS, metadata={"format": "pt"})
    return unfinished.replace(out)


def add_near_start(model: "MoTEModel", start: Path, expert: str, tasks: Iterable[str]) -> None:
    """Add the expert `near_start`: halfway between another expert and the blocks of the model that all started from.

    As `mote.experts.merge` with `open_dense(start)`, but for its rounding: stored scores are of models made here.

    Args:
        model: A MoTE; changed in place.
        start: The dense model that it was trained from.
        expert: The other expert.
        tasks: Tasks that the new expert serves.
    """
    mote.experts.add(model, "near_start", expert, tasks=tasks)
    _move_to_start(model, start, ["near_start"], 0.5)


def move_experts_to_start(model: "MoTEModel", start: Path, tasks: Iterable[str], weight: float) -> None:
    """Interpolate the experts of some tasks with the blocks of the model that all started from.

    Args:
        model: A MoTE; changed in place.
        start: The dense model that it was trained from.
        tasks: The tasks.
        weight: Interpolation weight of the start, from 0 (as trained) to 1 (as the start).
    """
    _move_to_start(model, start, {model.config.tasks[task] for task in tasks}, weight)


def move_experts(
    model: "MoTEModel", start: Path, weights: Mapping[str, tuple[float, float]], shared: float = 0.0
) -> None:
    """Move each of some experts by its own amounts: towards the mean of all experts and the start, or away from them.

    Args:
        model: A MoTE; changed in place.
        start: The dense model that it was trained from.
        weights: Expert → weights of the mean and of the start; the rest of 1 is the expert's own. Negative: away.
        shared: Interpolation weight of the start for all weights outside the experts.
    """
    initial = load_file(start / WEIGHTS)
    for key, one in model.state_dict().items() if shared else ():
        of = weight_name(key, model.config)
        if of.expert is None and of.dense in initial:
            one.lerp_(initial[of.dense].to(one), shared)
    trained = {expert: mote.experts.weights(model, expert) for expert in model.config.available_experts}
    means = {name: torch.stack([of[name] for of in trained.values()]).mean(0) for name in next(iter(trained.values()))}
    for expert, (of_mean, of_start) in weights.items():
        for name, one in trained[expert].items():  # the model's own tensors
            one.copy_((1 - of_mean - of_start) * one + of_mean * means[name] + of_start * initial[name].to(one))


def _move_to_start(model: "MoTEModel", start: Path, experts: Iterable[str], weight: float) -> None:
    initial = load_file(start / WEIGHTS)
    for expert in experts:
        for name, one in mote.experts.weights(model, expert).items():  # the model's own tensors
            one.lerp_(initial[name].to(one), weight)
