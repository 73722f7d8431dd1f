"""How far each expert moved from its start, layer by layer."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
import yaml  # type: ignore[import-untyped]

from architectures_mote import architecture_of
from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote.checkpoints.reading import DenseSource, Source, load_dense, load_mote, open_any
from mote.checkpoints.writing import RECORD_FILE

DENSE = "feed-forward"  # what stands where a MoTE has experts, in a model that has none

Weights = dict[tuple[str, int | None], list[torch.Tensor]]  # (part, layer) → its weights


@dataclass(frozen=True)
class Movement:
    """How far the parts of a model moved.

    Attributes:
        start: What they are compared with, for people.
        from_start: Whether that is the start; otherwise it is the mean of the experts.
        experts: Expert → for each layer the Frobenius norm of the difference of its weights, relative to that of the
            start's; None in a layer without experts. The layer's attention is not among them. In a dense model
            there is one "expert", the `DENSE` part of each layer.
        shared: The same for what all experts share in each layer: the attention, or the whole of a layer without
            experts. Empty where the start is not known.
        outside: The same for what is in no layer, such as the token embeddings. None where the start is not known.
        overall: The same for each expert over all layers.
        cosines: Pair of experts → cosine between their movements, in each layer; None where one did not move.
        overall_cosines: The same over all layers.
    """

    start: str
    from_start: bool
    experts: dict[str, list[float | None]]
    shared: list[float | None]
    outside: float | None
    overall: dict[str, float | None]
    cosines: dict[tuple[str, str], list[float | None]]
    overall_cosines: dict[tuple[str, str], float | None]


def movement_of(model: str, start: str | None = None) -> Movement:
    """Measure how far a model moved from its start.

    Args:
        model: A MoTE or a dense model: a folder, or an id on the Hub.
        start: The same, before training: a dense model stands for the MoTE upcycled from it. Default: the mean of the
            model's experts takes the place of the start.

    Raises:
        FileNotFoundError: If one of the two is not there.
        ValueError: If the two are of different architectures or shapes; or without a start, if the model has no
            two experts.
    """
    trained = _load(open_any(model))
    if start is None:
        return _from_mean(trained)
    source = open_any(start)
    begun = _load(source, trained.config)
    _refuse_mismatch(trained, begun, model, start)
    return _compare(_weights(trained), _weights(begun), source.public_name, True, trained.config)


def find_start(model: str) -> str:
    """Find what a model was trained from, by what its folder records: `recipe.yaml`, or `upcycling.json`.

    Returns:
        A folder, or an id on the Hub.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If its folder records nothing, or what it names is not there.
    """
    recorded = _recorded_start(open_any(model).folder)
    if recorded is None:
        raise ValueError("its folder does not record where it comes from")
    if not Path(recorded).is_dir() and (Path(recorded).is_absolute() or recorded.count("/") != 1):
        raise ValueError(f"it comes from {Path(recorded).name}, which is not here")
    return recorded


def _recorded_start(folder: Path) -> str | None:
    recipe, record = folder / "recipe.yaml", folder / RECORD_FILE
    try:
        if recipe.is_file():
            return str(yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["source"])
        if record.is_file():
            return str(yaml.safe_load(record.read_text(encoding="utf-8"))["source"])  # JSON is YAML
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"its record of where it comes from cannot be read ({error})") from error
    return None


def _load(source: Source, like: MoTEConfig | None = None) -> MoTEModel:
    """Load a MoTE; or a dense model as a MoTE, of the layout of another one or with a single expert."""
    if not isinstance(source, DenseSource):
        source.config.require_whole_experts("compared weight by weight")
        return load_mote(source)
    dense, _ = load_dense(source, torch.float32)
    layout = (
        {"experts": [DENSE]}
        if like is None
        else {name: getattr(like, name) for name in ("experts", "layer_path", "shared_modules", "router")}
        | {"mote_layers": like.mote_layer_indices, "experts_per_token": like.experts_per_token}
    )
    return MoTEModel(MoTEConfig(backbone_config=dense.config, **layout), dense)


def _refuse_mismatch(trained: MoTEModel, begun: MoTEModel, model: str, start: str) -> None:
    kinds = [found.config.backbone_config.model_type for found in (trained, begun)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{start} is no start of {model}: its architecture is {kinds[1]!r}, expected {kinds[0]!r}")
    shapes = [{key: tuple(weight.shape) for key, weight in found.state_dict().items()} for found in (trained, begun)]
    wrong = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
    if wrong:
        raise ValueError(
            f"{start} is no start of {model}: {len(wrong)} weights are absent or of another shape in one of them, as "
            f"{wrong[0]} ({shapes[0].get(wrong[0], 'absent')}, in the start {shapes[1].get(wrong[0], 'absent')}). "
            "What works: the dense model that it was upcycled from, or the MoTE as it was before training"
        )


def _weights(model: MoTEModel) -> Weights:
    """Sort the weights by expert and layer: the shared part of a layer is "", what is in no layer has none."""
    weights: Weights = {}
    for key, weight in model.state_dict().items():
        for part, layer, piece in _parts(model.config, key, weight):
            weights.setdefault((part, layer), []).append(piece)
    return weights


def _parts(config: MoTEConfig, key: str, weight: torch.Tensor) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    """Tell of which part, and of which layer, a weight is."""
    layers = re.escape(architecture_of(config).layer_path)
    found = re.match(rf"backbone\.{layers}\.(?P<layer>\d+)\.(?:experts\.(?P<expert>[^.]+)\.|(?P<rest>.*))", key)
    if found is None:
        yield "", None, weight
    elif found["expert"] is not None:
        yield found["expert"], int(found["layer"]), weight
    elif found["rest"].startswith("feed_forward.experts."):  # of a token router, stacked
        for number, of_expert in enumerate(weight, start=1):
            yield f"expert {number}", int(found["layer"]), of_expert
    elif not found["rest"].startswith("feed_forward.router."):  # which a dense start does not have
        yield "", int(found["layer"]), weight


def _compare(trained: Weights, begun: Weights, start: str, from_start: bool, config: MoTEConfig) -> Movement:
    layers = range(config.num_hidden_layers)
    by_layer = [_products(trained, begun, layer) for layer in layers]
    in_all = _Products(Counter(), Counter())
    for products in by_layer:
        in_all.moved.update(products.moved)  # of a counter: adds
        in_all.start.update(products.start)
    experts = list(dict.fromkeys(part for part, _ in trained if part))
    pairs = list(combinations(experts, 2))
    return Movement(
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
    """Inner products in one layer: of movements with each other, and of starts with themselves.

    They are all that norms and cosines take, and those of several layers add up.
    """

    moved: Counter[tuple[str, str]]
    start: Counter[str]

    def relative(self, part: str) -> float | None:
        return math.sqrt(self.moved[part, part] / self.start[part]) if self.start[part] else None

    def cosine(self, a: str, b: str) -> float | None:
        lengths = math.sqrt(self.moved[a, a] * self.moved[b, b])
        return self.moved[a, b] / lengths if lengths else None


def _products(trained: Weights, begun: Weights, layer: int | None) -> _Products:
    """Multiply in float64, one layer at a time: a large model is not held in it as a whole."""
    found = _Products(Counter(), Counter())
    moved = {}
    for part in (part for part, place in trained if place == layer and (part, place) in begun):
        start = _vector(begun[part, layer])
        moved[part] = _vector(trained[part, layer]) - start
        found.start[part] = float(start @ start)  # type: ignore[assignment]  # a counter counts in any number
        found.moved[part, part] = float(moved[part] @ moved[part])  # type: ignore[assignment]
    for a, b in combinations([part for part in moved if part], 2):
        found.moved[a, b] = float(moved[a] @ moved[b])  # type: ignore[assignment]
    return found


def _vector(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.detach().to("cpu", torch.float64).flatten() for piece in pieces])


def _from_mean(model: MoTEModel) -> Movement:
    """Compare each expert with the mean of them all."""
    weights = {name: pieces for name, pieces in _weights(model).items() if name[0]}
    of_layers: dict[int | None, list[list[torch.Tensor]]] = {}
    for (_, layer), pieces in weights.items():
        of_layers.setdefault(layer, []).append(pieces)
    if min(map(len, of_layers.values())) < 2:
        raise ValueError("it has no two experts, whose mean could take the place of the start")
    means = {
        layer: [torch.stack([piece.double() for piece in same]).mean(dim=0) for same in zip(*experts, strict=True)]
        for layer, experts in of_layers.items()
    }
    begun = {name: means[name[1]] for name in weights}
    return _compare(weights, begun, "the mean of the experts", False, model.config)
