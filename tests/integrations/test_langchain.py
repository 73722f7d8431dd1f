"""LangChain's `Embeddings` over a MoTE."""

import asyncio
import pickle
from pathlib import Path

import pytest
from ecosystem.promises import Reference
from sentence_transformers import SentenceTransformer

pytest.importorskip("langchain_core", reason="the extra `langchain` is not installed")

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from mote.integrations.langchain import MoTEEmbeddings

TEXTS = ["Whales breathe air\nthrough a blowhole.", "Prices rise and money buys less."]


def test_queries_and_documents(trained_folder: Path, reference: Reference) -> None:
    embeddings: Embeddings = MoTEEmbeddings(trained_folder, trust_remote_code=True, encode_kwargs={"batch_size": 1})
    documents = embeddings.embed_documents(TEXTS)
    reference.is_by(documents, TEXTS, "search_document")
    reference.is_by(embeddings.embed_query(TEXTS[0]), TEXTS[:1], "search_query")  # encode_kwargs are theirs, too
    assert type(documents[0]) is list
    assert type(documents[0][0]) is float


def test_vector_store(model: SentenceTransformer, reference: Reference) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, MoTEEmbeddings(model))
    ((document, score),) = store.similarity_search_with_score(TEXTS[1], k=1)
    query, texts = reference.embed(TEXTS[1:], "search_query"), reference.embed(TEXTS, "search_document")
    scores = (texts @ query.T)[:, 0]
    assert document.page_content == TEXTS[scores.argmax()]
    assert score == pytest.approx(scores.max(), abs=1e-4)
    assert store.as_retriever(search_kwargs={"k": 1}).invoke(TEXTS[1])[0].page_content == document.page_content


def test_async(model: SentenceTransformer, reference: Reference) -> None:
    embeddings = MoTEEmbeddings(model, query_task="clustering")

    async def both() -> None:
        query, documents = await asyncio.gather(embeddings.aembed_query(TEXTS[0]), embeddings.aembed_documents(TEXTS))
        reference.is_by(query, TEXTS[:1], "clustering")
        reference.is_by(documents, TEXTS, "search_document")

    asyncio.run(both())


def test_pickling(trained_folder: Path, reference: Reference) -> None:
    embeddings = MoTEEmbeddings(trained_folder, trust_remote_code=True, document_task="clustering")
    reference.is_by(pickle.loads(pickle.dumps(embeddings)).embed_documents(TEXTS), TEXTS, "clustering")
