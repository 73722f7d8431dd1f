"""Figures of the card: the STS benchmark and NFCorpus, by the evaluators of sentence-transformers."""

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

from scripts.distill_small_encoder.texts import read_rows


def encode_batch_size() -> int:
    """How many texts to embed at once."""
    return 512 if torch.cuda.is_available() else 32


def sts_evaluator(data: Path, part: str) -> EmbeddingSimilarityEvaluator:
    """Make the evaluator of a part ("dev" or "test") of the STS benchmark."""
    rows = list(read_rows(data / "sts/stsbenchmark" / f"{part}.jsonl.gz"))
    return EmbeddingSimilarityEvaluator(
        [row["sentence1"] for row in rows],
        [row["sentence2"] for row in rows],
        [row["score"] for row in rows],
        batch_size=encode_batch_size(),
        name=f"sts-{part}",
        write_csv=False,
    )


def retrieval_evaluator(data: Path) -> InformationRetrievalEvaluator:
    """Make the evaluator of NFCorpus's test queries. The library's judgements are binary."""
    folder = data / "beir/nfcorpus"
    relevant: dict[str, set[str]] = {}
    for line in (folder / "qrels/test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, score = line.split("\t")
        if float(score) > 0:
            relevant.setdefault(query, set()).add(document)
    return InformationRetrievalEvaluator(
        {row["_id"]: row["text"] for row in read_rows(folder / "queries.jsonl.gz") if row["_id"] in relevant},
        {row["_id"]: f"{row['title']} {row['text']}".strip() for row in read_rows(folder / "corpus.jsonl.gz")},
        relevant,
        batch_size=encode_batch_size(),
        name="nfcorpus",
        write_csv=False,
    )


def evaluate(model: SentenceTransformer, data: Path) -> dict[str, float]:
    """Measure a model on held-out data: figure's name to its value times 100."""
    figures = {
        f"STS benchmark {part}, Spearman": sts_evaluator(data, part)(model)[f"sts-{part}_spearman_cosine"]
        for part in ("dev", "test")
    }
    retrieval = retrieval_evaluator(data)(model)
    figures["NFCorpus test, nDCG@10"] = retrieval["nfcorpus_cosine_ndcg@10"]
    figures["NFCorpus test, MRR@10"] = retrieval["nfcorpus_cosine_mrr@10"]
    return {name: 100 * value for name, value in figures.items()}
