"""LlamaIndex: `MoTEEmbedding`, for indices, retrievers and ingestion."""

import asyncio
import os
from typing import TYPE_CHECKING, Any

from mote.integrations import extra
from mote.integrations.encoder import TaskEncoder

with extra("llamaindex"):
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class MoTEEmbedding(BaseEmbedding):
    """LlamaIndex's `BaseEmbedding`: queries through the query expert, texts through the document expert.

    Args:
        model_name: A folder, an id on the Hub, or a loaded `SentenceTransformer`.
        **kwargs: Arguments of [`TaskEncoder`][mote.integrations.encoder.TaskEncoder], where the `batch_size` of
            `encode_kwargs` is `embed_batch_size` by default; and of `BaseEmbedding`: `num_workers` …
    """

    query_task: str | None = Field(default=None, description="Task of queries")
    document_task: str | None = Field(default=None, description="Task of documents")
    trust_remote_code: bool = Field(default=False, description="Whether to run the model's code")
    revision: str | None = Field(default=None, description="Branch, tag or commit on the Hub")
    device: str | None = Field(default=None, description="Device that the model runs on")
    encode_kwargs: dict[str, Any] = Field(default_factory=dict, description="Other arguments of encode")
    _encoder: TaskEncoder = PrivateAttr()

    def __init__(self, model_name: "str | os.PathLike[str] | SentenceTransformer", **kwargs: Any) -> None:
        fields = type(self).model_fields.keys()
        if unknown := kwargs.keys() - fields:  # which the base class ignores
            raise TypeError(f"MoTEEmbedding() got an unexpected keyword argument {min(unknown)!r}")
        own = kwargs.keys() & (fields - BaseEmbedding.model_fields.keys())
        encoder = TaskEncoder(model_name, **{name: kwargs.pop(name) for name in own})
        super().__init__(model_name=encoder.path or "a loaded model", **encoder.settings, **kwargs)
        self._encoder = encoder

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in serialized objects."""
        return "MoTEEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._encoder.encode_queries([query])[0].tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        batch_size = self.encode_kwargs.get("batch_size", self.embed_batch_size)
        return self._encoder.encode_documents(texts, batch_size=batch_size).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
