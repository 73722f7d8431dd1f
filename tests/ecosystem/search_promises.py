"""Libraries that search: some by `mote.integrations`, some by themselves."""

from typing import Any

import pytest
from ecosystem.promises import Reference, promises
from ecosystem.row_promises import QUERY, TEXTS


@promises("LangChain", "langchain_core")
def langchain(names: dict[str, Any], reference: Reference) -> None:
    assert names["found"][0].page_content == names["documents"][1]
    store = names["store"].store.values()
    reference.is_by([row["vector"] for row in store], [row["text"] for row in store], "search_document")
    reference.is_by(names["embeddings"].embed_query(QUERY), [QUERY], "search_query")
    reference.is_by(names["grouping"].embed_query(QUERY), [QUERY], "clustering")
    reference.is_by(vectors := names["grouping"].embed_documents(TEXTS), TEXTS, "clustering")
    assert (type(vectors), type(vectors[0][0])) == (list, float)


@promises("LlamaIndex", "llama_index.core")
def llamaindex(names: dict[str, Any], reference: Reference) -> None:
    (found,) = names["found"]
    assert found.text == names["documents"][1]
    (similarity,) = reference.embed([found.text], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert found.score == pytest.approx(similarity, abs=1e-4)


@promises("Chroma", "chromadb")
def chroma(names: dict[str, Any], reference: Reference) -> None:
    collection, documents = names["collection"], names["documents"]
    assert names["found"]["documents"] == [[documents[1]]]
    vectors = collection.get(ids=["whales", "prices", "git"], include=["embeddings"])["embeddings"]
    reference.is_by(vectors, documents, "search_document")
    (similarity,) = reference.embed(documents[1:2], "search_document") @ reference.embed([QUERY], "search_query")[0]
    assert names["found"]["distances"][0] == pytest.approx([1 - similarity], abs=1e-4)
