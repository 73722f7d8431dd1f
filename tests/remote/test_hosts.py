"""What works on a dense model works on a MoTE, or one sentence says what to do instead."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.families import difference
from helpers.paths import SMALL_ENCODER
from sentence_transformers import (
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
    evaluation,
    util,
)
from sentence_transformers.sentence_transformer import losses
from transformers import AutoTokenizer, pipeline

TEXTS = ["whales sing", "the compiler sings", "how deep do whales dive", "parsing a grammar"]


def encoder(folder: Path, **settings: Any) -> Any:
    return SentenceTransformer(str(folder), trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def model(trained_folder: Path) -> Any:
    return encoder(trained_folder)


# Without a task --------------------------------------------------------------------------------------------------


def similarity(model: Any) -> Any:
    evaluator = evaluation.EmbeddingSimilarityEvaluator(
        TEXTS, ["whales", *TEXTS[:3]], [0.1, 0.2, 0.3, 0.4], write_csv=False
    )
    return evaluator(model)["spearman_cosine"]


def pairs(model: Any) -> Any:
    return evaluation.BinaryClassificationEvaluator(TEXTS, TEXTS[::-1], [0, 1, 1, 0], write_csv=False)(model)


def mean_squared_error(model: Any) -> Any:
    teacher = SentenceTransformer(str(SMALL_ENCODER))
    return evaluation.MSEEvaluator(TEXTS, TEXTS, teacher_model=teacher, write_csv=False)(model)


def translation(model: Any) -> Any:
    return evaluation.TranslationEvaluator(TEXTS, TEXTS[::-1], write_csv=False)(model)


def paraphrases(model: Any) -> Any:
    return util.paraphrase_mining(model, TEXTS)


@pytest.mark.parametrize("host", [similarity, pairs, mean_squared_error, translation, paraphrases])
def test_what_a_host_without_prompts_is_told_works(trained_folder: Path, model: Any, host: Any) -> None:
    with pytest.raises(ValueError, match="No task for the text") as error:
        host(model)
    for remedy in ('default_prompt_name="classification"', 'config_kwargs={"default_task": "classification"}'):
        assert remedy in str(error.value)
    with_prompt = encoder(trained_folder, default_prompt_name="sts")
    assert np.abs(with_prompt.encode(TEXTS) - model.encode(TEXTS, prompt_name="sts")).max() <= 1e-6
    assert host(with_prompt)
    with_task = encoder(trained_folder, config_kwargs={"default_task": "sts"})
    assert np.abs(with_task.encode(TEXTS) - model.encode(TEXTS, task="sts")).max() <= 1e-6
    assert host(with_task)


def test_a_pipeline_is_told_what_works(trained_folder: Path, model: Any) -> None:
    arguments: Any = {"task": "feature-extraction", "model": str(trained_folder), "trust_remote_code": True}
    with pytest.raises(ValueError, match=r"in a pipeline with model_kwargs=\{'default_task': …\}"):
        pipeline(**arguments)(TEXTS[0])
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


def test_encode_query_of_a_text_with_an_instruction(model: Any, warned: Any) -> None:
    model.encode_query(["search_query: whales"])
    assert len(warned.messages) == 1


def test_a_token_routed_model_reads_both_as_well(token_routed: Path, warned: Any) -> None:
    encoder(token_routed).encode(["search_query: whales"], prompt="search_query: ")
    assert "put in front of a text" in warned.messages[0]


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
    closed = encoder(trained_folder, config_kwargs={"route_by_text": False, "default_task": "search_document"})
    text = "clustering: whales"
    as_document, as_cluster = (model.encode(text, task=task) for task in ("search_document", "clustering"))
    assert np.abs(as_document - as_cluster).max() > 1e-2
    assert np.abs(closed.encode(text) - as_document).max() <= 1e-6
    assert np.abs(closed.encode(text, prompt="about: ") - model.encode(f"about: {text}", task="document")).max() <= 1e-6
    for arguments in ({"prompt_name": "search_query"}, {"task": "clustering"}, {"prompt": "clustering: about "}):
        assert np.abs(closed.encode("whales", **arguments) - model.encode("whales", **arguments)).max() <= 1e-6
    closed.save(str(tmp_path / "closed"))
    assert encoder(tmp_path / "closed")[0].config.route_by_text is False
    with pytest.raises(ValueError, match=r"its own instruction does not count \(route_by_text=False\)"):
        encoder(trained_folder, config_kwargs={"route_by_text": False}).encode(text)


# In training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [losses.AdaptiveLayerLoss, losses.Matryoshka2dLoss])
def test_losses_over_layers_are_those_of_the_dense_model(fresh_folder: Path, wrapper: Any) -> None:
    values, gradients = [], []
    for model in (SentenceTransformer(str(SMALL_ENCODER)), encoder(fresh_folder)):
        settings = {"matryoshka_dims": [256, 16]} if wrapper is losses.Matryoshka2dLoss else {}
        loss = wrapper(model.eval(), losses.MultipleNegativesRankingLoss(model), **settings)  # eval: no dropout
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


@pytest.mark.parametrize("wrapper", [losses.AdaptiveLayerLoss, losses.Matryoshka2dLoss])
def test_losses_over_layers_train_their_experts(trained_folder: Path, wrapper: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    model = encoder(trained_folder)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = {"matryoshka_dims": [256, 16]} if wrapper is losses.Matryoshka2dLoss else {}
    arguments = transformers_arguments(tmp_path, prompts={"anchor": "search_query: ", "positive": "search_document: "})
    from sentence_transformers import SentenceTransformerTrainer

    rows = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    loss = wrapper(model, losses.MultipleNegativesRankingLoss(model), **settings)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss).train()
    moved = {key.split(".experts.")[1].split(".")[0] for key in moves(model, before) if ".experts." in key}
    assert moved == {"search_query", "search_document"}


def transformers_arguments(folder: Path, **settings: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments

    return SentenceTransformerTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=2, learning_rate=1e-3, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0, **settings,
    )  # fmt: skip


def moves(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    return [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]


def test_a_prompt_s_name_in_place_of_its_text(trained_folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import SentenceTransformerTrainer

    model = encoder(trained_folder)
    rows = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]})
    arguments = transformers_arguments(tmp_path, prompts={"anchor": "search_query", "positive": "search_document"})
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss)
    with pytest.raises(ValueError, match=r"'search_query.*Did you mean 'search_query: '") as error:
        trainer.train()
    assert "in training `prompts=`" in str(error.value)


# Models as in transformers ---------------------------------------------------------------------------------------


def test_more_tokens_in_sentence_transformers(trained_folder: Path, tmp_path: Path) -> None:
    model = encoder(trained_folder)
    model.tokenizer.add_tokens(["whalesong"])
    model[0].auto_model.resize_token_embeddings(len(model.tokenizer))
    assert model[0].config.vocab_size == model[0].config.backbone_config.vocab_size == len(model.tokenizer)
    expected = model.encode(["a whalesong"], prompt_name="clustering")
    model.save(str(tmp_path / "more"))
    again = encoder(tmp_path / "more")
    assert np.abs(again.encode(["a whalesong"], prompt_name="clustering") - expected).max() <= 1e-6
    assert again[0].auto_model.get_input_embeddings().num_embeddings == len(model.tokenizer)


# What a MoTE cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_other_backends(trained_folder: Path, backend: Any) -> None:
    command = f"`mote export MODEL --expert NAME --backend {backend} --out DIR`"
    with pytest.raises(ValueError, match=f"A MoTE runs on torch alone. For backend='{backend}', .*: {command}"):
        encoder(trained_folder, backend=backend)


@pytest.mark.parametrize("kind", [SparseEncoder, MultiVectorEncoder])
def test_encoders_of_other_kinds_route_as_well(trained_folder: Path, model: Any, kind: Any) -> None:
    """They put a new layer on top, as on the dense model; it takes what the expert gives."""
    other = kind(str(trained_folder), trust_remote_code=True)
    seen = []
    other[0].register_forward_hook(lambda *args: seen.append(args[-1]["token_embeddings"]))
    other.encode(TEXTS[:1], prompt_name="clustering")
    tokens = model.encode(TEXTS[:1], prompt_name="clustering", output_value="token_embeddings")[0]
    assert difference(seen[0][0], tokens.cpu()) <= 1e-5


# What is shown ---------------------------------------------------------------------------------------------------


def test_what_static_embeddings_ask_of_a_model(trained_folder: Path) -> None:
    """As model2vec does: `AutoModel` without a task, embeddings resized, one pass over tokens."""
    with pytest.raises(ValueError, match=r"load with from_pretrained\(…, default_task=…\)"):
        transformers.AutoModel.from_pretrained(trained_folder, trust_remote_code=True)(torch.tensor([[5]]))
    one = transformers.AutoModel.from_pretrained(trained_folder, trust_remote_code=True, default_task="clustering")
    tokenizer = AutoTokenizer.from_pretrained(trained_folder)
    one.resize_token_embeddings(len(tokenizer))
    tokens = torch.tensor([[5], [6]])
    expected = one(tokens, task="clustering").pooler_output
    assert difference(one(tokens, token_type_ids=torch.zeros_like(tokens)).pooler_output, expected) == 0.0


@pytest.fixture(scope="module")
def token_routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mote import upcycle

    return upcycle(str(SMALL_ENCODER), tmp_path_factory.mktemp("token-routed") / "mote", routing="token")
