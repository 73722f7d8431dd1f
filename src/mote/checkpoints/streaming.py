"""Write an upcycled model from the files of the dense one, without holding either in memory.

transformers' own rules (its conversion mapping) determine which tensors a weight of the dense model is made from. The
library applies them to a whole checkpoint; here they are applied to one weight at a time. A weight that is only renamed
is written out of the memory-mapped file.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from mote.checkpoints.reading import Checkpoint
from mote.checkpoints.tensors import MappedFiles, weight_name
from mote.remote.modeling_mote import MoTEModel
from mote.remote.weights_mote import WeightFiles, digest_of


class DenseWeights:
    """The weights of a dense checkpoint under the names of the native model, read one at a time."""

    def __init__(self, source: Checkpoint, model: PreTrainedModel) -> None:
        self.model = model
        self.expected = model.state_dict()
        self.files = MappedFiles(source.weights)
        rules = get_model_conversion_mapping(model, source.key_mapping or None)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.parts: dict[str, list[tuple[str, str | None]]] = {}
        for key in sorted(self.files.stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, self.expected)
            if name not in self.expected and key in self.expected:  # already in the native format
                name, pattern = key, None
            if name in self.expected:
                self.parts.setdefault(name, []).append((key, pattern))
        stored = self.files.stored.__getitem__
        self.new: dict[str, torch.Tensor] = {}
        dtype = next(iter(self.expected.values())).dtype
        for name, key in source.pooling_weights.items():  # not weights of the dense model, but in its files
            self.expected[name] = self.files.stored[key].to(dtype)
            self.parts[name] = [(key, None)]
        self.made_with = {name: first for first in self.parts for name in self._make(first, stored)}
        self.last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def add(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Add weights, in memory, that the MoTE has but no dense model does."""
        self.new |= weights

    def __contains__(self, name: str) -> bool:
        return name in self.made_with or name in self.new

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a weight: memory-mapped, or computed if the library converts it or its dtype changes."""
        if name in self.new:
            return self.new[name]
        first = self.made_with[name]
        if self.last[0] != first:  # weights made together (queries, keys, values) are requested one after another
            self.last = (first, self._make(first, self.files.__getitem__))
        return self.last[1][name]

    def _make(self, first: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the library's rule that makes the weight `first`, possibly with others."""
        key, pattern = self.parts[first][0]
        rule = WeightRenaming(key, first) if pattern is None else copy.deepcopy(self.converters[pattern])
        for key, pattern in self.parts[first]:
            tensor = read(key).to(self.expected[first].dtype)
            rule.add_tensor(first, key, pattern or key, tensor)  # type: ignore[arg-type]  # the library does so, too
        made = rule.convert(first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def can_stream(model: MoTEModel, dense: DenseWeights) -> bool:
    """Whether each weight of a fresh MoTE is a weight of the dense model, stored in the source's files.

    It is not with token routing (routers are random), and tied weights.
    """
    if not model.config.routes_by_task:
        return False
    tied = getattr(dense.model, "all_tied_weights_keys", None)
    return not tied and all(weight_name(name, model.config).dense in dense for name in model.state_dict())


class Copies(Mapping[str, torch.Tensor]):
    """The weights of a fresh MoTE, each read from the dense model that it is a copy of."""

    def __init__(self, model: MoTEModel, dense: DenseWeights) -> None:
        self.dense = dense
        self.origins = {name: weight_name(name, model.config).dense for name in model.state_dict()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.dense[self.origins[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)


def write_weights(model: MoTEModel, dense: DenseWeights, folder: Path, max_shard_size: str) -> None:
    """Write the weights of a fresh MoTE file by file, as `save_pretrained` would."""
    weights = Copies(model, dense)
    digests = {origin: digest_of(dense[origin]) for origin in dict.fromkeys(weights.origins.values())}
    known = {name: digests[origin] for name, origin in weights.origins.items()}
    WeightFiles(weights, model.config, folder, max_shard_size, known).write()
