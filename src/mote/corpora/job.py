"""What a run embeds, and the work of one shard: the same on every engine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mote.corpora.encoding import Devices, Model, windows
from mote.corpora.folder import FORMAT
from mote.corpora.source import Corpus, Document, Reader
from mote.corpora.store import quantized, write_shard


class Finished(NamedTuple):
    """A shard that was written.

    Attributes:
        number: Its number.
        entry: Its entry in the manifest.
        dimension: Dimension of the embeddings.
        ranges: Ranges of int8 (2, dimension), else None.
    """

    number: int
    entry: dict[str, Any]
    dimension: int
    ranges: list[list[float]] | None


@dataclass(frozen=True)
class Job:
    """What a run embeds; it is sent unchanged to the workers of a cluster.

    Attributes:
        model: The model.
        corpus: The texts.
        folder: Folder of the result.
        dtype: Dtype to store.
        shard_size: Texts per shard.
        ranges: Ranges of int8 (2, dimension), once the first shard has set them.
    """

    model: Model
    corpus: Corpus
    folder: Path
    dtype: str
    shard_size: int
    ranges: list[list[float]] | None = None

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of a new folder."""
        columns = self.corpus.columns
        return {
            "format": FORMAT,
            "complete": False,
            "model": self.model.identity(),
            "input": [{"name": part.name, "rows": part.rows, "sha256": part.sha256} for part in self.corpus.parts],
            "rows": len(self.corpus),
            "columns": {"text": list(columns.texts), "id": columns.id, "task": columns.task},
            "task": self.model.task,
            "prompt": self.model.prompt,
            "dtype": self.dtype,
            "dimensions": self.model.dimensions,
            "dimension": None,
            "shard_size": self.shard_size,
            "ranges": None,
            "shards": {},
        }

    def rows_of(self, number: int) -> tuple[int, int]:
        """Return the first row of a shard, and the row after its last."""
        return number * self.shard_size, min((number + 1) * self.shard_size, len(self.corpus))

    def write(self, number: int, documents: Sequence[Document], embeddings: np.ndarray) -> Finished:
        """Write a shard.

        Args:
            number: Its number.
            documents: Its texts.
            embeddings: (texts, dimension), float32.

        Raises:
            OSError: If it cannot be written.
            ValueError: If an embedding is not finite.
        """
        _require_finite(documents, embeddings, "")
        ranges = self.ranges
        if self.dtype == "int8" and ranges is None:
            ranges = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)]).tolist()
        stored = quantized(embeddings, self.dtype, ranges)
        _require_finite(documents, stored, f" in {self.dtype}")
        entry = write_shard(self.folder, number, [document.id for document in documents], stored)
        return Finished(number, entry, embeddings.shape[1], ranges)


def _require_finite(documents: Sequence[Document], embeddings: np.ndarray, where: str) -> None:
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(broken):
        first, count = documents[broken[0]].where, f"{len(broken)} of {len(documents)}"
        raise ValueError(f"{first}: the embedding is not finite{where} (in its shard {count} are not)")


def embed_shards(
    job: Job,
    numbers: Iterable[int],
    devices: Devices,
    progress: Callable[[int], object] = lambda _: None,
    reader: Reader | None = None,
) -> Iterator[Finished]:
    """Embed shards, in order.

    Args:
        job: The job.
        numbers: Shards.
        devices: The model.
        progress: Called with the number of newly embedded texts.
        reader: Reader of the corpus to continue with. Default: a new one.

    Raises:
        OSError: If a shard cannot be written.
        ValueError: If a row, a task or an embedding is invalid.
    """
    reader = reader or Reader(job.corpus)

    def begin(number: int) -> tuple[int, list[Document], Iterator[tuple[list[int], np.ndarray]]]:
        documents = reader.read(*job.rows_of(number))
        return number, documents, devices.encode(job.model, windows(documents, job.model, devices.encoder), progress)

    # Each shard is begun before the previous one is awaited, so that no device is idle in between.
    for begun, _ in pairwise(chain(map(begin, numbers), [None])):
        number, documents, results = begun  # type: ignore[misc]
        parts = list(results)
        embeddings = np.empty((len(documents), parts[0][1].shape[1]), np.float32)
        for rows, part in parts:
            embeddings[rows] = part
        finished = job.write(number, documents, embeddings)
        job = replace(job, ranges=finished.ranges)
        yield finished
