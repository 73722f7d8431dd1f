"""A token-routed model in Sentence-Transformers: its files, embeddings, training, and how it is upcycled."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import read_json, trusted
from helpers.families import batch, difference
from helpers.paths import SMALL_ENCODER
from helpers.token_routing import gradients, make_different, relative, same_gradients, without_dropout
from torch import nn
from transformers import AutoModel

from mote import plan_upcycling, upcycle
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
    from sentence_transformers import SentenceTransformer

    folder = tmp_path_factory.mktemp("token-trained") / "small-token"
    model = SentenceTransformer(str(upcycled_folder), trust_remote_code=True)
    make_different(model[0].model)
    model.save(str(folder))
    return folder


def sentence_transformer(folder: Path, **settings: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), trust_remote_code=True)
    for name, value in settings.items():
        setattr(model[0].model.config, name, value)
    return model


def test_an_upcycled_encoder_embeds_as_its_source(upcycled_folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model, source = sentence_transformer(upcycled_folder), SentenceTransformer(str(SMALL_ENCODER))
    assert type(model[0].model).__module__.startswith("transformers_modules.")  # the files that travelled
    assert abs(model.encode(TEXTS) - source.encode(TEXTS)).max() <= 1e-6
    prefixed = source.encode([f"clustering: {text}" for text in TEXTS])
    assert abs(model.encode(TEXTS, prompt_name="clustering") - prefixed).max() <= 1e-6


def test_the_folder_of_an_upcycled_encoder(upcycled_folder: Path, trained_folder: Path) -> None:
    code = {
        "architectures_mote.py",
        "configuration_mote.py",
        "mixed_batch_mote.py",
        "modeling_mote.py",
        "sentence_transformer_mote.py",
        "token_routing_mote.py",
    }
    for folder in (upcycled_folder, trained_folder):  # written by the command, and by `model.save`
        assert {path.name for path in folder.glob("*.py")} == code
    record = read_json(upcycled_folder / "mote.json")["steps"][0]
    assert record["settings"]["routing"] == "token"
    assert record["command"].endswith("--routing token")
    card = (upcycled_folder / "README.md").read_text(encoding="utf-8")
    assert "sends each token through 2 of them" in card
    assert "A text gets the embedding that the dense model gives it" in card
    assert "expert of its task" not in card
    assert "task=" not in card


def test_auto_model(trained_folder: Path) -> None:
    loaded = AutoModel.from_pretrained(trained_folder, trust_remote_code=True)
    own = TokenRoutedModel.from_pretrained(trained_folder)
    with torch.no_grad():
        assert difference(loaded(**batch()).last_hidden_state, own(**batch()).last_hidden_state) == 0.0


def test_encode(trained_folder: Path) -> None:
    model = sentence_transformer(trained_folder)
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
    with pytest.raises(ValueError, match=r"Unknown task 'clusterin'\. Did you mean 'clustering'"):
        model.encode(TEXTS, task="clusterin")


def encoded(model: Any, **arguments: Any) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, **arguments)


def test_a_default_prompt_of_another_task_is_left_out(trained_folder: Path) -> None:
    model = trusted(trained_folder, default_prompt_name="search_query")
    assert torch.equal(encoded(model), encoded(model, prompt_name="search_query"))
    assert torch.equal(encoded(model, task="clustering"), encoded(model, prompt=""))


def test_a_list_of_prompts_is_refused(trained_folder: Path) -> None:
    with pytest.raises(ValueError, match="must be one text for all inputs, got a list"):
        trusted(trained_folder).preprocess(TEXTS, prompt=["clustering: "] * 4)


def test_cached_loss_equals_the_plain_one(trained_folder: Path) -> None:
    from sentence_transformers.sentence_transformer import losses

    results = []
    for cached in (False, True):
        model = sentence_transformer(trained_folder, router_aux_loss_coef=0.0)
        without_dropout(model[0].model)
        anchors, positives = (model.preprocess(TEXTS, prompt=f"search_{role}: ") for role in ("query", "document"))
        loss = (
            losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
            if cached
            else losses.MultipleNegativesRankingLoss(model)
        )
        loss([anchors, positives], labels=None).backward()
        results.append(relative(gradients(model)))
    same_gradients(*results, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("cached", [False, True])
def test_the_loss_reaches_a_training_that_does_not_know_it(trained_folder: Path, cached: bool) -> None:
    """A loss that gives next to no gradient: what moves the router is the load balancing, as `balance_share` says."""
    from sentence_transformers.sentence_transformer import losses

    results = []
    for factor, share in ((1.0, 1 / 8), (2.0, 1 / 16), (1.0, None), (0.0, None)):
        model = sentence_transformer(trained_folder, router_aux_loss_coef=factor)
        without_dropout(model[0].model)
        features = [model.preprocess(TEXTS) for _ in range(2)]
        if share is not None:
            for columns in features:
                columns["balance_share"] = share
        loss = (
            losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, scale=1e-9)
            if cached
            else losses.MultipleNegativesRankingLoss(model, scale=1e-9)
        )
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
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    pairs = datasets.Dataset.from_dict({"anchor": TEXTS * 4, "positive": TEXTS[::-1] * 4})
    after = []
    for factor in (0.0, 50.0):
        model = sentence_transformer(trained_folder, router_aux_loss_coef=factor)
        model[0].model.gradient_checkpointing_enable()
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=8, learning_rate=1e-3, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
            router_mapping={"anchor": "query", "positive": "document"},
        )  # fmt: skip
        loss = MultipleNegativesRankingLoss(model)
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
        tokens = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
        mote = model[0].model.eval()
        with torch.no_grad():
            logits = mote(tokens["input_ids"], tokens["attention_mask"], output_router_logits=True).router_logits
        after.append(load_balancing_loss(logits, tokens["attention_mask"], 2).item() / len(logits))
    assert after[1] < 0.6 < 0.7 < after[0]
    assert after[1] >= 0.5 - 2e-3


def test_the_plan(tmp_path: Path) -> None:
    def plan(**settings: Any) -> str:
        return str(plan_upcycling(str(SMALL_ENCODER), tmp_path / "out", routing="token", **settings))

    assert "each token through 2 of 4 experts, with weights that sum to 1; load balancing 0.005" in plan()
    assert "with the router's probabilities as weights" in plan(norm_topk_prob=False, num_experts_per_tok=1)
    assert "these are all 1, and the router only learns to balance" in plan(num_experts_per_tok=1)
    counts = plan_upcycling(str(SMALL_ENCODER), routing="token", num_experts_per_tok=3).counts
    assert counts["active"] == counts["shared"] + 3 * counts["experts"]["0"]


def test_the_recorded_command_makes_the_same_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_experts_per_tok": 3, "norm_topk_prob": False, "router_aux_loss_coef": 0.2}
    out = upcycle(str(SMALL_ENCODER), tmp_path / "one", routing="token", **settings)
    words = shlex.split(read_json(out / "mote.json")["steps"][0]["command"])[1:]
    words[words.index("--src") + 1], words[words.index("--out") + 1] = str(SMALL_ENCODER), str(tmp_path / "other")
    assert main(words) == 0
    for folder in (out, tmp_path / "other"):
        config = read_json(folder / "config.json")
        assert config["model_type"] == "mote_token_routed"
        assert {name: config[name] for name in settings} == settings


def test_an_invalid_setting_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["upcycle", "--src", str(SMALL_ENCODER), "--out", str(tmp_path / "out"), "--routing", "token"]
    assert main([*words, "--num-experts-per-tok", "9"]) == 1
    assert "from 1 to 4, the number of experts, got 9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
