"""What a config takes, what it refuses, and how it decides which task a text is for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import BertConfig

from mote.remote.configuration_mote import MoTEConfig
from mote.remote.token_routing_mote import TokenRoutedConfig

BACKBONE = {"model_type": "bert", "num_hidden_layers": 6}


def config(**settings: Any) -> MoTEConfig:
    return MoTEConfig(**{"backbone_config": BACKBONE, **settings})


def two(**settings: Any) -> MoTEConfig:
    return config(experts=["a", "b"], **settings)


def test_the_defaults_are_the_paper_s() -> None:
    default = MoTEConfig()
    experts = ["classification", "clustering", "search_query", "search_document"]
    assert default.experts == default.available_experts == experts
    assert default.instructions == {expert: f"{expert}: " for expert in experts}
    assert default.tasks == {
        **{expert: expert for expert in experts},
        "document": "search_document",
        "pair_classification": "classification",
        "query": "search_query",
        "sts": "classification",
        "summarization": "classification",
    }
    assert default.backbone_config.model_type == "nomic_bert"
    assert default.mote_layer_indices == list(range(default.num_hidden_layers))
    assert (default.pooling, default.default_task, default.loaded_experts) == ("mean", "search_document", None)
    assert default.route_by_text is True


def test_tasks_that_the_paper_does_not_train_on_come_with_their_expert() -> None:
    assert two().tasks == {"a": "a", "b": "b"}
    names = ("clustering", "search_query")
    assert config(experts=list(names)).tasks == {**dict(zip(names, names, strict=True)), "query": "search_query"}
    assert config(tasks={"query": "clustering"}).expert_of("query") == "clustering"


def test_a_task_has_its_own_instruction_or_that_of_its_expert() -> None:
    mote = two(tasks={"own": "a", "other": "a"}, instructions={"a": "A: ", "own": "Own: "})
    assert [mote.instruction_of(task) for task in ("a", "own", "other", "b")] == ["A: ", "Own: ", "A: ", ""]
    assert two(tasks={"silent": "a"}, instructions={"a": "A: ", "silent": ""}).instruction_of("silent") == ""


def test_what_readers_of_configs_ask_for() -> None:
    of_backbone = BertConfig(num_hidden_layers=6)
    mote = MoTEConfig(backbone_config=of_backbone)
    for name in ("hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        assert getattr(mote, name) == getattr(of_backbone, name)
        setattr(mote, name, 3)
        assert getattr(mote, name) == getattr(mote.backbone_config, name) == 3
    assert MoTEConfig.from_dict(mote.to_dict()).vocab_size == 3
    assert of_backbone.num_hidden_layers == 6  # the caller's own does not change


def test_layers_that_have_experts() -> None:
    layers = {"every": [*range(6)], "every_other": [1, 3, 5], (5, 0, 2): [0, 2, 5]}
    assert [config(mote_layers=each).mote_layer_indices for each in layers] == [*layers.values()]
    assert config(mote_layers=[2, 1]).mote_layer_indices == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[
            ({"experts": experts}, "experts must be different words of letters, .* at least one, got")
            for experts in ([], ["a", "b", "a"], ["a.b"], ["a b"], ["a\n"], [""], [3])
        ],
        *[
            ({"mote_layers": layers}, "'every', 'every_other' .*or a list of different indices, got .*from 0 to 5")
            for layers in ([0, 6], [-1, 0], [3, 1, 3], [], "odd", [True], 3)
        ],
        ({"mote_layers": "every_other", "backbone_config": {**BACKBONE, "num_hidden_layers": 1}}, "of two layers"),
        ({"loaded_experts": ["clusterin"]}, r"loaded_experts \['clusterin'\] must be some of the experts"),
        ({"tasks": {"topics": "clusterin"}}, "expert of task 'topics': 'clusterin'. Did you mean 'clustering'. Avail"),
        ({"tasks": {"search_query": "clustering"}}, "Task 'search_query' must go to the expert of its own name"),
        ({"instructions": {"clusterin": "x"}}, "task of an instruction: 'clusterin'. Did you mean 'clustering'"),
        ({"instructions": {"search_query": "f: ", "search_document": "f: "}}, "stands for the expert 'search_query'"),
        ({"tasks": {"x": "clustering"}, "instructions": {"classification": "c", "x": "c"}}, "'c' of task 'x' already"),
        ({"route_by_text": "false"}, "route_by_text must be True or False, got 'false'"),
        ({"default_tasks": "sts"}, "Unknown setting 'default_tasks'. Did you mean 'default_task'"),
        ({"pooling": "max"}, "Unknown pooling 'max'.*'mean', 'cls', 'last_token'"),
        *[({"tasks": {name: "clustering"}}, f"Task {name!r} .*are not names") for name in ("auto", "none")],
        ({"default_task": "clusterin"}, "Unknown default_task 'clusterin'. Did you mean 'clustering'"),
        ({"layer_path": "encoder.layer"}, "set both or neither"),
        ({"shared_modules": ["attention"]}, "set both or neither"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_what_is_not_refused() -> None:
    assert config(quantization_note="x", tokenizer_class="T").quantization_note == "x"  # other libraries' settings
    assert two(instructions={"a": "", "b": ""}).instruction_of("a") == ""
    assert two(instructions={"a": None, "b": "b: "}).task_of(["b: x"]) == "b"  # null in a file: none
    assert config(experts="search").experts == ["search"]


def test_a_config_survives_json(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "experts": ["zebra", "mouse", "ant"],
        "tasks": {"walk": "zebra", "crawl": "ant", "Run": "zebra", "eat": "mouse"},
        "instructions": {"zebra": "Z\n| “z”: ", "ant": "", "eat": "eat: "},
        "mote_layers": [4, 1],
        "pooling": "cls",
        "default_task": "walk",
        "loaded_experts": ["ant", "zebra"],
    }
    mote = config(**settings)
    assert mote.to_dict() == MoTEConfig.from_dict(mote.to_dict()).to_dict()
    mote.save_pretrained(tmp_path)
    sorted_keys = json.loads((tmp_path / "config.json").read_text())
    assert list(sorted_keys["tasks"]) == sorted(mote.tasks)  # what the order in memory must outlive
    for loaded in (MoTEConfig.from_pretrained(tmp_path), MoTEConfig.from_dict(json.loads(mote.to_json_string()))):
        assert list(loaded.tasks.items()) == list(mote.tasks.items())  # `task_ids` are indices into it
        assert all(getattr(loaded, name) == value for name, value in settings.items() if name != "tasks")
        assert loaded.mote_layer_indices == [1, 4]
        assert isinstance(loaded.backbone_config, BertConfig)


def test_task_ids_do_not_depend_on_the_order_in_which_tasks_are_given(tmp_path: Path) -> None:
    tasks, names = {"walk": "a", "crawl": "b", "sleep": "a"}, ["a", "b", "crawl", "sleep", "walk"]
    assert list(two(tasks=tasks).tasks) == list(two(tasks=dict(reversed(tasks.items()))).tasks) == names
    mote = two(tasks={"walk": "a"})
    mote.tasks |= {"sleep": "a", "crawl": "b"}  # in memory
    mote.save_pretrained(tmp_path)
    assert list(mote.tasks) == list(MoTEConfig.from_pretrained(tmp_path).tasks) == names


def test_a_selection_of_experts_is_loaded(tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    one = MoTEConfig.from_pretrained(tmp_path, experts=["clustering"])
    assert (one.available_experts, len(one.experts), len(one.tasks)) == (["clustering"], 4, 9)
    assert MoTEConfig.from_pretrained(tmp_path, experts="clustering").available_experts == ["clustering"]
    settings = json.loads((tmp_path / "config.json").read_text())
    in_order = MoTEConfig.from_dict(settings, experts=["search_query", "classification"])
    assert in_order.available_experts == ["classification", "search_query"]
    assert MoTEConfig.from_dict(settings).available_experts == config().experts
    assert MoTEConfig.from_dict(settings, experts=None, pooling="cls").pooling == "cls"
    settings = config(loaded_experts=["clustering", "search_query"]).to_dict()
    assert MoTEConfig.from_dict(settings, experts=["search_query"]).available_experts == ["search_query"]
    with pytest.raises(ValueError, match=r"Unknown expert 'classification'.*Available: 'clustering', 'search_query'"):
        MoTEConfig.from_dict(settings, experts=["classification"])


def test_tasks_given_while_loading_are_completed() -> None:
    given = {"tasks": {"legal": "classification"}, "instructions": {"legal": "Law: "}}
    loaded = MoTEConfig.from_dict(config().to_dict(), **given)
    assert loaded.tasks == config(**given).tasks
    assert loaded.expert_of("clustering") == "clustering"
    assert loaded.instruction_of("legal") == "Law: "


def test_an_invalid_setting_while_loading() -> None:
    """The base class sets what it knows without a look, and drops the rest."""
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (MoTEConfig, {"default_task": "clusterin"}, "Unknown default_task 'clusterin'. Did you mean 'clustering'"),
        (MoTEConfig, {"experts": ["clustering"], "defaulttask": "clustering"}, "Did you mean 'default_task'"),
        (MoTEConfig, {"experts": ["clusterin"]}, "Unknown expert 'clusterin'. Did you mean 'clustering'"),
        (MoTEConfig, {"experts": []}, r"loaded_experts \[\] must be some of the experts"),
        (TokenRoutedConfig, {"router_aux_loss_coeff": 0.5}, "Unknown setting .*Did you mean 'router_aux_loss_coef'"),
    ]
    for kind, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            kind.from_dict(kind().to_dict(), **settings)


def test_the_expert_of_a_task() -> None:
    loaded = config(loaded_experts=["clustering"])
    assert loaded.expert_of("clustering") == config(default_task="clustering").expert_of(None) == "clustering"
    wrong: list[tuple[Any, str]] = [
        *[(task, "Unknown task .*Available: 'classification'") for task in ("clusterin", "", 3, ["clustering"])],
        (None, "'search_document' needs the expert 'search_document', which was not loaded"),
        ("sts", r"'sts' needs the expert 'classification', .* experts=\['clustering'\]"),
    ]
    for task, message in wrong:
        with pytest.raises(ValueError, match=message):
            loaded.expert_of(task)


RULES: dict[str, Any] = {
    "tasks": {"topics": "clustering", "mail": "clustering"},
    "instructions": {
        "classification": "classify: ",
        "clustering": "cluster: ",
        "search_query": "search_query: ",
        "search_document": "search_document: ",
        "topics": "cluster: by topic: ",
    },
}
STRICT = {**RULES, "default_task": None}
WITH_DEFAULT = {**RULES, "default_task": "sts"}
CLOSED = {**WITH_DEFAULT, "route_by_text": False}
ROLES = {"experts": ["a", "b"], "instructions": {"a": "A: "}}


@pytest.mark.parametrize(
    ("texts", "task", "prompt", "decided"),
    [
        # 1. An explicit task, whatever else there is.
        (["x"], "clustering", None, "clustering"),
        (["x"], "sts", None, "sts"),
        (["search_query: x"], "clustering", "classify: ", "clustering"),
        # 2. The prompt's text, before a role hint and before what the texts begin with.
        (["x"], None, "classify: ", "classification"),
        (["x"], None, "cluster: by topic: ", "topics"),
        (["x"], "query", "search_document: ", "search_document"),
        (["search_query: x"], None, "classify: ", "classification"),
        (["x"], None, "cluster: ", "clustering"),  # not `mail`, which has the same instruction and comes later
        # 3. The role hints, also with a prompt that is not an instruction.
        (["x"], "query", None, "query"),
        (["x"], "document", None, "document"),
        (["x"], "query", "Find: ", "query"),
        (["search_document: x"], "query", None, "query"),
        # 4. What each text begins with, the prompt included; the longest instruction counts.
        (["classify: x"], None, None, "classification"),
        (["cluster: by topic: x", "cluster: by topic: y"], None, None, "topics"),
        (["cluster: x", "search_query: x"], None, None, ["clustering", "search_query"]),
        (["by topic: x", "x"], None, "cluster: ", "clustering"),
        (["topic: x", "tops: x"], None, "cluster: by ", ["topics", "clustering"]),
        (["x"], None, "search_query: In short: ", "search_query"),
        (["cluster: x"], None, "", "clustering"),
    ],
)
def test_the_first_rule_that_applies(
    texts: list[str], task: str | None, prompt: str | None, decided: str | list[str]
) -> None:
    for default_task in (None, "summarization"):
        assert config(**RULES, default_task=default_task).task_of(texts, task, prompt) == decided


@pytest.mark.parametrize(
    ("settings", "inputs", "task", "prompt", "decided"),
    [
        # The default task comes last.
        (WITH_DEFAULT, ["x"], None, None, "sts"),
        (WITH_DEFAULT, ["x", "cluster: x"], None, None, ["sts", "clustering"]),
        (WITH_DEFAULT, [" cluster: x", "Cluster: x", "clusters", ""], None, None, "sts"),
        # Texts in dicts and pairs.
        (WITH_DEFAULT, [{"text": "cluster: x"}], None, None, "clustering"),
        (WITH_DEFAULT, [{"text": "x", "image": object()}], None, None, "sts"),
        (WITH_DEFAULT, [("cluster: x", "classify: y"), ["x", "y"]], None, None, ["clustering", "sts"]),
        (WITH_DEFAULT, [[{"text": "cluster: x"}, "y"]], None, None, "clustering"),
        (WITH_DEFAULT, [{"text": "by topic: x"}], None, "cluster: ", "clustering"),
        (WITH_DEFAULT, [{"image": object()}], None, "cluster: ", "clustering"),  # the prompt decides alone
        (RULES, [None], "topics", None, "topics"),
        # Texts that may not pick their expert.
        (CLOSED, ["cluster: x"], None, None, "sts"),
        (CLOSED, ["by topic: x"], None, "cluster: ", "clustering"),
        (CLOSED, ["topic: x"], None, "cluster: by ", "clustering"),  # the prompt alone; else it would be `topics`
        (CLOSED, ["x"], None, "cluster: by topic: about ", "topics"),
        (CLOSED, ["classify: x"], "query", None, "query"),
        (CLOSED, ["classify: x"], "clustering", None, "clustering"),
        # Role hints of a model that has no such task.
        (ROLES, ["A: x"], "query", None, "a"),
        ({"experts": ["a", "b"], "default_task": "b"}, ["x"], "document", None, "b"),
    ],
)
def test_defaults_and_other_inputs(
    settings: dict[str, Any], inputs: list[Any], task: str | None, prompt: str | None, decided: str | list[str]
) -> None:
    for one in (config(**settings), MoTEConfig.from_dict(config(**settings).to_dict())):
        assert one.task_of(inputs, task, prompt) == decided


AVAILABLE = r"No task for the text '.*y': .*no default_task.*'classification', .*, 'topics'.*encode_query"


@pytest.mark.parametrize(
    ("settings", "inputs", "task", "prompt", "message"),
    [
        # The strict mode.
        (STRICT, ["cluster: x", "y"], None, None, AVAILABLE),
        (STRICT, ["cluster: x", "y"], None, "", AVAILABLE),
        (STRICT, ["y"], None, "Find: ", AVAILABLE),
        (STRICT, ["x" * 100_000], None, None, "No task"),
        ({**ROLES, "default_task": "none"}, ["x"], "query", None, "No task for the text 'x'"),
        *[(STRICT, [text], None, None, "did you mean 'cluster: '") for text in ("cluster:x", "  Cluster : x")],
        (STRICT, ["x"], None, "CLUSTER: BY TOPIC:", "did you mean 'cluster: by topic: '"),
        ({**STRICT, "route_by_text": False}, ["cluster: x"], None, None, r"does not count \(route_by_text=False"),
        # An input without a text has no default task.
        *[
            (WITH_DEFAULT, ["x", value], None, prompt, r"No task for the input .*it has no text\. Pass `task=`")
            for value in ({"image": "x"}, {"text": None}, None, 3, [], [3, "x"], b"cluster: x")
            for prompt in (None, "cluster: about: ")
        ],
        # An explicit task is not passed over.
        (WITH_DEFAULT, ["cluster: x"], "clusterin", "cluster: ", "Unknown task 'clusterin'. Did you mean 'clustering'"),
        ({**RULES, "loaded_experts": ["classification"]}, ["x"], "topics", None, "'clustering', which was not loaded"),
        *[(RULES, ["x", "y"], task, None, "Unknown task") for task in (["clustering", "sts"], 3, ("clustering",))],
    ],
)
def test_no_decision(settings: dict[str, Any], inputs: list[Any], task: Any, prompt: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        config(**settings).task_of(inputs, task, prompt)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"experts": ["a", "general"], "tasks": {"document": "a"}}, "general"),
        ({"experts": ["a", "b"], "tasks": {"document": "b"}}, "b"),
        ({"experts": ["a", "b"]}, "a"),
        ({"default_task": "none"}, None),
        ({"default_task": None}, None),
    ],
)
def test_the_default_task(settings: dict[str, Any], chosen: str | None, tmp_path: Path) -> None:
    config(**settings).save_pretrained(tmp_path)
    loaded = MoTEConfig.from_pretrained(tmp_path)
    assert (config(**settings).default_task, loaded.default_task) == (chosen, chosen)
    more = {**loaded.to_dict(), "experts": [*loaded.experts, "new"], "tasks": {**loaded.tasks, "document": "new"}}
    assert MoTEConfig.from_dict(more).default_task == chosen  # a new expert does not change it


def test_a_warning_once_for_a_model_and_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    def warned(one: MoTEConfig, *arguments: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level("WARNING"):
            one.task_of(*arguments)
        return caplog.messages

    transformers.logging.enable_propagation()
    first = config(**RULES, name_or_path="me/first")
    assert re.search(
        "^me/first: no task .* go to 'search_document', .*encode_query .*`prompt_name=`", *warned(first, ["x"])
    )
    assert warned(first, ["y"]) == []
    assert "no task" in warned(config(**RULES, name_or_path="me/second"), ["x"])[0]
    assert "the prompt 'Find: ' belongs to no task" in warned(first, ["x"], None, "Find: ")[0]
    assert "did you mean 'cluster: '" in warned(first, ["Cluster : x"])[0]
    assert warned(first, ["cluster: x"]) == warned(first, ["x"], "query") == []
    assert (
        warned(MoTEConfig.from_dict({**first.to_dict(), "name_or_path": "me/third"}, default_task="sts"), ["x"]) == []
    )
    transformers.logging.disable_propagation()


def test_a_text_that_begins_with_an_instruction_of_the_paper() -> None:
    mote = config(instructions={})
    assert mote.task_of(["search_query: x", "clustering: x", "news: x"]) == [
        "search_query",
        "clustering",
        "search_document",
    ]
    assert mote.task_of(["x"], prompt="classification: ") == "classification"
    assert config(instructions={}, route_by_text=False).task_of(["search_query: x"]) == "search_document"
    assert two().task_of(["search_query: x"]) == "a"


def test_settings_of_the_backbone_while_loading() -> None:
    given = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.25, "add_pooling_layer": False, "unknown": 1}
    loaded, unused = MoTEConfig.from_dict(config().to_dict(), **given, return_unused_kwargs=True)
    assert (loaded.backbone_config.hidden_dropout_prob, loaded.backbone_config.attention_probs_dropout_prob) == (
        0.5,
        0.25,
    )
    assert unused == {"unknown": 1}
    assert config().to_dict()["vocab_size"] == BertConfig().vocab_size  # where other programs look for it
