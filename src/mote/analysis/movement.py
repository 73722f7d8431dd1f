"""How far each expert moved from its start, layer by layer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]

from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel, architecture_of
from mote.repository import RECORD_FILE
from mote.sources import DenseSource, Source, load_dense, load_mote, open_any

DENSE = "feed-forward"  # what stands where a MoTE has experts, in a model that has none

Vectors = dict[tuple[str, int | None], torch.Tensor]  # (part, layer) → all its weights in one row


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
    overall: dict[str, float]
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
    return _compare(_vectors(trained), _vectors(begun), source.public_name, True, trained.config)


def find_start(model: str) -> str:
    """Find what a model was trained from, by what its folder records: `recipe.yaml`, or `upcycling.json`.

    Returns:
        A folder, or an id on the Hub.

    Raises:
        ValueError: If the folder records nothing, or what it names is not there.
    """
    recorded = _recorded_start(Path(model))
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


def _vectors(model: MoTEModel) -> Vectors:
    """Sort the weights by expert and layer: the shared part of a layer is "", what is in no layer has none."""
    rows: dict[tuple[str, int | None], list[torch.Tensor]] = {}
    for key, weight in model.state_dict().items():
        for part, layer, piece in _parts(model.config, key, weight):
            rows.setdefault((part, layer), []).append(piece.detach().to("cpu", torch.float64).flatten())
    return {name: torch.cat(pieces) for name, pieces in rows.items()}


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


def _compare(trained: Vectors, begun: Vectors, start: str, from_start: bool, config: MoTEConfig) -> Movement:
    moved = {name: vector - begun[name] for name, vector in trained.items() if name in begun}
    layers = range(config.num_hidden_layers)
    experts = list(dict.fromkeys(part for part, _ in moved if part))

    def relative(part: str, layer: int | None) -> float | None:
        name = (part, layer)
        return float(moved[name].norm() / begun[name].norm()) if name in moved else None

    def joined(vectors: Vectors, part: str) -> torch.Tensor:
        return torch.cat([vectors[part, layer] for layer in layers if (part, layer) in vectors])

    pairs = list(combinations(experts, 2))
    return Movement(
        start=start,
        from_start=from_start,
        experts={expert: [relative(expert, layer) for layer in layers] for expert in experts},
        shared=[relative("", layer) for layer in layers] if from_start else [],
        outside=relative("", None),
        overall={expert: float(joined(moved, expert).norm() / joined(begun, expert).norm()) for expert in experts},
        cosines={(a, b): [_cosine(moved.get((a, layer)), moved.get((b, layer))) for layer in layers] for a, b in pairs},
        overall_cosines={(a, b): _cosine(joined(moved, a), joined(moved, b)) for a, b in pairs},
    )


def _cosine(a: torch.Tensor | None, b: torch.Tensor | None) -> float | None:
    if a is None or b is None or not a.any() or not b.any():
        return None
    return float(a @ b / (a.norm() * b.norm()))


def _from_mean(model: MoTEModel) -> Movement:
    """Compare each expert with the mean of them all."""
    vectors = {name: vector for name, vector in _vectors(model).items() if name[0]}
    of_layers: dict[int | None, list[torch.Tensor]] = {}
    for (_, layer), vector in vectors.items():
        of_layers.setdefault(layer, []).append(vector)
    if min(map(len, of_layers.values())) < 2:
        raise ValueError("it has no two experts, whose mean could take the place of the start")
    means = {layer: torch.stack(of_layer).mean(dim=0) for layer, of_layer in of_layers.items()}
    begun = {name: means[name[1]] for name in vectors}
    return _compare(vectors, begun, "the mean of the experts", False, model.config)
