"""What embeds the shards of a job: the model on devices of this machine, or on a cluster."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mote.corpora.cluster import on_ray, require_ray
from mote.corpora.encoding import Devices, Model
from mote.corpora.job import Finished, Job, embed_shards
from mote.inference.loading import check_device
from mote.remote.configuration_mote import alternatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

ENGINES = ("local", "ray")


class Embedder:
    """Embeds shards; a context manager. The model is loaded, and processes are started, when first needed.

    Args:
        models: The model; if it embeds several tasks, its settings for each.
        device: Device, or several, each with a process of its own. Default: the best available.
        processes: Number of processes on the CPU; with Ray, the number of workers.
        engine: `"local"`, or `"ray"` for a cluster through Ray Data.
        address: Address of a Ray cluster. Default: start a local one.

    Raises:
        OSError: If a package is not installed.
        ValueError: If settings exclude each other, or a device does not exist.
    """

    def __init__(
        self,
        *models: Model,
        device: str | Sequence[str] | None = None,
        processes: int | None = None,
        engine: str = "local",
        address: str | None = None,
    ) -> None:
        self.models = models
        self.on_cluster = engine == "ray"
        self.address, self.processes = address, processes
        self.devices = self._devices(device, engine)
        self._closing = ExitStack()

    def _devices(self, device: str | Sequence[str] | None, engine: str) -> list[str]:
        """Return the devices that the settings name; empty for the best one."""
        if engine not in ENGINES:
            raise ValueError(f"Unknown engine {engine!r}." + alternatives(engine, ENGINES))
        devices = [device] if isinstance(device, str) else list(device or ())
        if self.on_cluster:
            require_ray()
            if devices:
                raise ValueError("device is for the engine local: Ray assigns a device to each worker")
            return []
        if self.address is not None:
            raise ValueError("address is for the engine ray: add `--engine ray`")
        if devices and self.processes is not None:
            raise ValueError("device and processes exclude each other: processes are for the CPU, each device has one")
        for one in devices:
            check_device(one)
        devices = devices or ["cpu"] * (self.processes or 0)
        backend = self.models[0].backend
        if backend != "torch" and (len(devices) > 1 or set(devices) - {"cpu"}):
            raise ValueError(f"The backend {backend} runs in one process on the CPU; for several, add `--engine ray`")
        return devices

    @cached_property
    def encoder(self) -> "SentenceTransformer":
        """The model in this process; for a cluster, without weights.

        Raises:
            FileNotFoundError: If a file is missing.
            OSError: If a runtime is not installed.
            ValueError: If the model does not load, knows no such task, or has fewer dimensions than asked for.
        """
        here = "cpu" if len(self.devices) > 1 else next(iter(self.devices), None)
        encoder = self.models[0].load("meta" if self.on_cluster else here)
        for model in self.models:
            model.check(encoder)
        return encoder

    @cached_property
    def _local(self) -> Devices:
        return self._closing.enter_context(Devices(self.encoder, self.devices))

    def embed(self, job: Job, numbers: Sequence[int], progress: Callable[[int], object]) -> Iterator[Finished]:
        """Embed shards of a job.

        Args:
            job: The job.
            numbers: Shards.
            progress: Called with the number of newly embedded texts, if it is known.
        """
        if self.on_cluster:  # whose workers have working directories of their own
            source = Path(job.model.source)
            model = replace(job.model, source=str(source.absolute())) if source.is_dir() else job.model
            job = replace(job, folder=job.folder.absolute(), model=model)
            return on_ray(job, numbers, self.address, self.processes)
        return embed_shards(job, numbers, self._local, progress)

    def __enter__(self) -> "Embedder":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._closing.close()
