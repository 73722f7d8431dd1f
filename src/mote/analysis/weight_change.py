"""How much the weights of each expert changed in training, layer by layer."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]

from mote.analysis.similarity import Pair
from mote.checkpoints.models import load_dense, load_mote
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import Checkpoint, open_checkpoint
from mote.checkpoints.tensors import weight_name
from mote.remote.architectures_mote import architecture_of
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEModel

DENSE = "feed-forward"  # stands for the experts in a dense model

Weights = dict[tuple[str, int | None], list[torch.Tensor]]  # (expert, or "" if shared; layer) → weights


@dataclass(frozen=True)
class WeightChange:
    """Relative change of a model's weights.

    Attributes:
        start: Name of the model that they are compared with.
        from_start: True if this is the start of training; False if it is the mean of the experts.
        experts: Expert → in each layer the Frobenius norm of the change of its weights, relative to that of the
            start's weights; None in a layer without experts. The layer's attention is not included. A dense model has
            one "expert", the `DENSE` part of each layer.
        shared: The same for the weights that all experts share: the attention, or the whole of a layer without
            experts. Empty if the start is unknown.
        outside: The same for weights outside of the layers, such as token embeddings. None if the start is unknown.
        overall: The same for each expert over all layers.
        cosines: Pair of experts → in each layer the cosine between their changes; None if one did not change.
        overall_cosines: The same over all layers.
    """

    start: str
    from_start: bool
    experts: dict[str, list[float | None]]
    shared: list[float | None]
    outside: float | None
    overall: dict[str, float | None]
    cosines: dict[Pair, list[float | None]]
    overall_cosines: dict[Pair, float | None]


def weight_change_of(model: str, start: str | None = None, revision: str | None = None) -> WeightChange:
    """Measure how much the weights of a model changed in training.

    Args:
        model: A MoTE or a dense model: a folder or Hub id.
        start: The model before training; a dense model stands for the MoTE upcycled from it. Default: the mean of the
            model's experts.
        revision: Branch, tag or commit of a start on the Hub.

    Raises:
        FileNotFoundError: If one of the two does not exist.
        ValueError: If the two differ in architecture or shapes, or if there is no start and the model has fewer than
            two experts.
    """
    checkpoint = open_checkpoint(model)
    trained = _load(checkpoint)
    if start is None:
        return _from_mean(trained)
    source = open_checkpoint(start, revision)
    begun = _load(source, trained)
    _refuse_mismatch(trained, begun, checkpoint.public_name, source.public_name)
    pooling = source.format == "mote"  # a dense start has none: that of `begun` is random
    weights = _weights(trained, pooling), _weights(begun, pooling)
    return _compare(*weights, source.public_name, True, trained.config)


def find_start(model: str) -> tuple[str, str | None]:
    """Find what a model was trained from in its folder's `recipe.yaml` or `mote.json`.

    Returns:
        A folder, or a Hub id; and the commit on the Hub, if it is recorded.
    """
    folder = open_checkpoint(model).folder
    source = _recorded_source(folder)
    recorded = _recorded_start(folder) or source.get("name")
    if recorded is None:
        raise ValueError("its folder does not record what it was trained from")
    if not Path(recorded).is_dir():
        if Path(recorded).is_absolute() or recorded.count("/") != 1:
            raise ValueError(f"it was trained from {Path(recorded).name}, which does not exist here")
        return recorded, source.get("revision") if source.get("name") == recorded else None
    weights = source.get("weights")
    if weights is not None and weights != open_checkpoint(recorded).sha256_of_weights():
        raise ValueError(f"it was trained from {Path(recorded).name}, and the folder of this name has other weights")
    return recorded, None


def _recorded_start(folder: Path) -> str | None:
    """Return the source in `recipe.yaml`."""
    recipe = folder / "recipe.yaml"
    if recipe.is_file():
        try:
            return str(yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["source"])
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise ValueError(f"its record of what it was trained from cannot be read ({error})") from error
    return None


def _recorded_source(folder: Path) -> dict[str, Any]:
    """Return the source in `mote.json` of the last step that made the model out of another; empty if there is none."""
    steps = ("upcycle", "train", "pretrain")
    started = [step for step in read_steps(folder) if step["step"] in steps and step["sources"]]
    return started[-1]["sources"][0] if started else {}


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


def _refuse_mismatch(trained: MoTEModel, begun: MoTEModel, model: str, start: str) -> None:
    shapes = [{key: tuple(weight.shape) for key, weight in found.state_dict().items()} for found in (trained, begun)]
    wrong = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
    if wrong:
        of_model, of_start = (found.get(wrong[0], "missing") for found in shapes)
        raise ValueError(
            f"{start} is not the start of {model}: {len(wrong)} weights differ in name or shape, such as {wrong[0]} "
            f"({of_model}, in the start {of_start}). Expected the dense model that it was upcycled from, or the MoTE "
            "before training"
        )


def _weights(model: MoTEModel, pooling: bool = True) -> Weights:
    """Group the weights by expert and layer; for weights outside of the layers, the layer is None.

    Args:
        model: The model.
        pooling: Whether those of a pooling by attention are included.
    """
    weights: Weights = {}
    for key, weight in model.state_dict().items():
        if key.startswith("pooling.") and not pooling:
            continue
        for expert, layer, part in _parts(model.config, key, weight):
            weights.setdefault((expert, layer), []).append(part)
    return weights


def _parts(config: MoTEConfig, key: str, weight: torch.Tensor) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    expert, layer, dense = weight_name(key, config)
    found = re.match(rf"{re.escape(architecture_of(config).layer_path)}\.(\d+)\.(.+)", dense)
    if expert is not None or found is None:
        yield expert or "", layer, weight
    elif config.routes_by_task:
        yield "", int(found[1]), weight
    elif found[2].startswith("feed_forward.experts."):  # stacked, in a token-routed model
        for number, of_expert in enumerate(weight, start=1):
            yield f"expert {number}", int(found[1]), of_expert
    elif not found[2].startswith("feed_forward.router."):  # which a dense start does not have
        yield "", int(found[1]), weight


def _compare(trained: Weights, begun: Weights, start: str, from_start: bool, config: MoTEConfig) -> WeightChange:
    layers = range(config.num_hidden_layers)
    by_layer = [_products(trained, begun, layer) for layer in layers]
    in_all = _Products(defaultdict(float), defaultdict(float))
    for products in by_layer:
        for both, product in products.changes.items():
            in_all.changes[both] += product
        for expert, product in products.start.items():
            in_all.start[expert] += product
    experts = list(dict.fromkeys(expert for expert, _ in trained if expert))
    pairs = list(combinations(experts, 2))
    return WeightChange(
        start=start,
        from_start=from_start,
        experts={expert: [products.relative(expert) for products in by_layer] for expert in experts},
        shared=[products.relative("") for products in by_layer] if from_start else [],
        outside=_products(trained, begun, None).relative(""),
        overall={expert: in_all.relative(expert) for expert in experts},
        cosines={pair: [products.cosine(*pair) for products in by_layer] for pair in pairs},
        overall_cosines={pair: in_all.cosine(*pair) for pair in pairs},
    )


class _Products(NamedTuple):
    """Inner products in one layer: of the changes with each other, and of the starts with themselves.

    Norms and cosines follow from these products, which add up over layers.
    """

    changes: dict[tuple[str, str], float]
    start: dict[str, float]

    def relative(self, expert: str) -> float | None:
        return math.sqrt(self.changes[expert, expert] / self.start[expert]) if self.start[expert] else None

    def cosine(self, a: str, b: str) -> float | None:
        lengths = math.sqrt(self.changes[a, a] * self.changes[b, b])
        return self.changes[a, b] / lengths if lengths else None


def _products(trained: Weights, begun: Weights, layer: int | None) -> _Products:
    """Multiply in float64, one layer at a time, so that no large model is held in float64."""
    found = _Products(defaultdict(float), defaultdict(float))
    changes = {}
    for expert in (expert for expert, place in trained if place == layer and (expert, place) in begun):
        start = _vector(begun[expert, layer])
        changes[expert] = _vector(trained[expert, layer]) - start
        found.start[expert] = float(start @ start)
        found.changes[expert, expert] = float(changes[expert] @ changes[expert])
    for a, b in combinations([expert for expert in changes if expert], 2):
        found.changes[a, b] = float(changes[a] @ changes[b])
    return found


def _vector(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach().to("cpu", torch.float64).flatten() for part in parts])


def _from_mean(model: MoTEModel) -> WeightChange:
    """Compare each expert with the mean of all experts."""
    weights = {name: parts for name, parts in _weights(model).items() if name[0]}
    of_layers: dict[int | None, list[list[torch.Tensor]]] = {}
    for (_, layer), parts in weights.items():
        of_layers.setdefault(layer, []).append(parts)
    if min(map(len, of_layers.values())) < 2:
        raise ValueError("it has fewer than two experts, whose mean could take the place of the start")
    means = {
        layer: [torch.stack([part.double() for part in same]).mean(dim=0) for same in zip(*experts, strict=True)]
        for layer, experts in of_layers.items()
    }
    begun = {name: means[name[1]] for name in weights}
    return _compare(weights, begun, "the mean of the experts", False, model.config)
