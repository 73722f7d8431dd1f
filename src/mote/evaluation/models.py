"""Models to evaluate: their labels, their revisions, and how they are loaded and embed for mteb."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mteb.models import CompressionWrapper, ModelMeta, SentenceTransformerEncoderWrapper, SparseEncoderWrapper
from sentence_transformers import SparseEncoder

from mote.checkpoints.hashing import folder_hash
from mote.data.texts import count_longer
from mote.evaluation.metadata import mteb_name
from mote.evaluation.options import EvaluateOptions
from mote.inference.loading import load_any_encoder, task_config
from mote.remote.configuration_mote import GENERAL, MTEB_PROMPTS, ROLE_HINTS, MoTEConfig, require_known

logger = logging.getLogger(__name__)


class _Evaluated:
    """What an encoder of mteb lacks: it tells a MoTE the task of a dataset, and fails on NaN and infinity."""

    chosen: Mapping[str, str] = {}  # dataset → task of the model, from the options
    longer = 0  # number of texts of a dataset that the model does not read to their end

    def encode(self, *args: Any, task_metadata: Any, prompt_type: Any = None, **kwargs: Any) -> Any:
        """Embed texts; `ValueError` if an embedding is not finite."""
        wrapper: Any = self  # of the other base class
        texts = (text for batch in args[0] for text in batch.get("text", ()))
        self.longer += count_longer(texts, wrapper.model.tokenizer, wrapper.model.max_seq_length)
        config: Any = getattr(wrapper.model[0], "config", None)
        if getattr(config, "routes_by_task", False):
            task = task_of(config, task_metadata, getattr(prompt_type, "value", None), self.chosen)
            if task is not None and not (prompt_type and task in ROLE_HINTS):  # mteb passes roles on itself
                name, prompts = task_metadata.name, wrapper.model_prompts or {}
                given = f"{name}-{prompt_type.value}" if prompt_type else name  # by `--definition`
                wrapper.model_prompts = {**prompts, name: prompts.get(given, wrapper.model.prompts.get(task, ""))}
                kwargs["task"], prompt_type = task, None
        embeddings = super().encode(  # type: ignore[misc]
            *args, task_metadata=task_metadata, prompt_type=prompt_type, **kwargs
        )
        if isinstance(embeddings, torch.Tensor):
            # As Sentence-Transformers does where it gives arrays.
            embeddings = embeddings.float()
        return _finite(embeddings)


def _finite(embeddings: Any) -> Any:
    """Return embeddings as they are; retrieval would count those that are not finite as a score of 0."""
    sparse = isinstance(embeddings, torch.Tensor) and embeddings.is_sparse
    values = torch.as_tensor(embeddings.coalesce().values() if sparse else embeddings)
    if not values.isfinite().all():
        raise ValueError("the model returns embeddings that are not finite (NaN or infinite)")
    return embeddings


def own_task(config: MoTEConfig, metadata: Any, chosen: Mapping[str, str]) -> str | None:
    """Return the task that was chosen for a dataset, or that has its name."""
    names = (metadata.name, metadata.dataset["path"].rpartition("/")[2])
    found = next((chosen[name] for name in names if name in chosen), None)
    if found is not None:
        require_known(found, config.tasks, f"task for the dataset {metadata.name!r}:")
    return found or next((name for name in names if name in config.tasks), None)


def task_of(config: MoTEConfig, metadata: Any, role: str | None, chosen: Mapping[str, str]) -> str | None:
    """Return the task of a MoTE that embeds the texts of a dataset, or those of a role; None: its default task."""
    own = own_task(config, metadata, chosen)
    # Documents of a task for queries alone are those of the source.
    of_source = role == "document" and config.tasks.get("document") == GENERAL and not chosen
    if own and not of_source and not (role and config.tasks[own] == config.tasks.get("query")):
        return own
    task = role or MTEB_PROMPTS.get(metadata.type)
    return task if task in config.tasks else None


def experts_of(config: MoTEConfig, metadata: Any, chosen: Mapping[str, str]) -> str:
    """Name the experts that a score is made by: one, or that of queries and that of documents."""
    roles = ["query", "document"] if f"{metadata.type}-query" in MTEB_PROMPTS else [None]
    return " and ".join(dict.fromkeys(config.expert_of(task_of(config, metadata, role, chosen)) for role in roles))


class DenseEncoder(_Evaluated, SentenceTransformerEncoderWrapper):
    """mteb's wrapper of a `SentenceTransformer`."""


class SparseVectorEncoder(_Evaluated, SparseEncoderWrapper):
    """mteb's wrapper of a `SparseEncoder`."""


class Quantized(CompressionWrapper):
    """mteb's wrapper that quantises the embeddings of each call; a dimension without any range becomes NaN in int8."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Embed and quantise texts; `ValueError` if a value is not finite."""
        return _finite(super().encode(*args, **kwargs))


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate: a folder, or an id on the Hub with its commit; and what its vectors become."""

    name: str
    path: str
    commit: str | None
    options: EvaluateOptions
    dimensions: int | None = None
    precision: str | None = None

    @property
    def label(self) -> str:
        """What tables call it: its name, and what its vectors are cut or quantised to."""
        return " ".join(str(part) for part in (self.name, self.dimensions, self.precision) if part)

    @cached_property
    def revision(self) -> str:
        """The commit, or a hash of the folder's files, among them all weights."""
        return self.commit or folder_hash(Path(self.path))

    @cached_property
    def config(self) -> MoTEConfig | None:
        """The config of a MoTE with task experts; None for any other model."""
        return task_config(self.path, self.commit)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that loading depends on, and thus all scores."""
        return self.options.model_dump(include={"dtype", "retrieval", "trust_remote_code"})

    def meta(self, **experiment: Any) -> ModelMeta:
        """Describe the model to mteb's cache, which is laid out by name, revision and what else a score depends on."""
        vectors = {"dimensions": self.dimensions, "precision": self.precision, "max_length": self.options.max_length}
        settings = {name: value for name, value in (self.settings | vectors | experiment).items() if value}
        key = {"name": mteb_name(self.path), "revision": self.revision, "experiment_kwargs": settings or None}
        return ModelMeta.create_empty(key)

    def load(self, device: str | None) -> Any:
        """Load the model, on the device "meta" without its weights; `ValueError` if it does not load, or lacks some."""
        model: Any = load_any_encoder(self.path, revision=self.commit, device=device, **self.settings)
        width = 0 if isinstance(model, SparseEncoder) else model.get_embedding_dimension()
        if (self.dimensions or self.precision) and not 0 < (self.dimensions or 1) <= width:
            raise ValueError(
                f"{self.label}: dimensions and precisions are for dense vectors, and at most for all of their "
                f"dimensions, which are {width} here"
            )
        if self.dimensions:
            model.truncate_dim = self.dimensions
        if self.options.max_length is not None:
            model.max_seq_length = self.options.max_length
        return model

    def encoder(self, prompts: Mapping[str, str]) -> DenseEncoder | SparseVectorEncoder:
        """Load the model, and wrap it for mteb, with prompts, by mteb's names, in place of the model's own."""
        model = self.load(self.options.device)
        encoder = (SparseVectorEncoder if isinstance(model, SparseEncoder) else DenseEncoder)(model)
        _warn_of_unused_prompts(self.label, encoder)
        encoder.chosen = self.options.experts
        encoder.model_prompts = {**(encoder.model_prompts or {}), **prompts}
        return encoder


def _warn_of_unused_prompts(label: str, encoder: Any) -> None:
    """Name the prompts whose texts mteb ignores, in place of its own warning of names, which `evaluate` silences."""
    prompts: dict[str, str | None] = encoder.model.prompts
    default = prompts.get(encoder.model.default_prompt_name or "")
    used = {"", None, default, *(encoder.model_prompts or {}).values()}
    unused = [name for name, text in prompts.items() if text not in used]
    if unused:
        logger.warning(
            f"{label}: MTEB does not use the prompts {', '.join(map(repr, unused))}, whose names it does not know. "
            "It knows `query`, `document`, and its task types and tasks, such as `STS` or `Retrieval-query`"
        )
