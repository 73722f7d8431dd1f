"""LangChain's `Embeddings` over a MoTE."""

from pathlib import Path

import pytest
from ecosystem.promises import Reference

pytest.importorskip("langchain_core", reason="the extra `langchain` is not installed")

from langchain_core.embeddings import Embeddings

from mote.integrations.langchain import MoTEEmbeddings

TEXTS = ["Whales breathe air\nthrough a blowhole.", "Prices rise and money buys less."]


def test_queries_and_documents(trained_folder: Path, reference: Reference) -> None:
    embeddings: Embeddings = MoTEEmbeddings(trained_folder, trust_remote_code=True, encode_kwargs={"batch_size": 1})
    documents = embeddings.embed_documents(TEXTS)
    reference.is_by(documents, TEXTS, "search_document")
    reference.is_by(embeddings.embed_query(TEXTS[0]), TEXTS[:1], "search_query")  # encode_kwargs are theirs, too
    assert type(documents[0]) is list
    assert type(documents[0][0]) is float
