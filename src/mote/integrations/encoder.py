"""What the integrations share: queries and documents through one model, each with its task."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mote.inference.loading import load_encoder
from mote.remote.configuration_mote import alternatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class TaskEncoder:
    """A Sentence-Transformers model with a task for queries and one for documents.

    Args:
        model: A folder, an id on the Hub, or a loaded `SentenceTransformer`: a MoTE, or any other model.
        query_task: Task of queries: a MoTE's task, or the name of another model's prompt. Default: as in
            `encode_query`.
        document_task: Task of documents. Default: as in `encode_document`.
        trust_remote_code: Whether to run the code in its repository or folder.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        device: Device; with several, documents are spread over them, with one process each. Default:
            Sentence-Transformers' choice.
        encode_kwargs: Other arguments of `encode`, for queries and documents: `batch_size`, `normalize_embeddings`,
            `truncate_dim` …

    Raises:
        ValueError: If the model does not load, a task is unknown or missing, or `encode_kwargs` set the task.
    """

    def __init__(
        self,
        model: "str | os.PathLike[str] | SentenceTransformer",
        *,
        query_task: str | None = None,
        document_task: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        device: str | Sequence[str] | None = None,
        encode_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if device is not None and not device:
            raise ValueError(f"device={device!r} names no device: name at least one, or leave it out")
        self.path: str | None = None
        self._model: SentenceTransformer | None = None
        if isinstance(model, str | os.PathLike):
            # Absolute, because a stored path may be read from another working directory.
            self.path = str(Path(model).absolute()) if Path(model).is_dir() else os.fspath(model)
        elif revision is not None or isinstance(device, str):
            raise ValueError("revision and device apply to a model that is yet to be loaded: leave them out")
        else:
            self._model = model
        for name in ("prompt", "prompt_name", "task"):
            if name in (encode_kwargs or {}):
                raise ValueError(
                    f"encode_kwargs has {name!r}, which would apply to queries and documents alike: pass "
                    "`query_task=` and `document_task=`"
                )
        self.query_task, self.document_task = query_task, document_task
        self.trust_remote_code, self.revision = trust_remote_code, revision
        self.device = device if device is None or isinstance(device, str) else list(device)
        self.encode_kwargs = dict(encode_kwargs or {})
        self._check()

    @property
    def model(self) -> "SentenceTransformer":
        """The model, loaded when it is first needed."""
        if self._model is None:
            first = self.device[0] if isinstance(self.device, list) else self.device
            self._model = load_encoder(
                str(self.path), revision=self.revision, device=first, trust_remote_code=self.trust_remote_code
            )
        return self._model

    def encode_queries(self, texts: Sequence[str], **kwargs: Any) -> np.ndarray:
        """Embed queries: B texts to [B, H]."""
        return self._encode(self.model.encode_query, texts, self.query_task, kwargs)

    def encode_documents(self, texts: Sequence[str], **kwargs: Any) -> np.ndarray:
        """Embed documents: B texts to [B, H]."""
        if isinstance(self.device, list):
            kwargs.setdefault("device", self.device)
        return self._encode(self.model.encode_document, texts, self.document_task, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a model that can be loaded again: another process would lack its code."""
        return {**self.__dict__, "_model": None if self.path is not None else self._model}

    def _encode(
        self, of_the_role: Callable[..., Any], texts: Sequence[str], task: str | None, kwargs: dict[str, Any]
    ) -> np.ndarray:
        kwargs = {**self.encode_kwargs, **kwargs}
        if task is None:
            return np.asarray(of_the_role(list(texts), **kwargs))
        config: Any = getattr(self.model[0], "config", None)
        if not getattr(config, "routes_by_task", False):
            return np.asarray(self.model.encode(list(texts), prompt_name=task, **kwargs))
        config.expert_of(task)  # an unknown task's error, even if there is a prompt of that name
        prompt = self.model.prompts.get(task, config.instruction_of(task))
        return np.asarray(self.model.encode(list(texts), task=task, prompt=prompt, **kwargs))

    def _check(self) -> None:
        """Embed a query and a document, so that errors show before there is an index.

        Raises:
            ValueError: If this fails.
        """
        for role, task, encode in (
            ("query", self.query_task, self.encode_queries),
            ("document", self.document_task, self.encode_documents),
        ):
            try:
                encode(["text"], device=None)
            except ValueError as error:
                tasks = getattr(getattr(self.model[0], "config", None), "tasks", {role})
                if task is not None or role in tasks:
                    raise
                raise ValueError(
                    f"The model has no task {role!r}: pass `{role}_task=`.{alternatives('', tasks)}"
                ) from error
