"""Experts on disk: one expert's file, from a model or on its own, PEFT adapters, and the list of a model's experts.

An expert is useless without the attention and the embeddings that it was trained with, its base. So its file holds a
hash of the base, and it cannot be added to a model with another one.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from mote import hub
from mote.checkpoints.reading import open_mote
from mote.checkpoints.sentence_transformers import source_prompts
from mote.checkpoints.tensors import MappedFiles, weight_name
from mote.experts.adapters import merged_weights
from mote.experts.blocks import require_task_experts
from mote.files import read_json, replaced, sha256_of
from mote.remote.configuration_mote import MoTEConfig, require_known
from mote.remote.modeling_mote import MoTEModel
from mote.remote.weights_mote import base_hash, digest_of, group_of, read_header, read_index
from mote.reporting import Report, millions, table

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ExpertArtefact:
    """An expert on disk.

    Attributes:
        source: Hub id, folder or file, as the user gave it.
        file: Its file.
        revision: Commit hash, if it came from the Hub.
        name: Name of the expert.
        tasks: Tasks that the expert served; of a file, without roles and types, such as `query` and `sts`.
        instructions: Task → text in front of its inputs; always for the task of its own name.
        base: Hash of its base.
    """

    source: str
    file: Path
    revision: str | None
    name: str
    tasks: list[str]
    instructions: dict[str, str]
    base: str

    @property
    def public_name(self) -> str:
        """Hub id and name of the expert, or the file's name."""
        return self.file.name if self.revision is None else f"{self.source}:{self.name}"

    def provenance(self) -> dict[str, Any]:
        """Describe the artefact for `mote.json`."""
        weights = {self.file.name: sha256_of(self.file)}
        return {"name": self.public_name, "revision": self.revision, "weights": weights}

    def weights_for(self, model: MoTEModel) -> dict[str, torch.Tensor]:
        """Read the weights, named as in the dense model, for a MoTE in memory; an error if it has another base."""
        found = base_of(model.config, model.state_dict())
        if found != self.base:
            raise ValueError(
                f"The expert {self.name!r} of {self.source} has another base than {model.name_or_path or 'the model'}: "
                f"{self.base} and {found}. What works: the MoTE that it was extracted from, or one in which only "
                "experts were changed"
            )
        return {weight_name(key, model.config).dense: weight for key, weight in load_file(self.file).items()}


@dataclass(eq=False)
class AdapterArtefact(ExpertArtefact):
    """A PEFT adapter on disk, which merged into its dense model makes an expert; `base` names that model.

    It has no tasks, and no instruction.
    """

    @property
    def public_name(self) -> str:
        """Hub id and subfolder, or the folder's name."""
        return self.source if self.revision is not None else self.file.resolve().parent.name

    def weights_for(self, model: MoTEModel) -> dict[str, torch.Tensor]:
        """Merge the adapter into its dense model, and return what becomes an expert of a MoTE in memory."""
        return merged_weights(self.file.parent, self.base, model)


def open_expert(src: str | Path, name: str | None = None, revision: str | None = None) -> ExpertArtefact:
    """Open one expert; its weights are not read.

    Args:
        src: A file of an expert; a MoTE; or a PEFT adapter of the dense model that a MoTE was made from. The last two
            are folders, or ids on the Hub, from which only this expert is downloaded.
        name: Name of the expert in a MoTE, or of the subfolder of an adapter.
        revision: Branch, tag or commit on the Hub.
    """
    file, commit = Path(src), None
    if name is not None or not (file.is_file() or file.suffix == ".safetensors"):
        local = hub.local_folder(src, revision)
        adapter = Path(name or "", "adapter_*").as_posix()
        folder = local or hub.fetch(str(src), revision, [SAFE_WEIGHTS_INDEX_NAME, CONFIG_NAME, adapter])
        commit = None if local else folder.name  # the cache names a snapshot after its commit
        place = folder / (name or "")
        if (place / ADAPTER_CONFIG_NAME).is_file():
            base = str(read_json(place / ADAPTER_CONFIG_NAME)["base_model_name_or_path"])
            full_name, own = f"{src}:{name}" if name else str(src), name or Path(src).name
            return AdapterArtefact(full_name, place / ADAPTER_SAFE_WEIGHTS_NAME, commit, own, [], {own: ""}, base)
    if name is not None:
        index = read_index(folder) or {"experts": {}}
        require_known(name, index["experts"], f"expert with a file of its own in {src}:")
        file = folder / index["experts"][name]
        if commit is not None:
            with hub.explained(f"The file of the expert {name!r} cannot be downloaded", FileNotFoundError):
                hub.fetch(str(src), commit, [file.name])
    header = read_header(file) if file.is_file() else {}
    if "name" not in header:
        raise ValueError(f"{file} is not the file of an expert: name one of a model as MODEL:EXPERT")
    expert = ExpertArtefact(str(src), file, commit, **{key: header[key] for key in header if key != "id"})
    if name is not None:  # and what its model assigns to it
        config = read_json(file.parent / CONFIG_NAME)
        expert.tasks = [task for task, served_by in config["tasks"].items() if served_by == name]
        expert.instructions |= {task: text for task, text in config["instructions"].items() if task in expert.tasks}
    return expert


def open_word(word: str) -> str | ExpertArtefact:
    """Open the expert that a command-line word names: a file, an adapter, or `MODEL:EXPERT`.

    Any other word, the name of an expert, is returned unchanged.
    """
    src, _, name = word.rpartition(":")
    if word.endswith(".safetensors") or (not src and ("/" in word or Path(word, ADAPTER_CONFIG_NAME).is_file())):
        return open_expert(word)
    return open_expert(src, name) if src else word


def extract(src: str, name: str, out: str | Path, *, overwrite: bool = False, revision: str | None = None) -> Path:
    """Copy one expert of a MoTE: a file with its weights and, in the header, its tasks, instructions and base.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: Name of the expert.
        out: File to write.
        overwrite: Whether to replace an existing file.
        revision: Branch, tag or commit of a source on the Hub.

    Returns:
        The file.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists: choose another file, or replace it with `--overwrite`")
    expert = open_expert(src, name, revision)
    if isinstance(expert, AdapterArtefact):
        problem = f"{expert.source} is an adapter, which is added as it is: `mote experts add MODEL {expert.source}`"
        raise ValueError(problem)  # noqa: TRY004
    with replaced(out) as temporary:
        shutil.copyfile(expert.file, temporary)
    logger.info("Wrote %s", out)
    logger.info("mote experts add MODEL %s --name %s --out DIR", out, name)
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
    files, prompts = MappedFiles(source.weights), source_prompts(source)  # which may be reworded
    parameters: dict[str | None, int] = {}
    for key, weight in files.stored.items():
        expert = weight_name(key, config).expert
        parameters[expert] = parameters.get(expert, 0) + weight.numel()
    experts = [
        {
            "name": name,
            "parameters": parameters.get(name),
            "instruction": prompts.get(name, config.instruction_of(name)),
            "tasks": [task for task, expert in config.tasks.items() if expert == name],
        }
        for name in config.experts
    ]
    return ExpertList(base_of(config, files), config.default_task, experts)


def base_of(config: MoTEConfig, weights: Mapping[str, torch.Tensor]) -> str:
    """Hash the base of the experts of a MoTE, whose weights are in memory or in files."""
    shared = (key for key in weights if group_of(key, config) is None)
    return base_hash(config, {key: digest_of(weights[key]) for key in shared})
