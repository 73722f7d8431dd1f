"""What the table of docs/ecosystem.md promises of each library that embeds texts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

QUERY = "why does everything cost more"
TEXTS = ["how do I take back a commit", "Prices rise."]
DEFAULT = None  # the default task, without its instruction


class Row(NamedTuple):
    """A library's row: the vectors that its program makes of `QUERY` and of `TEXTS` (or of one), and their tasks."""

    imports: str
    embed: Callable[[Any], tuple[Any, Any]]
    plain: tuple[str | None, str | None] = (DEFAULT, DEFAULT)
    best: tuple[str | None, str | None] = ("search_query", DEFAULT)


def grouping(imports: str, embed: Callable[[Any], Any], best: str = "clustering") -> Row:
    """Describe a row of a library that embeds texts of one kind."""
    return Row(imports, lambda it: (None, embed(it)), best=(None, best))


def topic_vectors(model: Any) -> Any:
    """Embed texts as BERTopic does with a model of Sentence-Transformers."""
    from bertopic.backend._utils import select_backend

    return select_backend(model).embed(TEXTS)


ROWS = {
    "LangChain": Row(
        "from langchain_huggingface import HuggingFaceEmbeddings",
        lambda it: (it.embed_query(QUERY), it.embed_documents(TEXTS)),
    ),
    "LlamaIndex": Row(
        "from llama_index.embeddings.huggingface import HuggingFaceEmbedding",
        lambda it: (it.get_query_embedding(QUERY), it.get_text_embedding_batch(TEXTS)),
        plain=("search_query", DEFAULT),
        best=("search_query", "search_document"),
    ),
    "Haystack": Row(
        "from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder",
        lambda it: (it.run(QUERY)["embedding"], None),
    ),
    "Chroma": Row(
        "from chromadb.utils.embedding_functions import SentenceTransformerEmbeddingFunction",
        lambda it: (it.embed_query([QUERY]), it(TEXTS)),
    ),
    "txtai": Row(
        "from txtai import Embeddings",
        lambda it: (it.transform(QUERY, "query"), it.batchtransform(TEXTS, "data")),
        plain=("search_query", "search_document"),
    ),
    "LanceDB": Row(
        "from lancedb.embeddings import get_registry",
        lambda it: (it.compute_query_embeddings(QUERY), it.compute_source_embeddings(TEXTS)),
    ),
    "pymilvus": Row(
        "from milvus_model.dense import SentenceTransformerEmbeddingFunction",
        lambda it: (it.encode_queries([QUERY]), it.encode_documents(TEXTS)),
    ),
    "redisvl": Row(
        "from redisvl.utils.vectorize import HFTextVectorizer",
        lambda it: (it.embed(QUERY, prompt_name="query"), it.embed_many(TEXTS)),
        plain=("search_query", DEFAULT),
    ),
    "mem0": Row(
        "from mem0.configs.embeddings.base import BaseEmbedderConfig\n"
        "from mem0.embeddings.huggingface import HuggingFaceEmbedding",
        lambda it: (it.embed(QUERY, "search"), it.embed_batch(TEXTS, "add")),
    ),
    "semantic-router": grouping("from semantic_router.encoders import HuggingFaceEncoder", lambda it: it(TEXTS)),
    "BERTopic": grouping("from bertopic import BERTopic", lambda it: topic_vectors(it.embedding_model)),
    "KeyBERT": grouping("from keybert import KeyBERT", lambda it: it.model.embed(TEXTS)),
    "turftopic": grouping("from turftopic import KeyNMF", lambda it: it.encoder_.encode(TEXTS)),
    "chonkie": grouping("from chonkie import SentenceTransformerEmbeddings", lambda it: it.embed_batch(TEXTS)),
    "scikit-learn": grouping(
        "from sklearn.preprocessing import FunctionTransformer",
        lambda it: it.fit_transform(TEXTS),
        best="classification",
    ),
    "DSPy": grouping("import dspy", lambda it: it(TEXTS), best="search_query"),
    "`pipeline`": Row(
        "from transformers import pipeline",
        lambda it: (None, [np.mean(tokens[0], axis=0) for tokens in it(TEXTS)]),
        best=(None, DEFAULT),
    ),
}
