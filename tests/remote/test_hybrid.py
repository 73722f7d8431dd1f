"""Hybrid vectors: dense and sparse from one pass, their scores added, searched exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, files_in, tiny_tokenizer, trusted_sparse
from helpers.families import difference
from helpers.steps import with_different_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from mote import HybridIndex, upcycle

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch, about its products

EXPERTS = ["search_query", "search_document"]
TEXTS = ["whales breathe air", "a", "tides come twice a day, mostly"]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One by Equation 4 with the 12 largest weights, one with a head; experts differ, saved and loaded again."""
    folder = tmp_path_factory.mktemp("hybrid")
    source = dense_checkpoint(folder / "tiny", head="mlm")
    saved = {}
    for name, limit in {"embeddings": 12, "head": None}.items():
        settings: dict[str, Any] = {"retrieval": "hybrid", "sparse_from": name, "max_active_dims": limit}
        fresh = upcycle(source, folder / f"fresh-{name}", experts=EXPERTS, pooling="cls", **settings)
        saved[name] = with_different_experts(fresh, folder / name)
    return saved


@pytest.mark.parametrize("name", ["embeddings", "head"])
def test_both_vectors_come_from_one_pass(name: str, hybrids: dict[str, Path]) -> None:
    model = trusted_sparse(hybrids[name])
    size, passes = model[0].config.vocab_size, []
    layer = model[0].model.blocks[0].experts["search_query"]
    layer.register_forward_hook(lambda *_: passes.append(1))
    vectors = model.encode_query(TEXTS).to_dense()
    assert len(passes) == 1
    assert vectors.shape == (3, size + 16) == (3, model.get_embedding_dimension())
    sparse, dense = vectors[:, :size], vectors[:, size:]
    assert torch.equal(model.encode_query(TEXTS, retrieval="dense").to_dense(), dense)
    assert torch.equal(model.encode_query(TEXTS, retrieval="sparse").to_dense(), sparse)
    batch = model.tokenizer(["search_query: " + text for text in TEXTS], padding=True, return_tensors="pt")
    bare = AutoModel.from_pretrained(hybrids[name], trust_remote_code=True)
    with torch.no_grad():
        hidden = bare(**batch, task="search_query").last_hidden_state
        logits, kept = hidden @ bare.get_input_embeddings().weight.T, batch["attention_mask"].bool()
        if name == "head":
            with_head = AutoModelForMaskedLM.from_pretrained(hybrids[name], trust_remote_code=True)
            logits = with_head(**batch, task="search_query").logits
        else:
            kept &= ~torch.isin(
                batch["input_ids"], torch.tensor([model.tokenizer.cls_token_id, model.tokenizer.sep_token_id])
            )
    assert difference(dense, hidden[:, 0]) < 1e-6  # [CLS], not normalised
    weights = (torch.log1p(torch.relu(logits)) * kept[..., None]).amax(dim=1)
    if name == "embeddings":
        weights = weights * (weights >= weights.topk(12).values[:, -1:])
    assert difference(sparse, weights) < 1e-6


def test_the_dense_part_is_never_cut(hybrids: dict[str, Path]) -> None:
    model, cut = trusted_sparse(hybrids["head"]), trusted_sparse(hybrids["head"])
    message = r"also cut the dense part: leave it out, .* set model\[-1\]\.max_active_dims = 5"
    for kind in ("hybrid", "dense"):
        with pytest.raises(ValueError, match=message):
            model.encode_query(TEXTS, retrieval=kind, max_active_dims=5)
    with pytest.raises(ValueError, match=message):
        trusted_sparse(hybrids["head"], max_active_dims=5).encode_query(TEXTS)
    pooling: Any = cut[-1]
    pooling.max_active_dims = 5
    sparse = model.encode_query(TEXTS, retrieval="sparse", max_active_dims=5).to_dense()
    dense = model.encode_query(TEXTS, retrieval="dense").to_dense()
    assert torch.equal(cut.encode_query(TEXTS).to_dense(), torch.cat([sparse, dense], dim=1))


def test_scores_are_dense_plus_weight_times_sparse(hybrids: dict[str, Path], tmp_path: Path) -> None:
    model = trusted_sparse(hybrids["embeddings"])
    parts = {}
    for kind in ("dense", "sparse"):
        queries = model.encode_query(TEXTS, retrieval=kind).to_dense()
        parts[kind] = queries @ model.encode_document(TEXTS, retrieval=kind).to_dense().T
    for weight in (None, 0.0, 0.3, 5.0):
        given = {} if weight is None else {"weight": weight}
        queries, documents = model.encode_query(TEXTS, **given), model.encode_document(TEXTS, **given)
        expected = parts["dense"] + (1.0 if weight is None else weight) * parts["sparse"]
        assert difference(model.similarity(queries, documents), expected) < 1e-4
    pooling: Any = model[-1]
    pooling.weight = 0.25
    model.save(str(tmp_path / "saved"))
    assert trusted_sparse(tmp_path / "saved")[-1].weight == 0.25
    assert "sparse_pooling_mote.py" in files_in(tmp_path / "saved")
    with pytest.raises(ValueError, match="retrieval must be 'hybrid', 'dense' or 'sparse', got 'both'"):
        model.encode_query(TEXTS, retrieval="both")


@pytest.mark.parametrize("weight", [0.0, 1.0, 30.0])
def test_search_finds_what_scoring_every_document_finds(
    weight: float, hybrids: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    model = trusted_sparse(hybrids["embeddings"])
    rng = np.random.default_rng(0)
    documents = ["".join(rng.choice([*"abcdefgh "], 12)) + str(i % 7) for i in range(300)]
    queries = ["".join(rng.choice([*"abcdefgh "], 8)) for _ in range(5)]
    index = HybridIndex(model)
    index.add(documents[:120], batch_size=64)
    index.add(documents[120:], batch_size=64)
    assert len(index) == 300
    scores, numbers = index.search(queries, top_k=7, weight=weight)
    whole = model.similarity(
        model.encode_query(queries, weight=weight), model.encode_document(documents, weight=weight, batch_size=64)
    ).numpy()
    assert np.allclose(scores, np.sort(whole, axis=1)[:, ::-1][:, :7], atol=1e-4)
    assert np.allclose(np.take_along_axis(whole, numbers, axis=1), scores, atol=1e-4)
    assert index.search([], top_k=3)[0].shape == (0, 3)
    assert index.search(queries[:1], top_k=1000)[0].shape == (1, 300)


@pytest.mark.slow
def test_reference_scores(shared: Path, tmp_path: Path) -> None:
    """Those recorded with the weights of the CoT-MAE authors' code."""
    reference = shared / "fixtures" / "cot-mae-reference"
    stored = load_file(reference / "cotmae.safetensors")
    expected = load_file(reference / "sparse_expected.safetensors")
    (tmp_path / "dense").mkdir()
    encoder_and_head = {name: value for name, value in stored.items() if name.startswith(("bert.", "cls."))}
    save_file(encoder_and_head, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "dense" / "config.json").write_text((reference / "config.json").read_text())
    tiny_tokenizer(tmp_path / "dense")
    settings: dict[str, Any] = {"experts": EXPERTS, "pooling": "cls", "retrieval": "hybrid", "sparse_from": "head"}
    model = trusted_sparse(upcycle(tmp_path / "dense", tmp_path / "mote", **settings)).eval()

    def vectors(kind: str) -> torch.Tensor:
        features = {name: expected[name].clone() for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            return model({**features, "route": "search_query"}, retrieval=kind)["sentence_embedding"]

    assert difference(vectors("dense"), expected["dense_cls"]) < 1e-5
    assert difference(vectors("sparse"), expected["splade_max"]) < 1e-5
    for kind in ("dense", "sparse", "hybrid"):
        scores = vectors(kind)[0::2] @ vectors(kind)[1::2].T
        assert torch.allclose(scores, expected[f"score_{kind}"], rtol=1e-5, atol=1e-5)
    pooling: Any = model[-1]
    pooling.max_active_dims = 32
    assert difference(vectors("sparse"), expected["splade_max_top32"]) < 1e-5
