"""A MoTE with its family's head for masked language modelling: the native model's predictions, in all its uses."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import (
    assert_same,
    dense_checkpoint,
    edit_weights,
    files_in,
    published_nomic,
    published_nomic_moe,
    read_json,
    tensors_of,
    tiny_tokenizer,
    to_bin,
    trusted,
)
from helpers.families import FAMILIES, VOCAB_SIZE, batch, dense_model, difference, family, real_difference
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModel, AutoModelForMaskedLM, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from mote import configure, transform, upcycle
from mote import experts as verbs
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.remote.modeling_mote import MoTEModel

EXPERTS = ["alpha", "beta"]
WITHOUT_HEAD = r"Unrecognized configuration class .* AutoModelForMaskedLM|\d+ missing keys \(head\."
WITH_HEAD = [name for name in FAMILIES if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES]


def native_checkpoint(folder: Path, name: str = "bert", **settings: Any) -> Path:
    """A tiny native model with its head, no weight of which is at its initial value."""
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_config(dense_model(name, **settings).config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def labelled_batch(rows: int = 4) -> dict[str, torch.Tensor]:
    inputs = batch(rows)
    hidden = (inputs["input_ids"] % 3 == 0) & inputs["attention_mask"].bool()
    return {**inputs, "labels": torch.where(hidden, inputs["input_ids"], -100)}


def remote(folder: Path, **settings: Any) -> Any:
    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_checkpoint(tmp_path_factory.mktemp("native") / "tiny")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycle(str(source), tmp_path_factory.mktemp("mote") / "tiny-mote", with_head=True, experts=EXPERTS)


@pytest.fixture(scope="module")
def headless(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycle(str(source), tmp_path_factory.mktemp("headless") / "tiny-mote", experts=EXPERTS)


@pytest.mark.parametrize("name", [family(name) for name in WITH_HEAD])
def test_every_expert_predicts_as_the_native_model(name: str, tmp_path: Path) -> None:
    native: Any = AutoModelForMaskedLM.from_pretrained(native_checkpoint(tmp_path / "native", name))
    out = upcycle(str(tmp_path / "native"), tmp_path / "mote", with_head=True, experts=EXPERTS)
    model = remote(out)
    inputs = labelled_batch()
    expected = native(**inputs)
    for expert in EXPERTS:
        found = model(**inputs, task=expert)
        assert difference(found.logits, expected.logits) == 0.0
        assert found.loss.equal(expected.loss)
    mixed = model(**inputs, task=EXPERTS * 2)
    assert real_difference(mixed.logits, expected.logits, inputs["attention_mask"]) <= 2e-7
    assert abs(mixed.loss - expected.loss) <= 1e-6  # two steps of a float32 of this size
    tied = native.get_output_embeddings().weight is native.get_input_embeddings().weight
    assert tied == (name != "eurobert")
    for one in (model, native):  # the new tokens' weights are drawn: give them those of the native model
        one.resize_token_embeddings(VOCAB_SIZE + 4, mean_resizing=False)
    with torch.no_grad():
        for get in ("get_input_embeddings", "get_output_embeddings"):
            getattr(model, get)().weight.copy_(getattr(native, get)().weight)
    inputs["input_ids"][0, 0] = inputs["labels"][0, 0] = VOCAB_SIZE + 1
    expected = native(**inputs)
    model.save_pretrained(tmp_path / "again")
    for each in (model, remote(tmp_path / "again")):
        assert (each.get_output_embeddings().weight is each.get_input_embeddings().weight) == tied
        found = each(**inputs, task="beta")
        assert difference(found.logits, expected.logits) == 0.0
        assert found.loss.equal(expected.loss)


def test_the_published_nomic(tmp_path: Path) -> None:
    """Its head was published without biases."""
    source = published_nomic(tmp_path / "nomic", prefix=True)
    weights = torch.load(source / "pytorch_model.bin")
    norm = {f"cls.predictions.transform.layer_norm.{kind}": torch.randn(16) for kind in ("weight", "bias")}
    torch.save({**weights, **norm}, source / "pytorch_model.bin")
    model = remote(upcycle(str(source), tmp_path / "mote", with_head=True, experts=EXPERTS))
    hidden = model.backbone(**batch(), expert="alpha").last_hidden_state
    transformed = F.silu(hidden @ weights["cls.predictions.transform.dense.weight"].T)
    transformed = F.layer_norm(transformed, (16,), *norm.values(), eps=model.config.backbone_config.layer_norm_eps)
    expected = transformed @ weights["cls.predictions.decoder.weight"].T
    assert difference(model(**batch(), task="alpha").logits, expected) <= 1e-5


def test_a_pickle_with_the_heads_of_pre_training(tmp_path: Path) -> None:
    """As bert-base-uncased: the head for pairs of sentences is dropped, and so is the pooler."""
    source = dense_checkpoint(tmp_path / "bert", head="pretraining")
    to_bin(source)
    out = upcycle(str(source), tmp_path / "mote", with_head=True, experts=EXPERTS)
    dropped = read_json(out / "mote.json")["steps"][0]["dropped"]
    modules = {name.removeprefix("bert.").rpartition(".")[0] for name in dropped}
    assert modules == {"pooler.dense", "cls.seq_relationship"}
    native: Any = AutoModelForMaskedLM.from_pretrained(source)
    assert difference(remote(out)(**batch(), task="beta").logits, native(**batch()).logits) == 0.0


def test_gradients_reach_head_shared_weights_and_the_one_expert(folder: Path) -> None:
    model = remote(folder)
    model(**labelled_batch(), task="beta").loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".experts.alpha." in name), name
    assert model.head.cls.predictions.bias.grad is not None


def test_fill_mask(folder: Path, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"trust_remote_code": True, "device": "cpu"}
    text = "ab [MASK] cd"
    with caplog.at_level(logging.ERROR, "transformers"):
        fill: Any = pipeline("fill-mask", str(folder), model_kwargs={"default_task": "beta"}, **settings)
    assert not caplog.records
    assert fill(text) == pipeline("fill-mask", str(source), device="cpu")(text)


def test_token_routing(source: Path, tmp_path: Path) -> None:
    out = upcycle(str(source), tmp_path / "out", with_head=True, routing="token")
    assert {"masked_lm_mote.py", "token_routed_masked_lm_mote.py"} < files_in(out)
    model, native = remote(out), AutoModelForMaskedLM.from_pretrained(source)
    inputs = labelled_batch()
    expected = native(**inputs)
    assert difference(model(**inputs).logits, expected.logits) <= 2e-7
    model.train()(**inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path / "again")
    assert difference(remote(tmp_path / "again")(**inputs).logits, model.eval()(**inputs).logits) == 0.0
    assert type(trusted(out)[0].model).__name__ == "TokenRoutedModel"


def test_the_folder(folder: Path, headless: Path) -> None:
    assert files_in(folder) == files_in(headless) | {"masked_lm_mote.py", "model-head.safetensors"}
    config, other = (read_json(one / "config.json") for one in (folder, headless))
    own = {"AutoModelForMaskedLM": "masked_lm_mote.MoTEForMaskedLM"}
    assert config == {**other, "architectures": ["MoTEForMaskedLM"], "auto_map": {**other["auto_map"], **own}}
    weights, others = (tensors_of(one) for one in (folder, headless))
    assert_same({name: weight for name, weight in weights.items() if not name.startswith("head.")}, others)
    assert "AutoModelForMaskedLM" in (folder / "README.md").read_text()
    assert "AutoModelForMaskedLM" not in (headless / "README.md").read_text()


def test_embedding_models_leave_the_head_out(folder: Path, headless: Path, tmp_path: Path) -> None:
    model, expected = (AutoModel.from_pretrained(one, trust_remote_code=True) for one in (folder, headless))
    assert not any(name.startswith("head.") for name in model.state_dict())
    assert difference(model(**batch(), task="alpha")[0], expected(**batch(), task="alpha")[0]) == 0.0
    one = AutoModel.from_pretrained(folder, trust_remote_code=True, experts=["beta"])
    assert not any(".alpha." in name or name.startswith("head.") for name in one.state_dict())
    vectors, others = (trusted(one).encode(["ab cd", "ef"], task="beta") for one in (folder, headless))
    assert (vectors == others).all()
    model.save_pretrained(tmp_path)
    assert read_json(tmp_path / "config.json") == read_json(headless / "config.json")
    assert "masked_lm_mote.py" not in files_in(tmp_path)
    beta = remote(folder, experts=["beta"])  # one expert with the head
    beta.save_pretrained(tmp_path / "beta")
    found = remote(tmp_path / "beta")(**batch(), task="beta").logits
    assert difference(found, beta(**batch(), task="beta").logits) == 0.0


def test_a_folder_without_a_head(folder: Path, headless: Path) -> None:
    remote(folder)  # whose classes the library then knows
    for load in (remote, MoTEForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match=WITHOUT_HEAD):
            load(headless)


@pytest.mark.parametrize(
    ("with_head", "changes", "load", "problem"),
    [
        (True, {"head__cls__predictions__bias": None}, MoTEForMaskedLM, "missing keys .head.cls.predictions.bias"),
        (True, {"head__other__weight": torch.ones(2)}, MoTEForMaskedLM, "1 unexpected keys .head.other.weight"),
        (True, {"header__weight": torch.ones(2)}, MoTEModel, "1 unexpected keys .header.weight"),
        (False, {"head__weight": torch.ones(2)}, MoTEModel, "1 unexpected keys .head.weight"),
    ],
)
def test_damage(
    with_head: bool, changes: dict[str, Any], load: Any, problem: str, folder: Path, headless: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(folder if with_head else headless, tmp_path / "damaged")
    edit_weights(damaged, **changes)
    with pytest.raises(ValueError, match=f"do not match their config.*{problem}"):
        load.from_pretrained(damaged)


def test_sources_without_a_head(dense: Path, tmp_path: Path) -> None:
    for one, message in (
        (dense, r"lack .* keys of BertForMaskedLM: cls\..* leave out `--with-head`"),
        (dense_checkpoint(tmp_path / "qwen3", "qwen3"), "Unrecognized configuration class .*Qwen3Config"),
        (published_nomic_moe(tmp_path / "moe"), "moe has no head for masked language modelling"),
    ):
        with pytest.raises(ValueError, match=message):
            upcycle(str(one), tmp_path / "out", with_head=True)
    assert not (tmp_path / "out").exists()


def test_verbs_that_make_a_task_model_keep_the_head(folder: Path, tmp_path: Path) -> None:
    expected = remote(folder).head.state_dict()
    for out in (
        transform(folder, tmp_path / "removed", verbs.remove, name="alpha"),
        transform(folder, tmp_path / "moved", verbs.interpolate, weight=0.5),
        configure(folder, tmp_path / "set", default_task="beta"),
    ):
        assert_same(remote(out).head.state_dict(), expected)
        assert "masked_lm_mote.py" in files_in(out)
        assert "AutoModelForMaskedLM" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(verbs.export, {"name": "beta"}), (verbs.average, {}), (verbs.compress, {"bits": 8})],
)
def test_verbs_that_make_another_model_say_that_the_head_is_left_out(
    function: Any, arguments: dict[str, Any], folder: Path, headless: Path, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "mote")
    expected = transform(headless, tmp_path / "expected", function, **arguments)
    assert "head for masked" not in caplog.text
    out = transform(folder, tmp_path / "out", function, **arguments)
    assert "The head for masked language modelling is dropped: the result only embeds texts" in caplog.messages
    assert files_in(out) == files_in(expected)
    assert_same(*(tensors_of(one) for one in (out, expected)))
    assert read_json(out / "config.json") == read_json(expected / "config.json")


def test_an_expert_fits_with_and_without_the_head(folder: Path, headless: Path, tmp_path: Path) -> None:
    """The base that an artefact belongs to is what experts rely on, which the head is not."""
    verbs.extract(str(headless), "beta", tmp_path / "beta")
    out = transform(folder, tmp_path / "out", verbs.add, "new", verbs.open_expert(tmp_path / "beta"))
    assert verbs.open_expert(tmp_path / "beta").base == verbs.list_experts(str(out)).base_hash


def test_a_copy_in_memory_is_tied_to_itself(folder: Path) -> None:
    other = copy.deepcopy(model := remote(folder))
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    assert other.get_output_embeddings().weight is not model.get_output_embeddings().weight
