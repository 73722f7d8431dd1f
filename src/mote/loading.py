"""Whether a model found all its weights: transformers draws those that are missing at random, and only reports it."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

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
