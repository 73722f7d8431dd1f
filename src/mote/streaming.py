"""Write an upcycled model out of the files of the dense one, without ever holding either in memory.

What a weight of the dense model is made of is decided by transformers' own rules (its conversion mapping). The library
applies them to a whole checkpoint; here they are applied to one weight when it is its turn. What is only renamed stays
in the source's memory-mapped file until it is written, and all experts are written from the same place.
"""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import TensorSpec, safe_open, serialize_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from experts_mote import weight_of_an_expert
from modeling_mote import MoTEModel
from mote.sources import DenseSource, load_pickle, read_on_meta

Report = Callable[[str], None]


class DenseWeights:
    """The weights of a dense checkpoint under the names of the native model, read one at a time.

    Args:
        source: The checkpoint.
        model: The native model without weights, from `dense_without_weights`.
    """

    def __init__(self, source: DenseSource, model: PreTrainedModel) -> None:
        """Find out what each weight is made of; reads none."""
        self.model = model
        self.expected = model.state_dict()
        self.files = MappedFiles(source.weights)
        rules = get_model_conversion_mapping(model, source.key_mapping)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.parts: dict[str, list[tuple[str, str | None]]] = {}
        for key in sorted(self.files.stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, self.expected)
            if name not in self.expected and key in self.expected:  # it is in the native format already
                name, pattern = key, None
            if name in self.expected:
                self.parts.setdefault(name, []).append((key, pattern))
        stored = self.files.stored.__getitem__
        self.made_with = {name: first for first in self.parts for name in self._make(first, stored)}
        self.last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def __contains__(self, name: str) -> bool:
        return name in self.made_with

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a weight: mapped into memory, or, where the library converts it or its type changes, in memory."""
        first = self.made_with[name]
        if self.last[0] != first:  # what is made together (queries, keys, values) is asked for together
            self.last = (first, self._make(first, self.files.__getitem__))
        return self.last[1][name]

    def _make(self, first: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the library's rule that makes the weight `first`, and maybe others with it."""
        key, pattern = self.parts[first][0]
        rule = WeightRenaming(key, first) if pattern is None else copy.deepcopy(self.converters[pattern])
        for key, pattern in self.parts[first]:
            tensor = read(key).to(self.expected[first].dtype)
            rule.add_tensor(first, key, pattern or key, tensor)  # type: ignore[arg-type]  # the library does so, too
        made = rule.convert(first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class MappedFiles:
    """The tensors of some files with weights. One file is open at a time, mapped into memory where its format allows.

    Args:
        paths: Safetensors, or pickles of tensors.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Note where each tensor is."""
        self.place: dict[str, Path] = {}
        self.stored: dict[str, torch.Tensor] = {}  # without weights
        for path in paths:
            tensors = read_on_meta([path])
            self.stored |= tensors
            self.place |= dict.fromkeys(tensors, path)
        self.opened: Path | None = None
        self.read: Callable[[str], torch.Tensor] = self.stored.__getitem__

    def __getitem__(self, key: str) -> torch.Tensor:
        path = self.place[key]
        if self.opened != path:
            self.read = self.stored.__getitem__  # closes one file before the next is opened
            is_pickle = path.suffix != ".safetensors"
            self.read = load_pickle(path).__getitem__ if is_pickle else safe_open(path, "pt").get_tensor
            self.opened = path
        return self.read(key)


def names_in_dense(model: MoTEModel) -> dict[str, str]:
    """Tell for each weight of a MoTE which weight of the dense model it is, or was, a copy of."""
    of_block = weight_of_an_expert(model)
    found = {name: of_block.fullmatch(name) for name in model.state_dict()}
    return {
        name: match["layer"] + match["weight"] if match else name.removeprefix("backbone.")
        for name, match in found.items()
    }


def can_stream(model: MoTEModel, dense: DenseWeights) -> bool:
    """Whether each weight of a fresh MoTE is one of the dense model, and that one is in the source's files.

    Not so where a router is drawn at random and experts are stacked, where the source is quantized, and where the
    library makes weights up, or ties them to one another.
    """
    if model.config.router == "token" or getattr(dense.model.config, "quantization_config", None) is not None:
        return False
    tied = getattr(dense.model, "all_tied_weights_keys", None)
    return not tied and all(name in dense for name in names_in_dense(model).values())


def write_weights(
    model: MoTEModel, dense: DenseWeights, folder: Path, max_shard_size: str, report: Report = lambda line: None
) -> None:
    """Write the weights of a fresh MoTE file by file, as `save_pretrained` would: names, order, index.

    Args:
        model: The MoTE, without weights.
        dense: What its experts are copies of.
        folder: Where to write.
        max_shard_size: Of each file, as in `"5GB"`.
        report: Called after each of several files.
    """
    origins = names_in_dense(model)
    # New ones, because parts of one tensor (queries, keys, values) would each count as the whole.
    weights = {name: torch.empty_like(weight) for name, weight in model.state_dict().items()}
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size)
    total, done = shards.metadata["total_size"], 0
    for file, names in shards.filename_to_tensors.items():
        once = dict.fromkeys(origins[name] for name in names)
        tensors = {origin: dense[origin].contiguous() for origin in once}
        specs = {name: _place(tensors[origins[name]]) for name in names}
        serialize_file(specs, folder / file, metadata={"format": "pt"})
        done += sum(spec.data_len for spec in specs.values())
        if shards.is_sharded:
            report(f"{file}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB written")
    if shards.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **shards.metadata}
        index = json.dumps({"metadata": metadata, "weight_map": shards.tensor_to_filename}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index + "\n", encoding="utf-8")


def _place(tensor: torch.Tensor) -> TensorSpec:
    """Say where in memory a tensor is, which must stay there until it is written."""
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        data_ptr=tensor.data_ptr(),
        data_len=tensor.nbytes,
    )
