"""The model that embeds a corpus: one on one device, or one in a process for each of several devices."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from configuration_mote import ROLE_HINTS, alternatives
from mote.checkpoints.hashing import folder_hash
from mote.corpora.source import Document
from mote.hub import commit_of
from mote.inference.loading import load_encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

WINDOW = 2048
"""Texts that are sorted by length together. Windows are the same on any number of devices, so batches are, too."""


@dataclass(frozen=True)
class Model:
    """A Sentence-Transformers model, where it is and how it embeds.

    Attributes:
        source: A folder, or an id on the Hub.
        backend: `"torch"`; for a folder written by `mote export` also `"onnx"` or `"openvino"`.
        trust_remote_code: Run the code in its repository.
        revision: Commit on the Hub; None for a folder.
        batch_size: Texts in a batch.
        dimensions: Dimensions that are kept. Default: all.
        prompt: Prompt of all texts.
        task: Task of all texts.
    """

    source: str
    backend: str = "torch"
    trust_remote_code: bool = False
    revision: str | None = None
    batch_size: int = 32
    dimensions: int | None = None
    prompt: str | None = None
    task: str | None = None

    def identity(self) -> dict[str, str | None]:
        """Describe it for the manifest: the commit of the Hub, or a hash of the folder."""
        revision = self.revision or folder_hash(Path(self.source))
        return {"name": self.source, "revision": revision, "backend": self.backend}

    def load(self, device: str | None = None) -> "SentenceTransformer":
        """Load it.

        Raises:
            FileNotFoundError: If the runtime's file is missing.
            OSError: If the runtime is not installed.
            ValueError: If it does not load.
        """
        if self.backend == "torch" or device == "meta":
            return load_encoder(
                self.source, revision=self.revision, device=device, trust_remote_code=self.trust_remote_code
            )
        from mote.inference.runtimes import load_exported

        return load_exported(self.source, self.backend)

    def arguments(self, encoder: "SentenceTransformer", task: str | None = None) -> dict[str, Any]:
        """Return the arguments of `encode` for the texts of a task. Default: that of all texts.

        Raises:
            ValueError: If the model knows no such task or prompt.
        """
        task = self.task if task is None else task
        if task is None:
            return {} if self.prompt is None else {"prompt": self.prompt}
        config: Any = getattr(encoder[0], "config", None)
        tasks = config.tasks if str(getattr(config, "model_type", "")).startswith("mote") else {}
        if task in tasks and not encoder.prompts.get(task):
            return {"task": task, "prompt": ""}
        if task in encoder.prompts:
            return {"prompt_name": task, **({"task": task} if task in ROLE_HINTS else {})}
        raise ValueError(f"Unknown task {task!r}." + alternatives(task, dict.fromkeys([*encoder.prompts, *tasks])))

    def check(self, encoder: "SentenceTransformer") -> int | None:
        """Make sure that the model fits the settings.

        Returns:
            The dimension of its embeddings, if it is known.

        Raises:
            ValueError: If it knows no such task, or has fewer dimensions.
        """
        self.arguments(encoder)
        dimension = encoder.get_embedding_dimension()
        if self.dimensions is not None and self.dimensions > (dimension or self.dimensions):
            raise ValueError(f"dimensions {self.dimensions}: the model's embeddings have {dimension}")
        return self.dimensions or dimension

    def encode(self, encoder: "SentenceTransformer", window: "Window", **pool: Any) -> np.ndarray:
        """Embed the texts of a window (texts, dimension)."""
        return np.asarray(
            encoder.encode(
                window.texts,
                batch_size=self.batch_size,
                truncate_dim=self.dimensions,
                show_progress_bar=False,
                **window.arguments,
                **pool,
            ),
            dtype=np.float32,
        )


def find_model(source: str, *, revision: str | None = None, **settings: Any) -> Model:
    """Find a model, without loading it.

    Raises:
        FileNotFoundError: If it is neither a folder with a model nor on the Hub.
    """
    return Model(source, revision=commit_of(source, revision), **settings)


class Window(NamedTuple):
    """Texts of one task that are embedded by one call.

    Attributes:
        rows: Their rows in the shard.
        texts: The texts.
        arguments: Arguments of `encode`.
    """

    rows: list[int]
    texts: list[str]
    arguments: dict[str, Any]


def windows(documents: Sequence[Document], model: Model, encoder: "SentenceTransformer") -> Iterator[Window]:
    """Cut the texts of a shard into windows, task by task.

    Raises:
        ValueError: If the model knows no such task.
    """
    by_task: dict[str | None, list[int]] = {}
    for row, document in enumerate(documents):
        by_task.setdefault(document.task, []).append(row)
    for task, rows in by_task.items():
        try:
            arguments = model.arguments(encoder, task)
        except ValueError as error:
            raise ValueError(f"{documents[rows[0]].where}: {error}") from None
        for start in range(0, len(rows), WINDOW):
            part = rows[start : start + WINDOW]
            yield Window(part, [documents[row].text for row in part], arguments)


EncodeAll = Callable[[Iterable[Window]], Iterator[np.ndarray]]
"""Embeds windows, in order."""


@contextmanager
def on_devices(
    model: Model, encoder: "SentenceTransformer", devices: Sequence[str], progress: Callable[[int], object]
) -> Iterator[EncodeAll]:
    """Make a model ready: in this process, or with several devices in a process for each.

    Args:
        model: Settings of the model.
        encoder: The model.
        devices: Devices of the processes, such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`; for one or none the
            encoder stays in this process, on its own device.
        progress: Called with a number of texts whenever they are embedded.
    """
    if len(devices) < 2:
        hook = encoder.register_forward_hook(lambda _, __, output: progress(len(output["sentence_embedding"])))
        try:
            yield lambda windows: (model.encode(encoder, window) for window in windows)
        finally:
            hook.remove()
        return

    threads = max(1, (os.cpu_count() or 1) // len(devices))
    encoder.in_worker = _InWorker(threads if set(devices) == {"cpu"} else None)  # type: ignore[assignment]
    pools = [encoder.start_multi_process_pool([device]) for device in devices]  # one each: a free one takes a window
    free: SimpleQueue[Any] = SimpleQueue()
    for pool in pools:
        free.put(pool)

    def encode(window: Window) -> np.ndarray:
        pool = free.get()
        try:
            return model.encode(encoder, window, pool=pool, chunk_size=len(window.texts))
        finally:
            free.put(pool)
            progress(len(window.texts))

    with ThreadPoolExecutor(len(pools)) as executor:
        try:
            yield lambda windows: executor.map(encode, windows)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for pool in pools:
                with suppress(ValueError):
                    encoder.stop_multi_process_pool(pool)


class _InWorker:
    """Sets a worker process up when the model arrives there: Sentence-Transformers leaves no other place for it."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def __reduce__(self) -> Any:
        return _set_up_worker, (os.getpid(), self.threads)


def _set_up_worker(parent: int, threads: int | None) -> _InWorker:
    """Share the cores among the processes, and end with the parent: if killed, it leaves its workers waiting."""
    import torch

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if os.getpid() != parent:
        threading.Thread(target=watch, daemon=True).start()
        if threads is not None:
            torch.set_num_threads(threads)
    return _InWorker(threads)
