"""The model that embeds texts: which one it is, how it embeds, and on which devices."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mote.checkpoints.hashing import folder_hash
from mote.corpora.options import ModelOptions
from mote.hub import commit_of
from mote.inference.loading import check_device, load_any_encoder, load_encoder
from mote.remote.configuration_mote import ROLE_HINTS, alternatives

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SYNONYMS = {"query": ("search_query",), "document": ("search_document", "passage", "corpus")}
"""Role → other names that models have for it. Sentence-Transformers gives each model an empty prompt `document`, which
must not hide them."""


class SortedTexts(NamedTuple):
    """Texts of one task, the longest first; `rows` are their places in the shard."""

    rows: list[int]
    texts: list[str]
    arguments: dict[str, Any]


class Encoder:
    """Any Sentence-Transformers model. It is loaded, and its processes are started, when first needed.

    Args:
        source: A folder, or an id on the Hub.
        options: How it embeds, and where.
        sparse: Whether it is a `SparseEncoder`.
    """

    def __init__(self, source: str, options: ModelOptions, sparse: bool = False) -> None:
        self.source, self.options, self.sparse = source, options, sparse
        self._pool: dict[str, Any] | None = None
        for device in options.devices:
            check_device(device)

    @cached_property
    def commit(self) -> str | None:
        """Commit on the Hub; None for a folder."""
        return commit_of(self.source, self.options.revision)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the embeddings, apart from the task."""
        options = {name: getattr(self.options, name) for name in ("backend", "max_length", "model_dtype", "dimensions")}
        return {"name": self.source, "revision": self.commit or folder_hash(Path(self.source)), **options}

    @cached_property
    def model(self) -> Any:
        """The loaded model; for a cluster, without its weights."""
        options = self.options
        device = next(iter(options.devices), None) if len(options.devices) < 2 else "cpu"
        settings: dict[str, Any] = {"revision": self.commit, "trust_remote_code": options.trust_remote_code}
        if options.backend != "torch" and options.engine == "local":
            from mote.inference.runtimes import load_exported

            model: Any = load_exported(self.source, options.backend, **settings)
        else:
            settings |= {"dtype": options.model_dtype, "device": "meta" if options.engine == "ray" else device}
            model = (load_any_encoder if self.sparse else load_encoder)(self.source, **settings)
        limits = {"max_length": model.max_seq_length, "dimensions": model.get_embedding_dimension()}
        for name, limit in limits.items():
            wanted = getattr(options, name)
            if wanted is not None and limit is not None and wanted > limit:
                raise ValueError(f"{name} is {wanted}, but the model has at most {limit}")
        if options.max_length is not None:
            model.max_seq_length = options.max_length
        return model

    def arguments(self, task: str | None, prompt: str | None = None) -> dict[str, Any]:
        """Return the arguments of `encode` for a task, or a prompt in its place.

        Raises:
            ValueError: If the model has no such task or prompt, or has a role under another name.
        """
        if task is None:
            return {} if prompt is None else {"prompt": prompt}
        prompts = self.model.prompts
        config: Any = getattr(self.model[0], "config", None)
        tasks = config.tasks if str(getattr(config, "model_type", "")).startswith("mote") else {}
        if task in tasks and not prompts.get(task):
            return {"task": task, "prompt": ""}
        others = [name for name in SYNONYMS.get(task, ()) if name in tasks or prompts.get(name)]
        if task in prompts and (prompts[task] or not others):
            return {"prompt_name": task, **({"task": task} if task in ROLE_HINTS else {})}
        raise ValueError(f"Unknown task {task!r}." + alternatives(task, others or [*prompts, *tasks]))

    def sort(self, texts: Sequence[str], rows: Sequence[int], task: str | None, prompt: str | None) -> SortedTexts:
        """Sort some rows of a shard by tokens.

        `encode` sorts by characters, by which up to a quarter of a batch is padding.
        """
        lengths = dict(zip(rows, self._count_tokens([texts[row] for row in rows]), strict=True))
        rows = sorted(rows, key=lambda row: -lengths[row])
        return SortedTexts(rows, [texts[row] for row in rows], self.arguments(task, prompt))

    @cached_property
    def _count_tokens(self) -> Callable[[Sequence[str]], list[int]]:
        """Counts tokens, or characters if there is no fast tokenizer. Another thread may be using the original."""
        tokenizer = deepcopy(getattr(getattr(self.model[0], "tokenizer", None), "backend_tokenizer", None))
        if tokenizer is None:
            return lambda texts: [len(text) for text in texts]
        tokenizer.no_padding()
        if self.model.max_seq_length:
            tokenizer.enable_truncation(self.model.max_seq_length)
        return lambda texts: [len(tokens) for tokens in tokenizer.encode_batch_fast(list(texts))]

    def encode(self, sorted_texts: SortedTexts) -> Iterator[tuple[list[int], np.ndarray]]:
        """Embed texts in batches that do not depend on the devices; yield rows and their embeddings in float32."""
        rows, size = sorted_texts.rows, self.options.batch_size
        settings, step = {"truncate_dim": self.options.dimensions, **sorted_texts.arguments}, size
        if len(self.options.devices) > 1:
            settings |= {"pool": self._processes(), "chunk_size": size}
            step = len(rows)
        for start in range(0, len(rows), step):
            texts = sorted_texts.texts[start : start + step]
            embeddings = self.model.encode(texts, batch_size=size, show_progress_bar=False, **settings)
            yield rows[start : start + step], np.asarray(embeddings, dtype=np.float32)

    def encode_sparse(self, texts: Sequence[str], task: str) -> "csr_matrix":
        """Embed texts with a `SparseEncoder`, [N, V], or [N, V + H] of a hybrid one."""
        from mote.inference.searching import rows_of

        settings = {"batch_size": self.options.batch_size, **self.arguments(task)}
        return rows_of(self.model.encode(list(texts), show_progress_bar=False, save_to_cpu=True, **settings))

    def _processes(self) -> dict[str, Any]:
        if self._pool is None:
            names = self.options.devices
            threads = max(1, (os.cpu_count() or 1) // len(names)) if set(names) == {"cpu"} else None
            self.model.in_worker = _InWorker(threads)
            self._pool = self.model.start_multi_process_pool(names)
        return self._pool

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            with suppress(ValueError):
                self.model.stop_multi_process_pool(self._pool)


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
