"""Sparse encoders are scored by mteb, through its own wrapper."""

from pathlib import Path

import pytest

pytest.importorskip("mteb")

from helpers.checkpoints import dense_checkpoint, edit_weights
from helpers.rows import write_rows
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder
from sklearn.metrics import ndcg_score

from mote import evaluate, upcycle

WORDS = ["salt", "wood", "iron", "glass", "rope", "wax"]


def test_a_sparse_encoder_is_scored(tmp_path: Path) -> None:
    """The score is that of the dot products of both sides, each through its expert; NaN is a failure."""
    data = tmp_path / "data" / "beir" / "words"
    write_rows(data / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": word} for i, word in enumerate(WORDS)])
    write_rows(data / "queries.jsonl", [{"_id": f"q{i}", "text": f"{word}s"} for i, word in enumerate(WORDS)])
    (data / "qrels").mkdir()
    lines = [f"q{i}\td{i}\t1" for i in range(len(WORDS))]
    (data / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    folder = upcycle(source, tmp_path / "model", retrieval="sparse", max_active_dims=20)
    found = evaluate({"model": str(folder)}, data=data.parents[1], out=tmp_path / "out", trust_remote_code=True)
    model = SparseEncoder(str(folder), trust_remote_code=True)
    queries, documents = model.encode_query([f"{word}s" for word in WORDS]), model.encode_document(WORDS)
    scores = model.similarity(queries, documents).numpy()
    expected = 100 * ndcg_score([[i == j for j in range(len(WORDS))] for i in range(len(WORDS))], scores, k=10)
    assert 0 < expected < 100
    assert found.scores["model"] == {"beir-words": pytest.approx(expected, abs=1e-3)}
    name = "head.cls.predictions.transform.dense.bias"
    edit_weights(folder, **{name: load_file(folder / "model.safetensors")[name] * float("nan")})
    broken = evaluate({"model": str(folder)}, data=data.parents[1], out=tmp_path / "out", trust_remote_code=True)
    assert "not finite" in broken.failures["model"]["beir-words"]
