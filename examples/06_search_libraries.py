"""Search with a MoTE in LangChain, LlamaIndex and Chroma.

    pip install "mote-embeddings[langchain,llamaindex,chroma]"
    python examples/06_search_libraries.py [--model FOLDER_OR_HUB_ID]

Queries are embedded as queries, documents as documents. Runs in seconds on a CPU.
"""

import argparse
from pathlib import Path

import chromadb
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

from mote.integrations.chroma import MoTEEmbeddingFunction
from mote.integrations.langchain import MoTEEmbeddings
from mote.integrations.llamaindex import MoTEEmbedding

SMALL_MOTE = Path(__file__).parent / "small-mote"
DOCUMENTS = [
    "Whales are mammals: they breathe air through a blowhole.",
    "To undo the last commit but keep your changes, run git reset --soft HEAD~1.",
    "Inflation means that prices rise and money buys less than before.",
]
QUERY = "why does everything cost more than last year"


def with_langchain(model: SentenceTransformer) -> None:
    store = InMemoryVectorStore.from_texts(DOCUMENTS, MoTEEmbeddings(model))
    document, score = store.similarity_search_with_score(QUERY, k=1)[0]
    print(f"LangChain:  {score:.2f}  {document.page_content}")


def with_llamaindex(model: SentenceTransformer) -> None:
    index = VectorStoreIndex([TextNode(text=text) for text in DOCUMENTS], embed_model=MoTEEmbedding(model))
    found = index.as_retriever(similarity_top_k=1).retrieve(QUERY)[0]
    print(f"LlamaIndex: {found.score:.2f}  {found.text}")


def with_chroma(source: str) -> None:
    function = MoTEEmbeddingFunction(source, trust_remote_code=True)  # a path, so that a collection can reload it
    collection = chromadb.EphemeralClient().create_collection("documents", embedding_function=function)
    collection.add(ids=["whales", "git", "prices"], documents=DOCUMENTS)
    found = collection.query(query_texts=[QUERY], n_results=1)
    print(f"Chroma:     {1 - found['distances'][0][0]:.2f}  {found['documents'][0][0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SMALL_MOTE), help="MoTE")
    source = parser.parse_args().model
    model = SentenceTransformer(source, trust_remote_code=True)
    print(QUERY)
    with_langchain(model)
    with_llamaindex(model)
    with_chroma(source)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
