"""Workers of a Ray cluster, which embed whole shards through Ray Data."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mote.corpora.encoder import Encoder
from mote.corpora.job import Job, Shard, embed_shards


def embed_on_ray(
    job: Job, numbers: Sequence[int], encoder: Encoder, progress: Callable[[int], object]
) -> Iterator[Shard]:
    """Embed shards on a cluster, whose workers write them to storage that all of them share.

    Takes the arguments of `embed_shards`; `progress` is not called, and of the encoder, only the settings are used.

    Yields:
        The shards, in the order in which they finish.

    Raises:
        ConnectionError: If there is no cluster at the address.
    """
    import ray

    connected = ray.is_initialized()
    if not connected:
        ray.init(address=encoder.options.address or "local", log_to_driver=False, logging_level=logging.ERROR)
    try:
        job = replace(job, folder=job.folder.absolute())  # workers have working directories of their own
        if job.dtype == "int8" and job.ranges is None:  # the first shard sets the ranges for all
            for shard in _embedded(job, numbers[:1], encoder):
                job = replace(job, ranges=shard.ranges)
                yield shard
            numbers = numbers[1:]
        if numbers:
            yield from _embedded(job, numbers, encoder)
    finally:
        if not connected:
            ray.shutdown()


def _embedded(job: Job, numbers: Sequence[int], encoder: Encoder) -> Iterator[Shard]:
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False  # there is one already
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    workers = min(encoder.options.processes or gpus or len(nodes), len(numbers))
    smallest = min(node["CPU"] for node in nodes if node.get("CPU"))
    # Ray limits the threads of a worker to its CPUs.
    cpus = 1 if gpus else max(1, min(smallest, smallest * len(nodes) // workers))
    here = {"engine": "local", "address": None, "processes": None, "revision": encoder.commit}
    source = str(Path(encoder.source).absolute()) if Path(encoder.source).is_dir() else encoder.source
    items = [{"number": number} for number in numbers]
    results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Worker,
        fn_constructor_args=(job, source, encoder.options.model_copy(update=here)),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=cpus,
        num_gpus=min(1, gpus / workers) if gpus else None,
    )
    for row in results.iter_rows():
        if "error" in row:
            raise row["error"]
        yield Shard(**row["shard"])


class _Worker:
    """A process with a model."""

    def __init__(self, job: Job, source: str, options: Any) -> None:
        self.job, self.encoder = job, Encoder(source, options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Embed some shards. Errors are returned as results: of a raised one, Ray may keep only the text."""
        try:
            shards = embed_shards(self.job, list(map(int, batch["number"])), self.encoder)
            return {"shard": [shard._asdict() for shard in shards]}
        except (OSError, ValueError) as error:
            return {"error": [error]}
