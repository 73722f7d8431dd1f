"""Experts added to a model in memory, removed from it, and renamed."""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import assert_same, trusted
from helpers.families import (
    all_families,
    assert_threads_agree,
    batch,
    dense_model,
    fresh_mote,
    make_different,
    mote_config,
    trained_mote,
)
from helpers.on_disk import VERBS, last_hidden
from helpers.paths import SMALL_ENCODER

import mote
from mote import prompts_of, upcycle
from mote.experts import add, remove, rename
from mote.remote.modeling_mote import MoTEModel
from mote.remote.token_routing_mote import TokenRoutedConfig, TokenRoutedModel
from mote.training.adapters import merge_adapters

THREE = ["alpha", "beta", "gamma"]
PAPER = ["classification", "clustering", "search_query", "search_document"]


def assert_round_trip(model: MoTEModel, folder: Path) -> None:
    """Saved and loaded again, a model is what it was, names and bits."""
    model.save_pretrained(folder)
    loaded = MoTEModel.from_pretrained(folder)
    for field in ("experts", "tasks", "instructions", "default_task", "loaded_experts"):
        assert getattr(loaded.config, field) == getattr(model.config, field)
    assert list(loaded.config.tasks) == list(model.config.tasks)  # `task_ids` are indices into them
    assert_same(loaded.state_dict(), model.state_dict())


@all_families
@pytest.mark.parametrize("mote_layers", ["every", "every_other"])
def test_a_copy_is_a_model_of_its_own(name: str, mote_layers: str, tmp_path: Path) -> None:
    model = trained_mote(name, mote_layers=mote_layers)
    before = {expert: last_hidden(model, task=expert) for expert in ("alpha", "beta")}
    shared = mote.experts.parameter_counts(model)["shared"]
    add(model, "gamma", "beta")
    assert model.config.experts == THREE
    assert last_hidden(model, task="gamma").equal(before["beta"])
    assert mote.experts.parameter_counts(model)["shared"] == shared  # the attention was not copied
    with torch.no_grad():
        for parameter in model.blocks[0].experts["gamma"].parameters():
            parameter.add_(0.1)
    assert not last_hidden(model, task="gamma").equal(before["beta"])
    assert all(last_hidden(model, task=expert).equal(output) for expert, output in before.items())
    with torch.no_grad():
        for parameter in model.blocks[0].shared.parameters():
            parameter.mul_(1.5)
    for expert, output in before.items():
        assert not last_hidden(model, task=expert).equal(output)
    moved = last_hidden(model, task="gamma")
    by_hand = copy.deepcopy(model)
    for block in by_hand.blocks:
        block.experts["alpha"].load_state_dict(block.experts["gamma"].state_dict())
    assert last_hidden(by_hand, task="alpha").equal(moved)  # through the same attention as the others
    assert_round_trip(model, tmp_path)


@all_families
def test_the_mean_and_removing_and_renaming(name: str, tmp_path: Path) -> None:
    model = trained_mote(name, experts=THREE)
    before = {expert: last_hidden(model, task=expert) for expert in THREE}
    averaged = last_hidden(mote.experts.average(model))
    add(model, "middle")
    remove(model, "alpha")
    rename(model, "beta", "delta")
    assert model.config.experts == list(model.blocks[0].experts) == ["delta", "gamma", "middle"]
    for task, expected in (("delta", before["beta"]), ("gamma", before["gamma"]), ("middle", averaged)):
        assert last_hidden(model, task=task).equal(expected)
    assert_round_trip(model, tmp_path)
    with pytest.raises(ValueError, match="Unknown task 'alpha'"):
        last_hidden(model, task="alpha")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_mode_and_frozen_weights_are_kept(dtype: torch.dtype) -> None:
    model = trained_mote("nomic_bert", experts=THREE).to(dtype).train()
    for block in model.blocks:
        block.experts["alpha"].requires_grad_(False)
    for name, start in (("frozen", "alpha"), ("free", "beta"), ("middle", "mean")):
        add(model, name, start)
        for expert in (block.experts[name] for block in model.blocks):
            assert expert.training
            assert {parameter.dtype for parameter in expert.parameters()} == {dtype}
            if name != "middle":
                assert {parameter.requires_grad for parameter in expert.parameters()} == {name == "free"}


def test_the_blocks_of_the_dense_model_as_an_expert() -> None:
    dense = dense_model("bert")
    model = make_different(MoTEModel(mote_config(dense), copy.deepcopy(dense)).eval())
    blocks = {name: dense.state_dict()[name] for name in mote.experts.weights(model, "alpha")}
    for name in ("source", "mean"):
        add(model, name, blocks)
        assert last_hidden(model, task=name).equal(last_hidden(dense))
    assert not last_hidden(model, task="alpha").allclose(last_hidden(dense), atol=1e-3)
    add(model, "copy", "mean")  # the expert of that name, not the mean of all
    assert last_hidden(model, task="copy").equal(last_hidden(dense))


def test_threads_and_gradients_reach_a_new_expert_alone() -> None:
    model = trained_mote("bert")
    add(model, "gamma", "alpha")
    make_different(model)
    assert_threads_agree(lambda thread, _: [last_hidden(model, task=THREE[thread % 3])], turns=10, threads=6)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch(), task="gamma").pooler_output.sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".experts.alpha." in key or ".experts.beta." in key), key


def paper_mote(**settings: Any) -> MoTEModel:
    return fresh_mote("bert", experts=PAPER, **settings)


def test_tasks_and_instructions_of_new_experts(tmp_path: Path) -> None:
    model = paper_mote(instructions={"summarization": "sum: "})
    add(model, "without")
    assert model.config.instruction_of("without") == ""
    add(model, "several", instruction={"several": "one: ", "other": "two: "}, tasks="other")
    assert (model.config.instruction_of("several"), model.config.instruction_of("other")) == ("one: ", "two: ")
    add(model, "sts", "classification", instruction="sts: ", tasks=["pair_classification", "paraphrase"])
    tasks = model.config.tasks
    assert [task for task, expert in tasks.items() if expert == "sts"] == ["sts", "pair_classification", "paraphrase"]
    assert tasks["summarization"] == "classification"
    assert model.config.instruction_of("paraphrase") == "sts: "
    assert model.config.task_of(["sts: a text"]) == "sts"
    add(model, "summarization")  # what the config says of the task stays
    assert model.config.instruction_of("summarization") == "sum: "
    assert_round_trip(model, tmp_path)
    model = trained_mote("bert")  # to which some experts bring unseen tasks
    add(model, "classification", "alpha")
    assert model.config.tasks["sts"] == "classification"  # as in any MoTE that has it
    rename(model, "beta", "search_query")
    assert model.config.tasks["query"] == "search_query"
    assert_round_trip(model, tmp_path)


def test_tasks_of_a_removed_expert(tmp_path: Path) -> None:
    model = paper_mote(default_task="summarization")
    new = {"sts": "clustering", "pair_classification": "search_query", "summarization": None}
    remove(model, "classification", tasks=new)
    tasks = {name: expert for name, expert in model.config.tasks.items() if name in {"classification", *new}}
    assert tasks == {"sts": "clustering", "pair_classification": "search_query"}
    assert model.config.default_task == "search_document"
    assert_round_trip(model, tmp_path)
    model = paper_mote()
    unseen = dict.fromkeys(("pair_classification", "sts", "summarization"))
    remove(model, "classification", tasks={"classification": "clustering", **unseen})  # stay removed, whatever that has
    assert set(model.config.tasks) == {*PAPER, "query", "document"}
    assert_round_trip(model, tmp_path)
    model = trained_mote("bert", default_task="alpha")
    remove(model, "alpha", tasks={"alpha": "beta"})  # a task may outlive the expert of its name
    assert last_hidden(model, task="alpha").equal(last_hidden(model, task="beta"))
    assert_round_trip(model, tmp_path)


def test_renaming_keeps_the_order_and_what_belongs_to_it(tmp_path: Path) -> None:
    model = paper_mote(default_task="search_query", instructions={"search_query": "q: ", "query": "Query: "})
    rename(model, "search_query", "questions")
    config = model.config
    assert config.experts == ["classification", "clustering", "questions", "search_document"]
    assert (config.default_task, config.tasks["query"]) == ("questions", "questions")
    assert config.instructions == {"questions": "q: ", "query": "Query: "}
    assert list(model.blocks[0].experts) == config.experts
    assert_round_trip(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (partial(add, name="clustering"), "must be different words of letters, .* got .*'clustering'"),
        (partial(add, name="new", start="clusterin"), "Unknown expert 'clusterin'. Did you mean 'clustering'?"),
        (partial(add, name="new", start={}), "Missing key"),
        (partial(add, name="new", start={"x": torch.zeros(1)}), 'Unexpected key.*"x"'),
        (partial(add, name="new", tasks=["clustering"]), "must go to the expert of its own name"),
        (partial(add, name="new", instruction="clustering: "), "already stands for"),
        (partial(add, name="new", instruction={"nw": "x"}), "Unknown task of an instruction: 'nw'"),
        (partial(remove, name="sts"), "Unknown expert 'sts'"),
        (partial(remove, name="clustering", tasks={"sts": "search_query"}), "task of the expert 'clustering': 'sts'"),
        (partial(remove, name="search_query", tasks={"query": "serch_document"}), "Did you mean 'search_document'"),
        (partial(remove, name="search_query", tasks={"query": "search_query"}), "of task 'query': 'search_query'"),
        (partial(remove, name="classification"), "'sts', 'summarization': name .* `--task pair_classification=EXPERT`"),
        (partial(rename, name="clusterin", new_name="x"), "Did you mean 'clustering'"),
        (partial(rename, name="clustering", new_name="sts"), "'sts' is already a task, of the expert 'classification'"),
    ],
)
def test_invalid_changes_leave_the_model_unchanged(change: Callable[[Any], Any], message: str) -> None:
    model = paper_mote(default_task="document")
    config, weights = model.config.to_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        change(model)
    assert model.config.to_dict() == config
    assert_same(model.state_dict(), weights)


def test_some_experts_alone(tmp_path: Path) -> None:
    trained_mote("bert", experts=THREE).save_pretrained(tmp_path / "whole")
    model = MoTEModel.from_pretrained(tmp_path / "whole", experts=["beta"])
    for start in ("mean", "alpha"):
        with pytest.raises(ValueError, match="Unknown expert 'alpha'"):
            add(model, "delta", start)
    with pytest.raises(ValueError, match=r"loaded_experts \[\] must be some of the experts"):
        remove(model, "beta")
    add(model, "delta", "beta")
    assert model.config.loaded_experts == ["beta", "delta"]
    assert_round_trip(model, tmp_path / "with delta")
    rename(model, "beta", "epsilon")
    rename(model, "alpha", "other")
    assert (model.config.experts, model.config.loaded_experts) == (
        ["other", "epsilon", "gamma", "delta"],
        ["epsilon", "delta"],
    )
    remove(model, "other")
    remove(model, "gamma")
    assert (model.config.experts, model.config.loaded_experts) == (["epsilon", "delta"], None)
    assert_round_trip(model, tmp_path / "complete")


def test_a_token_router_is_refused() -> None:
    model = TokenRoutedModel(TokenRoutedConfig(backbone_config=fresh_mote("bert").config.backbone_config))
    for verb in VERBS.values():
        with pytest.raises(ValueError, match="token-routed"):
            verb(model)


def test_adapters_must_be_merged_first() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["query", "output.dense"], init_lora_weights=False)
    adapted = peft.get_peft_model(trained_mote("bert"), adapter).eval()
    injected = peft.inject_adapter_in_model(adapter, trained_mote("bert")).eval()  # as by `add_adapter`
    for model in (adapted, adapted.base_model.model, injected):
        for verb in VERBS.values():
            with pytest.raises(ValueError, match=r"PEFT adapters.*merge_and_unload.*merge_adapters\(model\)` first"):
                verb(model)
    expected = last_hidden(adapted, task="alpha"), last_hidden(injected, task="alpha")
    merge_adapters(injected)
    for model, output in zip((adapted.merge_and_unload(), injected), expected, strict=True):
        assert (last_hidden(model, task="alpha") - output).abs().max() <= 1e-5
        for verb in VERBS.values():
            verb(copy.deepcopy(model))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")  # torch, about its own call
def test_a_quantised_model_is_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(trained_mote("bert"), {torch.nn.Linear})
    for change in (*VERBS.values(), lambda model: mote.offload(model, "disk")):
        with pytest.raises(ValueError, match="quantised model cannot be read, moved or saved: use it as it was"):
            change(model)


def test_prompts_are_updated(tmp_path: Path) -> None:
    model = trusted(upcycle(str(SMALL_ENCODER), tmp_path / "small"))
    add(model[0].model, "legal", "search_query", instruction="legal: ")
    make_different(model[0].model)
    by_task = model.encode(["legal: a contract"], task="legal")
    assert (model.encode(["a contract"], prompt="legal: ") == by_task).all()
    model.prompts = prompts_of(model[0].model.config)
    assert (model.encode(["a contract"], prompt_name="legal") == by_task).all()
    model.save(str(tmp_path / "saved"))
    assert (trusted(tmp_path / "saved").encode(["a contract"], prompt_name="legal") == by_task).all()


def test_the_default_prompt_follows_its_task(trained_folder: Path, tmp_path: Path, caplog: Any) -> None:
    source = tmp_path / "source"
    trusted(trained_folder, default_prompt_name="clustering").save(str(source))
    mote.transform(source, tmp_path / "renamed", rename, "clustering", "topics")
    renamed = trusted(tmp_path / "renamed")
    assert renamed.default_prompt_name == "topics"
    assert (renamed.encode(["bread"]) == trusted(source).encode(["bread"])).all()
    assert "default prompt" not in caplog.text
    mote.transform(source, tmp_path / "removed", remove, "clustering")
    assert re.search("default prompt 'clustering' .* does not belong to any task of the result", caplog.text)
    assert trusted(tmp_path / "removed").default_prompt_name is None


def test_a_default_prompt_of_no_task(trained_folder: Path, tmp_path: Path, caplog: Any) -> None:
    dense = mote.transform(trained_folder, tmp_path / "dense", mote.experts.export, "search_query")
    for experts, task in ((["search_query", "a"], None), (["a", "b"], None), (["b", "a"], "none")):
        folder = upcycle(str(dense), tmp_path / experts[0], experts=experts, default_task=task)
        assert trusted(folder).default_prompt_name == (None if task else "search_query")
    assert re.search("default prompt 'search_query' .* does not belong to any task of the result", caplog.text)
