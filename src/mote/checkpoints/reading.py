"""Read checkpoints: where they come from, what is in them, and the model made of them.

A dense model is always transformers' own class for the architecture, so that the conversion of published key names is
the library's. What the library would only report (weights that stay random) stops the run here.
"""

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from architectures_mote import ARCHITECTURES
from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote.checkpoints import nomic

# What a checkpoint may hold beside the encoder: heads of pre-training and fine-tuning. They are left out knowingly;
# any other key that the encoder does not know stops the run.
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

_NOT_ONLY_TENSORS = "it is damaged, or holds more than tensors, such as code, which is not run"

FILES_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "README.md", "[0-9]*_*/*"]


@dataclass
class Source:
    """A checkpoint on disk.

    Attributes:
        name: As the user gave it: a Hub id or a folder.
        folder: Where its files are.
        revision: Commit hash, where it came from the Hub.
        config: Of the model.
        weights: The files with the weights.
    """

    name: str
    folder: Path
    revision: str | None
    config: PreTrainedConfig
    weights: list[Path]

    @property
    def short_name(self) -> str:
        """The last part of the name, for naming what is made of it."""
        return Path(self.name).resolve().name if self.is_local else self.name.rsplit("/", 1)[-1]

    @property
    def is_local(self) -> bool:
        """Whether the source was given as a folder."""
        return self.revision is None

    @property
    def public_name(self) -> str:
        """The name to write into what others read: the id on the Hub, or a folder's name without its place."""
        return self.short_name if self.is_local else self.name

    def read_json(self, name: str, kind: type = dict) -> Any:
        """Read one of the source's JSON files; empty if there is none."""
        path = self.folder / name
        return read_json(path, kind) if path.is_file() else kind()

    def provenance(self) -> dict[str, Any]:
        """Describe the checkpoint for `mote.json`; reads its weights whole, for their hashes."""
        return {"name": self.public_name, "revision": self.revision, "weights": self.sha256_of_weights()}

    def sha256_of_weights(self) -> dict[str, str]:
        """Fingerprint each file with weights."""
        sums = {}
        for path in self.weights:
            with path.open("rb") as file:
                sums[path.name] = sha_fileobj(file).hex()
        return sums


@dataclass
class DenseSource(Source):
    """A dense checkpoint on disk.

    Attributes:
        config: Of the native architecture.
        key_mapping: How keys must be renamed before the native class knows them.
    """

    key_mapping: dict[str, str] | None = None


def open_source(src: str, revision: str | None = None) -> DenseSource:
    """Find a checkpoint and understand its config, without reading the weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such source, or it has no config or no weights.
        ValueError: If it is not a dense checkpoint of a supported architecture.
    """
    folder, commit = _locate(src, revision)
    weights = _weight_files(folder, src)
    config, key_mapping = _native_config(folder, weights, src)
    return DenseSource(src, folder, commit, config, weights, key_mapping)


def open_mote(src: str, revision: str | None = None) -> Source:
    """Find a MoTE and read its config, without reading the weights. Its code is not run: the installed one is.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such source, or it has no config or no weights.
        ValueError: If it is not a MoTE.
    """
    folder, commit = _locate(src, revision)
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type != "mote":
        raise ValueError(f"{src} is no MoTE but a {model_type!r}: `mote upcycle` makes a MoTE of a dense model")
    try:
        config = MoTEConfig.from_pretrained(folder)
    except (StrictDataclassError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The config of {src} does not hold: {error}") from error
    return Source(src, folder, commit, config, _weight_files(folder, src))


def open_any(src: str, revision: str | None = None) -> Source:
    """Find a checkpoint, dense or MoTE: see `open_source` and `open_mote`."""
    folder, _ = _locate(src, revision)
    is_mote = read_json(folder / "config.json").get("model_type") == "mote"
    return open_mote(src, revision) if is_mote else open_source(src, revision)


def load_mote(source: Source, experts: list[str] | None = None) -> MoTEModel:
    """Load a MoTE in the type in which it is stored.

    Args:
        source: From `open_mote`.
        experts: Load the weights of these alone. Default: of all.

    Raises:
        ValueError: If config and weights do not match.
    """
    with quiet_transformers():
        model = MoTEModel.from_pretrained(source.folder, dtype="auto", experts=experts)
    model.config._name_or_path = source.public_name  # no folder of this machine
    return model.eval()


def load_dense(source: DenseSource, dtype: str | torch.dtype = "auto") -> tuple[PreTrainedModel, list[str]]:
    """Load the native dense model, every weight of it from the source.

    Args:
        source: From `open_source`.
        dtype: As in `AutoModel.from_pretrained`.

    Returns:
        The model, and the keys of heads that were left out.

    Raises:
        ValueError: If the files are damaged, or hold too few or unknown keys.
    """
    with _reading(source):
        loaded = AutoModel.from_pretrained(source.folder, dtype=dtype, **_how_to_load(source))
    return _judged(source, *loaded)


def dense_without_weights(source: DenseSource, dtype: str | torch.dtype = "auto") -> tuple[PreTrainedModel, list[str]]:
    """Make sure that the native dense model can be loaded, as `load_dense` does, without reading a weight.

    Args:
        source: From `open_source`.
        dtype: As in `AutoModel.from_pretrained`.

    Returns:
        The model with empty weights, on the device `meta`, and the keys of heads that would be left out.

    Raises:
        ValueError: As from `load_dense`.
    """
    weights = read_on_meta(source.weights)
    with _reading(source):
        with torch.device("meta"):
            native = type(AutoModel.from_config(source.config))
        settings = {**_how_to_load(source), "state_dict": weights, "device_map": "meta"}
        loaded = native.from_pretrained(None, dtype=dtype, **settings)
    return _judged(source, *loaded)


def _how_to_load(source: DenseSource) -> dict[str, Any]:
    return {
        "config": source.config,
        "key_mapping": source.key_mapping,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }


@contextmanager
def _reading(source: DenseSource) -> Iterator[None]:
    """Say of errors in reading what they mean; the library's own report is judged by `_judged`."""
    try:
        with quiet_transformers():
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"The weights of {source.name} were not opened: {_NOT_ONLY_TENSORS}") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        files = ", ".join(path.name for path in source.weights)
        raise ValueError(
            f"The weights of {source.name} ({files}) cannot be read, are they truncated? {error}"
        ) from error


def _judged(source: DenseSource, model: PreTrainedModel, info: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """Raise `ValueError` unless all weights fit; else return the model, and the keys of heads that it has not."""
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]  # MoTE pools by itself
    left_out = sorted(key for key in info["unexpected_keys"] if key.split(".")[0] in HEADS)
    unexpected = sorted(set(info["unexpected_keys"]) - set(left_out))
    for problem, keys in (("lack", missing), ("hold unknown", unexpected), ("misshape", info["mismatched_keys"])):
        if keys:
            raise ValueError(
                f"The weights of {source.name} {problem} {len(keys)} keys of {type(model).__name__}: {_some(keys)}. "
                f"Known heads are left out ({', '.join(HEADS)}); anything else must match."
            )
    model.config._name_or_path = source.public_name  # no folder of this machine
    return model.eval(), left_out


def load_tokenizer(source: Source, tokenizer: str | None = None) -> Any:
    """Load the tokenizer of a source, or another one for it.

    Raises:
        ValueError: If there is none, or it has more tokens than the model.
    """
    has_own = any((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    has_own = has_own or any(source.folder.glob("*.model"))
    name = tokenizer or (source.folder if has_own else None)
    if name is None and isinstance(source, DenseSource) and source.key_mapping is not None:
        name = nomic.TOKENIZER
    if name is None:
        raise ValueError(f"{source.name} has no tokenizer: name one with `--tokenizer`, a folder or an id on the Hub")
    of_mote = name == source.folder and source.config.model_type == "mote"
    # told the config, the library does not ask whether to run the code that a MoTE comes with
    told = {"config": source.config} if of_mote else {}
    try:
        loaded = AutoTokenizer.from_pretrained(name, **told)
    except (OSError, ValueError) as error:
        raise ValueError(f"The tokenizer {name} for {source.name} cannot be loaded: {error}") from error
    if len(loaded) > source.config.vocab_size:
        raise ValueError(
            f"The tokenizer {name} has {len(loaded)} tokens, but {source.name} has embeddings for "
            f"{source.config.vocab_size} only"
        )
    return loaded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library from logging anything but errors, and from drawing bars."""
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
    """Find the folder of a source, and its commit where it is on the Hub."""
    folder, commit = Path(src), None
    if not folder.is_dir():
        folder = _download(src, revision)
        commit = folder.name  # the cache names a snapshot after its commit
    elif revision is not None:
        raise ValueError(f"{src} is a folder: it has no revision {revision!r}, only sources on the Hub have")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{src} is a PEFT adapter: merge it into its base model first (merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{src} has no config.json: it is not a model in Transformers' format")
    return folder, commit


def _download(src: str, revision: str | None) -> Path:
    """Fetch config, tokenizer and weights of a Hub repository; safetensors where there are any, else `.bin`."""
    folder = fetch(src, revision, [*FILES_BESIDE_WEIGHTS, "model*.safetensors"])
    if not any(folder.glob("model*.safetensors")):
        fetch(src, revision, ["pytorch_model*.bin"])
    return folder


def fetch(src: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a Hub repository whose names match a pattern.

    Raises:
        FileNotFoundError: If there is no such repository, or it cannot be reached.
    """
    try:
        return Path(snapshot_download(src, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise FileNotFoundError(f"{src} is neither a folder nor an id on the Hub (user/name)") from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{src} is gated: accept its terms on the Hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{src} is neither a folder nor a repository on the Hub (for a private one, log in with `hf auth login`)"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{src} is not a folder, and could not be fetched from the Hub: {error}") from error


def _weight_files(folder: Path, src: str) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            if not shards or not isinstance(shards, dict) or any(not isinstance(name, str) for name in shards.values()):
                raise ValueError(f"{index} names no files: its weight_map is empty or absent, or holds something else")
            files = [folder / name for name in sorted(set(shards.values()))]
            absent = [path.name for path in files if not path.is_file()]
            if absent:
                raise FileNotFoundError(f"{src} lacks {', '.join(absent)}, named in {index.name}")
            return files
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise FileNotFoundError(f"{src} has no weights: expected model.safetensors or pytorch_model.bin; found {found}")


def _native_config(folder: Path, weights: list[Path], src: str) -> tuple[PreTrainedConfig, dict[str, str] | None]:
    """Read the config as that of a native architecture, and how keys must be renamed before it fits."""
    settings = read_json(folder / "config.json")
    model_type = settings.get("model_type")
    if model_type == "mote":
        raise ValueError(f"{src} is a MoTE already: upcycling starts from a dense checkpoint")
    if nomic.is_original(settings):
        shapes = read_shapes(weights)
        return nomic.native_config(settings, shapes, src), nomic.key_mapping(shapes)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{src} has the architecture {model_type!r}, which this version of transformers does not have natively. "
            f"Supported by MoTE: {', '.join(ARCHITECTURES)}."
        )
    try:
        return AutoConfig.from_pretrained(folder), None
    except (StrictDataclassError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"The config of {src} does not hold: {error}") from error


def stored_dtype(source: DenseSource) -> torch.dtype:
    """Tell the type that "auto" stands for: the config's, otherwise that of the first weights that are no integers."""
    if isinstance(source.config.dtype, torch.dtype):
        return source.config.dtype
    tensors = read_on_meta(source.weights).values()
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of the tensors in some files, without reading the tensors.

    Raises:
        ValueError: If a file is damaged.
    """
    return {key: tuple(tensor.shape) for key, tensor in read_on_meta(files).items()}


def read_on_meta(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Read the tensors in some files as empty ones, on the device `meta`.

    Raises:
        ValueError: If a file is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            tensors.update(_tensors_on_meta(path))
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} was not opened: {_NOT_ONLY_TENSORS}") from error
        except (SafetensorError, RuntimeError, EOFError, AttributeError, OSError) as error:
            raise ValueError(f"{path} cannot be read, is it truncated? {error}") from error
    return tensors


def _tensors_on_meta(path: Path) -> dict[str, torch.Tensor]:
    is_pickle = path.suffix != ".safetensors"
    return load_pickle(path, "meta") if is_pickle else load_state_dict(str(path), map_location="meta")


def load_pickle(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Load the tensors of a pickle, mapped into memory unless it is in the format of torch before 1.6.

    Raises:
        ValueError: If it holds something other than a state dict.
    """
    state = torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{path} holds no state dict: expected tensors by their names")
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: If it is damaged, or holds another kind of value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected a {kind.__name__}")  # noqa: TRY004
    return content


def _some(keys: Iterable[Any]) -> str:
    shown = sorted(map(str, keys))
    return ", ".join(shown[:5]) + (" …" if len(shown) > 5 else "")
