"""How much the weights of each expert changed in training, layer by layer."""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np
import torch

from mote.analysis.measures import Array
from mote.checkpoints.models import load_dense, load_mote
from mote.checkpoints.reading import Checkpoint, open_checkpoint
from mote.checkpoints.tensors import weight_name
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEModel

DENSE = "feed-forward"  # stands for the experts in a dense model

Weights = dict[tuple[str, int | None], list[torch.Tensor]]  # (expert, or "" if shared; layer) → weights


@dataclass(frozen=True)
class WeightChange:
    """Relative changes of weights: the Frobenius norm of each change, relative to that of the start's weights."""

    start: str  # name of the model that they are compared with
    # Expert → its change in each layer, without the attention; None in a layer without experts. A dense model has one
    # "expert", the `DENSE` part of each layer.
    experts: dict[str, list[float | None]]
    shared: list[float | None]  # of each layer: the attention, or the whole of a layer without experts
    outside: float  # of the layers, such as token embeddings
    overall: dict[str, float | None]  # expert → its change over all layers
    # Pair of experts, as in "one / other" → cosine between their changes over all layers; None if one did not change.
    cosines: dict[str, float | None]


def weight_change_of(model: str, start: str) -> WeightChange:
    """Measure how much the weights of a model, a folder or Hub id, changed since its start.

    A dense start stands for the MoTE upcycled from it. Another layout or compressed experts are a `ValueError`.
    """
    checkpoint, source = open_checkpoint(model), open_checkpoint(start)
    trained = _load(checkpoint)
    initial = _load(source, trained)
    _refuse_mismatch(trained, initial, checkpoint.public_name, source.public_name)
    pooling = source.format == "mote"  # a dense start has none: that of `initial` is random
    return _compare(_weights(trained, pooling), _weights(initial, pooling), source.public_name, trained.config)


def _load(source: Checkpoint, like: MoTEModel | None = None) -> MoTEModel:
    """Load a MoTE; or upcycle a dense source in memory, to the layout of another MoTE or with a single expert."""
    if source.format == "mote":
        if source.config.compression is not None:
            raise ValueError(
                f"The experts of {source.name} are compressed ({source.config.compression}): their weights cannot be "
                "compared. Use the model before compression"
            )
        if like is None or like.config.backbone_config.model_type != source.config.model_type:
            return load_mote(source)
    dense, _ = load_dense(source, torch.float32)
    if like is None:
        return MoTEModel(MoTEConfig(backbone_config=dense.config, experts=[DENSE]), dense)
    config: Any = copy.deepcopy(like.config)
    if config.backbone_config.model_type == dense.config.model_type:
        config.mote_layers = config.mote_layer_indices
    config.backbone_config = dense.config
    return type(like)(config, dense)


def _refuse_mismatch(trained: MoTEModel, initial: MoTEModel, model: str, start: str) -> None:
    shapes = [{key: tuple(weight.shape) for key, weight in found.state_dict().items()} for found in (trained, initial)]
    wrong = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
    if wrong:
        of_model, of_start = (found.get(wrong[0], "missing") for found in shapes)
        raise ValueError(
            f"{start} is not the start of {model}: {len(wrong)} weights differ in name or shape, such as {wrong[0]} "
            f"({of_model}, in the start {of_start}). Expected the dense model that it was upcycled from, or the MoTE "
            "before training"
        )


def _weights(model: MoTEModel, pooling: bool = True) -> Weights:
    """Group the weights by expert and layer (None outside of the layers), with or without a pooling by attention."""
    weights: Weights = {}
    for key, weight in model.state_dict().items():
        if key.startswith("pooling.") and not pooling:
            continue
        for expert, layer, part in _parts(model.config, key, weight):
            weights.setdefault((expert, layer), []).append(part)
    return weights


def _parts(config: MoTEConfig, key: str, weight: torch.Tensor) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    expert, layer, dense = weight_name(key, config)
    found = re.match(rf"{re.escape(config.architecture.layer_path)}\.(\d+)\.(.+)", dense)
    if expert is not None or found is None:
        yield expert or "", layer, weight
    elif config.routes_by_task:
        yield "", int(found[1]), weight
    elif found[2].startswith("feed_forward.experts."):  # stacked, in a token-routed model
        for number, of_expert in enumerate(weight, start=1):
            yield f"expert {number}", int(found[1]), of_expert
    elif not found[2].startswith("feed_forward.router."):  # which a dense start does not have
        yield "", int(found[1]), weight


def _compare(trained: Weights, initial: Weights, start: str, config: MoTEConfig) -> WeightChange:
    """Compare in float64, one layer at a time, so that no large model is held in float64.

    Norms and cosines follow from inner products, which add up over layers.
    """
    layers = range(config.num_hidden_layers)
    parts = ["", *dict.fromkeys(expert for expert, _ in trained if expert)]
    products = np.zeros((len(layers), len(parts), len(parts)))  # of the changes
    squares = np.zeros((len(layers), len(parts)))  # squared norms of the start
    for layer in layers:
        changes = {}
        for index, part in enumerate(parts):
            if (part, layer) in trained:
                changes[index], squares[layer, index] = _change(trained[part, layer], initial[part, layer])
        for (i, one), (j, other) in combinations_with_replacement(changes.items(), 2):
            if i == j or i > 0:  # the shared weights have no counterpart
                products[layer, i, j] = one @ other
    outside, square = _change(trained["", None], initial["", None])
    (_, *overall), total = _relative(products.sum(axis=0), squares.sum(axis=0)), products.sum(axis=0)
    shared, *experts = zip(*map(_relative, products, squares), strict=True)
    pairs = combinations(range(1, len(parts)), 2)
    return WeightChange(
        start=start,
        experts={part: list(of_layers) for part, of_layers in zip(parts[1:], experts, strict=True)},
        shared=list(shared),
        outside=math.sqrt(float(outside @ outside) / square),
        overall=dict(zip(parts[1:], overall, strict=True)),
        cosines={f"{parts[i]} / {parts[j]}": _cosine(total[i, j], total[i, i] * total[j, j]) for i, j in pairs},
    )


def _change(trained: list[torch.Tensor], initial: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the difference as a vector, and the squared norm of the start."""
    after, before = (
        torch.cat([part.detach().to("cpu", torch.float64).flatten() for part in parts]) for parts in (trained, initial)
    )
    return after - before, float(before @ before)


def _relative(products: Array, squares: Array) -> list[float | None]:
    """Relative norm of each part's change; None where there is no such part."""
    return [
        math.sqrt(product / square) if square else None
        for product, square in zip(np.diag(products), squares, strict=True)
    ]


def _cosine(product: float, squares: float) -> float | None:
    return float(product / math.sqrt(squares)) if squares else None
