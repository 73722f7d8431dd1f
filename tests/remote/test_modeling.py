"""Properties that hold for every family, and what is special about some."""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers.families import (
    EAGER_ONLY,
    EXPERTS,
    NOT_CHECKPOINTED,
    all_families,
    batch,
    dense_model,
    difference,
    fresh_mote,
    in_threads,
    mote_config,
    rows_of,
    trained_mote,
)
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

import mote
from mote.checkpoints.tensors import weight_name
from mote.remote.architectures_mote import ARCHITECTURES
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEBlock, MoTEModel, pool


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
def test_experts_are_the_native_layers_and_differ_once_changed(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    alpha, beta = (model(**inputs, task=expert).pooler_output for expert in EXPERTS)
    assert difference(alpha, beta) > 1e-3
    block = next(module for module in model.modules() if isinstance(module, MoTEBlock))
    native = type(dense_model(name).get_submodule(ARCHITECTURES[name].layer_path)[0])
    assert all(type(expert) is native for expert in block.experts.values())


@all_families
def test_rows_of_a_mixed_batch_are_as_if_alone(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    tasks = ["alpha", "beta", "beta", "alpha"]
    with torch.no_grad():
        mixed = model(**inputs, task=tasks)
        by_id = model(**inputs, task_ids=torch.tensor([list(model.config.tasks).index(task) for task in tasks]))
        assert difference(mixed.last_hidden_state, by_id.last_hidden_state) == 0.0
        for row, task in enumerate(tasks):
            alone = {
                key: value[:, : int(inputs["attention_mask"][row].sum())] for key, value in rows_of(inputs, row).items()
            }
            out = model(**alone, task=task)
            assert difference(mixed.pooler_output[row], out.pooler_output[0]) <= 1e-6
            length = out.last_hidden_state.shape[1]
            assert difference(mixed.last_hidden_state[row, :length], out.last_hidden_state[0]) <= 1e-6


@all_families
def test_only_routed_experts_get_gradients(name: str) -> None:
    model = trained_mote(name)
    model(**batch(), task="beta").pooler_output.sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".experts.alpha." in key), key


@all_families
def test_gradients_with_checkpointing_are_the_same(name: str) -> None:
    plain, inputs = trained_mote(name).train(), batch()
    checkpointed = copy.deepcopy(plain)
    if name in NOT_CHECKPOINTED:
        with pytest.raises(ValueError, match="gradient checkpointing"):
            checkpointed.gradient_checkpointing_enable()
        return
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # the same dropout
        query, document = (model(**inputs, task=task).pooler_output for task in EXPERTS)
        (query * document).sum().backward()
    for (key, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert difference(one.grad, other.grad) == 0.0, key


@all_families
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, inputs = trained_mote(name), batch()
    model.save_pretrained(tmp_path)
    loaded = MoTEModel.from_pretrained(tmp_path, attn_implementation=model.backbone.config._attn_implementation)
    one = MoTEModel.from_pretrained(
        tmp_path, experts=["beta"], attn_implementation=model.backbone.config._attn_implementation
    )
    with torch.no_grad():
        for task in EXPERTS:
            expected = model(**inputs, task=task).last_hidden_state
            assert difference(loaded(**inputs, task=task).last_hidden_state, expected) == 0.0
        assert difference(one(**inputs, task="beta").last_hidden_state, expected) == 0.0
    assert list(one.state_dict()) == [key for key in model.state_dict() if ".experts.alpha." not in key]
    assert list(loaded.config.tasks) == list(model.config.tasks)  # task_ids mean the same


@all_families
def test_deepcopy_and_pickle(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    expected = model(**inputs, task="beta").pooler_output
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert difference(copied(**inputs, task="beta").pooler_output, expected) == 0.0
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
    assert difference(model(**inputs, task="beta").pooler_output, expected) == 0.0


@all_families
def test_hidden_states(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    out = model(**inputs, task="alpha", output_hidden_states=True)
    assert [tuple(state.shape) for state in out.hidden_states] == [(4, 9, 16)] * 3
    mixed = model(**inputs, task=["alpha", "beta", "alpha", "beta"], output_hidden_states=True)
    assert [tuple(state.shape) for state in mixed.hidden_states] == [(4, 9, 16)] * 3
    assert difference(mixed.hidden_states[1][0], out.hidden_states[1][0]) <= 1e-6
    assert difference(mixed.hidden_states[1][1, :7], out.hidden_states[1][1, :7]) > 1e-3


@all_families
def test_half_of_the_blocks_stay_dense(name: str) -> None:
    dense, inputs = dense_model(name), batch()
    expected = dense(**inputs).last_hidden_state
    model = MoTEModel(mote_config(dense, mote_layers="every_other"), dense).eval()
    layers = model.backbone.get_submodule(ARCHITECTURES[name].layer_path)
    assert [isinstance(layer, MoTEBlock) for layer in layers] == [False, True]
    assert difference(model(**inputs, task="beta").last_hidden_state, expected) == 0.0


@all_families
def test_parameter_counts(name: str) -> None:
    dense = dense_model(name)
    in_dense = sum(p.numel() for key, p in dense.named_parameters() if not key.startswith("pooler."))
    model = MoTEModel(mote_config(dense, experts=["a", "b", "c"]), dense)
    counts = mote.experts.parameter_counts(model)
    assert counts["active"] == in_dense
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    assert counts["total"] == counts["shared"] + sum(counts["experts"].values())
    assert 0 < counts["experts"]["a"] == counts["experts"]["b"] == counts["active"] - counts["shared"]


@all_families
def test_bfloat16(name: str) -> None:
    model = trained_mote(name).to(torch.bfloat16)
    out = model(**batch(), task=["alpha", "beta", "alpha", "beta"])
    assert out.pooler_output.dtype == torch.bfloat16
    assert out.pooler_output.isfinite().all()


def test_every_supported_architecture_is_tested() -> None:
    from helpers.families import FAMILIES, REPRESENTATIVES

    assert set(FAMILIES) == set(ARCHITECTURES)
    by_default = [ARCHITECTURES[name] for name in REPRESENTATIVES]  # layer path and shared modules
    assert sorted(by_default) == sorted(set(ARCHITECTURES.values()))


@pytest.mark.long
def test_eight_threads_serve_four_tasks() -> None:
    tasks = ["a", "b", "c", "d"]
    model = trained_mote("bert", experts=tasks)
    batches = [batch(seed=seed) for seed in range(8)]
    with torch.no_grad():
        serial = [[model(**inputs, task=task).pooler_output for task in tasks] for inputs in batches]
    wrong: list[tuple[int, str]] = []

    def serve(thread: int) -> None:
        with torch.no_grad():
            for turn in range(40):
                task = (thread + turn) % 4
                out = model(**batches[thread], task=tasks[task], output_hidden_states=turn % 3 == 0).pooler_output
                if difference(out, serial[thread][task]) != 0.0:
                    wrong.append((thread, tasks[task]))

    in_threads(8, serve)
    assert wrong == []


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    model, inputs = trained_mote("nomic_bert"), batch()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for task in ("alpha", "beta", ["alpha", "beta", "beta", "alpha"]):
            expected = model(**inputs, task=task).pooler_output
            assert difference(compiled(**inputs, task=task).pooler_output, expected) <= 1e-6


@pytest.mark.long
def test_one_task_compiles_into_one_graph() -> None:
    model, inputs = trained_mote("bert"), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert (
            difference(compiled(**inputs, task="beta").pooler_output, model(**inputs, task="beta").pooler_output)
            <= 1e-6
        )


def test_keys_on_disk(tmp_path: Path) -> None:
    from safetensors import safe_open

    trained_mote("nomic_bert", mote_layers=[1]).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    norms = {f"post_{part}_layernorm.{name}" for part in ("attention", "mlp") for name in ("weight", "bias")}
    expert = {f"mlp.{name}_proj.weight" for name in ("up", "gate", "down")} | norms
    embeddings = {"word_embeddings.weight", "token_type_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"}
    assert keys == (
        {f"backbone.embeddings.{key}" for key in embeddings}
        | {f"backbone.layers.0.{key}" for key in attention | expert}
        | {f"backbone.layers.1.shared.{key}" for key in attention}
        | {f"backbone.layers.1.experts.{name}.{key}" for name in EXPERTS for key in expert}
    )


def test_a_bert_block_shares_its_attention_and_nothing_else(tmp_path: Path) -> None:
    block = trained_mote("bert").backbone.encoder.layer[0]
    shared = {key.split(".", 1)[1] for key in block.state_dict() if key.startswith("shared.")}
    expert = {key.split(".", 2)[2] for key in block.state_dict() if key.startswith("experts.alpha.")}
    projections = ("self.query", "self.key", "self.value", "output.dense")
    assert shared == {f"attention.{name}.{kind}" for name in projections for kind in ("weight", "bias")}
    assert expert == {
        f"{name}.{kind}"
        for name in ("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm")
        for kind in ("weight", "bias")
    }


def test_a_module_replaced_in_the_shared_attention_reaches_every_expert() -> None:
    model, inputs = trained_mote("bert"), batch()
    before = [model(**inputs, task=task).pooler_output for task in EXPERTS]
    attention = model.backbone.encoder.layer[0].shared.attention
    attention.output.dense = nn.Sequential(attention.output.dense, nn.Dropout(1.0)).train()
    for task, expected in zip(EXPERTS, before, strict=True):
        assert difference(model(**inputs, task=task).pooler_output, expected) > 1e-3


def test_peft_adapts_the_shared_attention() -> None:
    peft = pytest.importorskip("peft")
    model, inputs = trained_mote("bert"), batch()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
    with torch.no_grad():
        for task in EXPERTS:
            on = adapted(**inputs, task=task).pooler_output
            with adapted.disable_adapter():
                off = adapted(**inputs, task=task).pooler_output
            assert difference(on, off) > 1e-4


def test_device_map_with_blocks_on_disk(tmp_path: Path) -> None:
    model, inputs = trained_mote("bert"), batch()
    model.save_pretrained(tmp_path / "model")
    device_map = {"backbone.embeddings": "cpu", "backbone.encoder.layer.0": "cpu", "backbone.encoder.layer.1": "disk"}
    loaded = MoTEModel.from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded")
    with torch.no_grad():
        for task in EXPERTS:
            assert (
                difference(loaded(**inputs, task=task).pooler_output, model(**inputs, task=task).pooler_output) == 0.0
            )


def test_attention_implementation_reaches_the_backbone(tmp_path: Path) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    for attention in ("eager", "sdpa"):
        loaded = MoTEModel.from_pretrained(tmp_path, attn_implementation=attention)
        assert loaded.backbone.config._attn_implementation == attention
    loaded.set_attn_implementation("eager")
    assert loaded.backbone.config._attn_implementation == "eager"
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash"):
        MoTEModel.from_pretrained(tmp_path, attn_implementation="flash_attention_2")


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
    torch.manual_seed(0)
    config = CONFIG_MAPPING["bert"](
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = MoTEModel(MoTEConfig(backbone_config=config, experts=EXPERTS)).eval()
    inputs = batch()
    assert difference(model(**inputs, task="alpha").pooler_output, model(**inputs, task="beta").pooler_output) == 0.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_another_architecture_can_be_described_by_hand() -> None:
    dense, inputs = dense_model("bert"), batch()
    expected = dense(**inputs).last_hidden_state
    by_hand = {"layer_path": "encoder.layer", "shared_modules": ["attention.self", "attention.output"]}
    model = MoTEModel(mote_config(dense, **by_hand), dense).eval()
    assert difference(model(**inputs, task="beta").last_hidden_state, expected) == 0.0
    assert "attention.output.LayerNorm.weight" not in dict(
        model.backbone.encoder.layer[0].experts["beta"].named_parameters()
    )


# Pooling -------------------------------------------------------------------------------------------------------------


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


def test_pooling_without_a_mask_and_of_nothing_but_padding() -> None:
    hidden = torch.randn(2, 5, 4)
    assert difference(pool(hidden, None, "mean"), hidden.mean(1)) <= 1e-6
    assert difference(pool(hidden, None, "last_token"), hidden[:, -1]) == 0.0
    assert pool(hidden, torch.zeros(2, 5, dtype=torch.long), "mean").eq(0).all()


def test_mean_pooling_counts_tokens_exactly_in_bfloat16() -> None:
    hidden = torch.ones(1, 511, 4, dtype=torch.bfloat16)  # bfloat16 cannot represent 511
    assert pool(hidden, torch.ones(1, 511, dtype=torch.long), "mean").eq(1).all()


def test_mean_pooling_of_a_long_text_in_float16() -> None:
    hidden = torch.full((1, 8192, 4), 10.0, dtype=torch.float16)  # whose sum is larger than any float16 number
    assert pool(hidden, torch.ones(1, 8192, dtype=torch.long), "mean").eq(10).all()


def test_experts_that_were_not_loaded_are_not_lost(tmp_path: Path) -> None:
    fresh_mote("bert").save_pretrained(tmp_path / "all")
    one = MoTEModel.from_pretrained(tmp_path / "all", experts=["beta"])
    with pytest.raises(ValueError, match="all also holds the experts alpha, which were not loaded"):
        one.save_pretrained(tmp_path / "all")
    (tmp_path / "all" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ValueError, match="all also holds the experts alpha, which were not loaded"):
        one.save_pretrained(tmp_path / "all")
    (tmp_path / "config.json").rename(tmp_path / "all" / "config.json")
    one.save_pretrained(tmp_path / "one")
    again = MoTEModel.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "one")  # nothing else was there
    assert MoTEModel.from_pretrained(tmp_path / "all")(**batch(), task="alpha").pooler_output.shape[0] == 4


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no default_task"),
        ({"task": "alfa"}, "Unknown task 'alfa'. Did you mean 'alpha'"),
        ({"task": ["alpha", "gamma", "alpha", "beta"]}, "Unknown task 'gamma'"),
        ({"task": 1}, "Unknown task 1. Available: 'alpha', 'beta'"),
        ({"task_ids": [0, 1, 2, 0]}, r"task_ids \[2\] are out of range"),
        ({"task": ["alpha"]}, "1 tasks for 4 rows"),
        ({"task": ["alpha"] * 5}, "5 tasks for 4 rows"),
        ({"task": "alpha", "task_ids": torch.zeros(4, dtype=torch.long)}, "not both"),
        ({"task_ids": torch.tensor([0, 1, 2, 0])}, r"task_ids \[2\] are out of range. Tasks: {0: 'alpha', 1: 'beta'"),
        ({"task_ids": torch.tensor([0, 1, -1, 0])}, r"task_ids \[-1\] are out of range"),
        ({"task_ids": torch.zeros(3, dtype=torch.long)}, "3 tasks for 4 rows"),
        ({"task_ids": torch.zeros(4)}, r"task_ids \[0.0, 0.0, 0.0, 0.0\] are out of range"),
        ({"task_ids": torch.tensor([True, False, True, False])}, r"task_ids \[True, False, True, False\] are out of"),
        (
            {"task_ids": torch.zeros(4, 1, dtype=torch.long)},
            r"task_ids \[\[0\], .* are out of range",
        ),
    ],
)
def test_wrong_tasks_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fresh_mote("bert")(**batch(), **arguments)


@pytest.mark.parametrize("name", ["taks", "tsk", "tasks", "task_id", "task_name"])
def test_a_misspelt_task_does_not_go_to_the_default_one(name: str) -> None:
    model, inputs = trained_mote("bert"), batch()
    model.config.default_task = "alpha"
    with pytest.raises(ValueError, match=rf"Unknown argument '{name}'\. Did you mean 'task(_ids)?'\?"):
        model(**inputs, **{name: "beta"})
    of_transformers = {"num_items_in_batch": 4, "output_attentions": False, "output_hidden_states": True}
    assert difference(model(**inputs, **of_transformers).pooler_output, model(**inputs).pooler_output) == 0.0


def test_resized_token_embeddings_are_saved(tmp_path: Path) -> None:
    model = trained_mote("bert")
    size = model.config.vocab_size + 5
    model.resize_token_embeddings(size)
    model.save_pretrained(tmp_path)
    loaded = MoTEModel.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.backbone.config.vocab_size == size
    inputs = {"input_ids": torch.tensor([[5, size - 1]])}
    with torch.no_grad():
        expected = model(**inputs, task="beta").pooler_output
        assert difference(loaded(**inputs, task="beta").pooler_output, expected) == 0.0


def test_names_of_weights() -> None:
    """`weight_name` names every weight of the dense model, once for each expert or once in all."""
    for name in ("bert", "nomic_bert", "distilbert", "gemma3_text"):
        dense = dense_model(name)
        in_dense = {key for key in dense.state_dict() if not key.startswith("pooler.")}
        layer_path, shared_modules = ARCHITECTURES[name]
        model = MoTEModel(mote_config(dense, mote_layers=[1]), dense)
        names = [weight_name(key, model.config) for key in model.state_dict()]
        assert {found.dense for found in names} == in_dense
        assert len(set(names)) == len(names)
        for found in names:
            in_block = found.dense.startswith(f"{layer_path}.1.")
            is_shared = found.dense.removeprefix(f"{layer_path}.1.").startswith(shared_modules)
            assert found.layer == (1 if in_block else None)
            assert (found.expert is None) == (is_shared or not in_block)


def test_a_task_whose_expert_is_not_loaded(tmp_path: Path) -> None:
    trained_mote("bert", tasks={"sts": "alpha"}).save_pretrained(tmp_path)
    model = MoTEModel.from_pretrained(tmp_path, experts=["beta"])
    with pytest.raises(
        ValueError, match=r"Task 'sts' needs the expert 'alpha', which was not loaded: experts=\['beta'\]"
    ):
        model(**batch(), task="sts")
    with pytest.raises(ValueError, match=r"Expert 'gamma' is not in this checkpoint.*'alpha', 'beta'"):
        MoTEModel.from_pretrained(tmp_path, experts=["gamma"])
    model.save_pretrained(tmp_path / "partial")
    again = MoTEModel.from_pretrained(tmp_path / "partial")
    assert again.config.available_experts == ["beta"]
    with pytest.raises(ValueError, match=r"Expert 'alpha' is not in this checkpoint\. Available: 'beta'"):
        MoTEModel.from_pretrained(tmp_path / "partial", experts=["alpha"])


def test_weights_that_do_not_match_the_config(tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path)
    for change, message in (
        ({"experts": ["alpha", "beta", "gamma"]}, "missing keys"),
        ({"experts": ["alpha"]}, "unexpected keys"),
        ({"mote_layers": [0]}, "keys"),
    ):
        config = MoTEConfig.from_pretrained(tmp_path)
        changed = MoTEConfig(**{**config.to_dict(), "tasks": None, **change})
        with pytest.raises(ValueError, match=message):
            MoTEModel.from_pretrained(tmp_path, config=changed)


def test_unknown_and_unsupported_architectures() -> None:
    tiny = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "embedding_size": 16}
    described = {"layer_path": "encoder.layer", "shared_modules": ["attention"]}
    for name, settings, message in (
        ("albert", {}, "does not support 'albert': it uses one layer"),
        ("deberta-v2", {}, "does not support 'deberta-v2'"),
        ("deberta-v2", described, "does not support 'deberta-v2': it does not pass keyword arguments down"),
        ("t5", {}, "does not know the architecture 't5'.*layer_path"),
    ):
        backbone = AutoConfig.for_model(name, **tiny, intermediate_size=16)
        with pytest.raises(ValueError, match=message):
            MoTEModel(MoTEConfig(backbone_config=backbone, **settings))


def test_an_architecture_described_wrongly() -> None:
    dense = dense_model("bert")
    with pytest.raises(AttributeError, match="BertLayer has no attribute `self_attn`"):
        MoTEModel(mote_config(dense, layer_path="encoder.layer", shared_modules=["self_attn"]), dense)


def test_a_backbone_that_does_not_hand_arguments_down() -> None:
    dense = dense_model("bert")
    model = MoTEModel(mote_config(dense), dense)
    with pytest.raises(RuntimeError, match="not told its expert"):
        model.backbone(**batch())


def test_hidden_states_asked_for_in_the_config(tmp_path: Path) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    model = MoTEModel.from_pretrained(tmp_path, output_hidden_states=True)
    assert len(model(**batch(), task="alpha").hidden_states) == 3
    assert model(**batch(), task="alpha", output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("length", [5, 2000])
def test_a_file_that_was_cut_short(tmp_path: Path, length: int) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", length)
    with pytest.raises(ValueError, match=f"Cannot read the weights in {tmp_path}: is a file truncated"):
        MoTEModel.from_pretrained(tmp_path)


def test_copies_on_several_gpus_in_one_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cannot run in nn\.DataParallel"):
        fresh_mote("bert")._replicate_for_data_parallel()
