"""A job of embedding, shard by shard, and the engines that run it: this machine, or a Ray cluster."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from huggingface_hub.utils import tqdm

from mote.corpora.encoder import Encoder
from mote.corpora.options import CorpusOptions
from mote.corpora.shards import write_shard

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


class Shard(NamedTuple):
    """A shard that was written: its number, its rows, and the dimension of the embeddings."""

    number: int
    rows: int
    dimension: int


@dataclass(frozen=True)
class Job:
    """What is embedded, and where to; it is sent unchanged to the workers of a cluster.

    Attributes:
        texts: Texts with the columns `id`, `text` and `task`.
        sparse: Whether the embeddings are those of a `SparseEncoder`.
    """

    texts: "Dataset"
    folder: Path
    task: str | None = None
    prompt: str | None = None
    dtype: str = "float32"
    shard_size: int = 8192
    sparse: bool = False

    def __len__(self) -> int:
        """Return the number of shards."""
        return -(-len(self.texts) // self.shard_size)

    def file(self, number: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"shard-{number:05}.{'npz' if self.sparse else 'parquet'}"

    def rows(self, number: int) -> int:
        """Return the number of rows of a shard."""
        return min(self.shard_size, len(self.texts) - number * self.shard_size)

    def embed(self, number: int, encoder: Encoder, progress: Callable[[int], object] = lambda _: None) -> Shard:
        """Embed a shard and write it; `progress` is called with the number of newly embedded texts."""
        columns = self.texts[number * self.shard_size : (number + 1) * self.shard_size]
        by_task: dict[str | None, list[int]] = {}
        for row, task in enumerate(columns["task"]):
            by_task.setdefault(task, []).append(row)
        batches = []
        for task, rows in by_task.items():
            for batch in encoder.encode(columns["text"], rows, task or self.task, self.prompt):
                batches.append(batch)
                progress(len(batch[0]))
        embeddings = _in_order(batches)
        write_shard(self.file(number), columns["id"], embeddings, self.dtype)
        return Shard(number, *embeddings.shape)


def _in_order(batches: list[tuple[list[int], Any]]) -> Any:
    """Join the embeddings of batches, in the order of their rows."""
    first = batches[0][1]
    rows = [row for of_batch, _ in batches for row in of_batch]
    if not isinstance(first, np.ndarray):
        from scipy.sparse import vstack

        return vstack([vectors for _, vectors in batches], format="csr")[np.argsort(rows)]
    embeddings = np.empty((len(rows), first.shape[1]), np.float32)
    for of_batch, vectors in batches:
        embeddings[of_batch] = vectors
    return embeddings


def run(job: Job, numbers: Sequence[int], encoder: Encoder) -> Iterator[Shard]:
    """Embed shards of a job on the engine that the encoder's options name, and show the progress."""
    if not numbers:
        return
    for task in {job.task, *job.texts.unique("task")}:
        encoder.arguments(task, job.prompt)
    rows = len(job.texts)
    done = rows - sum(map(job.rows, numbers))
    engine = _on_ray if encoder.options.engine == "ray" else _here
    with (
        tqdm(total=rows, initial=done, unit=" texts", desc="Embedding", disable=None) as bar,
        closing(engine(job, numbers, encoder, bar.update)) as shards,
    ):
        for shard in shards:
            yield shard
            done += shard.rows
            bar.update(max(0, done - bar.n))
            if bar.disable:
                logger.info("%s of %s texts are embedded", f"{done:,}", f"{rows:,}")


def _here(job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object]) -> Generator[Shard]:
    for number in numbers:
        yield job.embed(number, encoder, progress)


# Ray -----------------------------------------------------------------------------------------------------------------


def _on_ray(job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object]) -> Generator[Shard]:
    """Embed shards through Ray Data; the workers write them to storage that all of them share.

    Ray finds the cluster: the one in `RAY_ADDRESS`, the one that this machine belongs to, or a new one on it.
    """
    import ray

    connected = ray.is_initialized()
    if not connected:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False  # there is one already
        options = encoder.options.model_copy(update={"engine": "local", "device": None, "revision": encoder.commit})
        source = str(Path(encoder.source).absolute()) if Path(encoder.source).is_dir() else encoder.source
        items = [{"number": number} for number in numbers]
        results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _Worker,
            # Workers have working directories of their own.
            fn_constructor_args=(replace(job, folder=job.folder.absolute()), source, options, encoder.sparse),
            batch_size=1,
            **_resources(encoder.options.workers, len(numbers)),
        )
        for row in results.iter_rows():
            if "error" in row:
                raise row["error"]
            yield Shard(**row["shard"])
    finally:
        if not connected:
            ray.shutdown()


def _resources(workers: int | None, shards: int) -> dict[str, Any]:
    """Return the number of workers, and what each of them gets of the cluster."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    workers = min(workers or gpus or len(nodes), shards)
    smallest = min(node["CPU"] for node in nodes if node.get("CPU"))
    return {
        "compute": ray.data.ActorPoolStrategy(size=workers),
        # Ray limits the threads of a worker to its CPUs.
        "num_cpus": 1 if gpus else max(1, min(smallest, smallest * len(nodes) // workers)),
        "num_gpus": min(1, gpus / workers) if gpus else None,
    }


class _Worker:
    """A process with a model."""

    def __init__(self, job: Job, source: str, options: CorpusOptions, sparse: bool) -> None:
        self.job, self.encoder = job, Encoder(source, options, sparse)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Embed some shards. Errors are returned as results: of a raised one, Ray may keep only the text."""
        try:
            shards = [self.job.embed(int(number), self.encoder) for number in batch["number"]]
            return {"shard": [shard._asdict() for shard in shards]}
        except (OSError, ValueError) as error:
            return {"error": [error]}
