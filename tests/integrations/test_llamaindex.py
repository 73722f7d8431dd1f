"""LlamaIndex's `BaseEmbedding` over a MoTE."""

import asyncio
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from ecosystem.promises import Reference
from sentence_transformers import SentenceTransformer

pytest.importorskip("llama_index.core", reason="the extra `llamaindex` is not installed")


from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import TextNode

from mote.integrations.llamaindex import MoTEEmbedding

TEXTS = ["Whales breathe air through a blowhole.", "Prices rise and money buys less.", "git reset undoes a commit."]


def test_async_calls_leave_the_loop_free(model: SentenceTransformer, reference: Reference, monkeypatch: Any) -> None:
    embedding = MoTEEmbedding(model, query_task="clustering", embed_batch_size=2)
    threads: set[int] = set()
    encode = SentenceTransformer.encode

    def record(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        return encode(*args, **kwargs)

    monkeypatch.setattr(SentenceTransformer, "encode", record)

    async def all_of_them() -> None:
        query, text, texts = await asyncio.gather(
            embedding.aget_query_embedding(TEXTS[0]),
            embedding.aget_text_embedding(TEXTS[0]),
            embedding.aget_text_embedding_batch(TEXTS),
        )
        reference.is_by(query, TEXTS[:1], "clustering")
        reference.is_by(text, TEXTS[:1], "search_document")
        reference.is_by(texts, TEXTS, "search_document")

    asyncio.run(all_of_them())
    assert threading.get_ident() not in threads
    assert threads


def test_serialization(trained_folder: Path, reference: Reference) -> None:
    embedding = MoTEEmbedding(
        trained_folder,
        trust_remote_code=True,
        document_task="clustering",
        encode_kwargs={"normalize_embeddings": True},
        embed_batch_size=3,
    )
    copies = [
        MoTEEmbedding.from_dict(embedding.to_dict()),
        MoTEEmbedding.from_json(embedding.to_json()),
        pickle.loads(pickle.dumps(embedding)),
    ]
    for copy in copies:
        assert copy.to_dict() == embedding.to_dict()
        reference.is_by(copy.get_text_embedding_batch(TEXTS), TEXTS, "clustering")


def test_serialization_of_a_loaded_model(model: SentenceTransformer, reference: Reference) -> None:
    stored = MoTEEmbedding(model, query_task="clustering").to_dict()
    with pytest.raises(ValueError, match="a loaded model does not load"):
        MoTEEmbedding.from_dict(stored)
    again = MoTEEmbedding.from_dict(stored, model_name=model)
    reference.is_by(again.get_query_embedding(TEXTS[0]), TEXTS[:1], "clustering")


def test_ingestion_knows_the_task(model: SentenceTransformer, reference: Reference) -> None:
    cached = IngestionPipeline(transformations=[MoTEEmbedding(model)])
    nodes = [TextNode(text=text, id_=str(number)) for number, text in enumerate(TEXTS)]
    reference.is_by([node.embedding for node in cached.run(nodes=nodes)], TEXTS, "search_document")
    other = IngestionPipeline(transformations=[MoTEEmbedding(model, document_task="clustering")], cache=cached.cache)
    reference.is_by([node.embedding for node in other.run(nodes=nodes)], TEXTS, "clustering")


def test_a_misspelled_argument_is_an_error(model: SentenceTransformer) -> None:
    """The base class would ignore it, and the queries have the wrong expert."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'query_tsk'"):
        MoTEEmbedding(model, query_tsk="clustering")
