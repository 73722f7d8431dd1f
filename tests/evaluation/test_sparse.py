"""Sparse encoders are scored by mteb, through its own wrapper."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mteb")

from helpers.checkpoints import dense_checkpoint, edit_weights, tensors_of
from helpers.rows import write_retrieval_dataset
from sentence_transformers import SparseEncoder
from sklearn.metrics import ndcg_score

from mote import evaluate, model_meta, upcycle

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch, about its products

WORDS = ["salt", "wood", "iron", "glass", "rope", "wax"]


def written(tmp_path: Path) -> Path:
    corpus = {f"d{i}": word for i, word in enumerate(WORDS)}
    queries = {f"q{i}": f"{word}s" for i, word in enumerate(WORDS)}
    qrels = [f"q{i} d{i} 1" for i in range(len(WORDS))]
    write_retrieval_dataset(tmp_path / "data" / "beir" / "words", corpus, queries, *qrels)
    return tmp_path / "data"


def ndcg(model: SparseEncoder, **settings: Any) -> float:
    """nDCG@10 x 100 of the dot products of queries and documents."""
    queries = model.encode_query([f"{word}s" for word in WORDS], **settings)
    scores = model.similarity(queries, model.encode_document(WORDS, **settings)).numpy()
    return 100 * ndcg_score(np.eye(len(WORDS)), scores, k=10)


@pytest.mark.long
def test_a_sparse_encoder_is_scored(tmp_path: Path) -> None:
    """The score is that of the dot products of both sides, each through its expert; NaN is a failure."""
    data = written(tmp_path)
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    folder = upcycle(source, tmp_path / "model", retrieval="sparse", max_active_dims=20)
    meta = model_meta(folder)
    assert (meta.model_type, meta.embed_dim, meta.similarity_fn_name.value) == (["sparse"], 60, "dot")
    found = evaluate({"model": str(folder)}, data=data, out=tmp_path / "out", trust_remote_code=True)
    expected = ndcg(SparseEncoder(str(folder), trust_remote_code=True))
    assert 0 < expected < 100
    assert found.scores["model"] == {"beir-words": pytest.approx(expected, abs=1e-3)}
    name = "head.cls.predictions.transform.dense.bias"
    edit_weights(folder, **{name: tensors_of(folder)[name] * float("nan")})
    broken = evaluate({"model": str(folder)}, data=data, out=tmp_path / "out", trust_remote_code=True)
    assert "not finite" in broken.failures["model"]["beir-words"]


@pytest.mark.long
def test_each_kind_of_vectors_of_a_hybrid_model(tmp_path: Path) -> None:
    data = written(tmp_path)
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    folder = upcycle(source, tmp_path / "model", retrieval="hybrid")
    settings = {"data": data, "out": tmp_path / "out", "trust_remote_code": True}
    model = SparseEncoder(str(folder), trust_remote_code=True)
    for kind in ("dense", "sparse", "hybrid"):
        found = evaluate({"model": str(folder)}, retrieval=kind, **settings)
        expected = ndcg(model, retrieval=kind)
        assert found.scores["model"]["beir-words"] == pytest.approx(expected, abs=1e-3)
    half = evaluate({"model": str(folder)}, retrieval="hybrid", dtype="bfloat16", **settings)
    assert half.scores["model"]["beir-words"] == pytest.approx(expected, abs=20)  # ranks may change
    dense = upcycle(source, tmp_path / "dense")
    with pytest.raises(ValueError, match=r"Unknown vectors of .*: 'sparse'\. Available: 'dense'"):
        evaluate({"dense": str(dense)}, retrieval="sparse", **settings)
