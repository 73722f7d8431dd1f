"""The model that embeds a corpus: on one device, or on several with a process each."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.tensors import DTYPES
from mote.corpora.source import Document
from mote.hub import commit_of
from mote.inference.loading import load_encoder
from mote.remote.configuration_mote import ROLE_HINTS, alternatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

WINDOW = 2048
"""Number of texts sorted by length together. Windows do not depend on the number of devices, so neither do batches."""

SYNONYMS = {"query": ("search_query",), "document": ("search_document", "passage", "corpus")}
"""Role → other names that models have for it. Sentence-Transformers gives each model an empty prompt `document`, which
must not hide them."""


@dataclass(frozen=True)
class Model:
    """A Sentence-Transformers model, where it is and how it embeds.

    Attributes:
        source: A folder, or an id on the Hub.
        backend: `"torch"`; for a folder written by `mote export` also `"onnx"` or `"openvino"`.
        trust_remote_code: Whether to run the code in its repository.
        revision: Commit on the Hub; None for a folder.
        content: Hash of a folder; None for a model on the Hub.
        batch_size: Texts in a batch.
        max_length: Maximum length of a text in tokens. Default: the model's.
        model_dtype: Dtype of the weights, and so of the computation. Default: the stored one.
        dimensions: Number of dimensions to keep. Default: all.
        prompt: Prompt of all texts.
        task: Task of all texts.
    """

    source: str
    backend: str = "torch"
    trust_remote_code: bool = False
    revision: str | None = None
    content: str | None = None
    batch_size: int = 32
    max_length: int | None = None
    model_dtype: str | None = None
    dimensions: int | None = None
    prompt: str | None = None
    task: str | None = None

    def identity(self) -> dict[str, Any]:
        """Describe the model for the manifest: by its commit on the Hub, or a hash of the folder."""
        settings = {"max_length": self.max_length, "dtype": self.model_dtype}
        given = {name: value for name, value in settings.items() if value is not None}
        return {"name": self.source, "revision": self.revision or self.content, "backend": self.backend, **given}

    def load(self, device: str | None = None) -> "SentenceTransformer":
        """Load the model.

        Raises:
            FileNotFoundError: If the runtime's file is missing.
            OSError: If the runtime is not installed.
            ValueError: If it does not load, or reads fewer tokens than asked for.
        """
        if self.backend == "torch" or device == "meta":
            encoder = load_encoder(
                self.source,
                revision=self.revision,
                device=device,
                dtype=self.model_dtype,
                trust_remote_code=self.trust_remote_code,
            )
        else:
            from mote.inference.runtimes import load_exported

            encoder = load_exported(
                self.source, self.backend, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        self.shorten(encoder)
        return encoder

    def shorten(self, encoder: "SentenceTransformer | SparseEncoder") -> None:
        """Have the loaded model read at most `max_length` tokens.

        Raises:
            ValueError: If it reads fewer.
        """
        if self.max_length is None:
            return
        limit = encoder.max_seq_length
        if limit is not None and self.max_length > limit:
            raise ValueError(f"max_length {self.max_length}: the model reads at most {limit} tokens")
        encoder.max_seq_length = self.max_length

    def arguments(self, encoder: "SentenceTransformer", task: str | None = None) -> dict[str, Any]:
        """Return the arguments of `encode` for the texts of a task. Default: the task of all texts.

        Raises:
            ValueError: If the model knows no such task or prompt, or knows a role by another name.
        """
        task = self.task if task is None else task
        if task is None:
            return {} if self.prompt is None else {"prompt": self.prompt}
        config: Any = getattr(encoder[0], "config", None)
        tasks = config.tasks if str(getattr(config, "model_type", "")).startswith("mote") else {}
        if task in tasks and not encoder.prompts.get(task):
            return {"task": task, "prompt": ""}
        others = [name for name in SYNONYMS.get(task, ()) if name in tasks or encoder.prompts.get(name)]
        if others and not encoder.prompts.get(task):
            known = ", ".join(map(repr, others))
            raise ValueError(f"The model has no task or prompt {task!r} of its own: name the one it has, {known}")
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
            raise ValueError(f"dimensions is {self.dimensions}, but the model's embeddings have only {dimension}")
        return self.dimensions or dimension

    def encode(self, encoder: "SentenceTransformer", window: "Window", **pool: Any) -> np.ndarray:
        """Embed texts (texts, dimension)."""
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
    """Find a model and its commit or hash, without loading it.

    Raises:
        FileNotFoundError: If it is neither a folder with a model nor on the Hub.
        ValueError: If the maximum length is below 1, or the dtype is unknown or set for another runtime than PyTorch.
    """
    max_length = settings.get("max_length")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    dtype, backend = settings.get("model_dtype"), settings.get("backend", "torch")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"Unknown model_dtype {dtype!r}." + alternatives(str(dtype), DTYPES))
    if dtype is not None and backend != "torch":
        raise ValueError(f"model_dtype is a setting of PyTorch: a model for {backend} has the dtype of its export")
    commit = commit_of(source, revision)
    content = folder_hash(Path(source)) if commit is None else None
    return Model(source, revision=commit, content=content, **settings)


class Window(NamedTuple):
    """Texts of one task that are sorted by length together.

    Attributes:
        rows: Their rows in the shard.
        texts: The texts.
        arguments: Arguments of `encode`.
    """

    rows: list[int]
    texts: list[str]
    arguments: dict[str, Any]

    def sorted(self, count: "TokenCounter") -> "Window":
        """Return the window with its longest texts first."""
        order = np.argsort([-length for length in count(self.texts)], kind="stable")
        return self._replace(rows=[self.rows[place] for place in order], texts=[self.texts[place] for place in order])

    def batches(self, size: int) -> Iterator["Window"]:
        """Cut the window into batches."""
        for start in range(0, len(self.rows), size):
            part = slice(start, start + size)
            yield self._replace(rows=self.rows[part], texts=self.texts[part])


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


class TokenCounter:
    """Counts the tokens of texts, or their characters if the model has no fast tokenizer.

    `encode` sorts by characters; texts with equally many characters differ in tokens, so that up to a quarter of the
    work is padding. Uses a copy of the tokenizer, because its settings must not change while another thread uses it.

    Args:
        encoder: The model.
    """

    def __init__(self, encoder: "SentenceTransformer") -> None:
        shared = getattr(getattr(encoder[0], "tokenizer", None), "backend_tokenizer", None)
        self.tokenizer = deepcopy(shared)
        if self.tokenizer is not None:
            self.tokenizer.no_padding()
            if encoder.max_seq_length:
                self.tokenizer.enable_truncation(encoder.max_seq_length)

    def __call__(self, texts: list[str]) -> list[int]:
        """Return the length of each text."""
        if self.tokenizer is None:
            return [len(text) for text in texts]
        return [len(tokens) for tokens in self.tokenizer.encode_batch_fast(texts)]


class Devices:
    """A model on its device in this process, or on several devices with a process each; a context manager.

    The processes start with the first texts, and serve any number of runs.

    Args:
        encoder: The model.
        names: Devices of the processes, such as `["cuda:0", "cuda:1"]` or `["cpu", "cpu"]`. With one or none, the
            encoder stays in this process, on its own device.
    """

    def __init__(self, encoder: "SentenceTransformer", names: Sequence[str] = ()) -> None:
        self.encoder = encoder
        self.names = list(names) if len(names) > 1 else []
        self._pools: list[Any] = []
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._threads = ThreadPoolExecutor(max(1, 2 * len(self.names)))  # half of them sort, ahead of the processes

    @cached_property
    def _count(self) -> TokenCounter:
        return TokenCounter(self.encoder)

    def encode(
        self, model: Model, windows: Iterable[Window], progress: Callable[[int], object]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Embed windows in batches of about the same number of tokens.

        Args:
            model: How to embed.
            windows: The windows.
            progress: Called with the number of newly embedded texts.

        Yields:
            Rows of the shard, and their embeddings (rows, dimension).
        """
        count = self._count
        if not self.names:
            ahead = self._threads.map(lambda window: window.sorted(count), windows)
            batches = (batch for window in ahead for batch in window.batches(model.batch_size))
            return (self._here(model, batch, progress) for batch in batches)
        if not self._pools:
            threads = max(1, (os.cpu_count() or 1) // len(self.names))
            in_worker = _InWorker(threads if set(self.names) == {"cpu"} else None)
            self.encoder.in_worker = in_worker  # type: ignore[assignment]
            for name in self.names:  # one pool each: a free one takes the next window
                self._pools.append(self.encoder.start_multi_process_pool([name]))
                self._free.put(self._pools[-1])
        return self._threads.map(partial(self._in_a_process, model, progress), windows)

    def _here(self, model: Model, batch: Window, progress: Callable[[int], object]) -> tuple[list[int], np.ndarray]:
        embeddings = model.encode(self.encoder, batch)
        progress(len(batch.rows))
        return batch.rows, embeddings

    def _in_a_process(
        self, model: Model, progress: Callable[[int], object], window: Window
    ) -> tuple[list[int], np.ndarray]:
        window = window.sorted(self._count)
        pool = self._free.get()
        try:
            return window.rows, model.encode(self.encoder, window, pool=pool, chunk_size=model.batch_size)
        finally:
            self._free.put(pool)
            progress(len(window.rows))

    def __enter__(self) -> "Devices":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            with suppress(ValueError):
                self.encoder.stop_multi_process_pool(pool)


class _InWorker:
    """Sets up a worker process when the model arrives there: Sentence-Transformers offers no other hook."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def __reduce__(self) -> Any:
        return _set_up_worker, (os.getpid(), self.threads)


def _set_up_worker(parent: int, threads: int | None) -> _InWorker:
    """Share the cores among the processes, and exit with the parent: a killed one would leave its workers waiting."""
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
