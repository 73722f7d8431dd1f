"""The model that embeds texts: which one it is, how it embeds, and on which devices."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mote.checkpoints.hashing import folder_hash
from mote.corpora.options import CorpusOptions
from mote.hub import commit_of
from mote.inference.loading import load_any_encoder, load_encoder, task_arguments


class Encoder:
    """Any Sentence-Transformers model, dense or sparse. It is loaded, and its processes are started, when needed."""

    def __init__(self, source: str, options: CorpusOptions, sparse: bool = False) -> None:
        self.source, self.options, self.sparse = source, options, sparse
        self.devices = [options.device] if isinstance(options.device, str) else options.device or []
        self._pool: dict[str, Any] | None = None
        self.truncated = 0  # texts of the last shard that the model read in part

    @cached_property
    def commit(self) -> str | None:
        """Commit on the Hub; None for a folder."""
        return commit_of(self.source, self.options.revision)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the embeddings, apart from the task."""
        options = {name: getattr(self.options, name) for name in ("max_length", "model_dtype", "dimensions")}
        return {"revision": self.commit or folder_hash(Path(self.source)), **options}

    @cached_property
    def model(self) -> Any:
        """The loaded model; for a cluster, without its weights."""
        options = self.options
        device = next(iter(self.devices), None) if len(self.devices) < 2 else "cpu"
        model: Any = (load_any_encoder if self.sparse else load_encoder)(
            self.source,
            revision=self.commit,
            trust_remote_code=options.trust_remote_code,
            dtype=options.model_dtype,
            task=getattr(options, "task", None),  # of `mote embed`
            device="meta" if options.engine == "ray" else device,
        )
        if options.max_length is not None:
            model.max_seq_length = options.max_length
        return model

    def arguments(self, task: str | None, prompt: str | None) -> dict[str, Any]:
        """Return the arguments of `encode` for a task, or a prompt in its place."""
        if task is None:
            return {} if prompt is None else {"prompt": prompt}
        return task_arguments(self.model, task)

    def encode(
        self, texts: Sequence[str], rows: Sequence[int], task: str | None, prompt: str | None
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield some rows, and their embeddings in float32: an array, or a SciPy matrix of a sparse encoder.

        Batches do not depend on the devices, and hold texts with about as many tokens: `encode` sorts by characters, by
        which up to a third of a batch is padding.
        """
        settings, size = self.arguments(task, prompt), self.options.batch_size
        name = settings.get("prompt_name", self.model.default_prompt_name)
        prompt = settings.get("prompt") or self.model.prompts.get(name) or ""
        lengths = dict(zip(rows, self._count_tokens([prompt + texts[row] for row in rows]), strict=True))
        rows, step = sorted(rows, key=lambda row: -lengths[row]), size
        if self.options.dimensions is not None:
            settings["truncate_dim"] = self.options.dimensions
        if len(self.devices) > 1:
            if self._pool is None:
                self.model.in_worker = _EndsWithParent()  # Sentence-Transformers offers no other hook
                self._pool = self.model.start_multi_process_pool(self.devices)
            settings |= {"pool": self._pool, "chunk_size": size}
            step = len(rows)
        for start in range(0, len(rows), step):
            part = [texts[row] for row in rows[start : start + step]]
            embeddings = self.model.encode(part, batch_size=size, show_progress_bar=False, **settings)
            yield rows[start : start + step], self._in_memory(embeddings)

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count tokens, or characters for a model without a tokenizer of Transformers."""
        tokenizer, lengths = getattr(self.model, "tokenizer", None), []
        if not callable(tokenizer):
            return [len(text) for text in texts]
        settings = {"truncation": True, "max_length": self.model.max_seq_length, "return_attention_mask": False}
        for start in range(0, len(texts), 1024):
            read = tokenizer(texts[start : start + 1024], **settings)
            lengths += [len(ids) for ids in read["input_ids"]]
            self.truncated += sum(bool(row.overflowing) for row in read.encodings or ())
        return lengths

    def _in_memory(self, embeddings: Any) -> Any:
        if not self.sparse:
            return np.asarray(embeddings, dtype=np.float32)
        from scipy.sparse import csr_matrix

        vectors = embeddings.cpu().coalesce()
        numbers = vectors.values().float().numpy(), vectors.indices().numpy()
        return csr_matrix(numbers, shape=tuple(vectors.shape))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            with suppress(ValueError):
                self.model.stop_multi_process_pool(self._pool)


class _EndsWithParent:
    """Ends a worker process, where it arrives with the model, after a kill of its parent: it would wait forever."""

    def __reduce__(self) -> Any:
        return _end_with_parent, ()


def _end_with_parent() -> None:
    parent = os.getppid()  # `multiprocessing` knows the parent only after its arguments have arrived

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
