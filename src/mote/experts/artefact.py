"""Expert artefacts: one expert in files of its own, and the base that it belongs to.

An expert is useless without the attention and the embeddings that it was trained with, its base. So its files hold a
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
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from mote import hub
from mote.checkpoints import cards
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step, origin_of, read_steps, recorded_files, write_steps
from mote.checkpoints.reading import MoTECheckpoint, is_mote, open_mote, require_expert
from mote.checkpoints.staging import EXPERT_FILE, ModelStaging
from mote.checkpoints.tensors import HEAD, weight_name
from mote.checkpoints.writing import require_writable
from mote.experts.checks import require_task_experts, require_uncompressed
from mote.files import read_json
from mote.remote.architectures_mote import architecture_of
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import Report, millions, table

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

logger = logging.getLogger(__name__)

FORMAT = 1  # of expert.json; readers refuse later formats
WEIGHTS_FILE = "expert.safetensors"

# Settings of a backbone that do not affect what it computes. Settings at their defaults do not count either, so that a
# version of transformers that adds one leaves hashes unchanged.
_COSMETIC = ("architectures", "dtype", "transformers_version", "use_cache", "is_decoder", "tie_word_embeddings")
_COSMETIC_PARTS = ("dropout", "initializer", "classifier", "summary_", "label", "output_", "_implementation", "_name_")

# Settings of token routing that affect what a model computes.
_ROUTING = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "shared_expert_bias")

_FIELDS: dict[str, type] = {"name": str, "tasks": list, "instructions": dict, "base": dict, "weights": dict}


@dataclass(eq=False)
class ExpertArtefact:
    """An expert on disk.

    Attributes:
        source: Hub id or folder, as the user gave it.
        folder: Folder of its files.
        revision: Commit hash, if it came from the Hub.
        settings: Content of expert.json.
    """

    source: str
    folder: Path
    revision: str | None
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the expert."""
        return self.settings["name"]

    @property
    def tasks(self) -> list[str]:
        """Tasks that the expert served."""
        return self.settings["tasks"]

    @property
    def instructions(self) -> dict[str, str]:
        """Task → text in front of its inputs, as in the config of its MoTE; always for the task of its own name."""
        return {self.name: "", **self.settings["instructions"]}

    @property
    def public_name(self) -> str:
        """Hub id, or the folder's name without its parents."""
        return self.folder.resolve().name if self.revision is None else self.source

    def provenance(self) -> dict[str, Any]:
        """Describe the artefact for `mote.json`."""
        weights = {WEIGHTS_FILE: self.settings["weights"]["sha256"]}
        return {"name": self.public_name, "revision": self.revision, "weights": weights}

    def load_weights(self) -> dict[str, torch.Tensor]:
        """Read the weights, named as in the dense model.

        Raises:
            FileNotFoundError: If the weight file is missing.
            ValueError: If the weights do not match expert.json.
        """
        path = self.folder / WEIGHTS_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.source} lacks {WEIGHTS_FILE}, the weights of the expert: copy all its files"
            )
        remedy = f"copy or extract the expert {self.name!r} again"
        with path.open("rb") as file:
            if sha_fileobj(file).hex() != self.settings["weights"]["sha256"]:
                raise ValueError(f"{path} does not match {EXPERT_FILE}; it is damaged or truncated: {remedy}")
        try:
            weights = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}): {remedy}") from error
        expected = self.settings["base"].get("dtype")
        others = {dtype_name(weight.dtype) for weight in weights.values()} - {expected}
        if others:
            raise ValueError(f"{path} holds weights of {', '.join(sorted(others))}, expected {expected}: {remedy}")
        return weights

    def weights_for(self, model: "MoTEModel") -> dict[str, torch.Tensor]:
        """Read the weights for a MoTE in memory, which must have the base of this expert; see `require_base`."""
        self.require_base(model)
        return self.load_weights()

    def require_base(self, model: "MoTEModel") -> None:
        """Check that a MoTE in memory has the base of this expert.

        Raises:
            ValueError: If the base is another one; the message says what differs, and what would work.
        """
        theirs, state = self.settings["base"], model.state_dict()
        ours = {**_describe(model.config, model.dtype), "hash": base_hash(model.config, state, state.__getitem__)}
        if ours["hash"] == theirs["hash"]:
            return
        names, where = ("architecture", "layers", "pooling", "dtype"), model.name_or_path or "the model"
        differing = [f"{name} {theirs.get(name)} and {ours[name]}" for name in names if ours[name] != theirs.get(name)]
        raise ValueError(
            f"The expert {self.name!r} of {self.source} has another base than {where}: it comes from "
            f"{theirs.get('name')} (base {theirs['hash']}), and {where} has the base {ours['hash']}. They differ in "
            f"{'; '.join(differing) or 'the weights that experts share'}. What works: {theirs.get('name')} itself, or "
            "a MoTE with the same base, in which only experts were trained, added or removed"
        )


def open_artefact(src: str | Path, revision: str | None = None) -> ExpertArtefact:
    """Open an expert artefact and read its description, not its weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such expert.
        ValueError: If its description is damaged, or in a later format.
    """
    folder, commit = Path(src), None
    if not folder.is_dir():
        folder = hub.fetch(str(src), revision, [EXPERT_FILE, WEIGHTS_FILE, "README.md", "config.json"])
        commit = folder.name  # the cache names a snapshot after its commit
    path = folder / EXPERT_FILE
    if not path.is_file():
        kind = "a whole model" if (folder / "config.json").is_file() else "not an expert artefact"
        raise FileNotFoundError(
            f"{src} is {kind}, it has no {EXPERT_FILE}: `mote experts extract` writes one from a MoTE"
        )
    settings = read_json(path)
    version = settings.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"{path} has format {version}; this version of mote reads up to {FORMAT}: update mote")
    wrong = _wrong_fields(settings)
    if version != FORMAT or wrong:
        raise ValueError(
            f"{path} is damaged: expected a format up to {FORMAT} and {', '.join(_FIELDS)}; wrong or missing: "
            f"{', '.join(wrong or ['format'])}"
        )
    return ExpertArtefact(str(src), folder, commit, settings)


def _wrong_fields(settings: dict[str, Any]) -> list[str]:
    """Return the fields of expert.json that are missing or of another type."""
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(settings.get(name), kind)]
    if wrong:
        return wrong
    texts = {
        "tasks": settings["tasks"],
        "instructions": settings["instructions"].values(),
        "base": [settings["base"].get("hash")],
        "weights": [settings["weights"].get("sha256")],
    }
    return [name for name, values in texts.items() if not all(isinstance(value, str) for value in values)]


def extract(
    src: str, name: str, out: str | Path, options: WriteOptions | None = None, *, revision: str | None = None
) -> Path:
    """Write one expert of a MoTE as an artefact: weights, tasks and instructions, base, card and `mote.json`.

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
        ValueError: If the source is not a task MoTE, has no such expert, or has compressed experts; if the repository
            to push to holds a whole model.
        PermissionError: If the Hub refuses the push.
    """
    options, out = options or WriteOptions(), Path(out)
    source = open_mote(src, revision)
    repo_id = require_writable(out, options, source.folder)
    if options.push:
        hub.refuse_whole_model(repo_id)
    config = source.config
    require_task_experts(config)
    require_uncompressed(config)
    require_expert(config, name)
    logger.info("Extracting the expert %s …", name)
    command = command_line("experts", "extract", source.public_name, name, out=out.resolve())
    with ModelStaging(out, options.overwrite) as folder:
        _write(source, name, folder, repo_id, command)
    logger.info("Wrote %s", out)
    if options.push:
        logger.info("Pushing to %s …", repo_id)
        pushed = hub.push(out, repo_id, recorded_files(out), options.private, what="an expert of a MoTE")
        logger.info("Pushed: %s", pushed)
    logger.info("mote experts add MODEL %s --out DIR", repo_id if options.push else out)
    return out


def _write(source: MoTECheckpoint, name: str, folder: Path, repo_id: str, command: str) -> None:
    config = source.config
    steps = read_steps(source.folder)
    weights = _read_expert(source, name)
    base = {
        "name": source.public_name,
        "upcycled_from": origin_of(steps),
        **_describe(config, next(iter(weights.values())).dtype),
        "hash": _hash_on_disk(source),
    }
    save_file(weights, folder / WEIGHTS_FILE, metadata={"base": base["hash"]})  # one entry: two have no order
    with (folder / WEIGHTS_FILE).open("rb") as file:
        sha256 = sha_fileobj(file).hex()
    tasks = [task for task, expert in config.tasks.items() if expert == name]
    parameters = sum(weight.numel() for weight in weights.values())
    settings = {
        "format": FORMAT,
        "name": name,
        "tasks": tasks,
        "instructions": {task: config.instructions[task] for task in tasks if task in config.instructions}
        | {name: config.instruction_of(name)},  # also if it is none: the paper's is another
        "base": base,
        "weights": {"file": WEIGHTS_FILE, "sha256": sha256, "parameters": parameters},
    }
    (folder / EXPERT_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    texts = {task: config.instruction_of(task) for task in tasks}
    values = {"name": name, "base": base, "parameters": millions(parameters), "command": command}
    cards.write_expert_card(folder, repo_id, source, texts, **values)
    step = new_step("extract", command=command, sources=[source.provenance()], settings={"name": name})
    write_steps([*steps, step], folder)


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
        return f"{table(*self._table(), align='lrll')}\n\nbase `{self.base_hash}`"

    def to_dict(self) -> dict[str, Any]:
        """Return the list as JSON values; the number of parameters is None for an expert that is not in the files."""
        experts = [
            {
                "name": name,
                "parameters": self.parameters.get(name),
                "instruction": self.config.instruction_of(name),
                "tasks": self._tasks_of(name),
            }
            for name in self.config.experts
        ]
        return {"base": self.base_hash, "default_task": self.config.default_task, "experts": experts}

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [
                name,
                millions(self.parameters[name]) if name in self.parameters else "not here",
                repr(self.config.instruction_of(name)),
                ", ".join(self._tasks_of(name)),
            ]
            for name in self.config.experts
        ]
        return ["expert", "parameters", "instruction", "tasks"], rows

    def _tasks_of(self, name: str) -> list[str]:
        return [task for task, expert in self.config.tasks.items() if expert == name]


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
    config = source.config
    require_task_experts(config)
    parameters: dict[str, int] = {}
    with _open_weights(source) as files:
        for key, file in files.items():
            expert = weight_name(key, config).expert
            if expert is not None:
                size = torch.Size(file.get_slice(key).get_shape()).numel()
                parameters[expert] = parameters.get(expert, 0) + size
    return ExpertList(config, _hash_on_disk(source), parameters)


def base_hash(config: MoTEConfig, keys: Iterable[str], read: Callable[[str], torch.Tensor]) -> str:
    """Hash the base of a MoTE's experts: shared weights, and the settings that determine how they are used.

    The hash does not change when experts are trained, added, removed or renamed, or files are saved or sharded again.

    Args:
        config: Config of the MoTE.
        keys: Keys of all its weights.
        read: Returns the weight of a key; called for one key after another.
    """
    digest = blake2b(json.dumps(_essentials(config), sort_keys=True, default=str).encode(), digest_size=16)
    for key in sorted(key for key in keys if not key.startswith(HEAD) and weight_name(key, config).expert is None):
        weight = read(key).detach().cpu().contiguous()
        digest.update(f"\0{key} {weight.dtype} {list(weight.shape)}\0".encode())
        digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash_on_disk(source: MoTECheckpoint) -> str:
    with _open_weights(source) as files:
        return base_hash(source.config, files, lambda key: files[key].get_tensor(key))


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
        of_native = {
            "model_type": backbone.backbone_config.model_type,
            **_essentials_of_backbone(backbone.backbone_config),
        }
        return {
            **of_native,
            "layers": backbone.mote_layer_indices,
            **{name: getattr(backbone, name) for name in _ROUTING},
        }
    defaults = CONFIG_MAPPING[backbone.model_type]().to_dict()
    return {
        name: value
        for name, value in backbone.to_dict().items()
        if name not in _COSMETIC
        and not any(part in name for part in _COSMETIC_PARTS)
        and (name not in defaults or defaults[name] != value)
    }


def _describe(config: MoTEConfig, dtype: Any) -> dict[str, Any]:
    return {
        "architecture": config.backbone_config.model_type,
        "layers": config.mote_layer_indices,
        "pooling": config.pooling,
        "dtype": dtype_name(dtype),
    }


def _read_expert(source: MoTECheckpoint, name: str) -> dict[str, torch.Tensor]:
    """Read the weights of one expert of a MoTE, and no others, under their names in the dense model.

    Raises:
        ValueError: If some are missing, or the files cannot be read.
    """
    with _open_weights(source) as files:
        names = {key: weight_name(key, source.config) for key in files}
        expected = {found.dense for found in names.values() if found.expert is not None}
        own = {found.dense: key for key, found in names.items() if found.expert == name}
        missing = sorted(expected - own.keys())
        if missing or not own:
            raise ValueError(
                f"{source.name} lacks {len(missing)} of the weights of the expert {name!r}, such as {missing[:1]}"
            )
        return {dense: files[own[dense]].get_tensor(own[dense]).clone() for dense in sorted(own)}


@contextmanager
def _open_weights(source: MoTECheckpoint) -> Iterator[dict[str, Any]]:
    """Memory-map the weight files; yield the open file of each key."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in source.weights:
            if path.suffix != ".safetensors":
                raise ValueError(
                    f"{source.name} has its weights in {path.name}: expected safetensors, as MoTE writes them"
                )
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read, is it truncated? {error}") from error
            files.update(dict.fromkeys(file.keys(), file))
        yield files


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype as in configs: `float32`."""
    return str(dtype).removeprefix("torch.")
