"""What docs/ecosystem.md says of other libraries' own classes holds: where queries go.

A MoTE is called in the same way for both there, so nothing on this side can tell. When one of these fails, that library
has changed: the page can be shorter.
"""

from pathlib import Path

import pytest
from ecosystem.promises import Reference

TEXTS = ["Whales breathe air through a blowhole.", "Prices rise and money buys less."]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="module")
def reference(trained_folder: Path) -> Reference:
    return Reference(trained_folder)


def test_langchain_takes_the_arguments_of_documents_for_queries(reference: Reference) -> None:
    langchain = pytest.importorskip("langchain_huggingface", reason="langchain-huggingface is not installed")
    settings = {"model_name": reference.folder, "model_kwargs": {"trust_remote_code": True}}
    documents = {"encode_kwargs": {"prompt_name": "search_document"}}
    alone = langchain.HuggingFaceEmbeddings(**settings, **documents)
    reference.is_by(alone.embed_query(TEXTS[0]), TEXTS[:1], "search_document")


def test_chroma_embeds_queries_as_documents(reference: Reference) -> None:
    functions = pytest.importorskip("chromadb.utils.embedding_functions", reason="chromadb is not installed")
    settings = {"model_name": reference.folder, "trust_remote_code": True}
    function = functions.SentenceTransformerEmbeddingFunction
    function.models.clear()  # it keeps one model per name
    first = function(**settings, default_prompt_name="search_document")
    reference.is_by(first.embed_query(TEXTS), TEXTS, "search_document")
    second = function(**settings, default_prompt_name="search_query")
    reference.is_by(second(TEXTS), TEXTS, "search_document")
    function.models.clear()


def test_instructions_in_the_texts_reach_the_experts_in_both(reference: Reference) -> None:
    functions = pytest.importorskip("chromadb.utils.embedding_functions", reason="chromadb is not installed")
    function = functions.SentenceTransformerEmbeddingFunction(reference.folder, trust_remote_code=True)
    reference.is_by(function([f"search_document: {text}" for text in TEXTS]), TEXTS, "search_document")
    reference.is_by(function.embed_query([f"search_query: {text}" for text in TEXTS]), TEXTS, "search_query")
    function.models.clear()
