"""Embeddings of a teacher, cached on disk, so that a run that was killed goes on where it was."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from mote.training.recipe import TeacherSettings

CHUNK = 2048  # texts

Report = Callable[[str], None]


def default_cache() -> Path:
    """The folder of cached embeddings: `teachers` in `MOTE_CACHE`, by default `~/.cache/mote`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOTE_CACHE") or Path(base) / "mote") / "teachers"


class Teacher:
    """A teacher, which is loaded when the first embedding is missing from the cache."""

    def __init__(
        self, settings: TeacherSettings, report: Report = lambda line: None, cache: Path | None = None
    ) -> None:
        """Of a recipe.

        Args:
            settings: The recipe's.
            report: Called with each line of progress.
            cache: Folder of the embeddings. Default: `default_cache()`.
        """
        self.settings = settings
        self.report = report
        self.cache = cache or default_cache()
        self._model: Any = None
        self._identity = ""

    def labels(self, columns: dict[str, list[str]]) -> pyarrow.Array:
        """Embed the text columns of a dataset.

        Args:
            columns: Column → texts; the recipe has a prompt for each, or none.

        Returns:
            For each row a list of numbers or, with several columns, a list of one such list for each column.
        """
        embeddings = [self.embed(texts, self.settings.prompts.get(name)) for name, texts in columns.items()]
        dimension = embeddings[0].shape[1]
        if len(embeddings) == 1:
            return _fixed_lists(pyarrow.array(embeddings[0].reshape(-1)), dimension)
        rows = np.stack(embeddings, axis=1)  # (rows, columns, dimension)
        return _fixed_lists(_fixed_lists(pyarrow.array(rows.reshape(-1)), dimension), len(embeddings))

    def embed(self, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        """Embed texts; see `teacher_embeddings`."""
        raise NotImplementedError


def _fixed_lists(values: pyarrow.Array, size: int) -> pyarrow.Array:
    return pyarrow.FixedSizeListArray.from_arrays(values, size)
