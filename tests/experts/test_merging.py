"""Experts averaged into one dense model, and moved towards their mean."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import assert_same, files_in, read_json, trusted
from helpers.families import all_families, batch, dense_model, fresh_mote, make_different, mote_config, trained_mote
from helpers.on_disk import VERBS, average, interpolate, last_hidden
from helpers.processes import run_python
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import mote
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import open_mote
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel

EXPERTS = ["classification", "clustering", "search_query", "search_document"]
TEXTS = ["whales breathe air", "a recipe for bread", "search_query: bread"]


def three_experts(name: str, **settings: Any) -> MoTEModel:
    """Three, because no float type can represent a third."""
    return trained_mote(name, experts=["alpha", "beta", "gamma"], **settings)


@all_families
def test_the_average_of_copies_is_the_dense_model(name: str) -> None:
    dense = dense_model(name)
    expected = last_hidden(dense)
    model = MoTEModel(mote_config(dense, experts=["alpha", "beta", "gamma"]), copy.deepcopy(dense)).eval()
    averaged = mote.experts.average(model)
    assert type(averaged) is type(dense)
    assert last_hidden(averaged).equal(expected)


@all_families
@pytest.mark.parametrize("mote_layers", ["every", "every_other"])
def test_the_average_of_different_experts(name: str, mote_layers: str) -> None:
    model = three_experts(name, mote_layers=mote_layers)
    by_hand = fresh_mote(name, experts=["alpha"], mote_layers=mote_layers)  # one expert: the mean, put there by hand
    weights = model.state_dict()
    means = by_hand.state_dict()
    for key in means:
        if ".experts.alpha." in key:
            of_all = [weights[key.replace("alpha", expert)].double() for expert in ("alpha", "beta", "gamma")]
            means[key] = (sum(of_all) / 3).float()  # type: ignore[arg-type]
    by_hand.load_state_dict(means)
    expected = last_hidden(by_hand, task="alpha")
    averaged = mote.experts.average(model)
    assert (last_hidden(averaged) - expected).abs().max() <= 1e-6
    assert (last_hidden(averaged) - last_hidden(model, task="alpha")).abs().max() > 1e-3
    whole = mote.experts.interpolate(model, 1)
    for expert in ("alpha", "beta", "gamma"):
        assert last_hidden(whole, task=expert).equal(last_hidden(averaged))


@pytest.mark.parametrize("verb", ["average", "interpolate", "export", "compress"])
def test_nothing_is_shared_with_the_mote(verb: str) -> None:
    model = three_experts("bert").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = VERBS[verb](model)
    assert all(module.training for module in other.modules())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert_same(model.state_dict(), before)
    assert model.config.compression is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_keeps_copies_as_they_are(dtype: torch.dtype) -> None:
    model = fresh_mote("modernbert", experts=["alpha", "beta", "gamma"]).to(dtype)
    averaged = mote.experts.average(model)
    assert {parameter.dtype for parameter in averaged.parameters()} == {dtype}
    assert_same(mote.experts.interpolate(model, 0.3).state_dict(), model.state_dict())
    make_different(model)
    for weight in (0, 0.0, {}, {"beta": 0}):  # changes no bit
        assert_same(mote.experts.interpolate(model, weight).state_dict(), model.state_dict())


def test_a_decoder_that_attends_both_ways_stays_one() -> None:
    dense = dense_model("qwen3", is_causal=False)
    model = make_different(MoTEModel(mote_config(dense), dense).eval())
    rows = torch.randint(5, 60, (2, 6))
    changed = rows.clone()
    changed[:, -1] = 7
    averaged, whole = mote.experts.average(model), mote.experts.interpolate(model, 1.0)
    with torch.no_grad():
        assert (averaged(rows).last_hidden_state[:, 0] != averaged(changed).last_hidden_state[:, 0]).any()
        assert averaged(rows).last_hidden_state.equal(whole(rows, task="beta").last_hidden_state)


def test_each_expert_at_its_own_weight() -> None:
    model = three_experts("nomic_bert")
    moved = mote.experts.interpolate(model, {"alpha": 0.25, "gamma": 1})
    before, after = model.state_dict(), moved.state_dict()
    mean = mote.experts.average(model).state_dict()
    for key, value in after.items():
        if ".experts.alpha." in key:
            dense = mean[key.replace("experts.alpha.", "").removeprefix("backbone.")]
            assert (value - (0.75 * before[key] + 0.25 * dense)).abs().max() <= 1e-6
            assert after[key.replace("alpha", "gamma")].equal(dense)
        elif ".experts.gamma." not in key:
            assert value.equal(before[key])


def test_invalid_interpolation_weights() -> None:
    model = trained_mote("bert")
    for weight, message in (
        (-0.1, "weight of 'alpha' is -0.1: expected a number from 0"),
        (float("nan"), "is nan"),
        ({"beta": 2}, "weight of 'beta' is 2"),
        ({"bta": 0.5}, "Unknown expert 'bta'. Did you mean 'beta'?"),
    ):
        with pytest.raises(ValueError, match=message):
            mote.experts.interpolate(model, weight)


def test_token_routed_experts_average_to_a_token_routed_model(token_routed: Path, hierarchical: Path) -> None:
    fresh, source, inputs = mote.load(hierarchical), mote.load(token_routed), batch()
    with torch.no_grad():
        expected = source(**inputs).last_hidden_state
        assert mote.experts.average(fresh)(**inputs).last_hidden_state.equal(expected)
        model = make_different(fresh)
        averaged = mote.experts.average(model)(**inputs).last_hidden_state
        assert (averaged - expected).abs().max() > 1e-3
        whole = mote.experts.interpolate(model, 1.0)
        for task in ("clustering", "query"):
            assert whole(**inputs, task=task).last_hidden_state.equal(averaged)


def test_the_averaged_folder_is_a_plain_dense_model(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["average", str(trained), "--out", str(out)]) == 0
    kept = {file for file in files_in(trained) if not file.endswith(".py") and not file.startswith("model")}
    assert files_in(out) == kept | {"mote.json", "model.safetensors"}
    assert not [path for path in tmp_path.iterdir() if path != out]
    assert read_json(out / "config.json")["architectures"] == ["BertModel"]
    _, info = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert all(key.startswith("pooler.") for key in info["missing_keys"])


@pytest.mark.long
def test_sentence_transformers_embeds_as_the_mote_at_the_mean(trained_folder: Path, tmp_path: Path) -> None:
    dense = SentenceTransformer(str(average(trained_folder, tmp_path / "dense")))
    mean = trusted(interpolate(trained_folder, tmp_path / "mean", 1.0))
    before = trusted(trained_folder)
    assert [type(module).__name__ for module in dense] == ["Transformer", "Pooling", "Normalize"]
    assert dense.prompts == mean.prompts == before.prompts
    assert dense.max_seq_length == mean.max_seq_length == before.max_seq_length
    for expert in EXPERTS:
        embedded = dense.encode(TEXTS, prompt_name=expert)
        assert np.array_equal(embedded, mean.encode(TEXTS, prompt_name=expert))
        assert not np.allclose(embedded, before.encode(TEXTS, prompt_name=expert), atol=1e-3)
    assert np.array_equal(dense.encode_query(TEXTS), mean.encode_query(TEXTS))


def test_the_mean_of_several_models(trained: Path, tmp_path: Path) -> None:
    """With what they share; all that is not a weight is the first one's."""
    others = [tmp_path / "second", tmp_path / "third"]
    for seed, folder in enumerate(others):
        torch.manual_seed(seed)
        model = MoTEModel.from_pretrained(trained)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        shutil.copytree(trained, folder)
        model.save_pretrained(folder)
    assert main(["average", *map(str, [trained, *others]), "--out", str(tmp_path / "out")]) == 0
    first, second, third, mean = (
        MoTEModel.from_pretrained(folder).state_dict() for folder in (trained, *others, tmp_path / "out")
    )
    for name, found in mean.items():
        assert torch.allclose(found, (first[name] + second[name] + third[name]) / 3, atol=1e-6), name
    assert trusted(tmp_path / "out").prompts == trusted(trained).prompts
    assert "made by averaging `second`, `third` and" in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert len(read_steps(tmp_path / "out")[-1]["sources"]) == 3
    mote.transform(trained, tmp_path / "other", mote.experts.rename, "clustering", "topics")
    with pytest.raises(ValueError, match=r"other is not a MoTE of the same shape and experts: .*clustering"):
        mote.experts.average(mote.load(trained), [open_mote(str(tmp_path / "other"))])


@pytest.mark.processes
def test_nobody_is_asked_to_trust_code(trained_folder: Path, tmp_path: Path) -> None:
    """The library asks at the terminal before it runs a model's own code; to merge experts none is run."""
    command = ["interpolate", trained_folder, "--weight", 0.5, "--out", tmp_path / "out"]
    done = run_python("import sys; from mote.cli import main; sys.exit(main(sys.argv[1:]))", *command, cwd=tmp_path)
    assert "custom code" not in done.stdout + done.stderr
