"""One expert in files of its own: what it is, and which base it belongs to.

An expert is worth nothing without the attention and the embeddings that it was trained with. So its files carry the
fingerprint of these, its base, and it goes into no model of another one.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from architectures_mote import architecture_of, weight_name
from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote.checkpoints import cards
from mote.checkpoints import writing as repository
from mote.checkpoints.provenance import origin_of, read_steps
from mote.checkpoints.reading import Source, fetch, read_json
from mote.checkpoints.staging import EXPERT_FILE

FORMAT = 1  # of expert.json; readers refuse later ones
WEIGHTS_FILE = "expert.safetensors"

# Settings of a backbone that do not touch what it computes. Those that have their default value do not count either,
# so that a version of transformers that adds one leaves fingerprints as they are.
_COSMETIC = ("architectures", "dtype", "transformers_version", "use_cache", "is_decoder", "tie_word_embeddings")
_COSMETIC_PARTS = ("dropout", "initializer", "classifier", "summary_", "label", "output_", "_implementation", "_name_")

_FIELDS: dict[str, type] = {"name": str, "tasks": list, "instructions": dict, "base": dict, "weights": dict}


@dataclass
class ExpertFiles:
    """An expert on disk.

    Attributes:
        source: As the user gave it: a Hub id or a folder.
        folder: Where its files are.
        revision: Commit hash, where it came from the Hub.
        settings: What expert.json says.
    """

    source: str
    folder: Path
    revision: str | None
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The expert's name."""
        return self.settings["name"]

    @property
    def tasks(self) -> list[str]:
        """The tasks that went to it."""
        return self.settings["tasks"]

    @property
    def instructions(self) -> dict[str, str]:
        """Task → the text in front of its inputs, as the config of its MoTE had them."""
        return self.settings["instructions"]

    @property
    def public_name(self) -> str:
        """The name to write into what others read: the id on the Hub, or a folder's name without its place."""
        return self.folder.resolve().name if self.revision is None else self.source

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Read the weights, named as in the dense model.

        Raises:
            FileNotFoundError: If they are not there.
            ValueError: If they are not those that expert.json describes.
        """
        path = self.folder / WEIGHTS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{self.source} lacks {WEIGHTS_FILE}, the weights of the expert: copy it whole")
        remedy = f"copy or extract the expert {self.name!r} again"
        with path.open("rb") as file:
            if sha_fileobj(file).hex() != self.settings["weights"]["sha256"]:
                raise ValueError(f"{path} is not the file that {EXPERT_FILE} describes, it is damaged or cut: {remedy}")
        try:
            weights = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}): {remedy}") from error
        dtype = self.settings["base"].get("dtype")
        others = {name_of(weight.dtype) for weight in weights.values()} - {dtype}
        if others:
            raise ValueError(f"{path} holds weights of {', '.join(sorted(others))}, expected {dtype}: {remedy}")
        return weights

    def require_base(self, source: Source) -> None:
        """Make sure that a MoTE has the base of this expert.

        Raises:
            ValueError: If it has another one; the message says what differs, and what would work.
        """
        ours, theirs = describe_base(source), self.settings["base"]
        if ours["fingerprint"] == theirs["fingerprint"]:
            return
        names = ("architecture", "layers", "pooling", "dtype")
        differing = [f"{name} {theirs.get(name)} and {ours[name]}" for name in names if ours[name] != theirs.get(name)]
        raise ValueError(
            f"The expert {self.name!r} of {self.source} has another base than {source.name}: it comes from "
            f"{theirs.get('name')} (base {theirs['fingerprint']}), and {source.public_name} has the base "
            f"{ours['fingerprint']}. They differ in {'; '.join(differing) or 'the weights that experts share'}. What "
            f"works: {theirs.get('name')} itself, or a MoTE that shares its base, in which only experts were trained, "
            "added or removed"
        )


def open_expert(src: str, revision: str | None = None) -> ExpertFiles:
    """Find an expert that has files of its own, and read what they say of it, without the weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such expert.
        ValueError: If its description is damaged, or in a format of a later version.
    """
    folder, commit = Path(src), None
    if not folder.is_dir():
        folder = fetch(src, revision, [EXPERT_FILE, WEIGHTS_FILE, "README.md", "config.json"])
        commit = folder.name  # the cache names a snapshot after its commit
    path = folder / EXPERT_FILE
    if not path.is_file():
        is_model = (folder / "config.json").is_file()
        kind = "a whole model" if is_model else "no expert in files of its own"
        raise FileNotFoundError(f"{src} is {kind}, it has no {EXPERT_FILE}: `mote experts extract` makes one of a MoTE")
    settings = read_json(path)
    version = settings.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"{path} has the format {version}; this version of mote reads up to {FORMAT}: update mote")
    wrong = _wrong_fields(settings)
    if version != FORMAT or wrong:
        raise ValueError(
            f"{path} is damaged: expected a format up to {FORMAT} and {', '.join(_FIELDS)}; wrong or missing: "
            f"{', '.join(wrong or ['format'])}"
        )
    return ExpertFiles(src, folder, commit, settings)


def _wrong_fields(settings: dict[str, Any]) -> list[str]:
    """Name what is missing in expert.json, or of another kind than what reads it expects."""
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(settings.get(name), kind)]
    if wrong:
        return wrong
    texts = {
        "tasks": settings["tasks"],
        "instructions": settings["instructions"].values(),
        "base": [settings["base"].get("fingerprint")],
        "weights": [settings["weights"].get("sha256")],
    }
    return [name for name, values in texts.items() if not all(isinstance(value, str) for value in values)]


def write_expert(source: Source, name: str, folder: Path, repo_id: str, command: str) -> None:
    """Write one expert of a MoTE into files of its own. Nothing but its weights is held in memory.

    Args:
        source: The MoTE.
        name: Of the expert.
        folder: Where to write.
        repo_id: Name under which readers find it.
        command: That makes it.
    """
    config: MoTEConfig = source.config  # type: ignore[assignment]
    base = describe_base(source)
    weights = read_expert(source, name)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"base": base["fingerprint"]})  # one entry: two have no order
    with (folder / WEIGHTS_FILE).open("rb") as file:
        sha256 = sha_fileobj(file).hex()
    tasks = [task for task, expert in config.tasks.items() if expert == name]
    parameters = sum(weight.numel() for weight in weights.values())
    settings: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "tasks": tasks,
        "instructions": {task: config.instructions[task] for task in tasks if task in config.instructions},
        "base": {**base, "dtype": name_of(next(iter(weights.values())).dtype)},
        "weights": {"file": WEIGHTS_FILE, "sha256": sha256, "parameters": parameters},
        "made": {
            **repository.describe_source(source),
            "command": command,
            **repository.describe_run(),
            "earlier": repository.earlier_records(source),
        },
    }
    repository.write_record(settings, folder, EXPERT_FILE)
    texts = {task: config.instruction_of(task) for task in tasks}
    cards.write_expert_card(folder, repo_id, name, texts, settings["base"], parameters, source, command)


def describe_base(source: Source) -> dict[str, Any]:
    """Say what the experts of a MoTE rely on: in words, and by a fingerprint."""
    config: MoTEConfig = source.config  # type: ignore[assignment]
    return {
        "name": source.public_name,
        "upcycled_from": origin_of(read_steps(source.folder)),
        "fingerprint": fingerprint_of_base(source),
        "architecture": config.backbone_config.model_type,
        "layers": config.mote_layer_indices,
        "pooling": config.pooling,
        "dtype": name_of(config.dtype),
    }


def fingerprint_of_base(source: Source) -> str:
    """Hash all that the experts of a MoTE rely on: shared weights, and what the config says of their use.

    It stays the same when experts are trained, added, removed or renamed, and when files are saved or cut anew. Weights
    are read one after the other.

    Raises:
        ValueError: If the weights cannot be read, or are not in safetensors.
    """
    config: MoTEConfig = source.config  # type: ignore[assignment]
    digest = blake2b(json.dumps(_essentials(config), sort_keys=True, default=str).encode(), digest_size=16)
    with ExitStack() as stack:
        place_of = _open_weights(source, stack)
        for key in sorted(place_of):
            if weight_name(key, config).expert is not None:
                continue
            weight = place_of[key].get_tensor(key)
            digest.update(f"\0{key} {weight.dtype} {list(weight.shape)}\0".encode())
            digest.update(weight.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _essentials(config: MoTEConfig) -> dict[str, Any]:
    """Pick what decides on how shared weights are used."""
    backbone = config.backbone_config
    usual = CONFIG_MAPPING[backbone.model_type]().to_dict()
    return {
        "model_type": backbone.model_type,
        "backbone": {
            name: value
            for name, value in backbone.to_dict().items()
            if name not in _COSMETIC
            and not any(part in name for part in _COSMETIC_PARTS)
            and (name not in usual or usual[name] != value)
        },
        "layers": config.mote_layer_indices,
        "pooling": config.pooling,
        "architecture": list(architecture_of(config)[:2]),
    }


def read_expert(source: Source, name: str) -> dict[str, torch.Tensor]:
    """Read the weights of one expert of a MoTE, and no others, under the names that they have in the dense model.

    Raises:
        ValueError: If there is no such expert, it is not in the files, or they cannot be read.
    """
    config: MoTEConfig = source.config  # type: ignore[assignment]
    config.require_expert(name)
    found = {key: weight_name(key, config) for key in without_weights(source).state_dict()}
    names = {key: parsed.dense for key, parsed in found.items() if parsed.expert == name}
    with ExitStack() as stack:
        place_of = _open_weights(source, stack)
        missing = sorted(names.keys() - place_of.keys())
        if missing:
            raise ValueError(
                f"{source.name} lacks {len(missing)} of the weights of the expert {name!r}, as {missing[0]}"
            )
        return {names[key]: place_of[key].get_tensor(key).clone() for key in sorted(names)}


def without_weights(source: Source) -> MoTEModel:
    """Build a MoTE in name only, for its names and sizes."""
    with torch.device("meta"):
        return MoTEModel(MoTEConfig.from_dict(source.config.to_dict()))


def _open_weights(source: Source, stack: ExitStack) -> dict[str, Any]:
    """Open the files with weights, each mapped into memory; tell for each key the file that has it."""
    place_of: dict[str, Any] = {}
    for path in source.weights:
        if path.suffix != ".safetensors":
            raise ValueError(f"{source.name} has its weights in {path.name}: expected safetensors, as MoTE writes them")
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read, is it truncated? {error}") from error
        place_of.update(dict.fromkeys(file.keys(), file))
    return place_of


def name_of(dtype: Any) -> str:
    """Name a type of numbers as configs do: `float32`."""
    return str(dtype).removeprefix("torch.")
