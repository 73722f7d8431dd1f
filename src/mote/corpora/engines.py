"""A job of embedding, shard by shard, and the engines that run it: this machine, or a Ray cluster."""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub.utils import tqdm

from mote.cluster import ray_cluster
from mote.corpora.encoder import Encoder
from mote.corpora.options import CorpusOptions
from mote.files import replaced

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What is embedded, and where to; it is sent unchanged to the workers of a cluster."""

    texts: "Dataset"  # with the columns id, text and task
    folder: Path
    task: str | None = None
    prompt: str | None = None
    dtype: str = "float32"
    shard_size: int = 8192
    sparse: bool = False  # whether the embeddings are those of a `SparseEncoder`

    def __len__(self) -> int:
        """Return the number of shards."""
        return -(-len(self.texts) // self.shard_size)

    def file(self, number: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"shard-{number:05}.{'npz' if self.sparse else 'parquet'}"

    def rows(self, number: int) -> int:
        """Return the number of rows of a shard."""
        return min(self.shard_size, len(self.texts) - number * self.shard_size)

    def embed(self, number: int, encoder: Encoder, progress: Callable[[int], object] = lambda _: None) -> None:
        """Embed a shard and write it; `progress` is called with the number of newly embedded texts."""
        columns = self.texts[number * self.shard_size : (number + 1) * self.shard_size]
        by_task: dict[str | None, list[int]] = {}
        for row, task in enumerate(columns["task"]):
            by_task.setdefault(task, []).append(row)
        batches, encoder.truncated = [], 0
        for task, rows in by_task.items():
            for batch in encoder.encode(columns["text"], rows, task or self.task, self.prompt):
                batches.append(batch)
                progress(len(batch[0]))
        write_shard(self.file(number), columns["id"], _in_order(batches), self.dtype)


def _in_order(batches: list[tuple[list[int], Any]]) -> Any:
    """Join the embeddings of batches, in the order of their rows."""
    places = np.argsort(np.concatenate([rows for rows, _ in batches]))
    vectors = [vectors for _, vectors in batches]
    if isinstance(vectors[0], np.ndarray):
        return np.concatenate(vectors)[places]
    from scipy.sparse import vstack

    return vstack(vectors, format="csr")[places]


def write_shard(path: Path, ids: Sequence[str], embeddings: Any, dtype: str = "float32") -> None:
    """Write embeddings [N, D], all of them finite, with their ids as parquet, or a SciPy matrix as it is."""
    if not isinstance(embeddings, np.ndarray):
        from scipy.sparse import save_npz

        with replaced(path) as unfinished:
            save_npz(unfinished, embeddings)
        return
    import pyarrow
    from pyarrow import parquet

    with np.errstate(over="ignore"):
        stored = embeddings.astype(dtype)
    broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
    if len(broken):
        raise ValueError(f"{len(broken)} embeddings are not finite in {dtype}, first that of {ids[broken[0]]!r}")
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(stored.reshape(-1)), stored.shape[1])
    shard = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})
    with replaced(path) as unfinished:
        parquet.write_table(shard, unfinished, use_dictionary=False)


def read_shard(path: Path) -> Any:
    """Read the embeddings of a shard: an array in float32, or a SciPy matrix."""
    if path.suffix == ".npz":
        from scipy.sparse import load_npz

        return load_npz(path)
    from pyarrow import parquet

    column = parquet.read_table(path, columns=["embedding"], partitioning=None)["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32)


def run(job: Job, numbers: Sequence[int], encoder: Encoder) -> Iterator[int]:
    """Embed shards of a job on the engine that the encoder's options name; yield the number of each written one."""
    if not numbers:
        return
    for task in {job.task, *job.texts.unique("task")}:
        encoder.arguments(task, job.prompt)
    engine = _on_ray if encoder.options.engine == "ray" else _here
    with (
        tqdm(total=sum(map(job.rows, numbers)), unit=" texts", desc="Embedding", disable=None) as bar,
        closing(engine(job, numbers, encoder, bar.update)) as shards,
    ):
        for number in shards:
            yield number
            if bar.disable:
                logger.info("Shard %d of %d is embedded", number + 1, len(job))


def _here(job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object]) -> Generator[int]:
    for number in numbers:
        job.embed(number, encoder, progress)
        yield number


def _on_ray(job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object]) -> Generator[int]:
    """Embed shards through Ray Data; the workers write them to storage that all of them share."""
    with ray_cluster() as ray:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False  # there is one already
        options = encoder.options.model_copy(update={"engine": "local", "revision": encoder.commit})
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
            progress(job.rows(row["number"]))
            encoder.truncated = row["truncated"]
            yield row["number"]


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
        """Embed a shard. Errors are returned as results: in one that was raised, Ray hides the cause."""
        try:
            self.job.embed(int(batch["number"][0]), self.encoder)
            return {**batch, "truncated": [self.encoder.truncated]}
        except (OSError, ValueError) as error:
            return {"error": [error]}
