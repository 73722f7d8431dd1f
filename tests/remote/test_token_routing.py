"""Token-level routing: every kind of feed-forward network, against closed forms, plain autograd and the reference."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import TASK_MOTE, code_in, trusted
from helpers.families import all_families, assert_near, batch, dense_model, difference, fresh_mote, rows_of
from helpers.kinds import FEED_FORWARD_FAMILIES, TOKEN_ROUTED
from helpers.paths import SMALL_ENCODER
from helpers.steps import plain_and_cached
from helpers.token_routing import (
    backward,
    fresh,
    gradients,
    loss_weights,
    make_different,
    relative,
    same_gradients,
    trained,
    upcycled,
    without_dropout,
)
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import nn

from mote import plan_upcycling, upcycle
from mote.remote.configuration_mote import ARCHITECTURES, MoTEConfig
from mote.remote.modeling_mote import MoTEModel
from mote.remote.token_routing_mote import (
    FEED_FORWARDS,
    TokenRoutedConfig,
    TokenRoutedFeedForward,
    TokenRoutedModel,
    TokenRouting,
    load_balancing_loss,
)

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]
TEXTS = ["how do whales breathe", "Whales come up for air.", "a recipe for bread that needs no kneading", "bread"]

all_kinds = pytest.mark.parametrize("name", TOKEN_ROUTED.families)


@pytest.mark.parametrize("num_experts_per_tok", [1, 2, 4])
@all_families
def test_a_fresh_model_equals_the_dense_one(name: str, num_experts_per_tok: int) -> None:
    dense, inputs = dense_model(name), batch()
    rates = sorted(module.p for module in dense.modules() if isinstance(module, nn.Dropout))
    with torch.no_grad():
        expected = dense(**inputs).last_hidden_state
        model = upcycled(dense, num_experts_per_tok=num_experts_per_tok)
        out = model(**inputs, output_hidden_states=True, output_router_logits=True)
    assert difference(out.last_hidden_state, expected) <= 2e-6
    assert [tuple(state.shape) for state in out.hidden_states] == [(4, 9, 16)] * 3
    assert [tuple(logits.shape) for logits in out.router_logits] == [(4, 9, 4)] * 2
    assert sorted(module.p for module in model.modules() if isinstance(module, nn.Dropout)) == rates


@pytest.mark.parametrize(("name", "setting"), [("modernbert", "mlp_dropout"), ("distilbert", "dropout")])
def test_dropout_of_the_network_itself(name: str, setting: str) -> None:
    model, hidden = upcycled(dense_model(name, **{setting: 1.0})).train(), torch.randn(1, 3, 16)
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        assert model.blocks[0].feed_forward(hidden, TokenRouting()).eq(0).all()


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_biases_as_the_config_says(name: str) -> None:
    for biases in (set(), {"gate_up_proj_bias", "down_proj_bias"}):
        dense = dense_model(name, mlp_bias=bool(biases))
        expected = dense(**batch()).last_hidden_state
        model = upcycled(dense)
        assert {*model.blocks[0].feed_forward.experts.state_dict()} == {"gate_up_proj", "down_proj"} | biases
        assert difference(model(**batch()).last_hidden_state, expected) <= 2e-6


@all_kinds
def test_the_router_begins_small_and_follows_the_seed(name: str) -> None:
    def routers(seed: int) -> torch.Tensor:
        dense = dense_model(name)
        torch.manual_seed(seed)
        return torch.cat([block.feed_forward.router.weight for block in upcycled(dense).blocks])

    assert difference(routers(0), routers(0)) == 0.0
    assert difference(routers(0), routers(1)) > 0.0
    assert 0.015 < routers(0).std() < 0.025  # initializer_range


class IdentityLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(4, 4), "activation_fn": nn.Identity(), "fc2": nn.Linear(4, 4)})
        for linear in (self.mlp["fc1"], self.mlp["fc2"]):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalized", [True, False])
def test_a_token_gets_the_weighted_sum_of_its_best_experts(normalized: bool, implementation: str) -> None:
    settings = {"norm_topk_prob": normalized, "experts_implementation": implementation}
    config = TokenRoutedConfig(experts=["a", "b", "c"], **settings)
    feed_forward = TokenRoutedFeedForward(IdentityLayer(), FEED_FORWARDS["jina_embeddings_v3"], config)
    with torch.no_grad():
        feed_forward.experts.down_proj.mul_(torch.tensor([1.0, 10.0, 100.0])[:, None, None])  # experts multiply
        # The first coordinate of a token is the logit of expert a, the second that of b; c always has 0.
        feed_forward.router.weight.copy_(torch.eye(4)[:3] * torch.tensor([1.0, 1.0, 0.0])[:, None])
        tokens = torch.tensor([[[2.0, 1.0, 3.0, 0.0], [-1.0, 1.0, 3.0, 0.0]]])
        out = feed_forward(tokens, TokenRouting())
    e = math.e
    totals = (e**2 + e, e + 1) if normalized else (e**2 + e + 1, 1 / e + e + 1)
    first = (e**2 * 1 + e * 10) / totals[0]  # a and b
    second = (e * 10 + 1 * 100) / totals[1]  # b and c
    assert difference(out, tokens * torch.tensor([first, second])[:, None]) <= 1e-4


@all_kinds
def test_implementations_agree_with_the_reference(name: str) -> None:
    model, results = trained(name, router_aux_loss_coef=0.0), []
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            out = model(**batch()).last_hidden_state
        results.append({"out": out, **relative(backward(model, batch()))})
    assert results[0]["out"].abs().max() > 0.1
    for result in results[1:]:
        same_gradients(result, results[0], 1e-5)


def test_the_implementation_is_the_one_asked_for(tmp_path: Path) -> None:
    trained("bert").save_pretrained(tmp_path)
    fresh_mote("bert")  # for which the library caches that it has no such experts
    assert TokenRoutedModel.from_pretrained(tmp_path).config._experts_implementation == "grouped_mm"
    for name in IMPLEMENTATIONS:
        model = TokenRoutedModel.from_pretrained(tmp_path, experts_implementation=name)
        assert model.blocks[0].feed_forward.experts.config._experts_implementation == name


def test_a_task_is_not_needed_but_must_be_known() -> None:
    model, inputs = trained("bert"), batch()
    expected = model(**inputs).pooler_output
    for routing in ({"task": "b"}, {"task": ["a", "b", "c", "d"]}, {"task_ids": torch.tensor([0, 1, 2, 3])}):
        assert difference(model(**inputs, **routing).pooler_output, expected) == 0.0
    with pytest.raises(ValueError, match="Unknown task 'e'"):
        model(**inputs, task="e")


def test_the_loss_of_three_tokens_by_hand() -> None:
    probabilities = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.1, 0.4], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]])
    mask = torch.tensor([[1, 1, 1, 0]])
    # two experts per token: (a, b), (a, c), (b, c); six choices, two on each expert
    # mean probabilities 1.4/3, 0.8/3, 0.8/3
    assert load_balancing_loss([probabilities.log()], mask, 2).item() == pytest.approx(2 / 3)
    megablocks = [load_balancing_loss([probabilities.log()] * n, mask, 2, "megablocks").item() for n in (1, 2)]
    assert megablocks == pytest.approx([1.0, 1.0])  # balanced, whatever the number of blocks and experts
    # one: a, a, b
    by_hand = (2 / 3) * (1.4 / 3) + (1 / 3) * (0.8 / 3)
    assert load_balancing_loss([probabilities.log()], mask, 1).item() == pytest.approx(by_hand)
    assert load_balancing_loss([probabilities.log()] * 2, mask.bool(), 1).item() == pytest.approx(2 * by_hand)
    assert load_balancing_loss([probabilities], torch.zeros(1, 4), 2).item() == 0.0  # nothing but padding
    unmasked = (2 / 4) * (1.5 / 4) + (1 / 4) * (0.9 / 4) + (1 / 4) * (1.6 / 4)
    assert load_balancing_loss([probabilities.log()], None, 1).item() == pytest.approx(unmasked)


@pytest.mark.parametrize(("balance_share", "formula"), [(None, "equation_1"), (0.125, "megablocks")])
@all_kinds
def test_the_loss_reaches_any_training(name: str, balance_share: float | None, formula: str) -> None:
    """Its gradient is the one that plain autograd gives to the formula, padding left out."""
    trained_model = trained(name, router_aux_loss_coef=3.0, router_aux_loss_type=formula)
    model, inputs = without_dropout(trained_model), batch()
    by_itself = backward(model, inputs, balance_share=balance_share)
    without = copy.deepcopy(model)
    without.config.router_aux_loss_coef = 0.0
    out = without(**inputs, output_router_logits=True)
    lengths = inputs["attention_mask"].sum(dim=1)
    loss = torch.tensor(0.0)
    for logits in out.router_logits:  # the formula once more, token by token
        tokens = torch.cat([logits[row, : lengths[row]] for row in range(4)]).softmax(dim=-1)  # [N, E]
        for expert in range(4):
            chosen = [expert in token.topk(2).indices for token in tokens]
            loss = loss + sum(chosen) / len(tokens) * tokens[:, expert].mean()
    factor = {"equation_1": 1.0, "megablocks": 4 / 2 / 2}[formula]
    weight = 3.0 * factor * (1.0 if balance_share is None else 4 * 0.125)
    (out.pooler_output.square().sum() + weight * loss).backward()
    same_gradients(by_itself, gradients(without), 1e-4)
    plain = backward(without, inputs)
    assert max(difference(by_itself[key], plain[key]) for key in plain if "router" in key) > 1e-3


def test_shares_add_up_to_one_loss() -> None:
    """Two halves of a step, each told its share, push as hard as one pass does."""
    model = without_dropout(trained("bert", router_aux_loss_coef=3.0, mote_layers=[0]))
    inputs = rows_of(batch(), 0, 0, 0, 0)  # every half has the same statistics

    def of_the_loss(parts: list[dict[str, torch.Tensor]], **kwargs: Any) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            (model(**part, **kwargs).pooler_output * 0.0).sum().backward()
        return model.blocks[0].feed_forward.router.weight.grad.clone()

    whole = of_the_loss([inputs])
    assert whole.abs().max() > 1e-3
    halves = [rows_of(inputs, 0, 1), rows_of(inputs, 2, 3)]
    assert difference(of_the_loss(halves, balance_share=1 / 4), whole) <= 1e-6
    assert difference(of_the_loss(halves), 2 * whole) <= 1e-6


def test_rows_laid_end_to_end_count_as_rows() -> None:
    model = trained("bert")
    weights = loss_weights(model)
    model(input_ids=torch.tensor([[5, 6, 7, 8]]), balance_share=0.5, cu_seq_lens_q=torch.tensor([0, 1, 2, 4]))
    assert weights == [pytest.approx(0.005 * 3 * 0.5)] * 2


def test_no_loss_outside_of_training_and_no_chunks_within() -> None:
    model = trained("bert", router_aux_loss_coef=3.0)
    chunked = upcycled(dense_model("bert", chunk_size_feed_forward=3), router_aux_loss_coef=3.0)
    chunked.load_state_dict(model.state_dict())
    same_gradients(backward(without_dropout(chunked), batch()), backward(without_dropout(model), batch()), 0.0)
    expected = backward(model.eval(), batch())
    model.config.router_aux_loss_coef = 0.0
    same_gradients(backward(model, batch()), expected, 0.0)


@pytest.mark.parametrize("name", ["nomic_bert", "bert"])
def test_mixed_precision(name: str) -> None:
    """As trainers do it with `bf16=True`: weights in float32, products in bfloat16."""
    model = without_dropout(trained(name))
    expected = relative(backward(model, batch()))
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            same_gradients(relative(backward(model, batch())), expected, 0.1)


def test_every_expert_has_a_gradient() -> None:
    """Zeros where no token came, not None: data-parallel training waits for all parameters."""
    model = trained("bert")
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        backward(model, {"input_ids": torch.tensor([[7]])})
        up = model.blocks[0].feed_forward.experts.up_proj.grad
        assert [bool(up[expert].any()) for expert in range(4)].count(True) == 2
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_checkpoint_of_the_other_kind(tmp_path: Path) -> None:
    for saved, other in ((fresh_mote("bert"), TokenRoutedModel), (fresh("bert"), MoTEModel)):
        saved.save_pretrained(tmp_path)
        config = other.config_class(**{**saved.config.to_dict(), "tasks": None})
        assert config.model_type == other.config_class.model_type
        with pytest.raises(ValueError, match=f"do not match their config.*of a '{config.model_type}'"):
            other.from_pretrained(tmp_path, config=config)
    with pytest.raises(ValueError, match="every text needs all experts: load the model without `experts=`"):
        TokenRoutedModel.from_pretrained(tmp_path, experts=["a"])


def test_invalid_settings() -> None:
    for settings, message in (
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1 to 4, the number of experts, got 0"),
        ({"experts": ["a"]}, "from 1 to 1, the number of experts, got 2"),
        ({"router_aux_loss_type": "equation_2"}, "Unknown router_aux_loss_type 'equation_2'"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenRoutedConfig(**settings)


def test_two_experts_may_have_the_same_instruction() -> None:
    same = {"experts": ["a", "b"], "instructions": {"a": "text: ", "b": "text: "}}
    assert TokenRoutedConfig(**same).instruction_of("b") == "text: "
    with pytest.raises(ValueError, match="already stands for the expert 'a'"):
        MoTEConfig(**same)


def test_every_architecture_has_a_feed_forward_network() -> None:
    assert set(FEED_FORWARDS) == set(ARCHITECTURES)
    assert set(FEED_FORWARDS.values()) == {FEED_FORWARDS[name] for name in FEED_FORWARD_FAMILIES}


@pytest.fixture(scope="module")
def upcycled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)  # of the routers
    return upcycle(
        SMALL_ENCODER, tmp_path_factory.mktemp("token") / "small-token", routing="token", paper_instructions=True
    )


@pytest.fixture(scope="module")
def trained_folder(upcycled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token-trained") / "small-token"
    model = trusted(upcycled_folder)
    make_different(model[0].model)
    model.save(str(folder))
    return folder


def test_a_small_encoder_embeds_as_its_source(upcycled_folder: Path, trained_folder: Path) -> None:
    model, source = trusted(upcycled_folder), SentenceTransformer(str(SMALL_ENCODER))
    assert type(model[0].model).__module__.startswith("transformers_modules.")  # the files that travelled
    assert_near(model.encode(TEXTS), source.encode(TEXTS))
    prefixed = source.encode([f"clustering: {text}" for text in TEXTS])
    assert_near(model.encode(TEXTS, prompt_name="clustering"), prefixed)
    for folder in (upcycled_folder, trained_folder):  # written by us, and by `model.save`
        assert code_in(folder) == TASK_MOTE | {"token_routing_mote.py"}
    card = (upcycled_folder / "README.md").read_text(encoding="utf-8")
    assert "sends each token through 2 of them" in card
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
    ways: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        ({"task": "clustering"}, ""),
        ({"prompt_name": "clustering"}, "clustering: "),
        ({"prompt": "unheard of: "}, "unheard of: "),
    ]
    for arguments, prefix in ways:
        assert_near(model.encode(TEXTS, **arguments), expected(prefix))
    assert_near(model.encode_query(TEXTS), expected("search_query: "))
    assert_near(model.encode_document(TEXTS), expected("search_document: "))
    assert "route" not in model.preprocess(TEXTS, prompt="clustering: ")
    model.default_prompt_name = "search_query"
    assert_near(model.encode(TEXTS), expected("search_query: "))
    assert_near(model.encode(TEXTS, task="clustering"), expected(""))
    with pytest.raises(ValueError, match="Unknown task 'clusterin'"):
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
def test_load_balancing_in_mini_batches_of_a_cached_loss(trained_folder: Path) -> None:
    """A loss that gives next to no gradient: what moves the router is the load balancing, as `balance_share` says."""
    results = []
    for factor, share in ((1.0, 1 / 8), (2.0, 1 / 16), (1.0, None), (0.0, None)):
        model = trusted(trained_folder, config_kwargs={"router_aux_loss_coef": factor})
        without_dropout(model[0].model)
        told = {} if share is None else {"balance_share": share}
        features = [{**model.preprocess(TEXTS), **told} for _ in range(2)]
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, scale=1e-9)
        loss(features, labels=None).backward()
        results.append(next(p.grad for key, p in model.named_parameters() if "layer.0.feed_forward.router" in key))
    of_share, of_half_the_share, of_four_passes, none = results
    assert none.abs().max() <= 1e-8
    assert of_share.abs().max() > 1e-4
    assert difference(of_share, of_half_the_share) <= 1e-7
    assert difference(of_four_passes, 4 * of_share) <= 1e-5


def test_the_plan() -> None:
    plan = plan_upcycling(SMALL_ENCODER, routing="token", num_experts_per_tok=1)
    assert "each token through 1 of 4 experts, whose weight is always 1: the router only learns to" in str(plan)
