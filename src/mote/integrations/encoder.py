"""What the integrations share: queries and documents through one model, each with its task."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mote.inference.loading import load_encoder, task_arguments
from mote.remote.configuration_mote import alternatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class TaskEncoder:
    """A Sentence-Transformers model with a task for queries and one for documents.

    Both are tried at once, so that errors show before there is an index.

    Args:
        model: A folder, an id on the Hub, or a loaded `SentenceTransformer`: a MoTE, or any other model.
        query_task: Task of queries: a MoTE's task, or the name of another model's prompt. Default: as in
            `encode_query`.
        document_task: Task of documents. Default: as in `encode_document`.
        trust_remote_code: Whether to run the code in its repository or folder.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        device: Device of a model that is to be loaded. Default: Sentence-Transformers' choice.
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
        device: str | None = None,
        encode_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.path: str | None = None
        self._model: SentenceTransformer | None = None
        if isinstance(model, str | os.PathLike):
            # Absolute, because a stored path may be read from another working directory.
            self.path = str(Path(model).absolute()) if Path(model).is_dir() else os.fspath(model)
        else:
            self._model = model
        if for_both := {"prompt", "prompt_name", "task"} & (encode_kwargs or {}).keys():
            name = min(for_both)
            raise ValueError(f"encode_kwargs has {name!r} for both sides: pass `query_task=` and `document_task=`")
        self.settings: dict[str, Any] = {
            "query_task": query_task,
            "document_task": document_task,
            "trust_remote_code": trust_remote_code,
            "revision": revision,
            "device": device,
            "encode_kwargs": dict(encode_kwargs or {}),
        }
        config: Any = getattr(self.model[0], "config", None)
        if getattr(config, "routes_by_task", False) and config.default_task is None:
            for role in ("query", "document"):  # our arguments, rather than those of `encode`, which the config names
                if role not in config.tasks and self.settings[f"{role}_task"] is None:
                    known = alternatives("", config.available_tasks)
                    raise ValueError(f"The model has no task {role!r}: pass `{role}_task=`.{known}")
        self.encode_queries(["text"])
        self.encode_documents(["text"])

    @property
    def model(self) -> "SentenceTransformer":
        """The model, loaded when it is first needed."""
        if self._model is None:
            names = ("revision", "device", "trust_remote_code")
            self._model = load_encoder(str(self.path), **{name: self.settings[name] for name in names})
        return self._model

    def encode_queries(self, texts: Sequence[str], **kwargs: Any) -> np.ndarray:
        """Embed queries: B texts to [B, H]."""
        return self._encode(self.model.encode_query, texts, self.settings["query_task"], kwargs)

    def encode_documents(self, texts: Sequence[str], **kwargs: Any) -> np.ndarray:
        """Embed documents: B texts to [B, H]."""
        return self._encode(self.model.encode_document, texts, self.settings["document_task"], kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a model that can be loaded again: another process would lack its code."""
        return {**self.__dict__, "_model": None if self.path is not None else self._model}

    def _encode(
        self, encode_role: Callable[..., Any], texts: Sequence[str], task: str | None, kwargs: dict[str, Any]
    ) -> np.ndarray:
        kwargs = {**self.settings["encode_kwargs"], **kwargs}
        if task is None:
            return np.asarray(encode_role(list(texts), **kwargs))
        return np.asarray(self.model.encode(list(texts), **task_arguments(self.model, task), **kwargs))
