"""What is embedded, and the work of one shard: the same on every engine."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.corpora.encoder import Encoder, SortedTexts
from mote.corpora.shards import shard_name, write_shard

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Job:
    """What is embedded, and where to; it is sent unchanged to the workers of a cluster.

    Attributes:
        texts: Texts with the columns `id`, `text` and `task`.
        digest: Hash of the texts.
        ranges: Ranges of int8 (2, dimension), once the first shard has set them.
    """

    texts: "Dataset"
    digest: str
    folder: Path
    task: str | None = None
    prompt: str | None = None
    dtype: str = "float32"
    shard_size: int = 8192
    ranges: list[list[float]] | None = None

    def identity(self, encoder: Encoder) -> dict[str, Any]:
        """Return everything that determines the embeddings."""
        own = {name: getattr(self, name) for name in ("task", "prompt", "dtype", "shard_size")}
        texts = {"rows": len(self.texts), "sha256": self.digest}
        return {"command": "embed", "model": encoder.identity, "texts": texts, **own}


class Shard(NamedTuple):
    """A shard that was written: its number and rows, the dimension of the embeddings, and the ranges of int8."""

    number: int
    rows: int
    dimension: int
    ranges: list[list[float]] | None


def embed_shards(
    job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object] = lambda _: None
) -> Iterator[Shard]:
    """Embed shards, in order; `progress` is called with the number of newly embedded texts."""

    def prepare(number: int) -> tuple[list[str], list[SortedTexts]]:
        columns = job.texts[number * job.shard_size : (number + 1) * job.shard_size]
        by_task: dict[str | None, list[int]] = {}
        for row, task in enumerate(columns["task"]):
            by_task.setdefault(task, []).append(row)
        sets = (encoder.sort(columns["text"], rows, task or job.task, job.prompt) for task, rows in by_task.items())
        return columns["id"], list(sets)

    ranges = job.ranges
    with ThreadPoolExecutor(1) as ahead:  # sorts the next shard, so that no device is idle in between
        following = ahead.submit(prepare, numbers[0])
        for number, after in zip(numbers, [*numbers[1:], None], strict=True):
            ids, sets = following.result()
            if after is not None:
                following = ahead.submit(prepare, after)
            batches = []
            for rows, batch in (each for sorted_texts in sets for each in encoder.encode(sorted_texts)):
                batches.append((rows, batch))
                progress(len(rows))
            embeddings = np.empty((len(ids), batches[0][1].shape[1]), np.float32)
            for rows, batch in batches:
                embeddings[rows] = batch
            if job.dtype == "int8" and ranges is None:
                ranges = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)]).tolist()
            write_shard(job.folder / shard_name(number), ids, embeddings, job.dtype, ranges)
            yield Shard(number, len(ids), embeddings.shape[1], ranges)
