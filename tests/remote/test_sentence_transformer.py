"""Every way to name a task reaches the right expert, on a model that was saved and loaded again."""

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import trusted
from helpers.families import assert_near
from helpers.steps import assert_cached_equals_plain, train, trained_experts
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

import mote
from mote.remote.modeling_mote import MoTEModel

TEXTS = [
    "how do whales breathe",
    "Whales come up for air and breathe through a blowhole on top of the head.",
    "a recipe for bread that needs no kneading",
    "bread",
]
EXPERTS = ["classification", "clustering", "search_query", "search_document"]


@pytest.fixture(scope="module")
def expected(model: SentenceTransformer, trained_folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """(expert, text in front) → embeddings, computed from the weights without Sentence-Transformers."""
    mote = MoTEModel.from_pretrained(trained_folder)

    def embed(expert: str, prefix: str) -> np.ndarray:
        batch = model.tokenizer([prefix + text for text in TEXTS], padding=True, return_tensors="pt")
        with torch.no_grad():
            pooled = mote(batch["input_ids"], batch["attention_mask"], task=expert).pooler_output
        return torch.nn.functional.normalize(pooled).numpy()

    prefixes = {f"{expert}: " for expert in EXPERTS} | {"", "custom: "}
    found = {(expert, prefix): embed(expert, prefix) for expert in EXPERTS for prefix in prefixes}
    assert all(abs(found[one, ""] - found[two, ""]).max() > 1e-2 for one, two in itertools.combinations(EXPERTS, 2))
    return found


WAYS = [
    *[({"prompt_name": expert}, expert, f"{expert}: ") for expert in EXPERTS],
    *[({"prompt": f"{expert}: "}, expert, f"{expert}: ") for expert in EXPERTS],
    *[({"task": expert}, expert, "") for expert in EXPERTS],
    ({"prompt_name": "sts"}, "classification", "classification: "),
    ({"prompt_name": "query"}, "search_query", "search_query: "),
    ({"prompt_name": "STS"}, "classification", "classification: "),
    ({"prompt_name": "Clustering"}, "clustering", "clustering: "),
    ({"prompt_name": "Retrieval-document"}, "search_document", "search_document: "),
    ({"task": "summarization"}, "classification", ""),
    ({"task": "query"}, "search_query", ""),
    ({"task": "document"}, "search_document", ""),
    # An explicit task beats the prompt, the prompt beats a role hint, and a hint beats the text.
    ({"task": "clustering", "prompt": "search_query: "}, "clustering", "search_query: "),
    ({"task": "clustering", "prompt": "custom: "}, "clustering", "custom: "),
    ({"task": "query", "prompt_name": "clustering"}, "clustering", "clustering: "),
    ({"task": "query", "prompt": "custom: "}, "search_query", "custom: "),
    ({"method": "encode_query"}, "search_query", "search_query: "),
    ({"method": "encode_document"}, "search_document", "search_document: "),
    ({"method": "encode_query", "prompt_name": "clustering"}, "clustering", "clustering: "),
]
DEFAULT_TASK = {"config_kwargs": {"default_task": "clustering"}}
DEFAULT_PROMPT = {"default_prompt_name": "clustering"}
REWORDED = {
    "prompts": {"clustering": "custom: ", "Classification": "custom: ", "search_document": "search_query: "},
}


def encode(model: SentenceTransformer, method: str = "encode", **arguments: Any) -> np.ndarray:
    return getattr(model, method)(TEXTS, **arguments)


@pytest.mark.parametrize(("arguments", "expert", "prefix"), WAYS)
def test_encode(
    model: SentenceTransformer, expected: dict, arguments: dict[str, str], expert: str, prefix: str
) -> None:
    assert_near(encode(model, **arguments), expected[expert, prefix])


@pytest.mark.parametrize(
    ("settings", "arguments", "expert", "prefix"),
    [
        (DEFAULT_TASK, {}, "clustering", ""),
        (DEFAULT_TASK, {"method": "encode_query"}, "search_query", "search_query: "),
        (DEFAULT_PROMPT, {}, "clustering", "clustering: "),
        (DEFAULT_PROMPT, {"task": "classification"}, "classification", ""),  # whose texts stay as they are
        (DEFAULT_PROMPT, {"prompt_name": "search_query"}, "search_query", "search_query: "),
        (REWORDED, {"prompt_name": "clustering"}, "clustering", "custom: "),
        (REWORDED, {"prompt_name": "Classification"}, "classification", "custom: "),
        (REWORDED, {"prompt_name": "search_document"}, "search_query", "search_query: "),  # another task's instruction
        # LlamaIndex passes empty ones always.
        ({"prompts": {"query": "", "text": ""}}, {"prompt_name": "query"}, "search_query", "search_query: "),
        ({"prompts": {"query": "", "text": ""}}, {"prompt_name": "text"}, "search_document", ""),
    ],
)
def test_defaults_and_reworded_prompts(
    trained_folder: Path,
    expected: dict,
    settings: dict[str, Any],
    arguments: dict[str, str],
    expert: str,
    prefix: str,
) -> None:
    assert_near(encode(trusted(trained_folder, **settings), **arguments), expected[expert, prefix])


def test_texts_that_begin_with_an_instruction(model: SentenceTransformer, expected: dict) -> None:
    texts = [f"{expert}: {text}" for expert, text in zip(EXPERTS, TEXTS, strict=True)]
    as_expected = [expected[expert, f"{expert}: "][row] for row, expert in enumerate(EXPERTS)]
    for batch_size in (1, 3, 32):
        assert_near(model.encode(texts, batch_size=batch_size), as_expected)
    assert_near(model.encode([{"text": text} for text in texts]), as_expected)
    longer = model.encode(TEXTS, prompt="search_query: about animals: ")  # a prompt that continues after it
    assert_near(longer, model.encode([f"about animals: {text}" for text in TEXTS], prompt_name="search_query"))
    assert len(model.encode([], prompt_name="clustering")) == 0
    with pytest.raises(ValueError, match="prompt must be a string, for all texts, got list"):
        model.encode(TEXTS, prompt=["clustering: "] * 4)


def test_prompt_names_without_instructions(trained_folder: Path, expected: dict, tmp_path: Path) -> None:
    """All prompts are empty: only their names tell them apart."""
    config = MoTEModel.config_class.from_pretrained(trained_folder)
    mote.configure(trained_folder, tmp_path / "silent", instructions=dict.fromkeys(config.tasks, ""))
    model = trusted(tmp_path / "silent")
    assert {*model.prompts.values()} == {""}
    for arguments, expert, prefix in WAYS:
        if ("prompt_name" in arguments or "method" in arguments) and prefix:
            assert_near(encode(model, **arguments), expected[expert, ""])
    prompt = model.prompts["clustering"]
    for copied in (copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):  # for processes of their own
        assert_near(model.encode(TEXTS, prompt=copied), expected["clustering", ""])
    for arguments in ({}, {"prompt": ""}):
        assert_near(model.encode(TEXTS, **arguments), expected["search_document", ""])  # the default task's
    model.save(str(tmp_path / "saved"))
    assert trusted(tmp_path / "saved").prompts == dict.fromkeys(model.prompts, "")


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_the_default_prompt_can_change_after_loading(trained_folder: Path, expected: dict, copied: Callable) -> None:
    model = copied(trusted(trained_folder))
    model.default_prompt_name = "clustering"
    assert_near(model.encode(TEXTS), expected["clustering", "clustering: "])
    assert_near(model.encode(TEXTS, task="classification"), expected["classification", ""])
    model.default_prompt_name = None
    explicit = model.encode(TEXTS, task="classification", prompt_name="clustering")
    assert_near(explicit, expected["classification", "clustering: "])


def test_an_adapter_keeps_the_tasks_of_a_mixed_batch(trained_folder: Path, expected: dict) -> None:
    peft = pytest.importorskip("peft")
    model = trusted(trained_folder, **DEFAULT_TASK)
    adapter = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["query"])  # its B is 0
    model[0].model = peft.get_peft_model(model[0].model, adapter)
    both = model.encode([f"search_query: {TEXTS[0]}", f"classification: {TEXTS[1]}"])
    assert_near(both[0], expected["search_query", "search_query: "][0])
    assert_near(both[1], expected["classification", "classification: "][1])


@pytest.mark.parametrize("kwargs", ["config_kwargs", "model_kwargs"])
def test_one_expert_alone(trained_folder: Path, expected: dict, kwargs: str) -> None:
    model = trusted(trained_folder, **{kwargs: {"experts": ["search_query"]}})
    assert list(mote.experts.parameter_counts(model[0].model)["experts"]) == ["search_query"]
    assert_near(model.encode_query(TEXTS), expected["search_query", "search_query: "])
    with pytest.raises(ValueError, match="needs the expert 'search_document', which was not loaded"):
        model.encode_document(TEXTS)


@pytest.mark.parametrize(
    "routing",
    [
        {"prompts": {"anchor": "search_query: ", "positive": "search_document: "}},
        {"router_mapping": {"anchor": "query", "positive": "document"}},
        {"router_mapping": {"anchor": "search_query", "positive": "search_document"}},
        # a prompt beats the role hints, also after the collator has stamped these on the features
        {
            "prompts": {"anchor": "search_query: ", "positive": "search_document: "},
            "router_mapping": {"anchor": "document", "positive": "query"},
        },
    ],
)
def test_the_trainer_routes_each_column(trained_folder: Path, tmp_path: Path, routing: dict[str, Any]) -> None:
    model = trusted(trained_folder)
    columns: list[tuple[str, str]] = []
    experts = model[0].model.backbone.encoder.layer[0].experts
    for name, expert in experts.items():
        expert.register_forward_hook(lambda _, args, output, name=name: columns.append((name, len(args[0]))))
    learned = train(model, losses.MultipleNegativesRankingLoss(model), tmp_path, TEXTS, **routing)
    assert trained_experts(learned) == {"search_query", "search_document"}
    assert [name for name, _ in columns] == ["search_query", "search_document"] * 2


def test_cached_loss_equals_the_plain_one(trained_folder: Path) -> None:
    mixed = [f"{expert}: {text}" for expert, text in zip(EXPERTS, TEXTS, strict=True)]

    def features(model: SentenceTransformer) -> list[Any]:
        anchors = model.preprocess(TEXTS, prompt="search_query: ")
        positives = model.preprocess(mixed)  # rows of four tasks: cut into mini-batches along with the rest
        assert anchors["route"] == "search_query"
        assert positives["route"].shape == (4,)
        return [anchors, positives]

    # eval: no dropout
    assert_cached_equals_plain("CachedMultipleNegativesRankingLoss", lambda: trusted(trained_folder).eval(), features)


def test_a_mixed_batch_is_never_flattened(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model[0], "can_flatten_inputs", True)
    assert model[0]._should_flatten_inputs("text", {"text": TEXTS}, task="query")
    assert not model[0]._should_flatten_inputs("text", {"text": TEXTS}, mixed_tasks=True)


@pytest.mark.slow
def test_without_instructions_a_real_source_embeds_as_before(shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    model = trusted(mote.upcycle(source, tmp_path / "mote"))
    dense = SentenceTransformer(str(source))
    texts = [*TEXTS, "", "  ", "word " * 1000, "🐳 جملة\t\u0000"]
    for expert in EXPERTS:
        for way in ({"task": expert}, {"prompt_name": expert}, {"prompt": f"{expert}: "}):
            expected = dense.encode(texts, prompt=way.get("prompt"))
            assert np.abs(model.encode(texts, **way) - expected).max() == 0
    assert model.max_seq_length == dense.max_seq_length == 256
