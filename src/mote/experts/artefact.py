"""Experts on disk: one expert extracted into a file of its own, and the list of a model's experts.

An expert is useless without the attention and the embeddings that it was trained with, its base. So its file holds a
hash of the base, and it cannot be added to a model with another one.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from mote import hub
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step, read_steps, recorded_files, write_steps
from mote.checkpoints.reading import is_mote, open_mote
from mote.checkpoints.staging import EXPERT_FILE, ModelStaging
from mote.checkpoints.tensors import HEAD, MappedFiles, weight_name
from mote.checkpoints.writing import require_writable
from mote.experts.blocks import require_task_experts, require_uncompressed
from mote.files import sha256_of
from mote.remote.configuration_mote import MoTEConfig, require_known
from mote.remote.modeling_mote import MoTEModel
from mote.reporting import Report, millions, table

logger = logging.getLogger(__name__)

HEADER = "mote"  # entry of the file's metadata with the description, as JSON

# Settings of token routing that affect what a model computes.
_ROUTING = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "shared_expert_bias")

# Parts of the names of a backbone's settings that do not.
_COSMETIC = (
    *("architectures", "dtype", "transformers_version", "use_cache", "is_decoder", "tie_word_embeddings"),
    *("dropout", "initializer", "classifier", "summary_", "label", "output_", "_implementation", "_name_"),
)


@dataclass(eq=False)
class ExpertArtefact:
    """An expert on disk.

    Attributes:
        source: Hub id or folder, as the user gave it.
        folder: Folder of its file.
        revision: Commit hash, if it came from the Hub.
        name: Name of the expert.
        tasks: Tasks that the expert served.
        instructions: Task → text in front of its inputs; always for the task of its own name.
        base: Hash of its base.
    """

    source: str
    folder: Path
    revision: str | None
    name: str
    tasks: list[str]
    instructions: dict[str, str]
    base: str

    @property
    def public_name(self) -> str:
        """Hub id, or the folder's name without its parents."""
        return self.folder.resolve().name if self.revision is None else self.source

    def provenance(self) -> dict[str, Any]:
        """Describe the artefact for `mote.json`."""
        weights = {EXPERT_FILE: sha256_of(self.folder / EXPERT_FILE)}
        return {"name": self.public_name, "revision": self.revision, "weights": weights}

    def weights_for(self, model: MoTEModel) -> dict[str, torch.Tensor]:
        """Read the weights, named as in the dense model, for a MoTE in memory; an error if it has another base."""
        state = model.state_dict()
        found = base_hash(model.config, state, state.__getitem__)
        if found != self.base:
            raise ValueError(
                f"The expert {self.name!r} of {self.source} has another base than {model.name_or_path or 'the model'}: "
                f"{self.base} and {found}. What works: the MoTE that it was extracted from, or one in which only "
                "experts were changed"
            )
        return load_file(self.folder / EXPERT_FILE)


def open_expert(src: str | Path, revision: str | None = None) -> ExpertArtefact:
    """Open an expert that was extracted; its weights are not read.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.
    """
    folder, commit = hub.local_folder(src, revision), None
    if folder is None:
        folder = hub.fetch(str(src), revision, [EXPERT_FILE])
        commit = folder.name  # the cache names a snapshot after its commit
    with safe_open(folder / EXPERT_FILE, framework="pt") as file:  # which only an extracted expert has
        description = json.loads(file.metadata()[HEADER])
    return ExpertArtefact(str(src), folder, commit, **description)


def open_word(word: str) -> str | ExpertArtefact:
    """Open the extracted expert that a command-line word names: a folder of one, or a path or id with a slash.

    Any other word, the name of an expert, is returned unchanged.
    """
    return open_expert(word) if "/" in word or (Path(word) / EXPERT_FILE).is_file() else word


def extract(
    src: str, name: str, out: str | Path, options: WriteOptions | None = None, *, revision: str | None = None
) -> Path:
    """Write one expert of a MoTE as a file with its weights, tasks, instructions and base, and `mote.json`.

    Only the weights of the expert are held in memory.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: Name of the expert.
        out: Folder to write.
        options: How the artefact is written.
        revision: Branch, tag or commit of a source on the Hub.

    Returns:
        The folder.
    """
    options, out = options or WriteOptions(), Path(out)
    source = open_mote(src, revision)
    config = source.config
    repo_id = require_writable(out, options, source.folder)
    if options.push:
        hub.refuse_whole_model(repo_id)
    require_task_experts(config)
    require_uncompressed(config)
    require_known(name, config.available_experts, "expert")
    logger.info("Extracting the expert %s …", name)
    files = MappedFiles(source.weights)
    names = {key: weight_name(key, config) for key in files.stored}
    tasks = [task for task, expert in config.tasks.items() if expert == name]
    description = {
        "name": name,
        "tasks": tasks,
        # Its own also if it is empty: a new expert may get the paper's instead.
        "instructions": {task: config.instruction_of(task) for task in tasks if task in {name, *config.instructions}},
        "base": base_hash(config, files.stored, files.__getitem__),
    }
    weights = {found.dense: files[key] for key, found in names.items() if found.expert == name}
    command = command_line("experts", "extract", source.public_name, name, out=out.resolve())
    with ModelStaging(out, options.overwrite) as folder:
        # One entry, because several would be in random order.
        save_file(weights, folder / EXPERT_FILE, metadata={HEADER: json.dumps(description, ensure_ascii=False)})
        step = new_step("extract", command=command, sources=[source.provenance()], settings={"name": name})
        write_steps([*read_steps(source.folder), step], folder)
    logger.info("Wrote %s", out)
    if options.push:
        logger.info("Pushing to %s …", repo_id)
        pushed = hub.push(out, repo_id, recorded_files(out), options.private, what="an expert of a MoTE")
        logger.info("Pushed: %s", pushed)
    logger.info("mote experts add MODEL %s --name %s --out DIR", repo_id if options.push else out, name)
    return out


@dataclass(frozen=True, repr=False)
class ExpertList(Report):
    """The experts of a MoTE.

    Attributes:
        base_hash: Hash of the experts' base.
        default_task: Task of texts without one.
        experts: `name`, `parameters` (their number; None for an expert that is not in the files), `instruction` and
            `tasks` of each.
    """

    base_hash: str
    default_task: str | None
    experts: list[dict[str, Any]]

    def __str__(self) -> str:
        """Format as a table."""
        rows = [
            (
                one["name"],
                "not here" if one["parameters"] is None else millions(one["parameters"]),
                repr(one["instruction"]),
                ", ".join(one["tasks"]),
            )
            for one in self.experts
        ]
        listed = table(("expert", "parameters", "instruction", "tasks"), rows, align="lrll")
        return f"{listed}\n\nbase `{self.base_hash}`"


def list_experts(src: str, *, revision: str | None = None) -> ExpertList:
    """List the experts of a MoTE, what they are for, and the hash of their base.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        revision: Branch, tag or commit of a source on the Hub.
    """
    source = open_mote(src, revision)
    config = source.config
    require_task_experts(config)
    files = MappedFiles(source.weights)
    parameters: dict[str | None, int] = {}
    for key, weight in files.stored.items():
        expert = weight_name(key, config).expert
        parameters[expert] = parameters.get(expert, 0) + weight.numel()
    experts = [
        {
            "name": name,
            "parameters": parameters.get(name),
            "instruction": config.instruction_of(name),
            "tasks": [task for task, expert in config.tasks.items() if expert == name],
        }
        for name in config.experts
    ]
    return ExpertList(base_hash(config, files.stored, files.__getitem__), config.default_task, experts)


def base_hash(config: MoTEConfig, keys: Iterable[str], read: Callable[[str], torch.Tensor]) -> str:
    """Hash the base of a MoTE's experts: shared weights, and the settings that determine how they are used.

    The hash does not change when experts are trained, added, removed or renamed, or files are saved or sharded again.
    `read` returns the weight of a key of the MoTE, one after another.
    """
    used = [_settings_of(config.backbone_config), config.mote_layer_indices, config.pooling]
    digest = blake2b(json.dumps(used, sort_keys=True, default=str).encode(), digest_size=16)
    for key in sorted(key for key in keys if not key.startswith(HEAD) and weight_name(key, config).expert is None):
        weight = read(key).detach().cpu().contiguous()
        digest.update(f"\0{key} {weight.dtype} {list(weight.shape)}\0".encode())
        digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _settings_of(backbone: Any) -> list[Any]:
    """Return the settings that affect what a backbone computes.

    Those at their defaults do not count, so that a version of transformers that adds one leaves hashes unchanged.
    """
    if is_mote(backbone):  # token-routed
        routing = [getattr(backbone, name) for name in _ROUTING]
        return [*_settings_of(backbone.backbone_config), backbone.mote_layer_indices, *routing]
    defaults = CONFIG_MAPPING[backbone.model_type]().to_dict()
    changed = {name: value for name, value in backbone.to_dict().items() if value != defaults.get(name)}
    return [
        backbone.model_type,
        {name: value for name, value in changed.items() if not any(part in name for part in _COSMETIC)},
    ]
