"""A token-routed model in Sentence-Transformers: its files, embeddings, training, and how it is upcycled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import TASK_MOTE, code_in, read_json, trusted
from helpers.families import difference
from helpers.paths import SMALL_ENCODER
from helpers.steps import plain_and_cached, train
from helpers.token_routing import make_different, relative, same_gradients, without_dropout
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import nn

from mote import plan_upcycling
from mote.cli import main
from mote.remote.token_routing_mote import TokenRoutedModel, load_balancing_loss

TEXTS = ["how do whales breathe", "Whales come up for air.", "a recipe for bread that needs no kneading", "bread"]


@pytest.fixture(scope="module")
def upcycled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token") / "small-token"
    torch.manual_seed(0)  # of the routers
    main(["upcycle", "--src", str(SMALL_ENCODER), "--out", str(folder), "--routing", "token"])
    return folder


@pytest.fixture(scope="module")
def trained_folder(upcycled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token-trained") / "small-token"
    model = trusted(upcycled_folder)
    make_different(model[0].model)
    model.save(str(folder))
    return folder


def test_an_upcycled_encoder_embeds_as_its_source(upcycled_folder: Path) -> None:
    model, source = trusted(upcycled_folder), SentenceTransformer(str(SMALL_ENCODER))
    assert type(model[0].model).__module__.startswith("transformers_modules.")  # the files that travelled
    assert abs(model.encode(TEXTS) - source.encode(TEXTS)).max() <= 1e-6
    prefixed = source.encode([f"clustering: {text}" for text in TEXTS])
    assert abs(model.encode(TEXTS, prompt_name="clustering") - prefixed).max() <= 1e-6


def test_the_folder_of_an_upcycled_encoder(upcycled_folder: Path, trained_folder: Path) -> None:
    for folder in (upcycled_folder, trained_folder):  # written by the command, and by `model.save`
        assert code_in(folder) == TASK_MOTE | {"token_routing_mote.py"}
    record = read_json(upcycled_folder / "mote.json")["steps"][0]
    assert record["settings"]["routing"] == "token"
    assert record["command"].endswith("--routing token")
    card = (upcycled_folder / "README.md").read_text(encoding="utf-8")
    assert "sends each token through 2 of them" in card
    assert "A text gets the embedding that the dense model gives it" in card
    assert "expert of its task" not in card
    assert "task=" not in card


def test_encode(trained_folder: Path) -> None:
    model = trusted(trained_folder)
    mote = TokenRoutedModel.from_pretrained(trained_folder)

    def expected(prefix: str) -> Any:
        tokens = model.tokenizer([prefix + text for text in TEXTS], padding=True, return_tensors="pt")
        with torch.no_grad():
            pooled = mote(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        return nn.functional.normalize(pooled).numpy()

    assert abs(expected("") - expected("clustering: ")).max() > 1e-2
    assert abs(model.encode(TEXTS) - expected("")).max() <= 1e-6
    assert abs(model.encode(TEXTS, task="clustering") - expected("")).max() <= 1e-6
    assert abs(model.encode(TEXTS, prompt_name="clustering") - expected("clustering: ")).max() <= 1e-6
    assert abs(model.encode(TEXTS, prompt="unheard of: ") - expected("unheard of: ")).max() <= 1e-6
    assert abs(model.encode_query(TEXTS) - expected("search_query: ")).max() <= 1e-6
    assert abs(model.encode_document(TEXTS) - expected("search_document: ")).max() <= 1e-6
    assert "route" not in model.preprocess(TEXTS, prompt="clustering: ")
    with pytest.raises(ValueError, match="must be one text for all inputs, got a list"):
        model.preprocess(TEXTS, prompt=["clustering: "] * 4)
    model.default_prompt_name = "search_query"
    assert abs(model.encode(TEXTS) - expected("search_query: ")).max() <= 1e-6
    assert abs(model.encode(TEXTS, task="clustering") - expected("")).max() <= 1e-6
    with pytest.raises(ValueError, match=r"Unknown task 'clusterin'\. Did you mean 'clustering'"):
        model.encode(TEXTS, task="clusterin")


def test_cached_loss_equals_the_plain_one(trained_folder: Path) -> None:
    def make() -> SentenceTransformer:
        model = trusted(trained_folder, config_kwargs={"router_aux_loss_coef": 0.0})
        without_dropout(model[0].model)
        return model

    def features(model: SentenceTransformer) -> list[Any]:
        return [model.preprocess(TEXTS, prompt=prompt) for prompt in ("search_query: ", "search_document: ")]

    plain, cached = plain_and_cached("CachedMultipleNegativesRankingLoss", make, features)
    assert abs(plain.pop("loss") - cached.pop("loss")) <= 1e-5
    same_gradients(relative(plain), relative(cached), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("cached", [False, True])
def test_the_loss_reaches_a_training_that_does_not_know_it(trained_folder: Path, cached: bool) -> None:
    """A loss that gives next to no gradient: what moves the router is the load balancing, as `balance_share` says."""
    results = []
    for factor, share in ((1.0, 1 / 8), (2.0, 1 / 16), (1.0, None), (0.0, None)):
        model = trusted(trained_folder, config_kwargs={"router_aux_loss_coef": factor})
        without_dropout(model[0].model)
        features = [model.preprocess(TEXTS) for _ in range(2)]
        if share is not None:
            for columns in features:
                columns["balance_share"] = share
        loss: Any = losses.MultipleNegativesRankingLoss(model, scale=1e-9)
        if cached:
            loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, scale=1e-9)
        loss(features, labels=None).backward()
        results.append(next(p.grad for key, p in model.named_parameters() if "layer.0.feed_forward.router" in key))
    told, twice, untold, none = results
    passes = 4 if cached else 2
    assert none.abs().max() <= 1e-8
    assert told.abs().max() > 1e-4
    assert difference(told, twice) <= 1e-7
    assert difference(untold, passes * told) <= 1e-5


@pytest.mark.long
def test_the_trainer_as_it_is(trained_folder: Path, tmp_path: Path) -> None:
    """Real steps of the unmodified trainer: a strong factor balances what a factor of zero leaves as it is."""
    after = []
    for factor in (0.0, 50.0):
        model = trusted(trained_folder, config_kwargs={"router_aux_loss_coef": factor})
        model[0].model.gradient_checkpointing_enable()
        roles = {"anchor": "query", "positive": "document"}
        train(
            model,
            losses.MultipleNegativesRankingLoss(model),
            tmp_path,
            TEXTS * 4,
            max_steps=8,
            per_device_train_batch_size=8,
            router_mapping=roles,
        )
        tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
        mote = model[0].model.eval()
        with torch.no_grad():
            logits = mote(tokens["input_ids"], tokens["attention_mask"], output_router_logits=True).router_logits
        after.append(load_balancing_loss(logits, tokens["attention_mask"], 2).item() / len(logits))
    assert after[1] < 0.6 < 0.7 < after[0]
    assert after[1] >= 0.5 - 2e-3


def test_the_plan() -> None:
    for settings, sentence in (
        ({}, "each token through 2 of 4 experts, with weights that sum to 1; load balancing 0.005"),
        ({"norm_topk_prob": False, "num_experts_per_tok": 1}, "with the router's probabilities as weights"),
        ({"num_experts_per_tok": 1}, "these are all 1, and the router only learns to balance"),
    ):
        assert sentence in str(plan_upcycling(SMALL_ENCODER, routing="token", **settings))
