"""Libraries that search: some by `mote.integrations`, some by themselves."""

from typing import Any

import pytest
from ecosystem.promises import Reference, promises

QUERY = "why does everything cost more"
TEXTS = ["how do I take back a commit", "Prices rise."]


@promises("LangChain", "langchain_core")
def langchain(names: dict[str, Any], reference: Reference) -> None:
    assert names["found"][0].page_content == names["documents"][1]
    store = names["store"].store.values()
    reference.is_by([row["vector"] for row in store], [row["text"] for row in store], "search_document")
    reference.is_by(names["embeddings"].embed_query(QUERY), [QUERY], "search_query")
    reference.is_by(names["grouping"].embed_query(QUERY), [QUERY], "clustering")
    reference.is_by(vectors := names["grouping"].embed_documents(TEXTS), TEXTS, "clustering")
    assert (type(vectors), type(vectors[0][0])) == (list, float)


@promises("LangChain 2", "langchain_huggingface")
def langchain_huggingface(names: dict[str, Any], reference: Reference) -> None:
    reference.is_by(names["embeddings"].embed_query(QUERY), [QUERY], "search_query")
    reference.is_by(names["embeddings"].embed_documents(TEXTS), TEXTS, "search_document")


@promises("LlamaIndex", "llama_index.core")
def llamaindex(names: dict[str, Any], reference: Reference) -> None:
    (found,) = names["found"]
    assert found.text == names["documents"][1]
    (similarity,) = reference.embed([found.text], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert found.score == pytest.approx(similarity, abs=1e-4)


@promises("LlamaIndex 2", "llama_index.embeddings.huggingface")
def llamaindex_huggingface(names: dict[str, Any], reference: Reference) -> None:
    reference.is_by(names["embedding"].get_query_embedding(QUERY), [QUERY], "search_query")
    reference.is_by(names["embedding"].get_text_embedding_batch(TEXTS), TEXTS, "search_document")


@promises("Haystack", "haystack_integrations.components.embedders.sentence_transformers")
def haystack(names: dict[str, Any], reference: Reference) -> None:
    documents, pipeline = names["documents"]["documents"], names["pipeline"]
    texts = [document.content for document in documents]
    reference.is_by([document.embedding for document in documents], texts, "search_document")
    assert names["found"]["retriever"]["documents"][0].content == texts[1]
    for each in (pipeline, type(pipeline).loads(pipeline.dumps())):
        query = each.get_component("embedder").run(QUERY)
        reference.is_by(query["embedding"], [QUERY], "search_query")


@promises("Chroma", "chromadb")
def chroma(names: dict[str, Any], reference: Reference) -> None:
    collection, documents = names["collection"], names["documents"]
    assert names["found"]["documents"] == [[documents[1]]]
    vectors = collection.get(ids=["whales", "prices", "git"], include=["embeddings"])["embeddings"]
    reference.is_by(vectors, documents, "search_document")
    (similarity,) = reference.embed(documents[1:2], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert names["found"]["distances"][0] == pytest.approx([1 - similarity], abs=1e-4)


@promises("Qdrant", "qdrant_client")
def qdrant(names: dict[str, Any], reference: Reference) -> None:
    ((found,), documents) = names["found"], names["documents"]
    assert found.payload["text"] == documents[1]
    (similarity,) = reference.embed(documents[1:2], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert found.score == pytest.approx(similarity, abs=1e-4)


@promises("txtai", "txtai")
def txtai(names: dict[str, Any], reference: Reference) -> None:
    ((found,), documents) = names["found"], names["documents"]
    assert found["text"] == documents[1]
    (similarity,) = reference.embed(documents[1:2], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert found["score"] == pytest.approx(similarity, abs=1e-4)
