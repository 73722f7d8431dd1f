"""Experts averaged into one dense model, interpolated towards their mean, or merged; and MoTEs averaged."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from mote.checkpoints.models import load_mote
from mote.checkpoints.reading import MoTECheckpoint, has_head
from mote.checkpoints.transform import Verb
from mote.experts import editing
from mote.experts.artefact import ExpertArtefact
from mote.experts.blocks import mean, mean_of_experts, require_editable, require_mergeable, weights_by_expert
from mote.experts.exporting import native_model
from mote.remote.configuration_mote import require_known
from mote.remote.modeling_mote import MoTEModel


@Verb("average", "the mean of the experts of", positional=("others",), of_several="made by averaging {others} and")
def average(model: MoTEModel, others: Sequence[MoTECheckpoint] = ()) -> PreTrainedModel:
    """Average the experts into a dense native model (Expert Averaging, EA in the paper), or several MoTEs into one.

    Experts that are token-routed themselves are averaged into a token-routed model. Several MoTEs are averaged weight
    by weight (a model soup, arXiv:2203.05482): they must have been trained from one start.

    Args:
        model: A MoTE with all its experts; not modified.
        others: MoTEs (from `open_mote`; on the command line folders or ids on the Hub) with the same experts.

    Returns:
        A model of the backbone's architecture, without a pooler, in which blocks without experts are copied; with
        others, a MoTE.
    """
    require_mergeable(model)
    if others:
        return _mean_of_models(model, others)
    experts = weights_by_expert(model.config, model.state_dict())
    shared = {name: weight.clone() for name, weight in experts.pop(None).items()}
    return native_model(model, shared | mean_of_experts([*experts.values()]), list(model.config.experts))


@Verb("interpolate", "made by moving the experts towards their mean, of")
def interpolate(model: MoTEModel, weight: float | Mapping[str, float]) -> MoTEModel:
    """Interpolate linearly between each expert and the mean of all experts.

    Args:
        model: A MoTE with all its experts; not modified.
        weight: Interpolation weight of the mean, from 0 (the expert, bit for bit) to 1 (the mean, as in `average`):
            one for all experts, or by name; experts that are not named stay unchanged.

    Returns:
        A new model.
    """
    require_mergeable(model)
    shares = weight if isinstance(weight, Mapping) else dict.fromkeys(model.config.experts, weight)
    for name, share in shares.items():
        require_known(name, model.config.experts, "expert")
        _require_weight(0 <= share <= 1, name, share, "a number from 0 (unchanged) to 1 (the mean)")
    interpolated = copy.deepcopy(model)
    parts = weights_by_expert(model.config, interpolated.state_dict())  # a state dict holds the model's own tensors
    experts = {name: parts[name] for name in model.config.experts}
    for key in experts[model.config.experts[0]]:
        center = mean([weights[key] for weights in experts.values()])
        for name, weights in experts.items():
            weights[key].copy_(torch.lerp(weights[key].to(center), center, shares.get(name, 0)))
    return interpolated


@Verb("experts merge", "made by merging {experts} into the expert `{name}`, of", positional=("experts",))
def merge(
    model: MoTEModel,
    experts: Mapping[str | ExpertArtefact, float],
    name: str,
    *,
    instruction: str | Mapping[str, str] | None = None,
    tasks: str | Iterable[str] = (),
) -> None:
    """Add an expert that is the weighted mean of others.

    Args:
        model: A MoTE in memory; changed in place.
        experts: Expert, or an extracted one (from `open_expert`) → its weight in the mean, above 0. Weights are scaled
            to sum to 1. On the command line, EXPERT=WEIGHT, or EXPERT for a weight of 1.
        name: Name of the new expert.
        instruction: Text in front of the new expert's inputs, as in `add`.
        tasks: Additional tasks of the new expert, as in `add`.
    """
    require_editable(model, uncompressed=True)
    for expert, weight in experts.items():
        _require_weight(0 < weight < math.inf, expert, weight, "a number above 0")
    parts = [editing.weights_of(model, one) for one in experts]
    merged = mean_of_experts(parts, list(experts.values()))
    editing.add(model, name, merged, instruction=instruction, tasks=tasks)


def _mean_of_models(model: MoTEModel, others: Sequence[MoTECheckpoint]) -> MoTEModel:
    soup = copy.deepcopy(model)
    states = [soup.state_dict()]
    for other in others:
        states.append(load_mote(other, with_head=has_head(model.config)).state_dict())
        shapes, theirs = ({(name, one.shape) for name, one in state.items()} for state in (states[0], states[-1]))
        if different := sorted(name for name, _ in shapes ^ theirs):
            raise ValueError(f"{other.name} is not a MoTE of the same shape and experts: {different[0]} differs")
    soup.load_state_dict(mean_of_experts(states))
    return soup


def _require_weight(valid: bool, expert: str | ExpertArtefact, weight: float, expected: str) -> None:
    if not valid:
        name = expert if isinstance(expert, str) else expert.public_name
        raise ValueError(f"The weight of {name!r} is {weight}: expected {expected}")
