"""The files with the weights of a saved MoTE: one for what all experts share, and one for each expert.

    model-base-<id>.safetensors               what all experts share; numbered files above `max_shard_size`
    model-expert-<name>-<id>.safetensors      an expert: its weights, and in the header what it is for
    model-head-<id>.safetensors               a head for masked language modelling, if there is one
    model.safetensors.index.json              the standard index: weight → file

An id is made from the contents. So the same expert is the same file, byte for byte, whatever becomes of the others, and
new contents get a new name: until the index is replaced, which is last, a folder holds the old model.

An expert is useless without the shared weights that it was trained with, its base. So the header of each file has a
hash of the base, and files of several models are never mixed in silence.
"""

import json
import os
import re
from collections.abc import Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file
from transformers.utils.hub import cached_files

from .configuration_mote import MTEB_PROMPTS, UNSEEN_TASKS, MoTEConfig

HEADER = "mote"  # entry of a file's metadata, and of the index's
HEAD = "head."  # prefix of the weights of a head
FILES = ("model-base-*.safetensors", "model-expert-*.safetensors", "model-head-*.safetensors")
OLD_FILES = ("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors")  # with the weights of all experts

# Settings of token routing that affect what a model computes.
_ROUTING = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "shared_expert_bias")

# Parts of the names of a backbone's settings that do not.
_COSMETIC = (
    *("architectures", "dtype", "transformers_version", "use_cache", "is_decoder", "tie_word_embeddings"),
    *("dropout", "initializer", "classifier", "summary_", "label", "output_", "return_dict", "_implementation"),
    "_name_",
)


def group_of(key: str, config: MoTEConfig) -> str | None:
    """Return the expert that a weight belongs to, `"head."` for a weight of the head, None for one of the base."""
    if key.startswith(HEAD):
        return HEAD
    found = re.search(r"\.experts\.([^.]+)\.", key)
    return found[1] if found is not None and config.routes_by_task and found[1] in config.experts else None


# Reading -------------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Any:
    """Read an index: the hash `base`, and the files `shared`, `head` and `experts` (by name).

    None if there is none, or another layout. The `weight_map` is not parsed.
    """
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    start = re.match(r'\{\s*"metadata":\s*', text)
    return start and json.JSONDecoder().raw_decode(text, start.end())[0].get(HEADER)


def weight_map(folder: Path) -> dict[str, str]:
    """Read the map from weights to files, which is long."""
    return json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]


def read_header(file: str | Path) -> dict[str, Any]:
    """Read from the header of a file: `id`, `base` and, of an expert, `name`, `tasks` and `instructions`."""
    try:
        with safe_open(file, framework="pt") as opened:
            return json.loads((opened.metadata() or {}).get(HEADER, "{}"))
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: truncated, or a pointer (`git lfs pull`)? {error}") from error


def find_index(name: Any, **hub: Any) -> tuple[Path | None, Any]:
    """Find the index of a folder or a repository on the Hub, the only file that is downloaded: its folder, and it."""
    try:
        found = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError:  # out of reach, which loading the model reports
        found = None
    index = read_index(Path(found).parent) if found else None
    return (Path(found).parent, index) if found and index else (None, None)


def find_files(name: str, folder: Path, index: Any, config: MoTEConfig, head: bool = True, **hub: Any) -> list[str]:
    """Find the files of the available experts, and of what they share, beside an index; download them from the Hub.

    Missing files are an `OSError`, other experts than the config's or files of another model a `ValueError`.
    """
    experts = config.available_experts if config.routes_by_task else []
    if not {*experts} <= index["experts"].keys() <= ({*config.experts} if experts else set()):
        raise ValueError(
            f"The weights of {name!r} do not match their config: they are those of the experts {[*index['experts']]}, "
            f"but the config of a {config.model_type!r} has {experts}"
        )
    files = [*index["shared"], *(index["head"] if head else []), *(index["experts"][name] for name in experts)]
    problem = None
    if not Path(name).is_dir():
        try:
            cached_files(name, files, **hub)
        except OSError as error:
            problem = error
    missing = [repr(expert) for expert in experts if not (folder / index["experts"][expert]).is_file()]
    if missing or problem is not None:
        lost = f"the experts {', '.join(missing)}" if missing else "what the experts share"
        raise OSError(f"{name} lacks the files of {lost} in {folder}") from problem
    for file in files:
        header = read_header(folder / file)
        if header.get("base") != index["base"] or not file.endswith(f"-{header.get('id')}.safetensors"):
            raise ValueError(f"{folder / file} does not belong to this model: get the file that its index lists")
    return [str(folder / file) for file in files]


# Writing -------------------------------------------------------------------------------------------------------------


class WeightFiles:
    """The files that a model's weights, by key, are to be written to.

    `previous` is the folder with the index of the model that is replaced, if it is not `folder`: experts that only that
    one has are kept, or it is a `ValueError`. `digests` are the results of `digest_of`, if they are known.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: MoTEConfig,
        folder: Path,
        max_shard_size: int | str = "50GB",
        digests: Mapping[str, str] | None = None,
        previous: Path | None = None,
    ) -> None:
        self.weights, self.folder, self.previous = weights, folder, previous or folder
        self.digests = digests or {key: digest_of(weights[key]) for key in weights}
        groups: dict[str | None, list[str]] = {None: []}
        for key in weights:
            groups.setdefault(group_of(key, config), []).append(key)
        self.base = base_hash(config, {key: self.digests[key] for key in groups[None]})
        sizes = {key: weights[key].to("meta") for key in groups.pop(None)}
        shards = split_torch_state_dict_into_shards(
            sizes, filename_pattern="model-base{suffix}.safetensors", max_shard_size=max_shard_size
        )
        self.headers: dict[str, str] = {}  # file → what its header says
        self.keys: dict[str, list[str]] = {}  # file → its weights
        shared = [self._add(Path(file).stem, keys) for file, keys in shards.filename_to_tensors.items()]
        head = [self._add("model-head", groups.pop(HEAD))] if HEAD in groups else []
        experts = {name: self._add(_stem(name), keys, describe(config, name)) for name, keys in groups.items() if name}
        self.weight_map = {key: name for name, keys in self.keys.items() for key in keys}
        self.index: dict[str, Any] = {"base": self.base, "shared": shared, "head": head, "experts": experts}
        experts |= self._keep([name for name in config.experts if name not in config.available_experts])
        self.loaded_experts: list[str] | None = [name for name in config.experts if name in self.index["experts"]]
        if not config.routes_by_task or self.loaded_experts == config.experts:
            self.loaded_experts = None

    def _add(self, stem: str, keys: list[str], description: Mapping[str, Any] | None = None) -> str:
        """Plan a file; return its name."""
        header = {"base": self.base, **(description or {})}
        contents = [header, sorted((key, self.digests[key]) for key in keys)]
        header["id"] = blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=8).hexdigest()
        name = f"{stem}-{header['id']}.safetensors"
        self.headers[name], self.keys[name] = json.dumps(header, sort_keys=True), keys
        return name

    def _keep(self, others: list[str]) -> dict[str, str]:
        """Return the files of experts that the replaced model has, but this one does not; list their weights."""
        index = read_index(self.previous) if others else None
        if index is None:
            lost = others if any(any(self.previous.glob(pattern)) for pattern in OLD_FILES) else []
        else:
            found = {name: file for name, file in index["experts"].items() if name not in self.index["experts"]}
            if index["base"] == self.base and {*found} <= {*others}:
                old = weight_map(self.previous).items()
                self.weight_map |= {key: file for key, file in old if file in found.values()}
                return found
            lost = [*found]
        if lost:
            raise ValueError(
                f"{self.previous} also holds the experts {', '.join(lost)}, which were not loaded, and would be lost: "
                "they do not fit other shared weights, are in one file with others, or were added in the meantime. "
                "Load the model again, or choose another place"
            )
        return {}

    def write(self) -> None:
        """Write what is new, then the index; remove files that no longer belong to the model."""
        for name, keys in self.keys.items():
            if not (self.folder / name).exists():
                self._write(self.folder / name, {key: self.weights[key].contiguous() for key in keys})
        index = {"metadata": {HEADER: self.index}, "weight_map": self.weight_map}
        path = self.folder / SAFE_WEIGHTS_INDEX_NAME
        temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
        listed = {*self.weight_map.values()}
        for file in [file for pattern in (*FILES, *OLD_FILES) for file in self.folder.glob(pattern)]:
            if file.name not in listed:
                file.unlink(missing_ok=True)

    def _write(self, path: Path, weights: dict[str, torch.Tensor]) -> None:
        # Its own: all processes of Sentence-Transformers' trainer (6.2) save.
        temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
        try:
            save_file(weights, temporary, metadata={"format": "pt", HEADER: self.headers[path.name]})
            with temporary.open("r+b") as file:  # the library writes several entries in random order
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
                file.seek(8)
                file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _stem(expert: str) -> str:
    """Begin the name of an expert's file, on any file system; its id tells apart what is alike here."""
    return f"model-expert-{re.sub('[^a-z0-9_-]', '-', expert.lower())[:80]}"


def describe(config: MoTEConfig, expert: str) -> dict[str, Any]:
    """Return what an expert's header says: its name, the tasks that it serves, and their instructions.

    Roles and types of tasks that many experts could serve are left out: the model's config assigns them.
    """
    assigned = {*UNSEEN_TASKS, *MTEB_PROMPTS.values()} - {expert}
    tasks = [task for task, served_by in config.tasks.items() if served_by == expert and task not in assigned]
    # Its own also if it is empty: another model may get the paper's instead.
    own = {task: config.instruction_of(task) for task in tasks if task in {expert, *config.instructions}}
    return {"name": expert, "tasks": tasks, "instructions": own}


def digest_of(weight: torch.Tensor) -> str:
    """Hash a tensor: its dtype, shape and values."""
    digest = sha256(f"{weight.dtype} {list(weight.shape)}\0".encode())  # processors have instructions for it
    digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def base_hash(config: MoTEConfig, digests: Mapping[str, str]) -> str:
    """Hash the base of a MoTE's experts: shared weights, and the settings that determine how they are used.

    `digests` are the results of `digest_of` for the shared weights, by key. The hash stays the same when experts are
    trained, added, removed or renamed, or files are saved or sharded again.
    """
    used = [_settings_of(config.backbone_config), config.mote_layer_indices, config.pooling]
    contents = [used, sorted(digests.items())]
    return blake2b(json.dumps(contents, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _settings_of(backbone: Any) -> list[Any]:
    """Return the settings that affect what a backbone computes; new ones, at their defaults, leave hashes unchanged."""
    if hasattr(backbone, "routes_by_task"):  # token-routed
        routing = [getattr(backbone, name) for name in _ROUTING]
        return [*_settings_of(backbone.backbone_config), backbone.mote_layer_indices, *routing]
    defaults = CONFIG_MAPPING[backbone.model_type]().to_dict()
    changed = {name: value for name, value in backbone.to_dict().items() if value != defaults.get(name)}
    return [
        backbone.model_type,
        {name: value for name, value in changed.items() if not any(part in name for part in _COSMETIC)},
    ]
