"""Search 200 abstracts of scientific papers by their titles.

    python examples/02_search.py [--model FOLDER_OR_HUB_ID]

`encode_query` and `encode_document` pick the instruction and the expert of each side. Runs in seconds on a CPU.
"""

import argparse
import gzip
import json
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import semantic_search
from transformers.utils import logging

HERE = Path(__file__).parent
DATA = HERE / "data" / "beir" / "arxiv"


def read(path: Path) -> dict[str, str]:
    """Read the texts of a JSON-lines file, keyed by id."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {row["_id"]: row["text"] for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "small-mote"), help="MoTE")
    search(SentenceTransformer(parser.parse_args().model, trust_remote_code=True))


def search(model: SentenceTransformer) -> None:
    queries, documents = read(DATA / "queries.jsonl.gz"), read(DATA / "corpus.jsonl.gz")
    query_embeddings = model.encode_query(list(queries.values()), convert_to_tensor=True)
    document_embeddings = model.encode_document(list(documents.values()), convert_to_tensor=True)
    found = semantic_search(query_embeddings, document_embeddings, top_k=3)

    document_ids = list(documents)
    for query, hits in list(zip(queries.values(), found, strict=True))[:3]:
        print(query)
        for hit in hits:
            print(f"  {hit['score']:.2f}  {documents[document_ids[hit['corpus_id']]][:90]} …")

    lines = (DATA / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    relevant = dict(line.split("\t")[:2] for line in lines)
    first = sum(
        document_ids[hits[0]["corpus_id"]] == relevant[query] for query, hits in zip(queries, found, strict=True)
    )
    print(f"\nThe right abstract comes first for {first} of {len(queries)} titles.")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
