"""The model that a recipe starts from: all its weights, of the recipe's kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, published_nomic, trusted
from helpers.runs import overrides

from mote import upcycle
from mote.checkpoints.models import load_dense, positions_of
from mote.checkpoints.plain import learned_positions
from mote.checkpoints.reading import open_checkpoint, open_dense
from mote.checkpoints.st_settings import write_instruction_pooling
from mote.training.losses import LoadBalancedLoss
from mote.training.model import build_model, names_of
from mote.training.recipe import load_recipe
from mote.training.run_folder import START_FOLDER
from mote.training.train import TrainingRun, train


def test_a_dense_model_pools_as_the_recipe_says(dense: Path, tmp_path: Path) -> None:
    recipe = load_recipe("ic", [f"model.source={dense}", "data.folder=examples/data", "model.pooling=last_token"])
    model, _ = build_model(recipe, open_dense(str(dense)), tmp_path)
    assert model[1].pooling_mode == "lasttoken"


@pytest.mark.parametrize("prefix", [True, False])
def test_nomics_published_formats_start_with_their_weights(prefix: bool, tmp_path: Path) -> None:
    source = published_nomic(tmp_path / "nomic", prefix)
    recipe = load_recipe("ic", [f"model.source={source}", "data.folder=examples/data"])
    model, names = build_model(recipe, open_checkpoint(str(source)), tmp_path / "run")
    expected = load_dense(open_dense(str(source)))[0].state_dict()
    loaded = model[0].model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    assert names.instruction_of("clustering") == model.prompts["clustering"] == "clustering: "
    assert (tmp_path / "run" / START_FOLDER).is_dir()


@pytest.mark.parametrize(("name", "positions"), [("bert", 40), ("roberta", 39), ("modernbert", None), ("qwen3", None)])
def test_learned_positions_are_counted_without_weights(name: str, positions: int | None, tmp_path: Path) -> None:
    """RoBERTa's begin after the padding index, here 0."""
    source = open_checkpoint(str(dense_checkpoint(tmp_path / name, name, max_position_embeddings=40)))
    assert positions_of(source) == learned_positions(load_dense(source)[0]) == positions
    mote = open_checkpoint(str(upcycle(source, tmp_path / "mote")))
    assert positions_of(mote) == positions


ROUTED = ("model.kind=token_routed", "model.layers=[1]")


def test_sources_that_do_not_suit_the_recipe(request: pytest.FixtureRequest) -> None:
    cases: list[tuple[str, str, tuple[str, ...], str]] = [
        ("ic", "fresh_folder", (), r"is already a MoTE, and differs from the recipe in model.kind"),
        ("mote", "token_routed", (), r"model.kind, model.layers\. It is of the kind 'token_routed', .* \[1\]"),
        ("mote-every-other", "fresh_folder", (), r"differs .* in model.layers"),
        ("mote-objectives", "fresh_folder", (), r"differs from the recipe in model.experts, model.tasks"),
        ("mote", "token_routed", (*ROUTED, "model.num_experts_per_tok=3"), r"differs .* in model.num_experts_per_tok"),
        ("mote", "upcycled", ("model.num_experts=3",), r"is already a MoTE, and differs .* in model.num_experts"),
        ("mote", "upcycled", ("model.router_aux_loss_coef=0.1",), r"differs .* in model.router_aux_loss_coef"),
        ("mote", "dense", ("model.num_experts=3", "model.router_aux_loss_coef=0.1"), "num_experts"),
        ("mote", "upcycled", ("model.instructions=false",), r"model.instructions is false, but .* remove them first"),
    ]
    for recipe, source, more, message in cases:
        folder = request.getfixturevalue(source)
        with pytest.raises(ValueError, match=message):
            names_of(load_recipe(recipe, [f"model.source={folder}", *more]), open_checkpoint(str(folder)))


@pytest.mark.parametrize(("recipe", "kind"), [("mote", "included"), ("mote", "excluded"), ("ic", "excluded")])
def test_code_of_a_folder_runs_only_if_it_is_trusted(recipe: str, kind: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={"normalize": True})
    if recipe == "ic":
        write_instruction_pooling(source, kind)
    else:
        source = upcycle(str(source), tmp_path / "mote", instruction_pooling=kind)
    for file in source.glob("*.py"):
        file.write_text("raise RuntimeError('code of the folder')")
    settings = [f"model.source={source}"]
    trusting = load_recipe(recipe, [*settings, "model.trust_remote_code=true"])
    build_model(load_recipe(recipe, settings), open_checkpoint(str(source)), tmp_path)
    with pytest.raises(RuntimeError, match="code of the folder"):
        build_model(trusting, open_checkpoint(str(source)), tmp_path / "trusting")
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["user/evil--own.Tokenizer", None]})
    with pytest.raises(ValueError, match=r"code of its own \(user/evil--own.Tokenizer\): .*trust_remote_code=true"):
        names_of(load_recipe(recipe, settings), open_checkpoint(str(source)))


@pytest.mark.parametrize("name", ["ic", "mote"])
def test_without_dropout_training_draws_no_random_numbers(name: str, dense: Path, tmp_path: Path) -> None:
    def passes(*more: str) -> list[torch.Tensor]:
        settings = [f"model.source={dense}", "data.folder=examples/data", *more]
        model, _ = build_model(load_recipe(name, settings), open_checkpoint(str(dense)), tmp_path / "run")
        inputs: dict[str, Any] = {
            "input_ids": torch.arange(5, 13)[None],
            "attention_mask": torch.ones(1, 8, dtype=torch.long),
        }
        network: Any = model[0].model.train()
        inputs |= {"task": "clustering"} if name == "mote" else {}
        return [network(**inputs).last_hidden_state for _ in range(2)]

    first, second = passes()
    assert not torch.equal(first, second)
    first, second = passes("model.dropout=0")
    assert torch.equal(first, second)


@pytest.mark.long
def test_task_experts_that_are_token_routed(trained_hierarchical: Path, data: Path, tmp_path: Path) -> None:
    settings = overrides(trained_hierarchical, data, tmp_path / "run", "training.mini_batch_size=null")
    ready = TrainingRun("mote", settings).prepare()
    assert {type(loss.loss) for loss in ready.trainer.loss.values()} == {LoadBalancedLoss}
    model = ready.model[0].model
    shares: list[float] = []
    model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: (
            shares.append(kwargs["balance_share"] * len(kwargs["input_ids"])) if module.training else None
        ),
        with_kwargs=True,
    )
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    ready.train()
    assert shares
    assert sum(shares) == pytest.approx(2)  # steps
    changed = {key for key, weight in model.state_dict().items() if not torch.equal(weight, before[key])}
    trained = {key.split(".experts.")[1].split(".")[0] for key in changed if "router" in key}
    assert trained == {"classification"}  # the task of both steps
    ready.finish({})
    loaded = trusted(tmp_path / "run" / "model")
    assert loaded[0].model.config.model_type == "mote_hierarchical"
    assert all(torch.equal(weight, loaded[0].model.state_dict()[key]) for key, weight in model.state_dict().items())
    with pytest.raises(ValueError, match=r"load-balancing loss of a token router .* would be lost: set training.bf16"):
        train("mote", overrides(trained_hierarchical, data, tmp_path / "fp16", "training.fp16=true"))


def test_the_recipe_decides_on_the_load_balancing_of_a_token_routed_source(token_routed: Path, tmp_path: Path) -> None:
    def built(*more: str) -> Any:
        settings = [*ROUTED, f"model.source={token_routed}", *more]
        source = open_checkpoint(str(token_routed))
        return build_model(load_recipe("mote", settings), source, tmp_path / "run")[0][0].model.config

    before = built().router_aux_loss_coef
    assert before > 0
    assert built("model.router_aux_loss_coef=0").router_aux_loss_coef == 0
