"""What works on a dense model works on a MoTE, or one sentence says what to do instead."""

import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.checkpoints import trusted
from helpers.families import assert_near, difference
from helpers.paths import SMALL_ENCODER
from helpers.steps import train, trained_experts
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder, evaluation, util
from sentence_transformers.sentence_transformer import losses
from transformers import AutoModel, pipeline

TEXTS = ["whales sing", "the compiler sings", "how deep do whales dive", "parsing a grammar"]


# Without a task --------------------------------------------------------------------------------------------------


def hosts() -> dict[str, Any]:
    others, teacher = TEXTS[::-1], SentenceTransformer(str(SMALL_ENCODER))
    return {
        "similarity": evaluation.EmbeddingSimilarityEvaluator(TEXTS, others, [0.1, 0.2, 0.3, 0.4], write_csv=False),
        "pairs": evaluation.BinaryClassificationEvaluator(TEXTS, others, [0, 1, 1, 0], write_csv=False),
        "mean squared error": evaluation.MSEEvaluator(TEXTS, TEXTS, teacher_model=teacher, write_csv=False),
        "translation": evaluation.TranslationEvaluator(TEXTS, others, write_csv=False),
        "paraphrases": lambda model: util.paraphrase_mining(model, TEXTS),
    }


@pytest.mark.parametrize("name", ["similarity", "pairs", "mean squared error", "translation", "paraphrases"])
def test_what_a_host_without_prompts_is_told_works(trained_folder: Path, model: Any, name: str) -> None:
    host = hosts()[name]
    with pytest.raises(ValueError, match="No task for the text") as error:
        host(model)
    for remedy in ('default_prompt_name="classification"', 'config_kwargs={"default_task": "classification"}'):
        assert remedy in str(error.value)
    with_prompt = trusted(trained_folder, default_prompt_name="sts")
    assert_near(with_prompt.encode(TEXTS), model.encode(TEXTS, prompt_name="sts"))
    assert host(with_prompt)
    with_task = trusted(trained_folder, config_kwargs={"default_task": "sts"})
    assert_near(with_task.encode(TEXTS), model.encode(TEXTS, task="sts"))
    assert host(with_task)


def test_a_pipeline_is_told_what_works(trained_folder: Path, model: Any) -> None:
    arguments: Any = {"task": "feature-extraction", "model": str(trained_folder), "trust_remote_code": True}
    with pytest.raises(ValueError, match=r"in a pipeline with model_kwargs=\{'default_task': …\}"):
        pipeline(**arguments)(TEXTS[0])
    with pytest.raises(ValueError, match=r"load with from_pretrained\(…, default_task=…\)"):
        AutoModel.from_pretrained(trained_folder, trust_remote_code=True)(torch.tensor([[5]]))
    features = pipeline(**arguments, model_kwargs={"default_task": "clustering"})(TEXTS[0], return_tensors=True)
    tokens = model.encode(TEXTS[0], task="clustering", output_value="token_embeddings")
    assert difference(features[0], tokens.cpu()) <= 1e-5


# An instruction twice --------------------------------------------------------------------------------------------


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    transformers.utils.logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield caplog


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt_name": "search_query"},
        {"prompt": "search_query: "},
        {"prompt": "clustering: "},
        {"prompt": "search_query: about whales: "},
        {"prompt_name": "query", "task": "query"},
        {"prompt": "custom: ", "task": "clustering"},
    ],
)
def test_an_instruction_twice_is_said_once(model: Any, warned: Any, arguments: dict[str, str]) -> None:
    for _ in range(2):
        model.encode(["whales", "search_query: whales"], **arguments)
    (message,) = warned.messages
    prompt = arguments.get("prompt", "search_query: ")
    assert message.startswith(f"The prompt {prompt!r} is put in front of a text that already begins with the ")
    assert "the instruction 'search_query: ': the model reads both. Keep the prompt, or" in message


def test_a_token_routed_model_reads_both_as_well(token_routed: Path, warned: Any) -> None:
    trusted(token_routed).encode_query(["search_query: whales"])
    (message,) = warned.messages
    assert "put in front of a text" in message


@pytest.mark.parametrize(
    "arguments", [{}, {"prompt": ""}, {"task": "search_query"}, {"task": "query"}, {"task": "clustering"}]
)
def test_an_instruction_once_is_right(model: Any, warned: Any, arguments: dict[str, str]) -> None:
    model.encode(["search_query: whales"], **arguments)
    model.encode(TEXTS, prompt_name="clustering")
    model.encode(["about search_query: whales", "clusters"], prompt_name="clustering")
    model[0].preprocess([("x", "y")], prompt="clustering: ")
    assert warned.messages == []


# Untrusted texts ------------------------------------------------------------------------------------------------


def test_a_text_does_not_pick_its_expert_where_that_is_off(trained_folder: Path, model: Any, tmp_path: Path) -> None:
    closed = trusted(trained_folder, config_kwargs={"route_by_text": False, "default_task": "search_document"})
    text = "clustering: whales"
    as_document, as_cluster = (model.encode(text, task=task) for task in ("search_document", "clustering"))
    assert np.abs(as_document - as_cluster).max() > 1e-2
    assert_near(closed.encode(text), as_document)
    assert_near(closed.encode(text, prompt="about: "), model.encode(f"about: {text}", task="document"))
    for arguments in ({"prompt_name": "search_query"}, {"task": "clustering"}, {"prompt": "clustering: about "}):
        assert_near(closed.encode("whales", **arguments), model.encode("whales", **arguments))
    closed.save(str(tmp_path / "closed"))
    assert trusted(tmp_path / "closed")[0].config.route_by_text is False
    with pytest.raises(ValueError, match=r"its own instruction does not count \(route_by_text=False\)"):
        trusted(trained_folder, config_kwargs={"route_by_text": False}).encode(text)


# In training -----------------------------------------------------------------------------------------------------


LOSSES_OVER_LAYERS: dict[str, Any] = {
    "AdaptiveLayerLoss": losses.AdaptiveLayerLoss,
    "Matryoshka2dLoss": partial(losses.Matryoshka2dLoss, matryoshka_dims=[256, 16]),
}


@pytest.mark.parametrize("name", LOSSES_OVER_LAYERS)
def test_losses_over_layers_are_those_of_the_dense_model(fresh_folder: Path, name: str) -> None:
    values, gradients = [], []
    for model in (SentenceTransformer(str(SMALL_ENCODER)), trusted(fresh_folder)):
        loss = LOSSES_OVER_LAYERS[name](model.eval(), losses.MultipleNegativesRankingLoss(model))  # eval: no dropout
        random.seed(0)
        columns = [model.preprocess(texts, prompt="clustering: ") for texts in (TEXTS, TEXTS[::-1])]
        value = loss(columns, None)
        value.backward()
        values.append(value.item())
        gradients.append(model[0].auto_model.get_input_embeddings().weight.grad)
        assert not model[0].auto_model.config.output_hidden_states
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert difference(*gradients) <= 1e-5
    assert gradients[0].any()


@pytest.mark.parametrize("name", LOSSES_OVER_LAYERS)
def test_losses_over_layers_train_their_experts(trained_folder: Path, name: str, tmp_path: Path) -> None:
    model = trusted(trained_folder)
    loss = LOSSES_OVER_LAYERS[name](model, losses.MultipleNegativesRankingLoss(model))
    prompts = {"anchor": "search_query: ", "positive": "search_document: "}
    assert trained_experts(train(model, loss, tmp_path, TEXTS, prompts=prompts)) == {"search_query", "search_document"}


def test_a_prompt_s_name_in_place_of_its_text(trained_folder: Path, tmp_path: Path) -> None:
    model = trusted(trained_folder)
    prompts = {"anchor": "search_query", "positive": "search_document"}
    with pytest.raises(ValueError, match=r"'search_query.*Did you mean 'search_query: '") as error:
        train(model, losses.MultipleNegativesRankingLoss(model), tmp_path, TEXTS, prompts=prompts)
    assert "in training `prompts=`" in str(error.value)


# Models as in transformers ---------------------------------------------------------------------------------------


def test_more_tokens_in_sentence_transformers(trained_folder: Path, tmp_path: Path) -> None:
    model: Any = trusted(trained_folder)
    model.tokenizer.add_tokens(["whalesong"])
    model[0].auto_model.resize_token_embeddings(len(model.tokenizer))
    assert model[0].config.vocab_size == model[0].config.backbone_config.vocab_size == len(model.tokenizer)
    expected = model.encode(["a whalesong"], prompt_name="clustering")
    model.save(str(tmp_path / "more"))
    again = trusted(tmp_path / "more")
    assert_near(again.encode(["a whalesong"], prompt_name="clustering"), expected)
    assert again[0].auto_model.get_input_embeddings().num_embeddings == len(model.tokenizer)


# What a MoTE cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_other_backends(trained_folder: Path, backend: Any) -> None:
    command = f"`mote export MODEL --expert NAME --backend {backend} --out DIR`"
    with pytest.raises(ValueError, match=f"A MoTE runs on torch alone. For backend='{backend}', .*: {command}"):
        trusted(trained_folder, backend=backend)


@pytest.mark.parametrize("kind", [SparseEncoder, MultiVectorEncoder])
def test_encoders_of_other_kinds_route_as_well(trained_folder: Path, model: Any, kind: Any) -> None:
    """They put a new layer on top, as on the dense model; it takes what the expert gives."""
    other = kind(str(trained_folder), trust_remote_code=True)
    seen = []
    other[0].register_forward_hook(lambda *args: seen.append(args[-1]["token_embeddings"]))
    other.encode(TEXTS[:1], prompt_name="clustering")
    tokens = model.encode(TEXTS[:1], prompt_name="clustering", output_value="token_embeddings")[0]
    assert difference(seen[0][0], tokens.cpu()) <= 1e-5
