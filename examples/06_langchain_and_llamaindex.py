"""Use a MoTE from LangChain and LlamaIndex.

    pip install -e ".[examples]"
    python examples/06_langchain_and_llamaindex.py [--src FOLDER_OR_HUB_ID]

Both embed queries and documents apart, and each has an argument for either prompt; the prompt picks the expert. Runs in
seconds on a CPU.
"""

import argparse
import tempfile
from pathlib import Path

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore, VectorStoreQuery
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from transformers.utils import logging

import mote

SMALL_ENCODER = Path(__file__).parent / "small-encoder"
DOCUMENTS = [
    "Whales are mammals: they breathe air through a blowhole.",
    "To undo the last commit but keep your changes, run git reset --soft HEAD~1.",
    "Inflation means that prices rise and money buys less than before.",
]
QUERY = "why does everything cost more than last year"


def with_langchain(folder: str) -> None:
    embeddings = HuggingFaceEmbeddings(
        model_name=folder,
        model_kwargs={"trust_remote_code": True},
        encode_kwargs={"prompt_name": "search_document"},
        query_encode_kwargs={"prompt_name": "search_query"},  # without it, queries would take encode_kwargs
    )
    store = InMemoryVectorStore.from_texts(DOCUMENTS, embeddings)
    document, score = store.similarity_search_with_score(QUERY, k=1)[0]
    print(f"LangChain:  {score:.2f}  {document.page_content}")


def with_llamaindex(folder: str) -> None:
    embedding = HuggingFaceEmbedding(
        model_name=folder,
        trust_remote_code=True,
        query_instruction="search_query: ",
        text_instruction="search_document: ",
    )
    nodes = embedding([TextNode(text=text) for text in DOCUMENTS])
    store = SimpleVectorStore()
    store.add(nodes)
    query = embedding.get_query_embedding(QUERY)
    found = store.query(VectorStoreQuery(query_embedding=query, similarity_top_k=1))
    texts = {node.node_id: node.text for node in nodes}
    print(f"LlamaIndex: {found.similarities[0]:.2f}  {texts[found.ids[0]]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(SMALL_ENCODER), help="dense encoder")
    source = parser.parse_args().src
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(mote.upcycle(source, Path(temporary) / "encoder-mote"))
        print(QUERY)
        with_langchain(folder)
        with_llamaindex(folder)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
