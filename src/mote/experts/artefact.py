"""Expert artefacts: one expert in a file of its own, and the base that it belongs to.

An expert is useless without the attention and the embeddings that it was trained with, its base. So its file holds a
hash of the base, and it cannot be added to a model with another one.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from mote import hub
from mote.checkpoints.cards import card_data
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step, read_steps, recorded_files, write_steps
from mote.checkpoints.reading import MoTECheckpoint, is_mote, open_mote, require_expert
from mote.checkpoints.staging import EXPERT_FILE, ModelStaging
from mote.checkpoints.tensors import HEAD, weight_name
from mote.checkpoints.writing import require_writable
from mote.experts.checks import require_task_experts, require_uncompressed
from mote.files import sha256_of
from mote.remote.architectures_mote import architecture_of
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import Report, millions, table

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

logger = logging.getLogger(__name__)

HEADER = "mote"  # entry of the file's metadata with the description, as JSON

# Settings of a backbone that do not affect what it computes. Nor do settings at their defaults count, so that a version
# of transformers that adds one leaves hashes unchanged.
_COSMETIC = ("architectures", "dtype", "transformers_version", "use_cache", "is_decoder", "tie_word_embeddings")
_COSMETIC_PARTS = ("dropout", "initializer", "classifier", "summary_", "label", "output_", "_implementation", "_name_")

# Settings of token routing that affect what a model computes.
_ROUTING = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "shared_expert_bias")


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
        base: Its base: `hash`, `architecture`, `layers`, `pooling` and `dtype`.
    """

    source: str
    folder: Path
    revision: str | None
    name: str
    tasks: list[str]
    instructions: dict[str, str]
    base: dict[str, Any]

    @property
    def public_name(self) -> str:
        """Hub id, or the folder's name without its parents."""
        return self.folder.resolve().name if self.revision is None else self.source

    def provenance(self) -> dict[str, Any]:
        """Describe the artefact for `mote.json`."""
        weights = {EXPERT_FILE: sha256_of(self.folder / EXPERT_FILE)}
        return {"name": self.public_name, "revision": self.revision, "weights": weights}

    def weights_for(self, model: "MoTEModel") -> dict[str, torch.Tensor]:
        """Read the weights, named as in the dense model, for a MoTE in memory; an error if it has another base."""
        state = model.state_dict()
        base = _describe(model.config, model.dtype, state, state.__getitem__)
        if base["hash"] != self.base["hash"]:
            where = model.name_or_path or "the model"
            names = [name for name in base if name != "hash" and base[name] != self.base[name]]
            differing = [f"{name} {self.base[name]} and {base[name]}" for name in names]
            raise ValueError(
                f"The expert {self.name!r} of {self.source} has another base than {where}: {self.base['hash']} and "
                f"{base['hash']}. They differ in {'; '.join(differing) or 'the weights that experts share'}. What "
                "works: the MoTE that it was extracted from, or one in which only experts were changed"
            )
        return load_file(self.folder / EXPERT_FILE)


def open_artefact(src: str | Path, revision: str | None = None) -> ExpertArtefact:
    """Open an expert artefact and read its description, not its weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such expert.
    """
    folder, commit = Path(src), None
    if not folder.is_dir():
        folder = hub.fetch(str(src), revision, [EXPERT_FILE])
        commit = folder.name  # the cache names a snapshot after its commit
    with safe_open(folder / EXPERT_FILE, framework="pt") as file:
        description = json.loads(file.metadata()[HEADER])
    return ExpertArtefact(str(src), folder, commit, **description)


def extract(
    src: str, name: str, out: str | Path, options: WriteOptions | None = None, *, revision: str | None = None
) -> Path:
    """Write one expert of a MoTE as an artefact: weights with tasks, instructions and base, a card and `mote.json`.

    Only the weights of the expert are held in memory.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: Name of the expert.
        out: Folder to write.
        options: How the artefact is written.
        revision: Branch, tag or commit of a source on the Hub.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is not a task MoTE, has no such expert, or has compressed experts.
        PermissionError: If the Hub refuses the push.
    """
    options, out = options or WriteOptions(), Path(out)
    source = open_mote(src, revision)
    repo_id = require_writable(out, options, source.folder)
    if options.push:
        hub.refuse_whole_model(repo_id)
    require_task_experts(source.config)
    require_uncompressed(source.config)
    require_expert(source.config, name)
    logger.info("Extracting the expert %s …", name)
    command = command_line("experts", "extract", source.public_name, name, out=out.resolve())
    with ModelStaging(out, options.overwrite) as folder:
        _write_weights(source, name, folder / EXPERT_FILE)
        _write_card(source, name, folder / "README.md", repo_id)
        step = new_step("extract", command=command, sources=[source.provenance()], settings={"name": name})
        write_steps([*read_steps(source.folder), step], folder)
    logger.info("Wrote %s", out)
    if options.push:
        logger.info("Pushing to %s …", repo_id)
        pushed = hub.push(out, repo_id, recorded_files(out), options.private, what="an expert of a MoTE")
        logger.info("Pushed: %s", pushed)
    logger.info("mote experts add MODEL %s --out DIR", repo_id if options.push else out)
    return out


def _write_weights(source: MoTECheckpoint, name: str, file: Path) -> None:
    config = source.config
    with _open_weights(source) as files:
        names = {key: weight_name(key, config) for key in sorted(files)}
        own = {found.dense: key for key, found in names.items() if found.expert == name}
        weights = {dense: files[key].get_tensor(key).clone() for dense, key in own.items()}
        dtype = next(iter(weights.values())).dtype
        base = _describe(config, dtype, files, lambda key: files[key].get_tensor(key))
    tasks = [task for task, expert in config.tasks.items() if expert == name]
    instructions = {task: config.instructions[task] for task in tasks if task in config.instructions}
    description = {
        "name": name,
        "tasks": tasks,
        # Its own also if it is empty: a new expert may get the paper's instead.
        "instructions": {**instructions, name: config.instruction_of(name)},
        "base": base,
    }
    # One entry, because several would be in random order.
    save_file(weights, file, metadata={HEADER: json.dumps(description, ensure_ascii=False)})


def _write_card(source: MoTECheckpoint, name: str, file: Path, repo_id: str) -> None:
    data = card_data(source, "adapter")
    data.library_name, data.pipeline_tag, data.tags = "mote", None, ["mote", "mixture-of-experts", "task-expert"]
    file.write_text(
        f"---\n{data}\n---\n\n# {repo_id}\n\nThe expert `{name}` of `{source.public_name}`, a MoTE (Mixture of Task "
        "Experts). It is not a complete model: with the Python\npackage `mote-embeddings`, add it to a MoTE with the "
        f"same base:\n\n```bash\nmote experts add MODEL {repo_id} --out DIR\n```\n",
        encoding="utf-8",
    )


@dataclass(frozen=True, repr=False)
class ExpertList(Report):
    """The experts of a MoTE.

    Attributes:
        config: Config of the MoTE.
        base_hash: Hash of the experts' base.
        parameters: Expert → number of parameters; experts that are not in the files are missing.
    """

    config: MoTEConfig
    base_hash: str
    parameters: dict[str, int]

    def __str__(self) -> str:
        """Format as a table."""
        rows = []
        for one in self.to_dict()["experts"]:
            size = "not here" if one["parameters"] is None else millions(one["parameters"])
            rows.append((one["name"], size, repr(one["instruction"]), ", ".join(one["tasks"])))
        listed = table(("expert", "parameters", "instruction", "tasks"), rows, align="lrll")
        return f"{listed}\n\nbase `{self.base_hash}`"

    def to_dict(self) -> dict[str, Any]:
        """Return the list as JSON values; the number of parameters is None for an expert that is not in the files."""
        experts = [
            {
                "name": name,
                "parameters": self.parameters.get(name),
                "instruction": self.config.instruction_of(name),
                "tasks": [task for task, expert in self.config.tasks.items() if expert == name],
            }
            for name in self.config.experts
        ]
        return {"base": self.base_hash, "default_task": self.config.default_task, "experts": experts}


def list_experts(src: str, *, revision: str | None = None) -> ExpertList:
    """List the experts of a MoTE, what they are for, and the hash of their base.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        revision: Branch, tag or commit of a source on the Hub.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        ValueError: If it is not a task MoTE.
    """
    source = open_mote(src, revision)
    require_task_experts(source.config)
    parameters: dict[str, int] = {}
    with _open_weights(source) as files:
        for key, file in files.items():
            expert = weight_name(key, source.config).expert
            if expert is not None:
                size = torch.Size(file.get_slice(key).get_shape()).numel()
                parameters[expert] = parameters.get(expert, 0) + size
        hash_of_base = base_hash(source.config, files, lambda key: files[key].get_tensor(key))
    return ExpertList(source.config, hash_of_base, parameters)


@contextmanager
def _open_weights(source: MoTECheckpoint) -> Iterator[dict[str, Any]]:
    """Memory-map the weight files; yield the open file of each key."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in source.weights]
        yield {key: file for file in files for key in file.keys()}  # noqa: SIM118  # not a dict


# The base ------------------------------------------------------------------------------------------------------------


def base_hash(config: MoTEConfig, keys: Iterable[str], read: Callable[[str], torch.Tensor]) -> str:
    """Hash the base of a MoTE's experts: shared weights, and the settings that determine how they are used.

    The hash does not change when experts are trained, added, removed or renamed, or files are saved or sharded again.
    `read` returns the weight of a key of the MoTE, one after another.
    """
    digest = blake2b(json.dumps(_essentials(config), sort_keys=True, default=str).encode(), digest_size=16)
    for key in sorted(key for key in keys if not key.startswith(HEAD) and weight_name(key, config).expert is None):
        weight = read(key).detach().cpu().contiguous()
        digest.update(f"\0{key} {weight.dtype} {list(weight.shape)}\0".encode())
        digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _essentials(config: MoTEConfig) -> dict[str, Any]:
    """Return the settings that determine how shared weights are used."""
    architecture = architecture_of(config)
    return {
        "model_type": config.backbone_config.model_type,
        "backbone": _essentials_of_backbone(config.backbone_config),
        "layers": config.mote_layer_indices,
        "pooling": config.pooling,
        "architecture": [architecture.layer_path, architecture.shared_modules],
    }


def _essentials_of_backbone(backbone: Any) -> dict[str, Any]:
    if is_mote(backbone):  # token-routed
        native = backbone.backbone_config
        of_native = {"model_type": native.model_type, **_essentials_of_backbone(native)}
        routing = {name: getattr(backbone, name) for name in _ROUTING}
        return {**of_native, "layers": backbone.mote_layer_indices, **routing}
    defaults = CONFIG_MAPPING[backbone.model_type]().to_dict()
    return {
        name: value
        for name, value in backbone.to_dict().items()
        if name not in _COSMETIC
        and not any(part in name for part in _COSMETIC_PARTS)
        and (name not in defaults or defaults[name] != value)
    }


def _describe(
    config: MoTEConfig, dtype: torch.dtype, keys: Iterable[str], read: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    return {
        "hash": base_hash(config, keys, read),
        "architecture": config.backbone_config.model_type,
        "layers": config.mote_layer_indices,
        "pooling": config.pooling,
        "dtype": str(dtype).removeprefix("torch."),
    }
