"""Loading: MoTEs with some or all experts, and any Sentence-Transformers model with all its weights.

If a checkpoint lacks weights, transformers initialises random ones and only logs it.
"""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

    from mote.remote.configuration_mote import MoTEConfig
    from mote.remote.modeling_mote import MoTEModel


def require_all_weights(encoder: "SentenceTransformer | SparseEncoder", path: str, revision: str | None = None) -> None:
    """Check that a checkpoint has all weights of the model that was loaded from it.

    Each of the model's networks is loaded once more, on the meta device, which reads headers only.

    Args:
        encoder: The model.
        path: Folder or id on the Hub that it was loaded from.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ValueError: If weights are missing; those of a pooler, which Sentence-Transformers does not use, may be.
    """
    from transformers import PreTrainedModel
    from transformers.utils import cached_file

    file = cached_file(path, "modules.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    entries = json.loads(Path(file).read_text(encoding="utf-8")) if file else [{"path": ""}]
    for module, entry in zip(encoder, entries, strict=False):
        network = getattr(module, "model", None)
        if not isinstance(network, PreTrainedModel) or network.config.model_type.startswith("mote"):
            continue  # a MoTE's own from_pretrained is strict
        missing = _missing_weights(type(network), path, revision, entry["path"], config=copy.deepcopy(network.config))
        if missing:
            shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
            raise ValueError(
                f"{path} lacks weights that its config requires, and random ones would replace them: {shown}. "
                "Load the files as they were saved together, in a format that the installed transformers reads"
            )


def _missing_weights(
    model_class: Any, path: str, revision: str | None, subfolder: str = "", **kwargs: Any
) -> list[str]:
    """Return the keys of weights that a checkpoint lacks or has in another shape."""
    from mote.checkpoints.models import quiet_transformers

    with quiet_transformers():
        _, info = model_class.from_pretrained(
            path,
            revision=revision or "main",
            subfolder=subfolder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    missing = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    return sorted(key for key in missing if "pooler." not in key)


def load(
    path: str | os.PathLike,
    *,
    experts: str | Iterable[str] | None = None,
    offload: str | None = None,
    keep: int = 1,
    **kwargs: Any,
) -> "MoTEModel":
    """Load a MoTE, with the installed code rather than that in its folder.

    Args:
        path: A folder, or an id on the Hub.
        experts: Experts to load; the others are known by name only. Default: all.
        offload: `"disk"` or `"cpu"`: at most `keep` experts are ever in memory, or on the device; see `offload`.
        keep: Number of experts on the device, with `offload`.
        **kwargs: Arguments of `from_pretrained`: `revision`, `dtype`, `device_map`, `attn_implementation` …

    Raises:
        ValueError: If weights are missing, left over, of another shape or unreadable, or an expert is unknown; or as
            from `offload`.
    """
    from mote.checkpoints.reading import mote_class
    from mote.inference.offloading import check_settings, start_offloaded

    config = _mote_config(path, experts, **kwargs)
    model_class = mote_class(config.model_type, "model")
    if offload is None:
        _refuse_keep(keep)
        return model_class.from_pretrained(path, experts=experts, **kwargs)
    check_settings(config, offload, keep)
    model = model_class.from_pretrained(path, experts=config.available_experts[:keep], **kwargs)
    start_offloaded(model, config.loaded_experts, offload, keep)
    return model


def _refuse_keep(keep: int) -> None:
    if keep != 1:
        raise ValueError(f"keep={keep} is for experts that are offloaded: pass `offload`, too")


def load_encoder(
    path: str | os.PathLike,
    *,
    offload: str | None = None,
    keep: int = 1,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> "SentenceTransformer":
    """Load any Sentence-Transformers model of dense vectors, with all its weights.

    Args:
        path: A folder, or an id on the Hub.
        offload: For a MoTE, `"disk"` or `"cpu"`: at most `keep` experts are ever in memory, or on the device.
        keep: Number of experts on the device, with `offload`.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        device: Device. Default: Sentence-Transformers' choice. With `"meta"`, the model is checked, but its weights are
            not read.
        dtype: Dtype of its weights. Default: the stored one.
        trust_remote_code: Whether to run the code in its repository or folder.

    Raises:
        ValueError: If it does not load, lacks weights, has untrusted code, cannot be offloaded, or is a sparse encoder.
    """
    from sentence_transformers import SentenceTransformer

    if offload is None:
        _refuse_keep(keep)
    path = os.fspath(path)
    try:
        is_sparse = is_sparse_encoder(path, revision)
    except OSError as error:
        raise ValueError(f"{path} does not load in Sentence-Transformers: {first_line(error)}") from error
    if is_sparse:
        raise ValueError(
            f"{path} is a sparse encoder, but dense vectors are needed here: `mote evaluate` scores it, "
            "sentence_transformers.SparseEncoder(…, trust_remote_code=True) loads it"
        )
    model_kwargs: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if device == "meta":
        model_kwargs["device_map"], device = "meta", None
    if offload is not None:
        from mote.inference.offloading import check_settings, start_offloaded

        config = _mote_config(path, revision=revision)
        check_settings(config, offload, keep)
        model_kwargs["experts"] = config.available_experts[:keep]
    encoder = _load_checked(SentenceTransformer, path, device, revision, trust_remote_code, model_kwargs)
    if offload is not None:
        model: Any = encoder[0]
        start_offloaded(model.model, config.loaded_experts, offload, keep)
    return encoder


def load_sparse_encoder(
    path: str | os.PathLike,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> "SparseEncoder":
    """Load any sparse encoder of Sentence-Transformers, with all its weights.

    Takes the arguments of `load_encoder` except those for offloading, and raises its errors.
    """
    from sentence_transformers import SparseEncoder

    model_kwargs: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if device == "meta":
        model_kwargs["device_map"], device = "meta", None
    return _load_checked(SparseEncoder, os.fspath(path), device, revision, trust_remote_code, model_kwargs)


def _load_checked(
    encoder_class: Any, path: str, device: str | None, revision: str | None, trust_remote_code: bool, model_kwargs: Any
) -> Any:
    """Load a model of Sentence-Transformers, and check that it has all its weights."""
    try:
        encoder = encoder_class(
            path, device=device, revision=revision, trust_remote_code=trust_remote_code, model_kwargs=model_kwargs
        ).eval()
    except Exception as error:  # whatever a library or the model's own code raises
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"{path} has code of its own, which runs only with --trust-remote-code (trust_remote_code=True)"
            ) from error
        raise ValueError(f"{path} does not load in Sentence-Transformers: {first_line(error)}") from error
    require_all_weights(encoder, path, revision)
    return encoder


def check_retrieval(retrieval: str) -> None:
    """Check that a kind of vectors exists.

    Raises:
        ValueError: If it does not.
    """
    if retrieval not in ("dense", "sparse", "hybrid"):
        raise ValueError(f"Unknown retrieval {retrieval!r}: expected dense, sparse or hybrid")


def load_any_encoder(
    path: str | os.PathLike, *, retrieval: str | None = None, revision: str | None = None, **settings: Any
) -> "SentenceTransformer | SparseEncoder":
    """Load any model of dense, sparse or hybrid vectors, with all its weights.

    Args:
        path: A folder, or an id on the Hub.
        retrieval: Kind of vectors: `dense`, `sparse` or `hybrid`; a hybrid model gives all of them. Default: its own.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        **settings: `device`, `dtype` and `trust_remote_code`, as in `load_encoder`.

    Raises:
        ValueError: As in `load_encoder`; or if it has no vectors of this kind.
    """
    sparse = is_sparse_encoder(os.fspath(path), revision)
    load: Any = load_sparse_encoder if sparse else load_encoder
    encoder = load(path, revision=revision, **settings)
    if retrieval is not None:
        if type(encoder[-1]).__name__ == "HybridPooling":
            encoder[-1].retrieval = retrieval
        elif retrieval != (own := "sparse" if sparse else "dense"):
            raise ValueError(f"{path} only gives {own} vectors: it has no {retrieval} ones")
    return encoder


def is_sparse_encoder(path: str, revision: str | None = None) -> bool:
    """Whether a model's folder or repository says that it is a `SparseEncoder`."""
    from transformers.utils import cached_file

    name = "config_sentence_transformers.json"
    file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    settings = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    return isinstance(settings, dict) and settings.get("model_type") == "SparseEncoder"


def has_own_code(path: str, revision: str | None = None) -> bool:
    """Whether the files of a model name code of its own, which the libraries run only if it is trusted."""
    from transformers.utils import cached_file

    def read(name: str, folder: str = "") -> Any:
        file = cached_file(path, name, revision=revision, subfolder=folder, _raise_exceptions_for_missing_entries=False)
        return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}

    try:
        modules = read("modules.json") or [{"path": "", "type": "sentence_transformers"}]
        names = ("config.json", "tokenizer_config.json")  # of the network; other modules name code by their type
        configs = [read(name, modules[0]["path"]) for name in names]
        others = [module for module in modules if not module["type"].startswith("sentence_transformers")]
    except (ValueError, LookupError, TypeError, AttributeError):  # damaged: loading says so
        return False
    return bool(others) or any("auto_map" in config for config in configs)


def _mote_config(path: str | os.PathLike, experts: Any = None, **kwargs: Any) -> "MoTEConfig":
    """Read the config of a MoTE with the installed class.

    Raises:
        ValueError: If it is not a MoTE.
    """
    from transformers import PreTrainedConfig

    from mote.checkpoints.reading import mote_class

    hub = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "subfolder") if kwargs.get(name)}
    model_type = PreTrainedConfig.get_config_dict(path, **hub)[0].get("model_type", "")
    if not model_type.startswith("mote"):
        raise ValueError(f"{path} is not a MoTE, its model_type is {model_type!r}: `mote upcycle` turns it into one")
    return mote_class(model_type, "config").from_pretrained(path, experts=experts, **hub)


def check_device(device: str | None) -> None:
    """Check that a device is available.

    Raises:
        ValueError: If it is not; the message lists those that are.
    """
    import torch

    if device is None:
        return
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    available += ["mps"] if torch.backends.mps.is_available() else []
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or (str(wanted) not in available and not (device == "cuda" and "cuda:0" in available)):
        raise ValueError(f"There is no device {device!r} here. Available: {', '.join(available)}")


def first_line(error: BaseException) -> str:
    """Format an error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
