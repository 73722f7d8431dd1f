"""Sparse encoders, by Sentence-Transformers' SpladePooling or CoT-MoTE's Equation 4, and hybrid ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from helpers.checkpoints import (
    TASK_MOTE,
    code_in,
    dense_checkpoint,
    edit_json,
    read_json,
    tiny_tokenizer,
    trusted_sparse,
)
from helpers.families import difference
from helpers.processes import run_as_stranger
from helpers.steps import with_different_experts
from helpers.token_routing import loss_weights
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModel, AutoModelForMaskedLM

from mote import configure, experts, transform, upcycle
from mote.checkpoints.st_settings import SPARSE_POOLING, Module, Pipeline
from mote.inference.loading import load_encoder
from mote.remote.sparse_pooling_mote import HighestLogits, SparsePooling

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch, about its products

EXPERTS = ["search_query", "search_document"]
TEXTS = ["whales breathe air", "a", "tides come twice a day, mostly"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_checkpoint(tmp_path_factory.mktemp("source") / "tiny", head="mlm")


LIMITED: dict[str, Any] = {"sparse_from": "embeddings", "max_active_dims": 12}
KINDS: dict[str, dict[str, Any]] = {
    "splade": {"retrieval": "sparse"},  # from the head
    "equation-4": {"retrieval": "sparse", **LIMITED},
    "hybrid-embeddings": {"retrieval": "hybrid", "pooling": "cls", **LIMITED},
    "hybrid-head": {"retrieval": "hybrid", "pooling": "cls", "sparse_from": "head"},
}


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder of each kind, whose experts differ, saved and loaded again."""
    folder = tmp_path_factory.mktemp("encoders")
    fresh = {name: upcycle(source, folder / f"fresh-{name}", experts=EXPERTS, **KINDS[name]) for name in KINDS}
    return {name: with_different_experts(fresh[name], folder / name) for name in KINDS}


def test_a_push_is_told_to_the_model(saved: dict[str, Path]) -> None:
    model = trusted_sparse(saved["splade"])
    model.model_card_data.set_model_id("user/sparse")  # as `push_to_hub` does; experts that were not loaded stay there
    assert model[0].repo_id == "user/sparse"


def tokens(model: SparseEncoder, task: str, texts: list[str]) -> Any:
    texts = [model[0].config.instruction_of(task) + text for text in texts]
    return model.tokenizer(texts, padding=True, return_tensors="pt")


def embed(model: SparseEncoder, side: str, texts: list[str] = TEXTS) -> torch.Tensor:
    return getattr(model, f"encode_{side}")(texts, show_progress_bar=False).to_dense()


def test_each_side_goes_through_its_expert_and_weights_are_those_of_the_logits(saved: dict[str, Path]) -> None:
    model = trusted_sparse(saved["splade"])
    assert isinstance(model[1], SpladePooling)
    assert model.similarity_fn_name == "dot"
    vectors = {side: embed(model, side) for side in ("query", "document")}
    assert difference(vectors["query"], vectors["document"]) > 0.01
    for side, task in zip(vectors, EXPERTS, strict=True):
        batch = tokens(model, task, TEXTS)
        with torch.no_grad():
            logits = model[0].model(**batch, task=task).logits
        weights = torch.log1p(torch.relu(logits)) * batch["attention_mask"][..., None]
        assert difference(vectors[side], weights.amax(dim=1)) < 1e-6


def test_equation_4(saved: dict[str, Path]) -> None:
    """Hidden states times token embeddings, at content tokens alone; the largest weights are kept."""
    forgotten = int(sentence_transformers.__version__.split(".")[1]) < 2  # what 6.0 and 6.1 do not read
    model = trusted_sparse(saved["equation-4"], max_active_dims=12 if forgotten else None)
    assert (model.max_active_dims, model.get_embedding_dimension()) == (12, model[0].config.vocab_size)
    bare = AutoModel.from_pretrained(saved["equation-4"], trust_remote_code=True)
    embeddings = bare.get_input_embeddings().weight.detach()
    for side, task in zip(("query", "document"), EXPERTS, strict=True):
        vectors = embed(model, side)
        for row, text in enumerate(TEXTS):
            with torch.no_grad():
                hidden = bare(**tokens(model, task, [text]), task=task).last_hidden_state[0, 1:-1]  # no [CLS], no [SEP]
            weights = torch.log1p(torch.relu(hidden @ embeddings.T)).amax(dim=0)
            assert (weights > 0).sum() > 12
            assert difference(vectors[row], weights * (weights >= weights.topk(12).values[-1])) < 1e-6


def test_texts_that_follow_each_other_without_padding(saved: dict[str, Path]) -> None:
    """The layout of flash attention, which a CPU does not have."""
    model = trusted_sparse(saved["equation-4"])
    batch = tokens(model, EXPERTS[0], TEXTS)
    kept = batch["attention_mask"].bool()
    hidden = torch.randn(*kept.shape, model[0].config.hidden_size)
    padded = model[1]({"token_embeddings": hidden, **batch})["sentence_embedding"]
    ends = torch.cumsum(kept.sum(dim=1), dim=0).tolist()
    flat = {"token_embeddings": hidden[kept][None], "input_ids": batch["input_ids"][kept][None]}
    assert torch.equal(model[1]({**flat, "cu_seq_lens_q": torch.tensor([0, *ends])})["sentence_embedding"], padded)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["as it is", "of an older version", "another formula"])
def test_a_splade_model_is_upcycled(kind: str, source: Path, tmp_path: Path) -> None:
    """A dense one keeps its vectors: each expert begins with them."""
    limit: dict[str, Any] = {}
    dense = SparseEncoder(str(source), max_active_dims=9)
    if kind == "another formula":
        pooling = SpladePooling(pooling_strategy="sum", activation_function="log1p_relu")
        dense, limit = SparseEncoder(modules=[dense[0], pooling]), {"max_active_dims": 9}
    dense.save(str(tmp_path / "dense"))
    if kind == "of an older version":
        modules = read_json(tmp_path / "dense" / "modules.json")
        for module, name in zip(modules, ("MLMTransformer", "SpladePooling"), strict=True):
            module["type"] = f"sentence_transformers.sparse_encoder.models.{name}.{name}"
        (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
        edit_json(tmp_path / "dense" / "sentence_bert_config.json", max_seq_length=128, do_lower_case=False)
    out = upcycle(tmp_path / "dense", tmp_path / "mote", instructions={"search_query": ""}, **limit)
    expected = SparseEncoder(str(tmp_path / "dense"), max_active_dims=9).encode(TEXTS).to_dense()
    model = trusted_sparse(out, max_active_dims=9)  # which old versions do not read
    assert torch.equal(model.encode(TEXTS, task="search_query").to_dense(), expected)
    assert read_json(out / "config_sentence_transformers.json")["max_active_dims"] == 9


def test_code_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "start").mkdir()
    (tmp_path / "source/sparse_pooling_mote.py").write_text("# of the source")
    (tmp_path / "start/sparse_pooling_mote.py").symlink_to(tmp_path / "source/sparse_pooling_mote.py")
    Pipeline([Module(SPARSE_POOLING, "")], {}, {}).write(tmp_path / "start")
    assert (tmp_path / "source/sparse_pooling_mote.py").read_text() == "# of the source"
    assert not (tmp_path / "start/sparse_pooling_mote.py").is_symlink()


def test_the_load_balancing_loss_knows_its_share_of_a_step(source: Path, tmp_path: Path) -> None:
    folder = upcycle(source, tmp_path / "hybrid", routing="token", retrieval="hybrid", sparse_from="head")
    model = trusted_sparse(folder).train()
    weights = loss_weights(model)
    features = model.preprocess(TEXTS[:2])
    model({**features, "balance_share": 1 / 64})
    assert weights == [pytest.approx(0.005 * 2 / 64)] * 2


ENCODE = f"""
import torch
from sentence_transformers import SparseEncoder
for folder in sys.argv[1:]:
    model = SparseEncoder(folder, trust_remote_code=True)
    vectors = [model.encode_query({TEXTS}).to_dense(), model.encode_document({TEXTS}).to_dense()]
    torch.save(vectors, folder + "/vectors.pt")
"""


def test_where_this_package_is_not_installed(saved: dict[str, Path], tmp_path: Path) -> None:
    models = {tmp_path / name: trusted_sparse(saved[name]) for name in ("splade", "equation-4")}
    for folder, model in models.items():
        model.save(str(folder))
    run_as_stranger(ENCODE, *models, cwd=tmp_path)
    for folder, model in models.items():
        queries, documents = torch.load(folder / "vectors.pt")
        assert torch.equal(queries, embed(model, "query"))
        assert torch.equal(documents, embed(model, "document"))


def test_files_and_card(saved: dict[str, Path]) -> None:
    assert code_in(saved["equation-4"]) - TASK_MOTE == {"sparse_pooling_mote.py"}  # Equation 4 needs no head
    assert code_in(saved["splade"]) - TASK_MOTE == {"masked_lm_mote.py"}
    card = (saved["splade"].parent / "fresh-equation-4" / "README.md").read_text()
    assert 'SparseEncoder("fresh-equation-4", trust_remote_code=True)' in card
    assert "- sparse-encoder\n" in card
    assert "SentenceTransformer" not in card


@pytest.mark.long
@pytest.mark.parametrize("name", ["splade", "equation-4"])
def test_verbs_keep_a_sparse_encoder_or_refuse_it_by_name(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    folder = saved[name]
    configure(folder, tmp_path / "set", default_task="search_query")
    transform(folder, tmp_path / "added", experts.add, "third")
    for out in (tmp_path / "set", tmp_path / "added"):
        assert torch.equal(embed(trusted_sparse(out), "query"), embed(trusted_sparse(folder), "query"))
        assert "SparseEncoder(" in (out / "README.md").read_text()
    verbs: list[tuple[Any, dict[str, Any]]] = [(experts.export, {"name": "search_query"}), (experts.average, {})]
    verbs += [(experts.compress, {"bits": 8})] * (name == "splade")  # its head is lost
    for function, arguments in verbs:
        with pytest.raises(ValueError, match=f"{name} gives sparse vectors, which this would lose"):
            transform(folder, tmp_path / "other", function, **arguments)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="is a sparse encoder, but dense vectors are needed here"):
        load_encoder(folder, trust_remote_code=True)


def test_settings_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    SparseEncoder(str(source)).save(str(tmp_path / "splade"))
    SparseEncoder(str(source)).save(str(tmp_path / "twice"))
    modules = read_json(tmp_path / "twice" / "modules.json")
    (tmp_path / "twice" / "modules.json").write_text(json.dumps([*modules, modules[1]]))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (source, {"max_active_dims": 8}, "add `--retrieval sparse`"),
        (source, {"retrieval": "sparse", "tokenizer": "nowhere"}, "nowhere"),
        (dense_checkpoint(tmp_path / "headless"), {"retrieval": "sparse"}, "headless lack .* leave out `--with-head`"),
        (tmp_path / "splade", {"retrieval": "dense"}, "splade gives sparse vectors, and has no pooling"),
        (tmp_path / "twice", {}, "got one with the modules Transformer, SpladePooling, SpladePooling"),
    ]
    for dense, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            upcycle(dense, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="Unknown sparse_from 'x'"):
        SparsePooling("x")  # type: ignore[arg-type]


def test_highest_logits_equal_those_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients, whole and in parts, with texts of which no token is kept."""
    monkeypatch.setattr(HighestLogits, "LOGITS", 60)  # of 20 tokens: 3 columns at a time
    monkeypatch.setattr(HighestLogits, "COLUMNS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden, embeddings = (torch.randn(*size, dtype=torch.float64, generator=generator) for size in ((5, 4, 3), (11, 3)))
    kept = torch.rand(5, 4, generator=generator) < 0.6
    kept[1] = False
    hidden.requires_grad_()
    embeddings.requires_grad_()
    weights = torch.rand(5, 11, dtype=torch.float64, generator=generator)
    plain = (hidden @ embeddings.T).masked_fill(~kept[..., None], 0).amax(dim=1)
    expected = torch.autograd.grad((plain.relu().log1p() * weights).sum(), (hidden, embeddings))
    found = HighestLogits.apply(hidden, embeddings, kept)
    assert torch.equal(found, plain)
    gradients = torch.autograd.grad((found.relu().log1p() * weights).sum(), (hidden, embeddings))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["embeddings", "head"])
def test_both_vectors_come_from_one_pass(name: str, saved: dict[str, Path]) -> None:
    folder = saved[f"hybrid-{name}"]
    model = trusted_sparse(folder)
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
    bare = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        hidden = bare(**batch, task="search_query").last_hidden_state
        logits, kept = hidden @ bare.get_input_embeddings().weight.T, batch["attention_mask"].bool()
        if name == "head":
            with_head = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
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


def test_the_dense_part_is_never_cut(saved: dict[str, Path]) -> None:
    model, cut = trusted_sparse(saved["hybrid-head"]), trusted_sparse(saved["hybrid-head"])
    for kind in ("hybrid", "dense"):
        with pytest.raises(ValueError, match=r"also cut the dense part: .* set model\[-1\]\.max_active_dims = 5"):
            model.encode_query(TEXTS, retrieval=kind, max_active_dims=5)
    pooling: Any = cut[-1]
    pooling.max_active_dims = 5
    sparse = model.encode_query(TEXTS, retrieval="sparse", max_active_dims=5).to_dense()
    dense = model.encode_query(TEXTS, retrieval="dense").to_dense()
    assert torch.equal(cut.encode_query(TEXTS).to_dense(), torch.cat([sparse, dense], dim=1))


def test_scores_are_dense_plus_weight_times_sparse(saved: dict[str, Path], tmp_path: Path) -> None:
    model = trusted_sparse(saved["hybrid-embeddings"])
    parts = {}
    for kind in ("dense", "sparse"):
        queries = model.encode_query(TEXTS, retrieval=kind).to_dense()
        parts[kind] = queries @ model.encode_document(TEXTS, retrieval=kind).to_dense().T
    given: list[dict[str, float]] = [{}, {"weight": 0.0}, {"weight": 0.3}, {"weight": 5.0}]
    for weight in given:
        queries, documents = model.encode_query(TEXTS, **weight), model.encode_document(TEXTS, **weight)
        expected = parts["dense"] + weight.get("weight", 1.0) * parts["sparse"]
        assert difference(model.similarity(queries, documents), expected) < 1e-4
    pooling: Any = model[-1]
    pooling.weight = 0.25
    model.save(str(tmp_path / "saved"))
    assert trusted_sparse(tmp_path / "saved")[-1].weight == 0.25
    with pytest.raises(ValueError, match="Unknown retrieval 'both'"):
        model.encode_query(TEXTS, retrieval="both")


@pytest.mark.slow
def test_reference_scores(shared: Path, tmp_path: Path) -> None:
    """Those recorded with the weights of the CoT-MAE authors' code: Equation 4, SPLADE, and both scores together."""
    reference = shared / "fixtures" / "cot-mae-reference"
    weights = load_file(reference / "cotmae.safetensors")
    expected = load_file(reference / "sparse_expected.safetensors")
    tiny_tokenizer(tmp_path / "dense")  # [PAD] [UNK] [CLS] [SEP] [MASK], as theirs
    encoder_and_head = {name: value for name, value in weights.items() if name.startswith(("bert.", "cls."))}
    save_file(encoder_and_head, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "dense" / "config.json").write_text((reference / "config.json").read_text())

    def upcycled(**settings: Any) -> SparseEncoder:
        folder = tmp_path / settings["retrieval"]
        return trusted_sparse(upcycle(tmp_path / "dense", folder, experts=EXPERTS, pooling="cls", **settings)).eval()

    def vectors(model: SparseEncoder, **arguments: Any) -> torch.Tensor:
        features = {name: expected[name].clone() for name in ("input_ids", "attention_mask")}
        return model({**features, "route": "search_query"}, **arguments)["sentence_embedding"]

    equation_4 = upcycled(retrieval="sparse", sparse_from="embeddings")
    in_training = vectors(equation_4)
    assert in_training.requires_grad
    with torch.no_grad():
        assert torch.equal(vectors(equation_4), in_training)
        assert difference(vectors(equation_4), expected["eq4_hidden_times_embedding_content_positions"]) < 1e-5
        model = upcycled(retrieval="hybrid", sparse_from="head")
        assert difference(vectors(model, retrieval="dense"), expected["dense_cls"]) < 1e-5
        assert difference(vectors(model, retrieval="sparse"), expected["splade_max"]) < 1e-5
        for kind in ("dense", "sparse", "hybrid"):
            both = vectors(model, retrieval=kind)
            scores = both[0::2] @ both[1::2].T
            assert torch.allclose(scores, expected[f"score_{kind}"], rtol=1e-5, atol=1e-5)
        pooling: Any = model[-1]
        pooling.max_active_dims = 32
        assert difference(vectors(model, retrieval="sparse"), expected["splade_max_top32"]) < 1e-5
