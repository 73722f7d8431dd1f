"""A MoTE with its family's head for masked language modelling: the native model's predictions, in all its uses."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from helpers.checkpoints import (
    dense_checkpoint,
    edit_weights,
    files_in,
    published_nomic,
    published_nomic_moe,
    read_json,
    tiny_tokenizer,
    to_bin,
    trusted,
)
from helpers.families import FAMILIES, VOCAB_SIZE, batch, dense_model, difference, family
from helpers.paths import ROOT
from safetensors.torch import load_file
from torch.nn import functional as F  # noqa: N812
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedModel,
    pipeline,
)

from mote import configure, plan_upcycling, transform, upcycle
from mote import experts as verbs
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.remote.modeling_mote import MoTEModel

EXPERTS = ["alpha", "beta"]
WITHOUT_HEAD = r"Unrecognized configuration class .* AutoModelForMaskedLM|\d+ missing keys \(head\."
WITH_HEAD = {
    *("nomic_bert", "jina_embeddings_v3", "gte", "bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie"),
    *("mpnet", "distilbert", "modernbert", "eurobert"),
}


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
    """A batch in which some tokens are to be predicted."""
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
    """The same source without its head."""
    return upcycle(str(source), tmp_path_factory.mktemp("headless") / "tiny-mote", experts=EXPERTS)


# The native model ----------------------------------------------------------------------------------------------------


def test_which_families_have_a_head() -> None:
    configs = {name: transformers.CONFIG_MAPPING[name] for name in FAMILIES if name in transformers.CONFIG_MAPPING}
    found = {name for name in configs if configs[name] in transformers.MODEL_FOR_MASKED_LM_MAPPING}
    assert found == WITH_HEAD & configs.keys()


@pytest.mark.parametrize("name", [family(name) for name in FAMILIES if name in WITH_HEAD])
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
    mixed = model(**inputs, task=["alpha", "beta", "alpha", "beta"])
    tokens = inputs["attention_mask"].bool()
    assert difference(mixed.logits[tokens], expected.logits[tokens]) <= 2e-7
    assert abs(mixed.loss - expected.loss) <= 2e-7
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


def test_another_dtype_and_shards(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"with_head": True, "dtype": "bfloat16", "max_shard_size": "10KB"}
    plan = plan_upcycling(str(source), tmp_path / "x", **settings)
    out = upcycle(str(source), tmp_path / "x", **settings)
    files = [load_file(path) for path in out.glob("*.safetensors")]
    assert len(files) > 1
    assert plan.size == sum(weight.nbytes for weights in files for weight in weights.values())
    model = remote(out)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# Training ------------------------------------------------------------------------------------------------------------


def test_gradients_reach_head_shared_weights_and_the_one_expert(folder: Path) -> None:
    model = remote(folder)
    model(**labelled_batch(), task="beta").loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name in dict(model.named_parameters()) if ".experts.alpha." in name}
    assert any(name.startswith("head.") for name in dict(model.named_parameters()))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # on a machine without a GPU
def test_the_documented_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of docs/upcycling.md, whose rows name their tasks."""
    section = (ROOT / "docs" / "upcycling.md").read_text().split("## With the head for masked language modelling", 1)[1]
    code = section.split("```python\n", 1)[1].split("```", 1)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    rows = [{"text": text, "task": task} for text in ("ab cd ef", "gh ij") for task in EXPERTS]
    exec(code.replace("bert-base-uncased-mote", str(folder)), {"dataset": Dataset.from_list(rows)})
    trained, before = remote(tmp_path / "trained").state_dict(), remote(folder).state_dict()
    changed = {name for name, weight in trained.items() if not weight.equal(before[name])}
    assert all(any(part in name for name in changed) for part in (".alpha.", ".beta.", ".shared.", "head."))
    again = remote(tmp_path / "trained")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_fill_mask(folder: Path, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"trust_remote_code": True, "device": "cpu"}
    text = "ab [MASK] cd"
    with caplog.at_level(logging.ERROR, "transformers"):
        fill: Any = pipeline("fill-mask", str(folder), model_kwargs={"default_task": "beta"}, **settings)
    assert not caplog.records
    assert fill(text) == pipeline("fill-mask", str(source), device="cpu")(text)
    with pytest.raises(ValueError, match=r"No task, and the model has no default_task.*default_task="):
        pipeline("fill-mask", str(folder), **settings)(text)


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
    embedding = AutoModel.from_pretrained(out, trust_remote_code=True)
    assert type(embedding).__name__ == "TokenRoutedModel"
    assert trusted(out).encode("ab").shape == (16,)
    embedding.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=WITHOUT_HEAD):
        remote(tmp_path / "headless")


# With and without the head -------------------------------------------------------------------------------------------


def test_the_folder(folder: Path, headless: Path) -> None:
    assert files_in(folder) == files_in(headless) | {"masked_lm_mote.py"}
    config, other = (read_json(one / "config.json") for one in (folder, headless))
    own = {"AutoModelForMaskedLM": "masked_lm_mote.MoTEForMaskedLM"}
    assert config == {**other, "architectures": ["MoTEForMaskedLM"], "auto_map": {**other["auto_map"], **own}}
    weights, others = (load_file(one / "model.safetensors") for one in (folder, headless))
    assert {name: weight for name, weight in weights.items() if not name.startswith("head.")}.keys() == others.keys()
    assert all(weights[name].equal(weight) for name, weight in others.items())
    assert "AutoModelForMaskedLM" in (folder / "README.md").read_text()
    assert "AutoModelForMaskedLM" not in (headless / "README.md").read_text()


def test_embedding_models_leave_the_head_out(folder: Path, headless: Path, tmp_path: Path) -> None:
    model, expected = (AutoModel.from_pretrained(one, trust_remote_code=True) for one in (folder, headless))
    assert not any(name.startswith("head.") for name in model.state_dict())
    assert difference(model(**batch(), task="alpha")[0], expected(**batch(), task="alpha")[0]) == 0.0
    one = AutoModel.from_pretrained(folder, trust_remote_code=True, experts=["beta"])
    assert not any(".alpha." in name or name.startswith("head.") for name in one.state_dict())
    texts = ["ab cd", "ef"]
    vectors = trusted(folder).encode(texts, task="beta")
    assert (vectors == trusted(headless).encode(texts, task="beta")).all()
    model.save_pretrained(tmp_path)
    assert read_json(tmp_path / "config.json") == read_json(headless / "config.json")
    assert "masked_lm_mote.py" not in files_in(tmp_path)


def test_a_model_saved_without_its_head_stays_one_with_it_in_memory(folder: Path, tmp_path: Path) -> None:
    model = remote(folder, experts=["beta"])
    model.save_pretrained(tmp_path)
    assert difference(remote(tmp_path)(**batch(), task="beta").logits, model(**batch(), task="beta").logits) == 0.0


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_without_a_head(again: bool, folder: Path, headless: Path) -> None:
    """Also once a folder with one has been loaded, whose classes the library then knows."""
    if again:
        remote(folder)
    with pytest.raises(ValueError, match=WITHOUT_HEAD):
        remote(headless)
    with pytest.raises(ValueError, match=WITHOUT_HEAD):
        MoTEForMaskedLM.from_pretrained(headless)


@pytest.mark.parametrize(
    ("which", "changes", "load", "problem"),
    [
        (
            "folder",
            {"head__cls__predictions__bias": None},
            MoTEForMaskedLM,
            r"missing keys \(head.cls.predictions.bias",
        ),
        ("folder", {"head__other__weight": torch.ones(2)}, MoTEForMaskedLM, r"1 unexpected keys \(head.other.weight"),
        ("folder", {"header__weight": torch.ones(2)}, MoTEModel, r"1 unexpected keys \(header.weight"),
        ("folder", {"backbone__embeddings__LayerNorm__bias": None}, MoTEModel, r"1 missing keys \(backbone.embeddings"),
        ("headless", {"head__weight": torch.ones(2)}, MoTEModel, r"1 unexpected keys \(head.weight"),
    ],
)
def test_damage(
    which: str, changes: dict[str, Any], load: Any, problem: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    damaged = shutil.copytree(request.getfixturevalue(which), tmp_path / "damaged")
    edit_weights(damaged, **changes)
    with pytest.raises(ValueError, match=f"do not match their config.*{problem}"):
        load.from_pretrained(damaged)


def test_sources_without_a_head(dense: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no head for masked language modelling \(missing: .*leave out"):
        upcycle(str(dense), tmp_path / "out", with_head=True)
    decoder = dense_checkpoint(tmp_path / "qwen3", "qwen3")
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*Qwen3Config.* AutoModelForMaskedLM"):
        upcycle(str(decoder), tmp_path / "out", with_head=True)
    published = published_nomic_moe(tmp_path / "moe")
    with pytest.raises(ValueError, match="moe has no head for masked language modelling"):
        upcycle(str(published), tmp_path / "out", with_head=True)
    assert not (tmp_path / "out").exists()


# What is made of a folder with a head --------------------------------------------------------------------------------


def head_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.state_dict().items() if name.startswith("head.")}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder, out: transform(folder, out, verbs.remove, name="alpha"),
        lambda folder, out: transform(folder, out, verbs.interpolate, weight=0.5),
        lambda folder, out: configure(folder, out, default_task="beta"),
    ],
    ids=["remove", "interpolate", "set"],
)
def test_verbs_that_make_a_task_model_keep_the_head(make: Any, folder: Path, tmp_path: Path) -> None:
    out = make(folder, tmp_path / "out")
    found, expected = head_of(remote(out)), head_of(remote(folder))
    assert found.keys() == expected.keys() != set()
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert "masked_lm_mote.py" in files_in(out)
    assert "AutoModelForMaskedLM" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(verbs.export, {"name": "beta"}), (verbs.average, {}), (verbs.compress, {"bits": 8})],
)
def test_verbs_that_make_another_model_say_that_the_head_is_left_out(
    function: Any, arguments: dict[str, Any], folder: Path, headless: Path, tmp_path: Path, caplog: Any
) -> None:
    sentence = "The head for masked language modelling is dropped: the result only embeds texts"
    with caplog.at_level(logging.INFO, "mote"):
        out = transform(folder, tmp_path / "out", function, **arguments)
    assert sentence in caplog.messages
    caplog.clear()
    expected = transform(headless, tmp_path / "expected", function, **arguments)
    assert sentence not in caplog.messages
    assert files_in(out) == files_in(expected)
    weights, others = (load_file(one / "model.safetensors") for one in (out, expected))
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(weight) for name, weight in others.items())
    assert read_json(out / "config.json") == read_json(expected / "config.json")


def test_an_expert_fits_with_and_without_the_head(folder: Path, headless: Path, tmp_path: Path) -> None:
    """The base that an artefact belongs to is what experts rely on, which the head is not."""
    verbs.extract(str(headless), "beta", tmp_path / "beta")
    out = transform(folder, tmp_path / "out", verbs.add, "new", verbs.open_expert(tmp_path / "beta"))
    assert verbs.open_expert(tmp_path / "beta").base == verbs.list_experts(str(out)).base_hash


def test_a_copy_in_memory_is_tied_to_itself(folder: Path) -> None:
    model = remote(folder)
    other = copy.deepcopy(model)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    assert other.get_output_embeddings().weight is not model.get_output_embeddings().weight
