"""Open checkpoints, dense or MoTE, in a folder or on the Hub: their configs are read and checked, not their weights."""

import copy
import logging
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mote import hub
from mote.checkpoints import nomic, nomic_moe, nv_embed
from mote.checkpoints.bidirectional import DECODERS
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.st_settings import ENCODERS, Pipeline
from mote.checkpoints.tensors import MappedFiles, is_finite, read_on_meta, read_shapes
from mote.files import read_json, sha256_of
from mote.remote.configuration_mote import ARCHITECTURES, MoTEConfig
from mote.remote.weights_mote import find_files, read_index

logger = logging.getLogger(__name__)

TOKEN_ROUTED = "mote_token_routed"
ATTENTION_POOLING = "mote_attention_pooling"

# model_type → this package's classes: config, model and, if there is one, the model with a head.
MOTE_CLASSES = {
    "mote": ("configuration_mote.MoTEConfig", "modeling_mote.MoTEModel", "masked_lm_mote.MoTEForMaskedLM"),
    TOKEN_ROUTED: (
        "token_routing_mote.TokenRoutedConfig",
        "token_routing_mote.TokenRoutedModel",
        "token_routed_masked_lm_mote.TokenRoutedForMaskedLM",
    ),
    "mote_compressed": ("compression_mote.CompressedConfig", "compression_mote.CompressedModel"),
    "mote_hierarchical": ("hierarchical_mote.HierarchicalMoTEConfig", "hierarchical_mote.HierarchicalMoTEModel"),
    ATTENTION_POOLING: (
        "attention_pooling_mote.AttentionPoolingConfig",
        "attention_pooling_mote.AttentionPoolingModel",
    ),
}

# Settings in config.json by which releases of Sentence-Transformers without `model_type` mark a reranker.
_OF_RERANKERS = ("sbert_ce_default_activation_function", "sentence_transformers")

ONNX_WEIGHTS = "onnx/weights.onnx_data"  # of all experts, beside a graph for each: there are no others then
FILES_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.py", "README.md", "router.safetensors", "[0-9]*_*/*"]


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint on disk, opened: its config is read, its weights are not."""

    name: str  # as the user gave it: an id on the Hub, or a folder
    folder: Path
    revision: str | None  # the commit, if it came from the Hub
    config: PreTrainedConfig  # of a dense model, that of the native architecture
    weights: list[Path]
    format: Literal["transformers", "nomic", "nomic_moe", "nv_embed", "mote"] = "transformers"
    # Renamings (regular expressions) that the keys need before the native class knows them.
    key_mapping: dict[str, str] = field(default_factory=dict)
    # Settings of `MoTEConfig` for a pooling that has weights in the files, and their names in a MoTE → in the files.
    pooling: dict[str, Any] = field(default_factory=dict)
    pooling_weights: dict[str, str] = field(default_factory=dict)
    code: str | None = None  # class of its own code, which is not run, if that may compute other embeddings

    def __post_init__(self) -> None:
        self.steps = read_steps(self.folder)  # by which it was made
        self.transformer = self.folder / Pipeline.read(self.folder).place  # network and tokenizer

    @property
    def short_name(self) -> str:
        """Last part of the name; models made from the checkpoint are named after it.

        A trained model, the folder `model` of a run, has the name of the run.
        """
        if not self.is_local:
            return self.name.rsplit("/", 1)[-1]
        folder = Path(self.name).resolve()
        of_run = folder.name == "model" and (folder.parent / "recipe.yaml").is_file()
        return folder.parent.name if of_run else folder.name

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint was given as a folder."""
        return self.revision is None

    @property
    def public_name(self) -> str:
        """Name for records and cards: the Hub id, or the folder's name without its parents."""
        return self.short_name if self.is_local else self.name

    def read_json(self, name: str, kind: type = dict) -> Any:
        """Read one of its JSON files; empty if it does not exist."""
        own = self.folder / name
        return read_json(own if own.is_file() else self.transformer / name, kind, missing_ok=True)

    def warn_of_code(self) -> None:
        """Warn, once, that the class of its own code is not run."""
        if self.code is not None:
            logger.warning(
                "The code of %s, %s, is not run, but Transformers' own class, whose embeddings may differ: for a "
                "decoder that attends in both directions, pass `--bidirectional`",
                *(self.name, self.code),
            )
            self.code = None

    def provenance(self) -> dict[str, Any]:
        """Describe the checkpoint for `mote.json`; reads all of its weights, to hash them."""
        return {"name": self.public_name, "revision": self.revision, "weights": self.sha256_of_weights()}

    def sha256_of_weights(self) -> dict[str, str]:
        """Hash each file with weights."""
        return {path.name: sha256_of(path) for path in self.weights}

    def non_finite_weights(self) -> list[str]:
        """Name the tensors that hold NaN or infinite values; reads the weights, one at a time if the format allows."""
        files = MappedFiles(self.weights)
        return [key for key in files.stored if not is_finite(files[key])]


@dataclass(eq=False)
class MoTECheckpoint(Checkpoint):
    """A MoTE on disk, opened."""

    config: MoTEConfig


def open_checkpoint(src: str, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint of any kind, from the Hub unless it is a folder, without its weights. Its code is not run."""
    checkpoint = _open(src, revision)
    require_mote(src, checkpoint.format, checkpoint.format not in ("nomic_moe", "nv_embed"))
    return checkpoint


def open_dense(src: str, revision: str | None = None) -> Checkpoint:
    """Open a source of upcycling: a dense checkpoint, a token-routed model, or a published mixture of experts."""
    checkpoint = _open(src, revision)
    if is_mote(checkpoint.config) and checkpoint.config.model_type != TOKEN_ROUTED:
        raise ValueError(f"{src} is already a MoTE: upcycling starts from a dense or a token-routed model")
    return checkpoint


def open_mote(src: str, revision: str | None = None, experts: list[str] | None = None) -> MoTECheckpoint:
    """Open a MoTE, possibly with the weights of some experts only; any other model is a `ValueError`."""
    checkpoint: Any = _open(src, revision, experts)
    require_mote(src, checkpoint.config.model_type, isinstance(checkpoint, MoTECheckpoint))
    return checkpoint


def require_mote(src: Any, kind: str, is_one: bool) -> None:
    """Raise `ValueError` for a model that has to become a MoTE first."""
    if not is_one:
        raise ValueError(f"{src} is not a MoTE but a {kind!r}: `mote upcycle --src {src}` makes a MoTE of it")


def _open(src: str, revision: str | None, experts: list[str] | None = None) -> Checkpoint:
    folder, commit = hub.local_folder(src, revision), None
    if folder is None:
        folder = hub.fetch(src, revision, FILES_BESIDE_WEIGHTS)
        commit = folder.name
    hub.refuse_adapter(folder, src)
    steps = read_steps(folder)  # before what they describe: a change in place must not go unnoticed
    pipeline = Pipeline.read(folder)
    settings = _settings(src, folder, pipeline)
    kind = settings.get("model_type")
    if kind in MOTE_CLASSES:
        config = mote_class(kind, "config").from_dict(settings)
        if index := read_index(folder):
            chosen = copy.deepcopy(config)
            if experts is not None and config.routes_by_task:
                chosen.load_only(experts)
            weights = [Path(file) for file in find_files(src, folder, index, chosen, revision=commit)]
        else:
            weights = _weight_files(src, folder, commit)
        opened = MoTECheckpoint(src, folder, commit, config, weights, "mote")
        opened.steps = steps
        return opened
    weights = _weight_files(src, folder, commit, pipeline.place)
    if nomic_moe.is_original(settings):
        config = nomic_moe.native_config(settings, read_shapes(weights), src)
        return Checkpoint(src, folder, commit, config, weights, "nomic_moe")
    if nv_embed.is_original(settings):
        pooling = nv_embed.pooling_settings(settings, read_shapes(weights), src)
        published = (nv_embed.KEY_MAPPING, pooling, nv_embed.POOLING_WEIGHTS)
        return Checkpoint(src, folder, commit, nv_embed.native_config(settings, src), weights, "nv_embed", *published)
    if nomic.is_original(settings):
        shapes = read_shapes(weights)
        config = nomic.native_config(settings, shapes, src)
        return Checkpoint(src, folder, commit, config, weights, "nomic", nomic.key_mapping(shapes))
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{src} has the architecture {kind!r}, which this version of transformers does not have natively. "
            f"Supported by MoTE: {', '.join(ARCHITECTURES)}."
        )
    code = settings.pop("auto_map", {}).get("AutoModel")  # of the source, neither used nor copied
    honoured = ("is_causal", False), ("use_bidirectional_attention", True)
    if kind in DECODERS and any(settings.get(name) is value for name, value in honoured):
        code = None
    return Checkpoint(src, folder, commit, CONFIG_MAPPING[kind].from_dict(settings), weights, code=code)


def _settings(src: str, folder: Path, pipeline: Pipeline) -> Any:
    """Read config.json; refuse rerankers, quantised models and those that do not begin with a Transformer."""
    settings = read_json(folder / pipeline.place / "config.json", missing_ok=bool(pipeline.modules))
    encoder = "CrossEncoder" if any(name in settings for name in _OF_RERANKERS) else pipeline.encoder
    quantised, problem = settings.get("quantization_config"), ""
    if pipeline.modules and not settings:
        problem = f"begins with a {pipeline.modules[0].name}, not with a Transformer and its config.json"
    elif encoder not in ENCODERS:
        problem = f"is a {encoder}: only encoders of single texts are supported, {', '.join(ENCODERS)}"
    elif quantised and settings.get("model_type") not in MOTE_CLASSES:
        method = quantised.get("quant_method", "bitsandbytes")  # which old files do not name
        problem = f"is quantised ({method}): use the model that it was made from, in 16 or 32 bits"
    if problem:
        raise ValueError(f"{src} {problem}")
    if adapters := sorted(file.parent.name for file in folder.glob("*/adapter_config.json")):
        hint = f"`mote experts add MOTE {src}:{adapters[0]} --name NAME` makes an expert of one"
        logger.warning("The adapters in %s are ignored: %s. %s", src, ", ".join(adapters), hint)
    return settings


def is_mote(config: PreTrainedConfig) -> TypeGuard[MoTEConfig]:
    """Whether a config is that of a MoTE of any kind, even if it was loaded as remote code."""
    return config.model_type in MOTE_CLASSES


def has_head(config: PreTrainedConfig) -> bool:
    """Whether a MoTE was saved with a head for masked language modelling."""
    return any(name.endswith("ForMaskedLM") for name in config.architectures or ())


def mote_class(model_type: str, kind: Literal["config", "model", "masked_lm"]) -> Any:
    """Return this package's class for a `model_type`."""
    classes = dict(zip(("config", "model", "masked_lm"), MOTE_CLASSES[model_type], strict=False))
    if kind not in classes:
        raise ValueError(f"A {model_type!r} cannot have a head for masked language modelling: leave out `--with-head`")
    module, _, name = classes[kind].partition(".")
    return getattr(import_module(f"mote.remote.{module}"), name)


def _weight_files(src: str, folder: Path, commit: str | None, place: str = "") -> list[Path]:
    """Find the weights, in one file or numbered ones; download them if the checkpoint is on the Hub."""
    folder = folder / place
    if commit is not None:
        hub.fetch(src, commit, [str(Path(place, "model*.safetensors"))])
        if not any(folder.glob("model*.safetensors")):
            hub.fetch(src, commit, [str(Path(place, "pytorch_model*.bin"))])
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        listed = folder / f"{name}.index.json"
        if listed.is_file():
            return [folder / shard for shard in sorted(set(read_json(listed)["weight_map"].values()))]
    if (folder / ONNX_WEIGHTS).is_file():
        return []
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise FileNotFoundError(f"{src} has no weights: expected model.safetensors or pytorch_model.bin; found {found}")


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that "auto" stands for: the config's, else that of the first floating-point weights."""
    if isinstance(checkpoint.config.dtype, torch.dtype):
        return checkpoint.config.dtype
    tensors = read_on_meta(checkpoint.weights).values()
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
