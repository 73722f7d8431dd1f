"""Models to evaluate: their labels, their revisions, and how they are loaded and embed for mteb."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper, SparseEncoderWrapper
from sentence_transformers import SparseEncoder

from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.reading import is_mote
from mote.evaluation.metadata import mteb_name
from mote.evaluation.options import EvaluateOptions
from mote.hub import commit_of
from mote.inference.loading import has_own_code, load_any_encoder
from mote.remote.configuration_mote import MTEB_PROMPTS
from mote.reporting import label_models

logger = logging.getLogger(__name__)


class _Evaluated:
    """What an encoder of mteb lacks: it tells a MoTE the type of a dataset, and fails on NaN and infinity."""

    def encode(self, *args: Any, task_metadata: Any, prompt_type: Any = None, **kwargs: Any) -> Any:
        """Embed texts; `ValueError` if an embedding is not finite, which retrieval would count as a score of 0."""
        task = None if prompt_type else MTEB_PROMPTS.get(task_metadata.type)  # a role says more than the type
        config = getattr(self.model[0], "config", None)  # type: ignore[attr-defined]  # of the other base class
        if config is not None and is_mote(config) and config.routes_by_task and task in config.tasks:
            kwargs["task"] = task
        embeddings = super().encode(  # type: ignore[misc]
            *args, task_metadata=task_metadata, prompt_type=prompt_type, **kwargs
        )
        if isinstance(embeddings, torch.Tensor):
            # As Sentence-Transformers does where it gives arrays.
            embeddings = embeddings.float()
        sparse = isinstance(embeddings, torch.Tensor) and embeddings.is_sparse
        values = torch.as_tensor(embeddings.coalesce().values() if sparse else embeddings)
        if not values.isfinite().all():
            raise ValueError("the model gives embeddings that are not finite (NaN or infinite)")
        return embeddings


class DenseEncoder(_Evaluated, SentenceTransformerEncoderWrapper):
    """mteb's wrapper of a `SentenceTransformer`."""


class SparseVectorEncoder(_Evaluated, SparseEncoderWrapper):
    """mteb's wrapper of a `SparseEncoder`."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate.

    Attributes:
        label: Label in tables.
        path: A folder, or an id on the Hub.
        revision: Hash of the folder's files, or the commit on the Hub.
        options: Options of the evaluation.
        retrieval: Kind of vectors: `dense`, `sparse` or `hybrid`. Default: the model's own.
    """

    label: str
    path: str
    revision: str
    options: EvaluateOptions
    retrieval: str | None = None

    def key(self, **experiment: Any) -> dict[str, Any]:
        """Fields of `mteb.ModelMeta` by which mteb's cache is laid out.

        Args:
            **experiment: Other settings that a score depends on.
        """
        settings = {"dtype": self.options.dtype, "retrieval": self.retrieval, "own_code": self._own_code, **experiment}
        experiment = {name: value for name, value in settings.items() if value is not None}
        return {"name": mteb_name(self.path), "revision": self.revision, "experiment_kwargs": experiment or None}

    def meta(self, **experiment: Any) -> ModelMeta:
        """Describe the model to mteb's cache; takes the arguments of `key`."""
        return ModelMeta.create_empty(overwrites=self.key(**experiment))

    def load(self, device: str | None) -> Any:
        """Load the model, on the device "meta" without its weights; `ValueError` if it does not load, or lacks some."""
        settings = {"dtype": self.options.dtype, "trust_remote_code": self.options.trust_remote_code}
        return load_any_encoder(self.path, retrieval=self.retrieval, revision=self._commit, device=device, **settings)

    def encoder(self, prompts: Mapping[str, str]) -> DenseEncoder | SparseVectorEncoder:
        """Load the model, and wrap it for mteb.

        Args:
            prompts: Prompts, by mteb's names, that replace the model's own.
        """
        model = self.load(self.options.device)
        encoder = (SparseVectorEncoder if isinstance(model, SparseEncoder) else DenseEncoder)(model)
        _warn_of_unused_prompts(self.label, encoder)
        encoder.model_prompts = {**(encoder.model_prompts or {}), **prompts}
        return encoder

    @cached_property
    def _own_code(self) -> bool | None:
        """False if the model has code of its own that is not trusted: a class of the library may take its place."""
        return False if not self.options.trust_remote_code and has_own_code(self.path, self._commit) else None

    @property
    def _commit(self) -> str | None:
        return None if Path(self.path).is_dir() else self.revision


def _warn_of_unused_prompts(label: str, encoder: Any) -> None:
    """Name the prompts that mteb ignores, in place of its own warning, which `evaluate` silences.

    mteb does not know the names of a MoTE's tasks either, but gets their texts under the names of its task types.
    """
    prompts: dict[str, str | None] = encoder.model.prompts
    default = prompts.get(encoder.model.default_prompt_name or "")
    used = {"", None, default, *(encoder.model_prompts or {}).values()}
    unused = [name for name, text in prompts.items() if text not in used]
    if unused:
        logger.warning(
            f"{label}: MTEB does not use the prompts {', '.join(map(repr, unused))}, whose names it does not know. "
            "It knows `query`, `document`, and its task types and tasks, such as `STS` or `Retrieval-query`"
        )


def find_models(
    models: str | Path | Sequence[str] | Mapping[str, str], options: EvaluateOptions
) -> list[EvaluatedModel]:
    """Find and label models, once for each kind of vectors, without loading them."""
    found = [
        EvaluatedModel(label, path, commit_of(path) or folder_hash(Path(path)), options)
        for label, path in label_models(models).items()
    ]
    kinds = list(dict.fromkeys(options.retrieval))
    if not kinds:
        return found
    names = {kind: f" ({kind})" if len(kinds) > 1 else "" for kind in kinds}
    return [replace(one, label=one.label + names[kind], retrieval=kind) for one in found for kind in kinds]
