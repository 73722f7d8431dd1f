"""Models are loaded with all their weights: transformers draws missing ones at random, and only reports it."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

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


def load_model(
    path: str,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> "SentenceTransformer":
    """Load any Sentence-Transformers model, with all its weights.

    Args:
        path: A folder, or an id on the Hub.
        revision: Commit on the Hub. Default: the newest.
        device: Where it runs. Default: what Sentence-Transformers picks.
        dtype: Of its weights. Default: that in which they are stored.
        trust_remote_code: Run code that it brings.

    Raises:
        ValueError: If it does not load, or lacks weights.
    """
    from sentence_transformers import SentenceTransformer

    with all_weights(path):
        try:
            return SentenceTransformer(
                path,
                device=device,
                revision=revision,
                trust_remote_code=trust_remote_code,
                model_kwargs={"dtype": dtype} if dtype else None,
            ).eval()
        except Exception as error:  # whatever a library or the model's own code raises
            raise ValueError(f"{path} does not load in Sentence-Transformers: {first_line(error)}") from error


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
