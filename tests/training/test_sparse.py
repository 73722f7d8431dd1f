"""Sparse encoders trained by a recipe: the library's SpladeLoss around our InfoNCE."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.datasets import write
from helpers.families import make_different
from helpers.runs import assert_same_weights, break_off, built_loss, overrides, plan, train_step
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

from mote import upcycle
from mote.training.recipe import load_recipe
from mote.training.run_folder import START_FOLDER
from mote.training.train import train

ROWS = [
    {"anchor": f"what is {word}", "positive": f"{word} is a thing of its own", "negative": f"nothing about {number}"}
    for number, word in enumerate(["salt", "wood", "iron", "glass", "rope", "wax"] * 4)
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder, "retrieval/things", ROWS)
    return folder


def settings(source: Path, data: Path, out: Path, *more: str) -> list[str]:
    return overrides(source, data, out, "training.batch_size=8", "training.mini_batch_size=4", *more)


def test_the_loss_is_the_librarys(source: Path, tmp_path: Path) -> None:
    """Without false negatives, and with gradients cached or not."""
    folder = upcycle(source, tmp_path / "model", experts=["search_query", "search_document"], retrieval="sparse")
    model = SparseEncoder(str(folder), trust_remote_code=True)
    make_different(model[0].model)
    model.eval()  # no dropout; the pooling works in place then, which has no gradients
    model[1].train()
    own = {"query_regularizer_weight": 0.2, "document_regularizer_weight": 0.1}
    columns = list(zip(*(row.values() for row in ROWS[:6]), strict=True))

    def gradients(loss: Any) -> list[torch.Tensor]:
        sides = ("search_query", "search_document", "search_document")
        features = [model.preprocess(list(texts), task=side) for texts, side in zip(columns, sides, strict=True)]
        model.zero_grad()
        values = loss(features, None)
        total = sum(values.values())
        total.backward()
        return [total.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    library = losses.SpladeLoss(model, losses.SparseMultipleNegativesRankingLoss(model), **own)
    expected = gradients(library)
    for size, kind in ((None, losses.SpladeLoss), (2, losses.CachedSpladeLoss)):
        loss = built_loss(model, {"mini_batch_size": size}, {"kind": "sparse", **own}, temperature=1.0)
        assert type(loss) is kind
        found = gradients(loss)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


@pytest.mark.long
def test_a_run_with_negatives_is_resumed(
    source: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also in the steps in which the weights of the sparsity losses rise."""
    more = ("training.max_steps=3", "retrieval.query_regularizer_weight=1", "retrieval.warmup_ratio=1")
    runs = [settings(source, pairs, tmp_path / name, *more, "retrieval.max_active_dims=9") for name in ("whole", "cut")]
    model = train("sparse", runs[0])
    break_off(runs[1], monkeypatch, at=3, recipe="sparse")
    assert (tmp_path / "cut" / "checkpoints").exists()
    train("sparse", runs[1])
    assert_same_weights(tmp_path / "cut" / "model", model)
    record = train_step(model)
    assert record["training_sets"] == {"retrieval/things": {"steps": 3, "rows": 20}}
    assert set(record["validation"]["after"]) >= {"validation_mean", "validation_retrieval"}
    encoder = SparseEncoder(str(model), trust_remote_code=True)
    assert encoder.max_active_dims == 9
    assert (encoder.encode_query("what is salt").to_dense() > 0).sum() <= 9
    card = (model / "README.md").read_text()
    assert "SparseEncoder(" in card
    assert "sparse-encoder" in card
    assert load_recipe(model / "recipe.yaml").retrieval.max_active_dims == 9


@pytest.mark.long
def test_from_a_mote(source: Path, pairs: Path, tmp_path: Path) -> None:
    """One with a head of its own, as of pre-training, becomes a sparse encoder; its files stay as they are."""
    pretrained = upcycle(source, tmp_path / "mote", experts=["search_query", "search_document"], with_head=True)
    before = (pretrained / "modules.json").read_text()
    model = train("sparse", settings(pretrained, pairs, tmp_path / "run", "retrieval.sparse_from=embeddings"))
    assert type(SparseEncoder(str(model), trust_remote_code=True)[1]).__name__ == "SparsePooling"
    assert (pretrained / "modules.json").read_text() == before
    assert not (tmp_path / "run" / START_FOLDER).exists()
    trained_again = settings(model, pairs, tmp_path / "again", "training.max_steps=1")  # it stays what it is
    assert "sparse_from: null" in plan("sparse", trained_again)
    again = train("sparse", trained_again)
    assert type(SparseEncoder(str(again), trust_remote_code=True)[1]).__name__ == "SparsePooling"
    with pytest.raises(ValueError, match=r"gives sparse vectors: set retrieval.kind=sparse"):
        plan("mote", settings(model, pairs, tmp_path / "dense", "tasks.classification=null", "tasks.clustering=null"))
    headless = upcycle(source, tmp_path / "headless", experts=["search_query", "search_document"])
    with pytest.raises(ValueError, match=r"headless has no head .* set retrieval.sparse_from=embeddings"):
        plan("sparse", settings(headless, pairs, tmp_path / "none"))


@pytest.mark.long
def test_a_hybrid_model_is_trained(source: Path, pairs: Path, tmp_path: Path) -> None:
    """The loss is on hybrid scores, the sparsity loss on the sparse part alone."""
    more = ("retrieval.weight=2", "validation.share=0.3", "training.max_steps=1")
    model = train("hybrid", settings(source, pairs, tmp_path / "run", *more))
    assert train_step(model)["validation"]["after"]["validation_mean"] > 0
    encoder = SparseEncoder(str(model), trust_remote_code=True)
    pooling: Any = encoder[-1]
    assert (pooling.weight, pooling.max_active_dims) == (2, 256)
    size = encoder[0].config.vocab_size
    loss = built_loss(encoder, retrieval={"kind": "hybrid"})
    vectors = torch.rand(4, size + 16)
    regularizer = losses.FlopsLoss(encoder).compute_loss_from_embeddings(vectors[:, :size])
    assert torch.equal(loss.document_regularizer.compute_loss_from_embeddings(vectors), regularizer)
