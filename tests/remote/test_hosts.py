"""What works on a dense model works on a MoTE, or one sentence says what to do instead."""

import itertools
import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.checkpoints import trusted
from helpers.families import assert_near, difference
from helpers.paths import SMALL_ENCODER
from sentence_transformers import SentenceTransformer, evaluation
from sentence_transformers.sentence_transformer import losses
from transformers import pipeline

TEXTS = ["whales sing", "the compiler sings", "how deep do whales dive", "parsing a grammar"]


def test_hosts_without_prompts(trained_folder: Path, model: Any) -> None:
    host = evaluation.EmbeddingSimilarityEvaluator(TEXTS, TEXTS[::-1], [0.1, 0.2, 0.3, 0.4], write_csv=False)
    assert host(model)  # through the default task's expert
    for settings, way in (
        ({}, {"task": "search_document"}),
        ({"default_prompt_name": "classification"}, {"prompt_name": "classification"}),
        ({"config_kwargs": {"default_task": "classification"}}, {"task": "classification"}),
    ):
        assert_near(trusted(trained_folder, **settings).encode(TEXTS), model.encode(TEXTS, **way))
    with pytest.raises(ValueError, match=r"no default_task.* For search, call encode_query"):
        host(trusted(trained_folder, config_kwargs={"default_task": "none"}))
    with pytest.raises(ValueError, match="`mote export MODEL --expert NAME --backend onnx --out DIR`"):
        trusted(trained_folder, backend="onnx")


def test_a_pipeline(trained_folder: Path, model: Any) -> None:
    arguments: Any = {"task": "feature-extraction", "model": str(trained_folder), "trust_remote_code": True}
    for settings, task in (({}, "search_document"), ({"default_task": "clustering"}, "clustering")):
        features = pipeline(**arguments, model_kwargs=settings)(TEXTS[0], return_tensors=True)
        tokens = model.encode(TEXTS[0], task=task, output_value="token_embeddings")
        assert difference(features[0], tokens.cpu()) <= 1e-5


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    transformers.utils.logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield caplog


def test_an_instruction_twice_is_said_once(model: Any, token_routed: Path, warned: Any) -> None:
    ways: list[dict[str, str]] = [
        {"prompt_name": "search_query"},
        {"prompt": "search_query: about whales: "},
        {"prompt_name": "query", "task": "query"},
        {"prompt": "custom: ", "task": "clustering"},
    ]
    for one, arguments in itertools.product((model, trusted(token_routed)), ways):
        transformers.utils.logging.warning_once.cache_clear()
        warned.clear()
        for _ in range(2):
            one.encode(["whales", "search_query: whales"], **arguments)
        (message,) = warned.messages
        prompt = arguments.get("prompt", "search_query: ")
        assert message.startswith(f"The prompt {prompt!r} is put in front of a text that already begins with the ")
        assert "the instruction 'search_query: ': the model reads both" in message


def test_an_instruction_once_is_right(model: Any, warned: Any) -> None:
    for arguments in ({}, {"prompt": ""}, {"task": "search_query"}, {"task": "query"}, {"task": "clustering"}):
        model.encode(["search_query: whales"], **arguments)
    model.encode(TEXTS, prompt_name="clustering")
    model.encode(["about search_query: whales", "clusters"], prompt_name="clustering")
    model[0].preprocess([("x", "y")], prompt="clustering: ")
    assert warned.messages == []


@pytest.mark.parametrize("make_loss", [losses.AdaptiveLayerLoss, partial(losses.Matryoshka2dLoss, matryoshka_dims=[9])])
def test_losses_over_layers_are_those_of_the_dense_model(fresh_folder: Path, make_loss: Any) -> None:
    values, gradients = [], []
    for model in (SentenceTransformer(str(SMALL_ENCODER)), trusted(fresh_folder)):
        loss = make_loss(model.eval(), losses.MultipleNegativesRankingLoss(model))  # eval: no dropout
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
