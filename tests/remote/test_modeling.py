"""Properties that hold for every family, and what is special about some."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import assert_same, edit_weights
from helpers.families import (
    EAGER_ONLY,
    EXPERTS,
    FAMILIES,
    REPRESENTATIVES,
    all_families,
    batch,
    dense_model,
    difference,
    fresh_mote,
    mote_config,
    trained_mote,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mote.remote.configuration_mote import ARCHITECTURES, MoTEConfig
from mote.remote.modeling_mote import MoTEModel, pool


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@all_families
def test_every_fresh_expert_equals_the_dense_model(name: str, attention: str) -> None:
    dense, inputs = dense_model(name, attention), batch()
    with torch.no_grad():
        expected = dense(**inputs).last_hidden_state
        model = MoTEModel(mote_config(dense), dense).eval()
        for expert in EXPERTS:
            assert difference(model(**inputs, task=expert).last_hidden_state, expected) == 0.0
    assert model.backbone.config._attn_implementation == ("eager" if name in EAGER_ONLY else attention)


@all_families
def test_experts_are_native_layers_and_differ_and_train_on_their_own(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    alpha, beta = (model(**inputs, task=expert).pooler_output for expert in EXPERTS)
    assert difference(alpha, beta) > 1e-3
    native = type(dense_model(name).get_submodule(ARCHITECTURES[name].layer_path)[0])
    assert all(type(expert) is native for expert in model.blocks[0].experts.values())
    beta.sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".experts.alpha." in key), key


def test_every_supported_architecture_is_tested() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES)
    by_default = [ARCHITECTURES[name] for name in REPRESENTATIVES]  # layer path and shared modules
    assert sorted(by_default) == sorted(set(ARCHITECTURES.values()))


def test_a_module_replaced_in_the_shared_attention_reaches_every_expert() -> None:
    model, inputs = trained_mote("bert"), batch()
    before = [model(**inputs, task=task).pooler_output for task in EXPERTS]
    attention = model.backbone.encoder.layer[0].shared.attention
    attention.output.dense = nn.Sequential(attention.output.dense, nn.Dropout(1.0)).train()
    for task, expected in zip(EXPERTS, before, strict=True):
        assert difference(model(**inputs, task=task).pooler_output, expected) > 1e-3


def test_attention_implementation_reaches_the_backbone(tmp_path: Path) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    for attention in ("eager", "sdpa"):
        loaded = MoTEModel.from_pretrained(tmp_path, attn_implementation=attention)
        assert loaded.backbone.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "qwen3", "llama"])
def test_a_decoder_can_attend_both_ways(name: str, attention: str) -> None:
    inputs = {"input_ids": torch.tensor([[7, 8, 9, 10]])}
    changed = {"input_ids": torch.tensor([[7, 8, 9, 11]])}
    for causal in (True, False):
        dense = dense_model(name, attention, is_causal=causal)
        model = MoTEModel(mote_config(dense), dense).eval()
        first = [model(**tokens, task="alpha").last_hidden_state[0, 0] for tokens in (inputs, changed)]
        assert (difference(*first) == 0.0) == causal


def test_a_new_model_starts_with_identical_experts() -> None:
    model = MoTEModel(mote_config(dense_model("bert"))).eval()
    alpha, beta = (model(**batch(), task=task).pooler_output for task in EXPERTS)
    assert difference(alpha, beta) == 0.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_loading_does_not_initialize_weights_that_it_replaces(tmp_path: Path) -> None:
    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.__name__.partition(".")[0])
            return func(*args, **kwargs or {})

    trained_mote("bert").save_pretrained(tmp_path)
    for load, random in ((MoTEModel.from_pretrained, False), (lambda _: fresh_mote("bert"), True)):
        called: set[str] = set()
        with Recorded():
            load(tmp_path)
        assert ({"uniform_", "normal_"} & called != set()) == random


def test_another_architecture_can_be_described_by_hand() -> None:
    dense, inputs = dense_model("bert"), batch()
    expected = dense(**inputs).last_hidden_state
    by_hand = {"layer_path": "encoder.layer", "shared_modules": ["attention.self", "attention.output"]}
    model = MoTEModel(mote_config(dense, **by_hand), dense).eval()
    assert difference(model(**inputs, task="beta").last_hidden_state, expected) == 0.0
    assert "attention.output.LayerNorm.weight" not in model.backbone.encoder.layer[0].experts["beta"].state_dict()
    with pytest.raises(AttributeError, match="BertLayer has no attribute `self_attn`"):
        MoTEModel(mote_config(dense, layer_path="encoder.layer", shared_modules=["self_attn"]), dense_model("bert"))


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_leaves_padding_out(side: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=dtype)
    mask = mask.flip(1) if side == "left" else mask
    for row in range(3):
        tokens = hidden[row][mask[row].bool()]
        assert difference(pool(hidden, mask, "mean")[row], tokens.mean(0)) <= 1e-6
        assert difference(pool(hidden, mask, "cls")[row], tokens[0]) == 0.0
        assert difference(pool(hidden, mask, "last_token")[row], tokens[-1]) == 0.0
    assert difference(pool(hidden, None, "mean"), hidden.mean(1)) <= 1e-6
    assert difference(pool(hidden, None, "last_token"), hidden[:, -1]) == 0.0
    assert pool(hidden, torch.zeros_like(mask), "mean").eq(0).all()


def test_mean_pooling_is_exact_in_half_precision() -> None:
    for length, value, dtype in (
        (511, 1.0, torch.bfloat16),  # which cannot represent 511
        (8192, 10.0, torch.float16),  # a sum larger than any float16 number
    ):
        hidden = torch.full((1, length, 4), value, dtype=dtype)
        assert pool(hidden, torch.ones(1, length, dtype=torch.long), "mean").eq(value).all()


def test_experts_that_were_not_loaded_are_not_lost(tmp_path: Path) -> None:
    fresh_mote("bert").save_pretrained(tmp_path / "all")
    one = MoTEModel.from_pretrained(tmp_path / "all", experts=["beta"])
    one.save_pretrained(tmp_path / "one")
    again = MoTEModel.from_pretrained(tmp_path / "one")
    assert again.config.available_experts == ["beta"]
    again.save_pretrained(tmp_path / "one")  # nothing else was there
    with pytest.raises(ValueError, match=r"Unknown expert 'alpha'\. Available: 'beta'"):
        MoTEModel.from_pretrained(tmp_path / "one", experts=["alpha"])
    before = {path: path.stat().st_ino for path in (tmp_path / "all").glob("*.safetensors")}
    with torch.no_grad():
        next(iter(one.blocks[0].experts["beta"].parameters())).add_(1)
    one.save_pretrained(tmp_path / "all")
    assert one.config.loaded_experts == ["beta"]
    both = MoTEModel.from_pretrained(tmp_path / "all")
    assert both.config.available_experts == ["alpha", "beta"]
    assert_same({key: both.state_dict()[key] for key in one.state_dict()}, one.state_dict())
    after = {path: path.stat().st_ino for path in (tmp_path / "all").glob("*.safetensors")}
    assert [path.name[:17] for path in after.keys() - before.keys()] == ["model-expert-beta"]
    assert {path: after[path] for path in before.keys() & after.keys()}.items() <= before.items()
    with torch.no_grad():
        next(iter(one.blocks[0].shared.parameters())).add_(1)
    for _ in range(2):  # with another base, then in the old layout
        with pytest.raises(ValueError, match="all also holds the experts alpha, which were not loaded"):
            one.save_pretrained(tmp_path / "all")
        edit_weights(tmp_path / "all")
    assert MoTEModel.from_pretrained(tmp_path / "all").config.available_experts == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "alfa"}, "Unknown task 'alfa'. Did you mean 'alpha'"),
        ({"task": ["alpha", "gamma", "alpha", "beta"]}, "Unknown task 'gamma'"),
        ({"task": 1}, "Unknown task 1. Available: 'alpha', 'beta'"),
        ({"task": ["alpha"] * 5}, "5 tasks for 4 rows"),
        ({"task": "alpha", "task_ids": torch.zeros(4, dtype=torch.long)}, "not both"),
        ({"task_ids": torch.tensor([0, 1, 2, 0])}, r"task_ids \[2\] are out of range. Tasks: {0: 'alpha', 1: 'beta'"),
        ({"task_ids": torch.tensor([0, 1, -1, 0])}, r"task_ids \[-1\] are out of range"),
        *[({"task_ids": torch.zeros(4).to(dtype)}, "are out of range") for dtype in (torch.float, torch.bool)],
        ({"task_ids": torch.zeros(4, 1, dtype=torch.long)}, r"task_ids \[\[0\], .* are out of range"),
    ],
)
def test_wrong_tasks_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fresh_mote("bert")(**batch(), **arguments)


def test_other_ways_to_name_the_tasks_of_rows() -> None:
    model, inputs = trained_mote("bert"), batch()
    expected = model(**inputs, task=["alpha", "beta", "alpha", "beta"]).pooler_output
    assert model(**inputs, task=np.array(["alpha", "beta"] * 2)).pooler_output.equal(expected)
    assert model(**inputs, task=[None, "beta"] * 2).pooler_output.equal(expected)  # None: the default task


@pytest.mark.parametrize("name", ["taks", "tsk", "tasks", "task_id", "task_name"])
def test_a_misspelt_task_does_not_go_to_the_default_one(name: str) -> None:
    model, inputs = trained_mote("bert"), batch()
    with pytest.raises(ValueError, match=rf"Unknown argument '{name}'\. Did you mean 'task(_ids)?'\?"):
        model(**inputs, **{name: "beta"})
    of_transformers = {"num_items_in_batch": 4, "output_attentions": False, "output_hidden_states": True}
    assert difference(model(**inputs, **of_transformers).pooler_output, model(**inputs).pooler_output) == 0.0


def test_weights_that_do_not_match_the_config(tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path)
    for change, message in (
        ({"experts": ["alpha", "beta", "gamma"]}, "those of the experts .'alpha', 'beta'., but .* 'gamma'"),
        ({"experts": ["alpha"]}, "do not match their config: they are those of"),
        ({"mote_layers": [0]}, "keys"),
    ):
        config = MoTEConfig.from_pretrained(tmp_path)
        changed = MoTEConfig(**{**config.to_dict(), "tasks": None, **change})
        with pytest.raises(ValueError, match=message):
            MoTEModel.from_pretrained(tmp_path, config=changed)


def test_an_unsupported_architecture_stays_one_if_it_is_described() -> None:
    described = {"layer_path": "encoder.layer", "shared_modules": ["attention"]}
    with pytest.raises(ValueError, match="does not support 'deberta-v2': it does not pass keyword arguments down"):
        _ = MoTEConfig(backbone_config={"model_type": "deberta-v2"}, **described).architecture


def test_copies_on_several_gpus_in_one_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cannot run in nn\.DataParallel"):
        fresh_mote("bert")._replicate_for_data_parallel()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Lora", {"init_lora_weights": False}),
        ("Vera", {"r": 2, "init_weights": False}),
        ("BOFT", {"boft_block_size": 4, "init_weights": False}),
        ("FourierFT", {"n_frequency": 10, "scaling": 500}),
        ("LNTuning", {"target_modules": ["LayerNorm"]}),
        ("TrainableTokens", {"target_modules": ["word_embeddings"], "token_indices": [*range(10)]}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT
def test_an_adapter_of_the_dense_model_is_refused(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = {"target_modules": ["query", "value"], **arguments}
    loaders = [peft.PeftModel.from_pretrained]
    if kind != "Vera":  # which transformers does not load
        loaders.append(lambda model, folder: model.load_adapter(folder))
    for source, make in (("dense", dense_model), ("mote", trained_mote)):
        adapter = peft.get_peft_model(make("bert"), getattr(peft, f"{kind}Config")(**config))
        for weight in (weight for weight in adapter.parameters() if weight.requires_grad):
            weight.data.add_(torch.randn_like(weight))
        adapter.save_pretrained(tmp_path / source)
        for load in loaders:
            model = trained_mote("bert").eval()
            before = model(**batch(), task="beta").pooler_output
            if source == "dense":
                with pytest.raises(ValueError, match=r"merge it into that one \(merge_and_unload\), and upcycle"):
                    load(model, tmp_path / source)
            else:
                loaded = load(model, tmp_path / source)
                model = loaded if kind == "Vera" else model
                assert difference(model.eval()(**batch(), task="beta").pooler_output, before) > 1e-3
