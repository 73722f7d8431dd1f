"""`mote analyze`: similarity between tasks, divergence, weight change of the experts."""

import dataclasses
import errno
import json
import math
import re
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_weights, tensors_of, trusted
from helpers.paths import SMALL_ENCODER
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax
from scipy.stats import ttest_ind
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router

import mote
from mote import Analysis, upcycle
from mote.analysis import plots
from mote.analysis.analyze import default_tasks, embed, instructions_of
from mote.analysis.measures import ALL_PAIRS, cosines, divergence_of, neighbor_distributions, similarity_of
from mote.analysis.weight_change import weight_change_of
from mote.cli import main

TEXTS = [
    "whales breathe air",
    "how do I reset my card",
    "a proof of the theorem",
    "list files in a folder",
    "rain is coming tomorrow",
    "the bank was closed",
]
TASKS = ["classification", "clustering", "search_query", "search_document"]

analyze = partial(mote.analyze, trust_remote_code=True)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small encoder with two prompts, as an instruction-conditioned dense model."""
    folder = tmp_path_factory.mktemp("prompted") / "small-ic"
    model = SentenceTransformer(str(SMALL_ENCODER))
    model.prompts = {"search_query": "search_query: ", "search_document": "search_document: "}
    model.save(str(folder))
    return folder


@pytest.fixture(scope="module")
def found(trained_folder: Path, prompted: Path) -> Analysis:
    models = {"trained": trained_folder, "dense": prompted}
    return analyze(models, texts=TEXTS, start=str(SMALL_ENCODER))


def test_the_similarity_of_tasks_is_the_cosine_of_what_encode_gives(model: SentenceTransformer) -> None:
    similarity = similarity_of({task: embed(model, TEXTS, task) for task in default_tasks(model)})
    over_all = similarity.pop(ALL_PAIRS)
    assert next(iter(similarity)) == "classification / clustering"
    assert len(similarity) == 6
    np.testing.assert_allclose(over_all, sum(similarity.values()) / 6, atol=1e-12)
    for pair, values in similarity.items():
        a, b = pair.split(" / ")
        first, second = (model.encode(TEXTS, prompt_name=task).astype(float) for task in (a, b))
        expected = [x @ y / math.sqrt(x @ x) / math.sqrt(y @ y) for x, y in zip(first, second, strict=True)]
        np.testing.assert_allclose(values, expected, atol=1e-12)
        assert values.max() < 0.9999


@pytest.mark.long
def test_a_fresh_mote_without_instructions_does_not_tell_tasks_apart(tmp_path: Path) -> None:
    folder = upcycle(str(SMALL_ENCODER), tmp_path / "bare", instructions=dict.fromkeys(TASKS, ""))
    found = analyze([folder], texts=TEXTS, start=str(SMALL_ENCODER), out=tmp_path / "out")
    assert (tmp_path / "out" / "similarity.png").is_file()  # no variance: drawn all the same
    similarity = found.models[0].similarity
    assert len(similarity) == 7
    assert all((values == 1.0).all() for values in similarity.values())
    assert (found.models[0].divergence["JS"] == 0.0).all()


def test_tasks_that_a_model_does_not_tell_apart_are_refused(trained_folder: Path, prompted: Path) -> None:
    folders = {"mote": trained_folder, "prompted": prompted, "plain": SMALL_ENCODER}
    for models, tasks, said in (
        (["mote"], ["quer", "sts"], "mote: classification 'classification: ', clustering"),
        (["mote"], ["sts", "sts"], "two tasks that all models know"),
        (["mote", "prompted"], ["clustering", "search_query"], "prompted: query '', document ''"),
        (["plain"], None, "plain: query '', document ''"),
        (["mote", "plain"], None, "plain: query '', document ''"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            analyze({name: folders[name] for name in models}, texts=TEXTS, tasks=tasks)


def test_prompts_of_dense_models() -> None:
    model = SentenceTransformer(str(SMALL_ENCODER))
    model.prompts = {"a": "x: ", "query": "q: ", "b": "x: ", "document": ""}
    assert default_tasks(model) == ["a", "query", "document"]
    model.prompts |= {"search_query": "s: ", "clustering": "c: "}
    assert default_tasks(model) == ["clustering", "search_query"]
    expected = model.encode([f"s: {text}" for text in TEXTS])
    np.testing.assert_allclose(embed(model, TEXTS, "search_query"), expected, atol=1e-6)


def test_divergences_equal_scipy_s() -> None:
    generator = np.random.default_rng(1)
    queries, documents = generator.normal(size=(2, 5, 16))
    p, q = (softmax(4 * x / np.linalg.norm(x, axis=1, keepdims=True), axis=1) for x in (queries, documents))
    found = divergence_of(queries, documents)
    np.testing.assert_allclose(found["KL(query ‖ document)"], rel_entr(p, q).sum(axis=1))
    np.testing.assert_allclose(found["KL(document ‖ query)"], rel_entr(q, p).sum(axis=1))
    np.testing.assert_allclose(found["JS"], jensenshannon(p, q, axis=1) ** 2)
    np.testing.assert_allclose(divergence_of(3 * queries, documents / 7)["JS"], found["JS"])


def test_neighbors_as_distributions_have_the_divergence_of_the_paper() -> None:
    """Two queries and their documents on the axes, by hand: the second document lies between the axes."""
    queries, documents = np.array([[2.0, 0.0], [0.0, 5.0]]), np.array([[3.0, 0.0], [1.0, 1.0]])
    half = math.sqrt(0.5)
    distances = np.array([[0.0, 1 - half], [1.0, 1 - half]])  # of each query to each document
    found = divergence_of(queries, documents)
    p = [[math.exp(-d) / (math.exp(-row[0]) + math.exp(-row[1])) for d in row] for row in distances]
    q = [[math.exp(-d) / (math.exp(-row[0]) + math.exp(-row[1])) for d in row] for row in distances.T]
    kl = [sum(a * math.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    np.testing.assert_allclose(found["neighbors KL"], kl, rtol=1e-12)
    np.testing.assert_allclose(found["neighbors JS"], jensenshannon(p, q, axis=1) ** 2, rtol=1e-9)
    assert found["neighbors KL"].min() > 0.05
    mirrored = divergence_of(documents, documents)
    np.testing.assert_allclose(mirrored["neighbors KL"], 0.0, atol=1e-15)  # the distances are symmetric
    given = neighbor_distributions(queries, documents)
    np.testing.assert_allclose(given, [p, q], rtol=1e-12)


@pytest.mark.long
def test_siamese_and_separate_models_are_compared_over_pairs(
    trained_folder: Path, model: SentenceTransformer, tmp_path: Path
) -> None:
    """A dense model without prompts, and one model for queries beside one for documents, knows no tasks but roles."""
    sides = [SentenceTransformer(str(SMALL_ENCODER)) for _ in range(2)]
    torch.nn.init.normal_(sides[1][0].auto_model.encoder.layer[0].output.dense.weight)
    separate = SentenceTransformer(modules=[Router.for_query_document(list(sides[0]), list(sides[1]))])
    separate.save(str(tmp_path / "separate"))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"query": text, "positive": f"{text}, in full"}) + "\n" for text in TEXTS))
    models = {"MoTE": trained_folder, "Siamese": SMALL_ENCODER, "separate": tmp_path / "separate"}
    out = tmp_path / "out"
    found = analyze(models, texts=TEXTS, pairs=file, out=out)
    assert {path.name for path in out.iterdir()} >= {"tsne.png", "analysis.md"}
    assert not (out / "similarity.png").exists()
    assert list(found.tests()) == ["Siamese", "separate"]
    by_label = {model.label: model for model in found.models}
    assert all(model.similarity == {} and model.layout is not None for model in found.models)
    documents = [f"{text}, in full" for text in TEXTS]
    for label, each in (("MoTE", model), ("Siamese", sides[0]), ("separate", separate)):
        embedded = (each.encode_query(TEXTS).astype(float), each.encode_document(documents).astype(float))
        expected = divergence_of(*embedded)["neighbors KL"]
        np.testing.assert_allclose(by_label[label].divergence["neighbors KL"], expected, rtol=1e-4)
    test = found.tests()["Siamese"]["neighbors KL"]
    samples = [by_label[label].divergence["neighbors KL"] for label in ("MoTE", "Siamese")]
    assert test.p == pytest.approx(ttest_ind(*samples, equal_var=False, alternative="less").pvalue)
    assert "Is MoTE lower than separate?" in str(found)


def test_a_known_change_is_measured(upcycled: Path, dense: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(upcycled, tmp_path / "changed")
    weights = tensors_of(folder)
    layer, changed = "backbone.encoder.layer.1.", {}
    for expert, factor in (("clustering", 1.0), ("search_query", -2.0)):
        key = f"{layer}experts.{expert}.intermediate.dense.weight"
        changed[key] = weights[key] + factor * 0.5
    key = f"{layer}shared.attention.self.query.weight"
    changed[key] = weights[key] * 1.25
    edit_weights(folder, **changed)
    change = weight_change_of(str(folder), str(dense))

    def norm(prefix: str) -> float:
        return math.sqrt(sum(float((w.double() ** 2).sum()) for name, w in weights.items() if name.startswith(prefix)))

    of_layer = norm(f"{layer}experts.clustering.")
    added = 0.5 * math.sqrt(weights[f"{layer}experts.clustering.intermediate.dense.weight"].numel())
    assert change.experts["clustering"] == pytest.approx([0.0, added / of_layer], rel=1e-5)
    assert change.experts["search_query"][1] == pytest.approx(2 * added / of_layer, rel=1e-5)
    assert change.experts["classification"] == [0.0, 0.0]
    both = math.hypot(of_layer, norm("backbone.encoder.layer.0.experts.clustering."))
    assert change.overall["clustering"] == pytest.approx(added / both, rel=1e-5)
    assert change.cosines["clustering / search_query"] == pytest.approx(-1.0, rel=1e-5)
    assert change.cosines["classification / clustering"] is None
    assert change.shared == pytest.approx([0.0, 0.25 * norm(key) / norm(f"{layer}shared.")], rel=1e-5)
    assert weight_change_of(str(folder), str(upcycled)).experts == change.experts


def test_prompts_may_be_reworded_and_experts_absent(trained_folder: Path, tmp_path: Path) -> None:
    settings = {"trust_remote_code": True, "prompts": {"clustering": "Group by topic: "}}
    model = SentenceTransformer(str(trained_folder), model_kwargs={"experts": ["clustering"]}, **settings)
    assert instructions_of(model) == {"clustering": "Group by topic: "}
    expected = model.encode(TEXTS[:2], prompt_name="clustering")
    assert np.abs(embed(model, TEXTS[:2], "clustering") - expected).max() <= 1e-6


def test_a_dense_model_changes_as_one_expert(dense: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "tuned")
    weights = tensors_of(folder)
    key = "embeddings.word_embeddings.weight"
    edit_weights(folder, **{key: weights[key] * 2})
    change = weight_change_of(str(folder), str(dense))
    assert change.experts == {"feed-forward": [0.0, 0.0]}
    outside = [w.double().flatten() for name, w in weights.items() if name.startswith("embeddings.")]
    expected = float(weights[key].double().norm() / torch.cat(outside).norm())
    assert change.outside == pytest.approx(expected, rel=1e-9)


def test_experts_in_some_layers_and_of_a_token_router(dense: Path, tmp_path: Path) -> None:
    every_other = upcycle(str(dense), tmp_path / "other", layers="every_other")
    change = weight_change_of(str(every_other), str(dense))
    assert change.experts["clustering"] == [None, 0.0]
    assert change.shared == [0.0, 0.0]
    routed = upcycle(str(dense), tmp_path / "routed", routing="token")
    change = weight_change_of(str(routed), str(dense))
    assert change.experts == {f"expert {number}": [0.0, 0.0] for number in (1, 2, 3, 4)}


def test_task_experts_that_are_token_routed(token_routed: Path, hierarchical: Path, tmp_path: Path) -> None:
    change = weight_change_of(str(hierarchical), str(token_routed))
    assert change.overall == dict.fromkeys(change.experts, 0.0)
    assert (change.shared, change.outside) == ([0.0, 0.0], 0.0)
    folder = shutil.copytree(hierarchical, tmp_path / "trained")
    key = "backbone.backbone.encoder.layer.1.experts.clustering.feed_forward.router.weight"
    edit_weights(folder, **{key: tensors_of(folder)[key] * 2})
    change = weight_change_of(str(folder), str(token_routed))
    assert {name for name, relative in change.overall.items() if relative} == {"clustering"}
    half = upcycle(str(token_routed), tmp_path / "half", layers=[0])
    assert weight_change_of(str(half), str(token_routed)).shared == [0.0, 0.0]


def test_a_dense_start_has_no_pooling_by_attention(dense: Path, tmp_path: Path) -> None:
    folder = upcycle(str(dense), tmp_path / "attentive", pooling="latent_attention")
    assert weight_change_of(str(folder), str(dense)).outside == 0.0
    key = next(key for key in tensors_of(folder) if key.startswith("pooling."))
    changed = shutil.copytree(folder, tmp_path / "changed")
    edit_weights(changed, **{key: tensors_of(folder)[key] + 1})
    assert (weight_change_of(str(changed), str(folder)).outside or 0) > 0


def test_a_start_of_another_shape_is_refused(upcycled: Path, tmp_path: Path) -> None:
    wide = dense_checkpoint(tmp_path / "wide", "bert", intermediate_size=48)
    with pytest.raises(ValueError, match=r"not the start of .* in name or shape, .*\(32.*in the start \(48"):
        weight_change_of(str(upcycled), str(wide))


@pytest.mark.long
def test_an_analysis_is_written_as_tables_json_and_charts(found: Analysis, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    found.save(folder)
    for name in ("similarity.png", "tsne.png"):
        picture = (folder / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", picture[16:24])
        assert 600 < width < 3000
        assert 300 < height < 2500
    content = json.loads((folder / "analysis.json").read_text())
    assert content["texts"]["texts"] == TEXTS
    trained, dense = content["models"]
    pair = "search_query / search_document"
    assert list(trained["similarity"]) == [pair, ALL_PAIRS]  # the tasks that both models know
    np.testing.assert_array_equal(trained["similarity"][pair], found.models[0].similarity[pair])
    assert trained["experts"] == {task: task for task in pair.split(" / ")}
    assert dense["experts"] == {}
    assert len(trained["weight_change"]["experts"]) == 4
    text = re.sub(" +", " ", (folder / "analysis.md").read_text())
    for said in ("| tasks | trained | dense |", "Is trained lower than dense?", "![tsne.png]", "expert search_query"):
        assert said in text
    assert str(tmp_path) not in text
    assert str(tmp_path.parent.parent) not in json.dumps(content)
    again = Analysis.from_json((folder / "analysis.json").read_text())
    assert str(again) == str(found)
    assert again.to_json() == found.to_json()


@pytest.mark.long
def test_without_space_for_all_files_the_earlier_analysis_remains(
    found: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.save(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def draw_half(_layouts: Any, path: Path) -> None:
        path.write_bytes(b"half a chart")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plots, "draw_tsne", draw_half)
    with pytest.raises(OSError, match="No space left on device"):
        dataclasses.replace(found, seed=1).save(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    without = [dataclasses.replace(model, layout=None) for model in found.models]
    dataclasses.replace(found, models=tuple(without)).save(tmp_path)
    assert not (tmp_path / "tsne.png").exists()  # of the earlier analysis


@pytest.mark.long
def test_the_same_analysis_twice_is_the_same(found: Analysis, trained_folder: Path, prompted: Path) -> None:
    again = analyze({"trained": trained_folder, "dense": prompted}, texts=TEXTS, start=str(SMALL_ENCODER))
    assert again.to_json() == found.to_json()


def test_the_command(trained_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("\n".join(TEXTS))
    words = ["analyze", f"ours={trained_folder}", "--texts", str(texts), "--out", str(out), "--limit", "4"]
    assert main([*words, "--trust-remote-code"]) == 0
    printed = capsys.readouterr().out
    assert "ours: 4 texts under classification, clustering, search_query, search_document …" in printed
    assert "Inter-task similarity: mean (standard deviation) of the cosine of 4 texts" in printed
    assert (out / "analysis.md").is_file()
    assert main(["analyze", str(trained_folder)]) == 1
    expected = f"error: {trained_folder} has code of its own, which runs only with --trust-remote-code"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("retrieval", ["dense", "sparse", "hybrid", None])
def test_each_kind_of_vectors_of_a_hybrid_model(retrieval: str | None, tmp_path: Path) -> None:
    hybrid = upcycle(dense_checkpoint(tmp_path / "tiny", head="mlm"), tmp_path / "model", retrieval="hybrid")
    result = analyze({"hybrid": hybrid}, texts=TEXTS, retrieval=retrieval)
    model = SparseEncoder(str(hybrid), trust_remote_code=True)
    kind = retrieval or "hybrid"
    sides = [
        side(TEXTS, retrieval=kind, convert_to_sparse_tensor=False).double().numpy()
        for side in (model.encode_query, model.encode_document)
    ]
    config: Any = model[0].config
    widths = {"dense": config.hidden_size, "sparse": config.vocab_size}
    assert sides[0].shape[1] == widths.get(kind, sum(widths.values()))
    (found,) = result.models
    np.testing.assert_allclose(found.divergence["cosine"], cosines(*sides))
    assert Analysis.from_json(result.to_json()).retrieval == retrieval
    assert (f"Vectors: {retrieval}." in str(result)) == (retrieval is not None)


def test_a_damaged_model_is_named(trained_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    model: Any = trusted(trained_folder)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save(str(folder))
    with pytest.raises(ValueError, match="not finite"):
        analyze([folder], texts=TEXTS)
