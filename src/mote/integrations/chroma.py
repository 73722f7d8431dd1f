"""Chroma: `MoTEEmbeddingFunction`, registered as `mote`, so that collections find it when they are reopened."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from mote.integrations import extra
from mote.integrations.encoder import TaskEncoder

with extra("chroma"):
    from chromadb.api.types import Documents, Embeddable, EmbeddingFunction, Embeddings, Space
    from chromadb.utils.embedding_functions import register_embedding_function

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_SETTINGS = ("query_task", "document_task", "trust_remote_code", "revision", "device", "encode_kwargs")

# Settings that affect the embeddings of documents, which a collection already holds.
_OF_DOCUMENTS = ("document_task", "revision", "encode_kwargs")


@register_embedding_function
class MoTEEmbeddingFunction(TaskEncoder, EmbeddingFunction[Embeddable]):
    """Chroma's `EmbeddingFunction`: queries through the query expert, documents through the document expert.

    A collection stores the arguments. When it is reopened, in a process that has imported this module, it loads the
    model with them, and runs its code if `trust_remote_code` was true. It cannot do so if it was made with a loaded
    model: pass the function to `get_collection` in that case.

    Arguments and errors are those of [`TaskEncoder`][mote.integrations.encoder.TaskEncoder].
    """

    # Config → function: Chroma rebuilds the function whenever it looks at a collection's configuration.
    _built: ClassVar[dict[str, "MoTEEmbeddingFunction"]] = {}

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
        super().__init__(
            model,
            query_task=query_task,
            document_task=document_task,
            trust_remote_code=trust_remote_code,
            revision=revision,
            device=device,
            encode_kwargs=encode_kwargs,
        )
        if self.path is not None:
            self._built[json.dumps(self.get_config(), sort_keys=True)] = self

    def __call__(self, input: Embeddable) -> Embeddings:
        """Embed documents: B texts to B vectors [H]."""
        return list(self.encode_documents(cast(Documents, input)).astype(np.float32))

    def embed_query(self, input: Embeddable) -> Embeddings:
        """Embed queries: B texts to B vectors [H]."""
        return list(self.encode_queries(cast(Documents, input)).astype(np.float32))

    @staticmethod
    def name() -> str:
        """Name by which a collection knows the class."""
        return "mote"

    def default_space(self) -> Space:
        """Default distance of a collection."""
        return "cosine"

    def supported_spaces(self) -> list[Space]:
        """Distances that make sense."""
        return ["cosine", "l2", "ip"]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as a collection stores them."""
        return {"model": self.path, **{name: getattr(self, name) for name in _SETTINGS}}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> "MoTEEmbeddingFunction":
        """Return the function of a stored config; equal configs give the same object."""
        if config["model"] is None:
            return _OfLoadedModel(config)
        built = MoTEEmbeddingFunction._built.get(json.dumps(config, sort_keys=True))
        return built or MoTEEmbeddingFunction(**config)

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        """Check a stored config.

        Raises:
            ValueError: If its keys are not those of `get_config`.
        """
        expected = ["model", *_SETTINGS]
        if sorted(config) != sorted(expected):
            raise ValueError(f"The config of a MoTEEmbeddingFunction has the keys {expected}, got {list(config)}")

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """Check that a new config suits a collection's documents, which are already embedded.

        Raises:
            ValueError: If the new config would embed them differently.
        """
        for name in _OF_DOCUMENTS:
            if old_config[name] != new_config[name]:
                raise ValueError(
                    f"The documents of this collection were embedded with {name}={old_config[name]!r}, so it cannot "
                    f"become {new_config[name]!r}: make another collection"
                )
        old, new = old_config["model"], new_config["model"]
        moved = Path(str(new)).is_dir() and not Path(str(old)).exists()
        if None not in (old, new) and old != new and not moved:
            raise ValueError(
                f"The documents of this collection were embedded by {old}, so its model cannot become {new}: make "
                "another collection"
            )


class _OfLoadedModel(MoTEEmbeddingFunction):
    """Stands for the function of a collection that was made with a loaded model; raises an error when used."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __call__(self, input: Embeddable) -> Embeddings:
        raise ValueError(
            "This collection was made with a loaded model, which its configuration cannot name: pass "
            "`embedding_function=MoTEEmbeddingFunction(…)` to get_collection()"
        )

    def embed_query(self, input: Embeddable) -> Embeddings:
        return self(input)

    def get_config(self) -> dict[str, Any]:
        return self._config
