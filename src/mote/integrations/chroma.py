"""Chroma: `MoTEEmbeddingFunction`, registered as `mote`, so that collections find it when they are reopened."""

import json
import os
from typing import Any, ClassVar, cast

import numpy as np

from mote.integrations import extra
from mote.integrations.encoder import TaskEncoder

with extra("chroma"):
    from chromadb.api.types import Documents, Embeddable, EmbeddingFunction, Embeddings, Space
    from chromadb.utils.embedding_functions import register_embedding_function


@register_embedding_function
class MoTEEmbeddingFunction(TaskEncoder, EmbeddingFunction[Embeddable]):
    """Chroma's `EmbeddingFunction`: queries through the query expert, documents through the document expert.

    A collection stores the arguments. When it is reopened, in a process that has imported this module, it loads the
    model with them, and runs its code if `trust_remote_code` was true. The model is therefore a folder or a Hub id.

    Arguments and errors are those of [`TaskEncoder`][mote.integrations.encoder.TaskEncoder].
    """

    # Config → function: Chroma builds a collection's function at each query, which would load the model each time.
    _of_config: ClassVar[dict[str, "MoTEEmbeddingFunction"]] = {}

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        super().__init__(os.fspath(model), **settings)  # a collection stores the name

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

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as a collection stores them."""
        config = {"model": self.path, **self.settings}
        self._of_config[json.dumps(config, sort_keys=True)] = self
        return config

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> "MoTEEmbeddingFunction":
        """Return the function of a stored config; equal configs give the same object."""
        known, key = MoTEEmbeddingFunction._of_config, json.dumps(config, sort_keys=True)
        if key not in known:
            known[key] = MoTEEmbeddingFunction(**config)
        return known[key]
