"""Workers of a Ray cluster, which embed whole shards through Ray Data."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from mote.corpora.encoding import Devices
from mote.corpora.job import Finished, Job, embed_shards
from mote.corpora.source import Reader


def require_ray() -> None:
    """Raise `OSError` if Ray Data is not installed."""
    if find_spec("ray") is None:
        raise OSError('The engine ray needs Ray Data, which is not installed: pip install "mote-embeddings[ray]"')


def on_ray(job: Job, numbers: Sequence[int], address: str | None, workers: int | None) -> Iterator[Finished]:
    """Embed shards on a cluster, whose workers write them to storage that all of them share.

    Args:
        job: The job.
        numbers: Shards.
        address: Address of the cluster. Default: the one that this process is connected to, else a new local one.
        workers: Number of workers. Default: one for each GPU of the cluster, or for each node if there is none.

    Yields:
        The shards, in the order in which they finish.

    Raises:
        ConnectionError: If there is no cluster at the address.
        OSError: If a shard cannot be written.
        ValueError: If a row, a task or an embedding is invalid.
    """
    import ray

    connected = ray.is_initialized()
    if not connected:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR)
    try:
        if job.dtype == "int8" and job.ranges is None:  # the first shard sets the ranges for all
            for finished in _embedded(job, numbers[:1], 1):
                job = replace(job, ranges=finished.ranges)
                yield finished
            numbers = numbers[1:]
        yield from _embedded(job, numbers, workers)
    finally:
        if not connected:
            ray.shutdown()


def _embedded(job: Job, numbers: Sequence[int], workers: int | None) -> Iterator[Finished]:
    import ray

    if not numbers:
        return
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # there is one already
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    workers = min(workers or gpus or len(nodes), len(numbers))
    smallest = min(node["CPU"] for node in nodes if node.get("CPU"))
    # Ray limits the threads of a worker to its CPUs.
    cpus = 1 if gpus else max(1, min(smallest, smallest * len(nodes) // workers))
    shards = ray.data.from_items([{"number": number} for number in numbers], override_num_blocks=len(numbers))
    results = shards.map_batches(
        _Worker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=cpus,
        num_gpus=min(1, gpus / workers) if gpus else None,
    )
    for row in results.iter_rows():
        if "error" in row:
            raise row["error"]
        yield Finished(**row["finished"])


class _Worker:
    """A process with a model."""

    def __init__(self, job: Job) -> None:
        self.reader = Reader(job.corpus)
        self.job = job
        self.devices = Devices(job.model.load())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Embed some shards. Errors are returned as results: of a raised one, Ray may keep only the text."""
        try:
            finished = embed_shards(self.job, map(int, batch["number"]), self.devices, reader=self.reader)
            return {"finished": [shard._asdict() for shard in finished]}
        except (OSError, ValueError) as error:
            return {"error": [error]}
