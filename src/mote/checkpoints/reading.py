"""Open checkpoints, dense or MoTE, in a folder or on the Hub, and load their models.

A dense model always uses transformers' own class for the architecture, so that the library converts published key
names. What the library would only report (weights that stay random) is an error here.
"""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from architectures_mote import ARCHITECTURES
from configuration_mote import MoTEConfig, alternatives
from modeling_mote import MoTEModel
from mote import hub
from mote.checkpoints import nomic, nomic_moe, nv_embed
from mote.checkpoints.tensors import HEAD, NOT_ONLY_TENSORS, is_finite, load_pickle, read_on_meta, read_shapes

_LOADING = RLock()

TOKEN_ROUTED = "mote_token_routed"
ATTENTION_POOLING = "mote_attention_pooling"

# model_type → this package's classes.
MOTE_CLASSES = {
    "mote": {
        "config": "configuration_mote.MoTEConfig",
        "model": "modeling_mote.MoTEModel",
        "masked_lm": "masked_lm_mote.MoTEForMaskedLM",
    },
    TOKEN_ROUTED: {
        "config": "token_routing_mote.TokenRoutedConfig",
        "model": "token_routing_mote.TokenRoutedModel",
        "masked_lm": "token_routed_masked_lm_mote.TokenRoutedForMaskedLM",
    },
    "mote_compressed": {
        "config": "compression_mote.CompressedConfig",
        "model": "compression_mote.CompressedModel",
    },
    "mote_hierarchical": {
        "config": "hierarchical_mote.HierarchicalMoTEConfig",
        "model": "hierarchical_mote.HierarchicalMoTEModel",
    },
    ATTENTION_POOLING: {
        "config": "attention_pooling_mote.AttentionPoolingConfig",
        "model": "attention_pooling_mote.AttentionPoolingModel",
    },
}

# Heads of pre-training and fine-tuning, which a checkpoint may hold beside the encoder. They are dropped; any other
# key that the encoder does not have is an error.
HEADS = (
    "cls",
    "classifier",
    "decoder",
    "discriminator_predictions",
    "generator_lm_head",
    "generator_predictions",
    "head",
    "lm_head",
    "pooler",
    "pre_classifier",
    "qa_outputs",
    "score",
    "vocab_layer_norm",
    "vocab_projector",
    "vocab_transform",
)

SMALL_ENCODER = "examples/small-encoder"  # used by the README and the recipe `smoke`

FILES_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "README.md", "[0-9]*_*/*"]

# Errors that libraries raise for a config with invalid values.
_INVALID_CONFIG = (StrictDataclassError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError)


@dataclass
class Checkpoint:
    """A checkpoint on disk, opened: its config is read, its weights are not.

    Attributes:
        name: Name as the user gave it: a Hub id or a folder.
        folder: Folder with its files.
        revision: Commit hash, if it came from the Hub.
        config: Config of the model; of a dense one, that of the native architecture.
        weights: Files with the weights.
        format: "transformers" (dense), "nomic" (dense, in Nomic's own format), "nomic_moe" (Nomic Embed v2, in the same
            format), "nv_embed" (NV-Embed), or "mote".
        key_mapping: Renamings (regular expressions) that the keys need before the native class knows them.
        pooling: `MoTEConfig` settings of a pooling that has weights in the files: NV-Embed's.
        pooling_weights: Names of these weights in a MoTE → in the files.
    """

    name: str
    folder: Path
    revision: str | None
    config: PreTrainedConfig
    weights: list[Path]
    format: Literal["transformers", "nomic", "nomic_moe", "nv_embed", "mote"] = "transformers"
    key_mapping: dict[str, str] = field(default_factory=dict)
    pooling: dict[str, Any] = field(default_factory=dict)
    pooling_weights: dict[str, str] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        """Last part of the name; models made from the checkpoint are named after it."""
        return Path(self.name).resolve().name if self.is_local else self.name.rsplit("/", 1)[-1]

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
        path = self.folder / name
        return read_json(path, kind) if path.is_file() else kind()

    def provenance(self) -> dict[str, Any]:
        """Describe the checkpoint for `mote.json`; reads all of its weights, to hash them."""
        return {"name": self.public_name, "revision": self.revision, "weights": self.sha256_of_weights()}

    def sha256_of_weights(self) -> dict[str, str]:
        """Hash each file with weights."""
        sums = {}
        for path in self.weights:
            with path.open("rb") as file:
                sums[path.name] = sha_fileobj(file).hex()
        return sums

    def non_finite_weights(self) -> list[str]:
        """Name the tensors that hold NaN or infinite values; reads the weights, one at a time if the format allows."""
        found = []
        for path in self.weights:
            if path.suffix != ".safetensors":
                found += [key for key, tensor in load_pickle(path).items() if not is_finite(tensor)]
                continue
            with safe_open(path, framework="pt") as file:
                found += [key for key in file.keys() if not is_finite(file.get_tensor(key))]  # noqa: SIM118
        return found


@dataclass
class MoTECheckpoint(Checkpoint):
    """A MoTE on disk, opened.

    Attributes:
        config: Config of the MoTE.
    """

    config: MoTEConfig


def open_checkpoint(src: str, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint of any kind, without reading the weights. Its code is not run.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The checkpoint; a MoTE as a `MoTECheckpoint`.

    Raises:
        FileNotFoundError: If the source does not exist, or has no config or no weights.
        ValueError: If its config is damaged, or not of a supported architecture.
    """
    checkpoint = _open(src, revision)
    published = {"nomic_moe": "a mixture of experts in Nomic's own format", "nv_embed": "in NV-Embed's own format"}
    if checkpoint.format in published:
        what = published[checkpoint.format]
        raise ValueError(f"{src} is {what}: write it in MoTE's first, `mote upcycle --src {src}`")
    return checkpoint


def _open(src: str, revision: str | None) -> Checkpoint:
    folder, commit = _locate(src, revision)
    settings = read_json(folder / "config.json")
    weights = _weight_files(folder, src)
    if settings.get("model_type") in MOTE_CLASSES:
        checkpoint: Checkpoint = _open_mote(src, folder, commit, weights, settings)
    else:
        checkpoint = _open_dense(src, folder, commit, weights, settings)
    _check_sizes(checkpoint)
    return checkpoint


def open_dense(src: str, revision: str | None = None) -> Checkpoint:
    """Open a source of upcycling: a dense checkpoint, a token-routed model, or a published mixture of experts.

    As `open_checkpoint`, with a `ValueError` for a MoTE that already has task experts.
    """
    if _model_type(src, revision) in MOTE_CLASSES.keys() - {TOKEN_ROUTED}:
        raise ValueError(f"{src} is already a MoTE: upcycling starts from a dense or a token-routed model")
    return _open(src, revision)


def open_mote(src: str, revision: str | None = None) -> MoTECheckpoint:
    """Open a MoTE: as `open_checkpoint`, with a `ValueError` for a dense model."""
    model_type = _model_type(src, revision)
    if model_type not in MOTE_CLASSES:
        raise ValueError(f"{src} is not a MoTE but a {model_type!r}: `mote upcycle` makes a MoTE of a dense model")
    checkpoint = open_checkpoint(src, revision)
    assert isinstance(checkpoint, MoTECheckpoint)
    return checkpoint


def _model_type(src: str, revision: str | None) -> Any:
    return read_json(_locate(src, revision)[0] / "config.json").get("model_type")


def is_mote(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a MoTE of any kind, even if it was loaded as remote code."""
    return config.model_type in MOTE_CLASSES


def has_head(config: PreTrainedConfig) -> bool:
    """Whether a MoTE was saved with a head for masked language modelling."""
    return any(name.endswith("ForMaskedLM") for name in config.architectures or ())


def mote_class(model_type: str, kind: Literal["config", "model", "masked_lm"]) -> Any:
    """Return this package's class for a `model_type`.

    Raises:
        ValueError: If models of this type cannot have a head.
    """
    if kind not in MOTE_CLASSES[model_type]:
        raise ValueError(f"A {model_type!r} cannot have a head for masked language modelling: leave out `--with-head`")
    module, _, name = MOTE_CLASSES[model_type][kind].partition(".")
    return getattr(import_module(module), name)


def load_mote(checkpoint: Checkpoint, experts: list[str] | None = None, *, with_head: bool = False) -> MoTEModel:
    """Load a MoTE in its stored dtype.

    Args:
        checkpoint: From `open_mote`.
        experts: Load only the weights of these experts. Default: all.
        with_head: Load its head, too, if it has one.

    Raises:
        ValueError: If config and weights do not match.
    """
    with quiet_transformers():
        kind: Any = "masked_lm" if with_head and has_head(checkpoint.config) else "model"
        model = mote_class(checkpoint.config.model_type, kind).from_pretrained(
            checkpoint.folder, dtype="auto", experts=experts
        )
    model.config._name_or_path = checkpoint.public_name  # no local path
    return model.eval()


def load_dense(
    checkpoint: Checkpoint, dtype: str | torch.dtype = "auto", *, with_head: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Load the native dense model, or a token-routed one, with every weight from the checkpoint.

    Args:
        checkpoint: From `open_dense`.
        dtype: As in `AutoModel.from_pretrained`.
        with_head: Load the model with its head for masked language modelling.

    Returns:
        The model, and the keys of heads that were dropped.

    Raises:
        ValueError: If the files are damaged, lack keys, or hold unknown ones.
    """
    with _reading(checkpoint):
        native = _native_class(checkpoint, with_head)
        loaded = native.from_pretrained(checkpoint.folder, dtype=dtype, **_loading_arguments(checkpoint))
    return _checked(checkpoint, *loaded)


def dense_without_weights(
    checkpoint: Checkpoint, dtype: str | torch.dtype = "auto", *, with_head: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Build the native dense model on the meta device, after the checks of `load_dense`.

    Args:
        checkpoint: From `open_dense`.
        dtype: As in `AutoModel.from_pretrained`.
        with_head: As in `load_dense`.

    Returns:
        The model without data, and the keys of heads that would be dropped.

    Raises:
        ValueError: As from `load_dense`.
    """
    weights = read_on_meta(checkpoint.weights)
    with _reading(checkpoint):
        native = _native_class(checkpoint, with_head)
        settings = {**_loading_arguments(checkpoint), "state_dict": weights, "device_map": "meta"}
        loaded = native.from_pretrained(None, dtype=dtype, **settings)
    return _checked(checkpoint, *loaded)


def _native_class(checkpoint: Checkpoint, with_head: bool) -> Any:
    if is_mote(checkpoint.config):
        return mote_class(checkpoint.config.model_type, "model")
    with torch.device("meta"):
        return type((AutoModelForMaskedLM if with_head else AutoModel).from_config(checkpoint.config))


def _loading_arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "config": checkpoint.config,
        "key_mapping": checkpoint.key_mapping or None,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }


@contextmanager
def _reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Explain errors while reading; `_checked` checks the library's own report."""
    try:
        with quiet_transformers():
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"The weights of {checkpoint.name} were not opened: {NOT_ONLY_TENSORS}") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        files = ", ".join(path.name for path in checkpoint.weights)
        raise ValueError(
            f"The weights of {checkpoint.name} ({files}) cannot be read, are they truncated? {error}"
        ) from error
    except (KeyError, ArithmeticError) as error:
        raise ValueError(f"The config of {checkpoint.name} is invalid: {type(error).__name__}: {error}") from error


def _checked(checkpoint: Checkpoint, model: PreTrainedModel, info: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the keys of heads that it lacks; raise `ValueError` unless all weights fit."""
    prefix = f"{model.base_model_prefix}."
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]  # a MoTE pools by itself
    if model.base_model is not model:
        lost = sorted(key for key in missing if not key.startswith(prefix))
        if checkpoint.format == "nomic" and all(key.endswith("bias") for key in lost):
            missing = [key for key in missing if key not in lost]  # not published: the native head's start as zeros
        elif lost:
            raise ValueError(
                f"{checkpoint.name} has no head for masked language modelling (missing: {', '.join(lost[:3])} …): "
                "leave out `--with-head`, or start from the checkpoint as it was pre-trained"
            )
    dropped = sorted(key for key in info["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in HEADS)
    unexpected = sorted(set(info["unexpected_keys"]) - {*dropped, *checkpoint.pooling_weights.values()})
    if is_mote(checkpoint.config):  # its class drops the head silently
        dropped = sorted(key for key in read_shapes(checkpoint.weights) if key.startswith(HEAD))
    for problem, keys in (("lack", missing), ("hold unknown", unexpected), ("misshape", info["mismatched_keys"])):
        if keys:
            shown = ", ".join(sorted(map(str, keys))[:5]) + (" …" if len(keys) > 5 else "")
            raise ValueError(
                f"The weights of {checkpoint.name} {problem} {len(keys)} keys of {type(model).__name__}: "
                f"{shown}. Known heads are dropped ({', '.join(HEADS)}); anything else must match."
            )
    model.config._name_or_path = checkpoint.public_name  # no local path
    return model.eval(), dropped


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None) -> Any:
    """Load the tokenizer of a checkpoint, or another one for it.

    Raises:
        ValueError: If there is no tokenizer, it is damaged, or it has more tokens than the model.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    has_own = any((checkpoint.folder / name).is_file() for name in files) or any(checkpoint.folder.glob("*.model"))
    name: str | Path
    if tokenizer is not None:
        name = tokenizer
    elif has_own:
        name = checkpoint.folder
    elif checkpoint.format == "nomic":
        name = nomic.TOKENIZER
    else:
        raise ValueError(
            f"{checkpoint.name} has no tokenizer: name one with `--tokenizer`, a folder or an id on the Hub"
        )
    # with the config given, the library does not ask whether to run the code of a MoTE or NV-Embed
    own = name == checkpoint.folder and checkpoint.format in ("mote", "nv_embed")
    given = {"config": checkpoint.config} if own else {}
    try:
        loaded = AutoTokenizer.from_pretrained(name, **given)
        size = len(loaded)
    except Exception as error:  # damaged files raise any kind of error, also tokenizers' own
        message = f"{type(error).__name__}: {error}" if not isinstance(error, OSError | ValueError) else error
        raise ValueError(f"The tokenizer {name} for {checkpoint.name} cannot be loaded: {message}") from error
    if size > checkpoint.config.vocab_size:
        raise ValueError(
            f"The tokenizer {name} has {size} tokens, but {checkpoint.name} has embeddings for "
            f"{checkpoint.config.vocab_size} only"
        )
    return loaded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library while it loads (only errors are logged, no progress bars), and load in one thread at a time.

    Both these settings and the library's loading change state of the whole process. Two threads that load at once can
    leave `PreTrainedModel.tie_weights` replaced by a function that does nothing (5.23), for all later models.
    """
    with _LOADING:
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _locate(src: str, revision: str | None) -> tuple[Path, str | None]:
    """Find the folder of a source, and its commit if it is on the Hub."""
    folder, commit = Path(src), None
    if src == SMALL_ENCODER and not folder.is_dir():
        raise FileNotFoundError(
            f"{src} is in MoTE's repository: run this at the root of a clone, or name another encoder (in a recipe: "
            "model.source=…), as in sentence-transformers/all-MiniLM-L6-v2"
        )
    if not folder.is_dir():
        folder = hub.fetch(src, revision, [*FILES_BESIDE_WEIGHTS, "model*.safetensors"])
        if not any(folder.glob("model*.safetensors")):
            hub.fetch(src, revision, ["pytorch_model*.bin"])
        commit = folder.name  # the cache names a snapshot after its commit
    elif revision is not None:
        raise ValueError(f"{src} is a folder: it has no revision {revision!r}, only sources on the Hub have one")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{src} is a PEFT adapter: merge it into its base model first (merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{src} has no config.json: it is not a model in Transformers' format")
    return folder, commit


def _weight_files(folder: Path, src: str) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            if not shards or not isinstance(shards, dict) or any(not isinstance(name, str) for name in shards.values()):
                raise ValueError(f"{index} must have a weight_map of file names: it is missing, empty or damaged")
            files = [folder / name for name in sorted(set(shards.values()))]
            absent = [path.name for path in files if not path.is_file()]
            if absent:
                raise FileNotFoundError(f"{src} lacks {', '.join(absent)}, named in {index.name}")
            return files
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise FileNotFoundError(f"{src} has no weights: expected model.safetensors or pytorch_model.bin; found {found}")


def _open_mote(
    src: str, folder: Path, commit: str | None, weights: list[Path], settings: dict[str, Any]
) -> MoTECheckpoint:
    try:
        config = mote_class(settings["model_type"], "config").from_pretrained(folder)
    except _INVALID_CONFIG as error:
        raise ValueError(f"The config of {src} is invalid: {error}") from error
    return MoTECheckpoint(src, folder, commit, config, weights, "mote")


def _open_dense(
    src: str, folder: Path, commit: str | None, weights: list[Path], settings: dict[str, Any]
) -> Checkpoint:
    if nomic_moe.is_original(settings):
        routed = nomic_moe.native_config(settings, read_shapes(weights), src)
        return Checkpoint(src, folder, commit, routed, weights, "nomic_moe")
    if nv_embed.is_original(settings):
        config = nv_embed.native_config(settings, src)
        pooling = nv_embed.pooling_settings(settings, read_shapes(weights), src)
        published = (nv_embed.KEY_MAPPING, pooling, nv_embed.POOLING_WEIGHTS)
        return Checkpoint(src, folder, commit, config, weights, "nv_embed", *published)
    if nomic.is_original(settings):
        shapes = read_shapes(weights)
        config = nomic.native_config(settings, shapes, src)
        return Checkpoint(src, folder, commit, config, weights, "nomic", nomic.key_mapping(shapes))
    model_type = settings.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{src} has the architecture {model_type!r}, which this version of transformers does not have natively. "
            f"Supported by MoTE: {', '.join(ARCHITECTURES)}."
        )
    try:
        return Checkpoint(src, folder, commit, AutoConfig.from_pretrained(folder), weights)
    except _INVALID_CONFIG as error:
        raise ValueError(f"The config of {src} is invalid: {error}") from error


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse sizes that are absurd given the weights, before building a model exhausts memory or time.

    Raises:
        ValueError: If a size is not a positive integer, or far larger than the weights suggest.
    """
    config: Any = checkpoint.config
    while is_mote(config):
        config = config.backbone_config
    shapes = read_shapes(checkpoint.weights)
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    tensors = len(shapes)
    sizes = ("hidden_size", "vocab_size", "num_attention_heads")
    largest = {**dict.fromkeys(sizes, 1000 * longest), "num_hidden_layers": tensors}
    for name, limit in largest.items():
        size = getattr(config, name, None)
        if size is not None and (type(size) is not int or not 1 <= size <= limit):
            raise ValueError(
                f"The config of {checkpoint.name} is invalid: {name} is {size!r}, expected an integer from 1 to "
                f"{limit:,}, as its weights have {tensors:,} tensors of at most {longest:,} rows or columns"
            )
    if isinstance(checkpoint, MoTECheckpoint) and checkpoint.config.routes_by_task:
        blocks, experts = len(checkpoint.config.mote_layer_indices), len(checkpoint.config.available_experts)
        if blocks * experts > tensors:
            raise ValueError(
                f"The config of {checkpoint.name} is invalid: it names {experts:,} experts in {blocks:,} blocks, but "
                f"there are only {tensors:,} tensors"
            )


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that "auto" stands for: the config's, else that of the first floating-point weights."""
    if isinstance(checkpoint.config.dtype, torch.dtype):
        return checkpoint.config.dtype
    tensors = read_on_meta(checkpoint.weights).values()
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: If it is damaged, nested too deeply, or holds another kind of value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}, got a {type(content).__name__}")  # noqa: TRY004
    return content


def require_expert(config: MoTEConfig, name: str) -> str:
    """Return the name of an expert whose weights are present.

    Raises:
        ValueError: If there is no such expert, or it was not loaded.
    """
    if name not in config.experts:
        raise ValueError(f"Unknown expert {name!r}." + alternatives(name, config.experts))
    if name not in config.available_experts:
        loaded = ", ".join(map(repr, config.available_experts))
        raise ValueError(f"The expert {name!r} was not loaded (loaded: {loaded}): add it to `experts=`")
    return name
