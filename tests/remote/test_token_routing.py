"""Token-level routing: the same properties for every family, against closed forms, plain autograd and the reference."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import files_in, read_json
from helpers.families import (
    FAMILIES,
    NOT_CHECKPOINTED,
    all_families,
    batch,
    dense_model,
    in_threads,
    mote_config,
    rows_of,
)
from helpers.paths import SMALL_ENCODER
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

import mote
from architectures_mote import ARCHITECTURES
from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote import plan_upcycling, upcycle
from mote.cli import main
from token_routing_mote import (
    TokenRoutedBlock,
    TokenRoutedFeedForward,
    TokenRouting,
    load_balancing_loss,
)

EXPERTS = ["a", "b", "c", "d"]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return (one - other).abs().max().item()


def token_config(dense: PreTrainedModel, **settings: Any) -> MoTEConfig:
    return mote_config(dense, **{"experts": EXPERTS, "router": "token", **settings})


def fresh(name: str, **settings: Any) -> MoTEModel:
    dense = dense_model(name)
    return MoTEModel(token_config(dense, **settings), dense).eval()


def trained(name: str, **settings: Any) -> MoTEModel:
    """Experts that differ, and a router with opinions."""
    return make_different(fresh(name, **settings))


def make_different(model: PreTrainedModel) -> Any:
    generator = torch.Generator().manual_seed(1)
    blocks = [module for module in model.modules() if type(module).__name__ == "TokenRoutedBlock"]
    assert blocks
    with torch.no_grad():
        for block in blocks:
            for parameter in block.feed_forward.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def blocks_of(model: nn.Module) -> list[TokenRoutedBlock]:
    return [module for module in model.modules() if isinstance(module, TokenRoutedBlock)]


def without_dropout(model: MoTEModel) -> MoTEModel:
    """In training mode, which the load-balancing loss needs, but with no chance in it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def relative(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As fractions of the largest."""
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    return {key: gradient / largest for key, gradient in gradients.items()}


def same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for key, gradient in one.items():
        assert difference(gradient, other[key]) <= tolerance, key


def backward(model: MoTEModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    """The gradients of a loss that knows nothing of routing."""
    model.zero_grad()
    model(**inputs, **kwargs).pooler_output.square().sum().backward()
    return gradients(model)


# Upcycling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
@all_families
def test_a_fresh_model_equals_the_dense_one(name: str, experts_per_token: int) -> None:
    dense, inputs = dense_model(name), batch()
    with torch.no_grad():
        expected = dense(**inputs).last_hidden_state
        model = MoTEModel(token_config(dense, experts_per_token=experts_per_token), dense).eval()
        assert difference(model(**inputs).last_hidden_state, expected) <= 2e-6
    assert len(blocks_of(model)) == 2


@all_families
def test_training_a_fresh_model_drops_out_as_much_as_the_dense_one(name: str) -> None:
    dense = dense_model(name)
    rates = sorted(module.p for module in dense.modules() if isinstance(module, nn.Dropout))
    model = MoTEModel(token_config(dense), dense)
    assert sorted(module.p for module in model.modules() if isinstance(module, nn.Dropout)) == rates


@pytest.mark.parametrize(
    ("name", "setting"), [("gte", "hidden_dropout_prob"), ("modernbert", "mlp_dropout"), ("distilbert", "dropout")]
)
def test_dropout_of_the_network_itself(name: str, setting: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    dense = dense_model(name, **{setting: 1.0})
    model = MoTEModel(token_config(dense, experts_implementation="eager"), dense).train()
    feed_forward, hidden = blocks_of(model)[0].feed_forward, torch.randn(1, 3, 16)
    bias = feed_forward.experts.down_proj_bias[0] if name == "gte" else 0.0  # which comes after the dropout
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        assert difference(feed_forward(hidden, TokenRouting()), 0 * hidden + bias) <= 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_biases_as_the_config_says(name: str, bias: bool) -> None:
    dense, inputs = dense_model(name, mlp_bias=bias), batch()
    expected = dense(**inputs).last_hidden_state
    model = MoTEModel(token_config(dense), dense).eval()
    names = {key for key, _ in blocks_of(model)[0].feed_forward.experts.named_parameters()}
    assert names == {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if bias else set())
    assert difference(model(**inputs).last_hidden_state, expected) <= 2e-6


@all_families
def test_half_of_the_blocks_stay_dense(name: str) -> None:
    dense, inputs = dense_model(name), batch()
    expected = dense(**inputs).last_hidden_state
    model = MoTEModel(token_config(dense, mote_layers="every_other"), dense).eval()
    layers = model.backbone.get_submodule(ARCHITECTURES[name].layer_path)
    assert [isinstance(layer, TokenRoutedBlock) for layer in layers] == [False, True]
    out = model(**inputs, output_router_logits=True)
    assert difference(out.last_hidden_state, expected) <= 2e-6
    assert len(out.router_logits) == 1


@all_families
def test_parameter_counts(name: str) -> None:
    dense = dense_model(name)
    in_dense = sum(p.numel() for key, p in dense.named_parameters() if not key.startswith("pooler."))
    model = MoTEModel(token_config(dense, experts_per_token=3), dense)
    counts = mote.experts.parameter_counts(model)
    routers = 2 * 16 * 4
    one = counts["experts"]["a"]
    zeros = 2 * 2 * 32 if name == "gte" else 0  # the bias that only the other projection has
    assert counts["experts"] == dict.fromkeys(EXPERTS, one)
    assert counts["total"] == sum(p.numel() for p in model.parameters()) == counts["shared"] + 4 * one
    assert counts["shared"] + one == in_dense + routers + zeros
    assert counts["active"] == counts["shared"] + 3 * one


@all_families
def test_the_router_begins_small_and_follows_the_seed(name: str) -> None:
    weights = []
    for seed in (0, 0, 1):
        dense = dense_model(name)
        torch.manual_seed(seed)
        model = MoTEModel(token_config(dense), dense)
        weights.append(torch.cat([block.feed_forward.router.weight for block in blocks_of(model)]))
    assert difference(weights[0], weights[1]) == 0.0
    assert difference(weights[0], weights[2]) > 0.0
    assert 0.015 < weights[0].std() < 0.025  # initializer_range


def test_a_new_model_without_a_dense_one() -> None:
    config = CONFIG_MAPPING["bert"](vocab_size=60, **FAMILIES["bert"])
    model = MoTEModel(MoTEConfig(backbone_config=config, experts=EXPERTS, router="token")).eval()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model(**batch()).pooler_output.isfinite().all()


# Routing -------------------------------------------------------------------------------------------------------------


class IdentityLayer(nn.Module):
    """A dense layer whose feed-forward network is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(4, 4), "activation_fn": nn.Identity(), "fc2": nn.Linear(4, 4)})
        for linear in (self.mlp["fc1"], self.mlp["fc2"]):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalized", [True, False])
def test_a_token_gets_the_weighted_sum_of_its_best_experts(normalized: bool, implementation: str) -> None:
    config = MoTEConfig(
        experts=["a", "b", "c"], router="token", normalize_router=normalized, experts_implementation=implementation
    )
    feed_forward = TokenRoutedFeedForward(IdentityLayer(), ARCHITECTURES["jina_embeddings_v3"].feed_forward, config)
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


@all_families
def test_implementations_agree_with_the_reference(name: str) -> None:
    outputs, results = [], []
    model = trained(name, load_balancing=0.0)
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        model.zero_grad()
        out = model(**batch()).last_hidden_state
        out.square().sum().backward()
        outputs.append(out)
        results.append(relative(gradients(model)))
    assert outputs[0].abs().max() > 0.1
    for out, result in zip(outputs[1:], results[1:], strict=True):
        assert difference(out, outputs[0]) <= 1e-5
        same_gradients(result, results[0], 1e-5)


def test_the_implementation_is_the_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe

    used = []
    for name in ("grouped_mm", "batched_mm"):
        function = moe.ALL_EXPERTS_FUNCTIONS[name]
        monkeypatch.setitem(
            moe.ALL_EXPERTS_FUNCTIONS._local_mapping,
            name,
            lambda *args, name=name, function=function: used.append(name) or function(*args),
        )
    trained("bert").save_pretrained(tmp_path)
    for asked, expected in ((None, "grouped_mm"), *[(name, name) for name in IMPLEMENTATIONS]):
        kwargs = {} if asked is None else {"experts_implementation": asked}
        model = MoTEModel.from_pretrained(tmp_path, **kwargs)
        assert model.config._experts_implementation == expected
        used.clear()
        model(**batch())
        assert used == ([] if expected == "eager" else [expected] * 2)
    with pytest.raises(ValueError, match="experts_implementation"):
        MoTEModel.from_pretrained(tmp_path, experts_implementation="fastest")


@all_families
def test_padding_changes_nothing(name: str) -> None:
    model, inputs = trained(name), batch()
    with torch.no_grad():
        together = model(**inputs)
        for row in range(4):
            length = int(inputs["attention_mask"][row].sum())
            alone = {key: value[:, :length] for key, value in rows_of(inputs, row).items()}
            assert difference(together.pooler_output[row], model(**alone).pooler_output[0]) <= 2e-6


def test_a_task_is_not_needed_but_must_be_known() -> None:
    model, inputs = trained("bert"), batch()
    expected = model(**inputs).pooler_output
    assert difference(model(**inputs, task="b").pooler_output, expected) == 0.0
    assert difference(model(**inputs, task=["a", "b", "c", "d"]).pooler_output, expected) == 0.0
    assert difference(model(**inputs, task_ids=torch.tensor([0, 1, 2, 3])).pooler_output, expected) == 0.0
    with pytest.raises(ValueError, match="Unknown task 'e'"):
        model(**inputs, task="e")


@all_families
def test_hidden_states_and_router_logits(name: str) -> None:
    model, inputs = trained(name), batch()
    out = model(**inputs, output_hidden_states=True, output_router_logits=True)
    assert [tuple(state.shape) for state in out.hidden_states] == [(4, 9, 16)] * 3
    assert [tuple(logits.shape) for logits in out.router_logits] == [(4, 9, 4)] * 2
    assert model(**inputs).router_logits is None


def test_router_logits_are_those_of_the_routers() -> None:
    model, inputs = trained("bert"), batch()
    seen: list[torch.Tensor] = []
    for block in blocks_of(model):
        block.feed_forward.router.register_forward_hook(
            lambda module, args, out: seen.append(args[0] @ module.weight.T)
        )
    logits = model(**inputs, output_router_logits=True).router_logits
    for one, other in zip(logits, seen, strict=True):
        assert difference(one, other) <= 1e-6


def test_threads_do_not_meet() -> None:
    model = trained("bert")
    batches = [batch(seed=seed, rows=2 + seed % 3) for seed in range(6)]
    with torch.no_grad():
        serial = [model(**inputs, output_router_logits=True) for inputs in batches]
    wrong: list[int] = []

    def serve(thread: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                out = model(**batches[thread], output_router_logits=True)
                pairs = [(out.pooler_output, serial[thread].pooler_output)]
                pairs += list(zip(out.router_logits, serial[thread].router_logits, strict=True))
                if any(difference(one, other) != 0.0 for one, other in pairs):
                    wrong.append(thread)

    in_threads(6, serve)
    assert wrong == []


@all_families
def test_deepcopy_and_pickle(name: str) -> None:
    model, inputs = trained(name), batch()
    expected = model(**inputs).pooler_output
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert difference(copied(**inputs).pooler_output, expected) == 0.0
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
    assert difference(model(**inputs).pooler_output, expected) == 0.0


@all_families
def test_bfloat16(name: str) -> None:
    dense, inputs = dense_model(name).to(torch.bfloat16), batch()
    with torch.no_grad():
        expected = dense(**inputs).last_hidden_state
        out = MoTEModel(token_config(dense), dense).eval()(**inputs).last_hidden_state
    assert out.dtype == torch.bfloat16
    assert difference(out.float(), expected.float()) <= 0.05


@pytest.mark.parametrize(("name", "one_graph"), [("nomic_bert", True), ("bert", False)])
def test_compiled_equals_eager(name: str, one_graph: bool) -> None:
    model, inputs = trained(name), batch()
    compiled = torch.compile(model, fullgraph=one_graph, backend="aot_eager")
    with torch.no_grad():
        assert difference(compiled(**inputs).pooler_output, model(**inputs).pooler_output) <= 1e-6


# The load-balancing loss ---------------------------------------------------------------------------------------------


def test_the_loss_of_three_tokens_by_hand() -> None:
    probabilities = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.1, 0.4], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]])
    mask = torch.tensor([[1, 1, 1, 0]])
    # two experts per token: (a, b), (a, c), (b, c); six choices, two on each expert
    # mean probabilities 1.4/3, 0.8/3, 0.8/3
    assert load_balancing_loss([probabilities.log()], mask, 2).item() == pytest.approx(1 / 3)
    # one: a, a, b
    by_hand = (2 / 3) * (1.4 / 3) + (1 / 3) * (0.8 / 3)
    assert load_balancing_loss([probabilities.log()], mask, 1).item() == pytest.approx(by_hand)
    assert load_balancing_loss([probabilities.log()] * 2, mask.bool(), 1).item() == pytest.approx(2 * by_hand)
    unmasked = (2 / 4) * (1.5 / 4) + (1 / 4) * (0.9 / 4) + (1 / 4) * (1.6 / 4)
    assert load_balancing_loss([probabilities.log()], None, 1).item() == pytest.approx(unmasked)


def test_the_loss_of_nothing_but_padding() -> None:
    assert load_balancing_loss([torch.randn(2, 3, 4)], torch.zeros(2, 3), 2).item() == 0.0


@pytest.mark.parametrize("balance_share", [None, 0.125])
@all_families
def test_the_loss_reaches_any_training(name: str, balance_share: float | None) -> None:
    """Its gradient is the one that plain autograd gives to the formula, padding left out."""
    model, inputs = without_dropout(trained(name, load_balancing=3.0)), batch()
    by_itself = backward(model, inputs, **({} if balance_share is None else {"balance_share": balance_share}))
    by_itself = {key: gradient.clone() for key, gradient in by_itself.items()}

    without = copy.deepcopy(model)
    without.config.load_balancing = 0.0
    out = without(**inputs, output_router_logits=True)
    lengths = inputs["attention_mask"].sum(dim=1)
    loss = torch.tensor(0.0)
    for logits in out.router_logits:  # the formula once more, token by token
        tokens = torch.cat([logits[row, : lengths[row]] for row in range(4)]).softmax(dim=-1)  # [N, E]
        for expert in range(4):
            chosen = [expert in token.topk(2).indices for token in tokens]
            loss = loss + sum(chosen) / (2 * len(tokens)) * tokens[:, expert].mean()
    weight = 3.0 * (1.0 if balance_share is None else 4 * 0.125)
    (out.pooler_output.square().sum() + weight * loss).backward()
    same_gradients(by_itself, gradients(without), 1e-4)
    plain = backward(without, inputs)
    assert max(difference(by_itself[key], plain[key]) for key in plain if "router" in key) > 1e-3


def test_the_value_of_the_loss_from_the_outside() -> None:
    model, inputs = trained("bert"), batch()
    logits = model(**inputs, output_router_logits=True).router_logits
    value = load_balancing_loss(logits, inputs["attention_mask"], model.config.experts_per_token)
    assert 2 / 4 < value.item() < 2 / 2  # between balance and always the same two experts, in two blocks
    changed = [logit + 5.0 * (1 - inputs["attention_mask"]).unsqueeze(-1) * torch.randn(4) for logit in logits]
    assert load_balancing_loss(changed, inputs["attention_mask"], 2).item() == pytest.approx(value.item())


def test_shares_add_up_to_one_loss() -> None:
    """Two halves of a step, each told its share, push as hard as one pass does."""
    model = without_dropout(trained("bert", load_balancing=3.0, mote_layers=[0]))
    inputs = rows_of(batch(), 0, 0, 0, 0)  # every half has the same statistics

    def of_the_loss(parts: list[dict[str, torch.Tensor]], **kwargs: Any) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            (model(**part, **kwargs).pooler_output * 0.0).sum().backward()
        return blocks_of(model)[0].feed_forward.router.weight.grad.clone()

    whole = of_the_loss([inputs])
    assert whole.abs().max() > 1e-3
    halves = [rows_of(inputs, 0, 1), rows_of(inputs, 2, 3)]
    assert difference(of_the_loss(halves, balance_share=1 / 4), whole) <= 1e-6
    assert difference(of_the_loss(halves), 2 * whole) <= 1e-6


def test_rows_laid_end_to_end_count_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("bert")
    weights: list[float] = []
    feed_forward = blocks_of(model)[0].feed_forward
    feed_forward.register_forward_pre_hook(
        lambda module, args, kwargs: weights.append(kwargs["routing"].loss_weight), with_kwargs=True
    )
    model(input_ids=torch.tensor([[5, 6, 7, 8]]), balance_share=0.5, cu_seq_lens_q=torch.tensor([0, 1, 2, 4]))
    assert weights == [pytest.approx(0.01 * 3 * 0.5)]


def test_no_loss_outside_of_training() -> None:
    model, inputs = trained("bert", load_balancing=3.0), batch()
    expected = {key: gradient.clone() for key, gradient in backward(model.eval(), inputs).items()}
    model.config.load_balancing = 0.0
    same_gradients(backward(model, inputs), expected, 0.0)


@pytest.mark.parametrize("reentrant", [True, False])
@all_families
def test_gradients_with_checkpointing_are_the_same(name: str, reentrant: bool) -> None:
    if name in NOT_CHECKPOINTED:
        pytest.skip("not checkpointed by transformers itself")
    plain, inputs = trained(name, load_balancing=3.0).train(), batch()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls: list[int] = []
    blocks_of(checkpointed)[0].feed_forward.register_forward_pre_hook(lambda *args: calls.append(1))
    results = []
    for model in (plain, checkpointed):
        torch.manual_seed(0)  # the same dropout
        results.append(backward(model, inputs))
    assert len(calls) == 2  # forward, and again
    same_gradients(*results, 1e-7)
    assert max(gradient.abs().max().item() for key, gradient in results[0].items() if "router" in key) > 1e-3


def test_a_network_that_the_dense_layer_would_call_in_chunks() -> None:
    model, inputs = without_dropout(trained("bert", load_balancing=3.0)), batch()
    dense = dense_model("bert", chunk_size_feed_forward=3)
    chunked = without_dropout(MoTEModel(token_config(dense, load_balancing=3.0), dense))
    chunked.load_state_dict(model.state_dict())
    same_gradients(backward(chunked, inputs), backward(model, inputs), 0.0)


@pytest.mark.parametrize("name", ["nomic_bert", "bert"])
def test_mixed_precision(name: str) -> None:
    """As trainers do it with `bf16=True`: weights in float32, products in bfloat16."""
    model, inputs = without_dropout(trained(name)), batch()
    expected = relative(backward(model, inputs))
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            found = backward(model, inputs)
        assert max(difference(gradient, expected[key]) for key, gradient in relative(found).items()) <= 0.1


def test_every_expert_has_a_gradient() -> None:
    """Zeros where no token came, not None: data-parallel training waits for all parameters."""
    model = trained("bert")
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        one_token = {"input_ids": torch.tensor([[7]])}
        model.zero_grad()
        model(**one_token).pooler_output.sum().backward()
        up = blocks_of(model)[0].feed_forward.experts.up_proj.grad
        assert [bool(up[expert].any()) for expert in range(4)].count(True) == 2
        assert all(parameter.grad is not None for parameter in model.parameters())


# Saving and loading --------------------------------------------------------------------------------------------------


@all_families
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, inputs = trained(name, experts_per_token=3, normalize_router=False, load_balancing=0.5), batch()
    model.save_pretrained(tmp_path)
    loaded = MoTEModel.from_pretrained(tmp_path, attn_implementation=model.backbone.config._attn_implementation)
    with torch.no_grad():
        assert difference(loaded(**inputs).last_hidden_state, model(**inputs).last_hidden_state) == 0.0
    config = loaded.config
    assert (config.router, config.experts_per_token, config.normalize_router) == ("token", 3, False)
    assert config.load_balancing == 0.5


@pytest.mark.parametrize(("name", "layers"), [("nomic_bert", "backbone.layers"), ("bert", "backbone.encoder.layer")])
def test_keys_on_disk(name: str, layers: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    trained(name, mote_layers=[1]).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        on_disk = list(file.keys())
    keys = {key.removeprefix(layers + ".1.") for key in on_disk if key.startswith(layers + ".1.")}
    norm = ("weight", "bias")
    if name == "nomic_bert":
        shared = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
        shared |= {f"post_{part}_layernorm.{kind}" for part in ("attention", "mlp") for kind in norm}
        experts = {"gate_up_proj", "down_proj"}
    else:
        linears = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
        shared = {f"attention.{part}.{kind}" for part in linears for kind in norm}
        shared |= {f"output.LayerNorm.{kind}" for kind in norm}
        experts = {"up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
    assert keys == (
        {f"shared.{key}" for key in shared}
        | {f"feed_forward.experts.{key}" for key in experts}
        | {"feed_forward.router.weight"}
    )


@pytest.mark.parametrize(("saved", "asked"), [("task", "token"), ("token", "task")])
def test_a_checkpoint_of_the_other_router(saved: str, asked: str, tmp_path: Path) -> None:
    fresh("bert", router=saved).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"do not match its config, whose router is '{asked}'.*missing keys"):
        MoTEModel.from_pretrained(tmp_path, router=asked)


def test_blocks_on_disk(tmp_path: Path) -> None:
    model, inputs = trained("bert"), batch()
    model.save_pretrained(tmp_path / "model")
    device_map = {"backbone.embeddings": "cpu", "backbone.encoder.layer.0": "cpu", "backbone.encoder.layer.1": "disk"}
    loaded = MoTEModel.from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded")
    with torch.no_grad():
        out = loaded(**inputs, output_router_logits=True)
        assert difference(out.pooler_output, model(**inputs).pooler_output) == 0.0
    assert len(out.router_logits) == 2


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router": "tokens"}, "Unknown router 'tokens'. Did you mean 'token'.*'task', 'token'"),
        (
            {"experts_per_token": 0},
            "experts_per_token must be a whole number from 1 to 4, the number of experts, not 0",
        ),
        ({"experts_per_token": 5}, "not 5"),
        ({"experts_per_token": 1.5}, "not 1.5"),
        ({"experts_per_token": True}, "not True"),
        ({"experts": ["a"]}, "from 1 to 1, the number of experts, not 2"),
        ({"load_balancing": -0.1}, "load_balancing must be a number, 0 or more, not -0.1"),
        ({"load_balancing": float("nan")}, "not nan"),
        ({"load_balancing": "much"}, "not 'much'"),
        ({"normalize_router": 1}, "normalize_router must be True or False, not 1"),
        ({"loaded_experts": ["a"]}, "With a token router every text needs all experts"),
        ({"layer_path": "layers", "shared_modules": ["mlp"]}, "cannot describe an architecture to a token router"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoTEConfig(**{"experts": EXPERTS, "router": "token", **settings})


def test_settings_of_a_token_router_do_not_matter_to_tasks() -> None:
    assert MoTEConfig(experts=["a"]).router == "task"  # though experts_per_token is 2


def test_one_instruction_for_tasks_of_two_experts() -> None:
    same = {"experts": ["a", "b"], "instructions": {"a": "text: ", "b": "text: "}}
    assert MoTEConfig(**same, router="token").instruction_of("b") == "text: "
    with pytest.raises(ValueError, match="already stands for the expert 'a'"):
        MoTEConfig(**same)


def test_an_architecture_without_a_row() -> None:
    config = CONFIG_MAPPING["albert"]()
    with pytest.raises(ValueError, match=r"feed-forward network of the architecture 'albert'.*Available: 'nomic_bert'"):
        MoTEModel(MoTEConfig(backbone_config=config, router="token"))


def test_every_supported_architecture_has_a_row() -> None:
    assert all(row.feed_forward for row in ARCHITECTURES.values())


def test_experts_cannot_be_selected(tmp_path: Path) -> None:
    trained("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="every text needs all experts: load the model without `experts=`"):
        MoTEModel.from_pretrained(tmp_path, experts=["a"])


def test_what_only_a_token_router_has() -> None:
    model = fresh("bert", router="task")
    for asked in ({"output_router_logits": True}, {"balance_share": 0.1}):
        with pytest.raises(ValueError, match="this model routes by task"):
            model(**batch(), task="a", **asked)


def test_a_backbone_that_does_not_hand_arguments_down() -> None:
    with pytest.raises(RuntimeError, match="not told its routing"):
        fresh("bert").backbone(**batch())


# Sentence-Transformers and the command -------------------------------------------------------------------------------

TEXTS = ["how do whales breathe", "Whales come up for air.", "a recipe for bread that needs no kneading", "bread"]


@pytest.fixture(scope="module")
def upcycled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token") / "small-token"
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


def test_the_folder_of_an_upcycled_encoder(upcycled_folder: Path) -> None:
    assert "token_routing_mote.py" in files_in(upcycled_folder)
    record = read_json(upcycled_folder / "upcycling.json")
    assert record["arguments"]["router"] == "token"
    assert record["command"].endswith("--routing token")
    card = (upcycled_folder / "README.md").read_text(encoding="utf-8")
    assert "sends each token through 2 of them" in card
    assert "A text gets the embedding that the dense model gives it" in card
    assert "expert of its task" not in card
    assert "task=" not in card


def test_auto_model(trained_folder: Path) -> None:
    loaded, own = (
        AutoModel.from_pretrained(trained_folder, trust_remote_code=True),
        MoTEModel.from_pretrained(trained_folder),
    )
    inputs = batch()
    with torch.no_grad():
        assert difference(loaded(**inputs).last_hidden_state, own(**inputs).last_hidden_state) == 0.0


def test_encode(trained_folder: Path) -> None:
    model = sentence_transformer(trained_folder)
    mote = MoTEModel.from_pretrained(trained_folder)

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


def test_cached_loss_equals_the_plain_one(trained_folder: Path) -> None:
    from sentence_transformers.sentence_transformer import losses

    results = []
    for cached in (False, True):
        model = sentence_transformer(trained_folder, load_balancing=0.0)
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


@pytest.mark.parametrize("cached", [False, True])
def test_the_loss_reaches_an_unknowing_training(trained_folder: Path, cached: bool) -> None:
    """A loss that gives next to no gradient: what moves the router is the load balancing, as `balance_share` says."""
    from sentence_transformers.sentence_transformer import losses

    results = []
    for factor, share in ((1.0, 1 / 8), (2.0, 1 / 16), (1.0, None), (0.0, None)):
        model = sentence_transformer(trained_folder, load_balancing=factor)
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


def test_the_trainer_as_it_is(trained_folder: Path, tmp_path: Path) -> None:
    """Real steps of the unmodified trainer: a strong factor balances what a factor of zero leaves as it is."""
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    pairs = datasets.Dataset.from_dict({"anchor": TEXTS * 4, "positive": TEXTS[::-1] * 4})
    after = []
    for factor in (0.0, 100.0):
        model = sentence_transformer(trained_folder, load_balancing=factor)
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
    assert after[1] < 0.3 < 0.35 < after[0]
    assert after[1] >= 0.25 - 1e-3


def test_the_plan(tmp_path: Path) -> None:
    def plan(**settings: Any) -> str:
        return str(plan_upcycling(str(SMALL_ENCODER), tmp_path / "out", router="token", **settings))

    assert "each token through 2 of 4 experts, with weights that sum to 1; load balancing 0.01" in plan()
    assert "with the router's probabilities as weights" in plan(normalize_router=False, experts_per_token=1)
    assert "these are all 1, and the router learns to balance alone" in plan(experts_per_token=1)
    counts = plan_upcycling(str(SMALL_ENCODER), router="token", experts_per_token=3).counts
    assert counts["active"] == counts["shared"] + 3 * counts["experts"]["clustering"]


def test_the_command_written_down_makes_the_same_model(tmp_path: Path) -> None:
    import shlex

    settings: dict[str, Any] = {
        "router": "token", "experts_per_token": 3, "normalize_router": False, "load_balancing": 0.2
    }  # fmt: skip
    out = upcycle(str(SMALL_ENCODER), tmp_path / "one", **settings)
    words = shlex.split(read_json(out / "upcycling.json")["command"])[1:]
    words[words.index("--src") + 1], words[words.index("--out") + 1] = str(SMALL_ENCODER), str(tmp_path / "other")
    assert main(words) == 0
    for folder in (out, tmp_path / "other"):
        config = read_json(folder / "config.json")
        assert {name: config[name] for name in settings} == settings


def test_a_wrong_setting_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["upcycle", "--src", str(SMALL_ENCODER), "--out", str(tmp_path / "out"), "--routing", "token"]
    assert main([*words, "--num-experts-per-tok", "9"]) == 1
    assert "from 1 to 4, the number of experts, not 9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
