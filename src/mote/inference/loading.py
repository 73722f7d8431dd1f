"""Models are loaded with all their weights: transformers draws missing ones at random, and only reports it."""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from configuration_mote import MoTEConfig
    from modeling_mote import MoTEModel

# A row of transformers' report. What is like in several layers is one row: `encoder.layer.{0, 1}.output.dense.bias`.
_ROW = re.compile(r"^(?P<key>\S.*?) +\| (?:\x1b\[[0-9;]*m)?(?:MISSING|MISMATCH)\b", re.MULTILINE)
_UNUSED = re.compile(r"(^|\.)pooler\.")  # Sentence-Transformers pools by itself, and many checkpoints have none


class _Reports(logging.Filter):
    """Takes transformers' reports on loading; what else is logged goes on as if there were no filter."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.missing: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return record.levelno >= self.level
        self.missing += [key for key in _ROW.findall(message) if not _UNUSED.search(key)]
        return False


@contextmanager
def all_weights(model: str) -> Iterator[None]:
    """Refuse a model that is loaded within the block without all its weights.

    Args:
        model: Its name, for the error.

    Raises:
        ValueError: If some are missing or of another shape; those of a pooler may be.
    """
    logger = logging.getLogger("transformers.modeling_utils")
    level, reports = logger.level, _Reports(logger.getEffectiveLevel())
    logger.addFilter(reports)
    logger.setLevel(min(logging.INFO, reports.level))  # at WARNING, it would also check a plan of tensor parallelism
    try:
        yield
    except Exception as error:  # where shapes differ, the library raises as well, and refers to its report
        if not reports.missing:
            raise
        raise ValueError(_message(model, reports.missing)) from error
    finally:
        logger.setLevel(level)
        logger.removeFilter(reports)
    if reports.missing:
        raise ValueError(_message(model, reports.missing))


def _message(model: str, missing: list[str]) -> str:
    shown = ", ".join(sorted(missing)[:3]) + (" …" if len(missing) > 3 else "")
    return (
        f"{model} lacks weights that its config asks for, and random ones would take their place: {shown}. Load the "
        "files as they were saved together, in a format that the installed transformers reads"
    )


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
        ValueError: If weights are missing, left over, of another shape or unreadable, or an expert is unknown; as
            `offload`.
    """
    from mote.checkpoints.reading import mote_class
    from mote.inference.offloading import check_settings, start_offloaded

    config = _mote_config(path, experts, **kwargs)
    model_class = mote_class(config.model_type, "model")
    if offload is None:
        return model_class.from_pretrained(path, experts=experts, **kwargs)
    check_settings(config, offload, keep)
    model = model_class.from_pretrained(path, experts=config.available_experts[:keep], **kwargs)
    start_offloaded(model, config.loaded_experts, offload, keep)
    return model


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
    """Load any Sentence-Transformers model, with all its weights.

    Args:
        path: A folder, or an id on the Hub.
        offload: For a MoTE, `"disk"` or `"cpu"`: at most `keep` experts are ever in memory, or on the device.
        keep: Number of experts on the device, with `offload`.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        device: Device that it runs on. Default: Sentence-Transformers' choice. On `"meta"` it is checked, but its
            weights are not read.
        dtype: Dtype of its weights. Default: the stored one.
        trust_remote_code: Run the code in its repository or folder.

    Raises:
        ValueError: If it does not load, lacks weights, has untrusted code, or cannot be offloaded.
    """
    from sentence_transformers import SentenceTransformer

    path = os.fspath(path)
    model_kwargs: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if device == "meta":
        model_kwargs["device_map"], device = "meta", None
    if offload is not None:
        from mote.inference.offloading import check_settings, start_offloaded

        config = _mote_config(path, revision=revision)
        check_settings(config, offload, keep)
        model_kwargs["experts"] = config.available_experts[:keep]
    with all_weights(path):
        try:
            encoder = SentenceTransformer(
                path, device=device, revision=revision, trust_remote_code=trust_remote_code, model_kwargs=model_kwargs
            ).eval()
        except Exception as error:  # whatever a library or the model's own code raises
            if not trust_remote_code and "trust_remote_code" in str(error):
                raise ValueError(
                    f"{path} has code of its own, which runs only with --trust-remote-code (trust_remote_code=True)"
                ) from error
            raise ValueError(f"{path} does not load in Sentence-Transformers: {first_line(error)}") from error
    if offload is not None:
        model: Any = encoder[0]
        start_offloaded(model.model, config.loaded_experts, offload, keep)
    return encoder


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
        raise ValueError(f"{path} is not a MoTE, its model_type is {model_type!r}: `mote upcycle` makes one of it")
    return mote_class(model_type, "config").from_pretrained(path, experts=experts, **hub)


def check_device(device: str | None) -> None:
    """Make sure that a device is there.

    Raises:
        ValueError: If it is not; the message lists those that are.
    """
    import torch

    if device is None:
        return
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    there += ["mps"] if torch.backends.mps.is_available() else []
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or (str(wanted) not in there and not (device == "cuda" and "cuda:0" in there)):
        raise ValueError(f"There is no device {device!r} here, but {', '.join(there)}")


def first_line(error: BaseException) -> str:
    """An error in one line: its kind and what it says first."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
