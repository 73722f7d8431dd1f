"""The trainer's arguments, and settings that are refused before training."""

import re
from pathlib import Path

import pytest
from helpers.paths import SMALL_ENCODER
from helpers.runs import overrides
from sentence_transformers import SentenceTransformerTrainingArguments

from mote.checkpoints.reading import open_checkpoint
from mote.training.model import names_of
from mote.training.recipe import load_recipe
from mote.training.train import TrainingRun, plan, train
from mote.training.trainer_settings import TrainingSettings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.retrieval.anchor=search_qury", r"Unknown task 'search_qury'. Did you mean 'search_query'"),
        ("tasks.retrieval.datasets=[retrieval/arxive]", r"arxive"),
        ("data.folder=/nowhere", r"nowhere"),
        ("model.source=/nowhere", r"nowhere"),
        ("tasks.retrieval.loss=InfoNCELos", r"unknown loss 'InfoNCELos'"),
        ("training.optim=adm", r"adm"),
        ("training.load_best_model_at_end=true", r"(?s)load_best_model_at_end requires .*Evaluation strategy: \S*NO"),
        ("training.lr_scheduler_type=straight", r"straight"),
        ("training.adam_beta2=x", r"adam_beta2: Input should be a valid number, .*, got 'x'"),
        ("model.layers=[99]", r"99"),
        ("training.start_weight={search: 0.5}", r"Unknown part of the model: 'search'\..*'shared'"),
        ("model.experts=[search_query]", r"Unknown task 'search_document'"),
    ],
)
def test_invalid_settings(override: str, message: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    for run_or_plan in (train, plan):
        with pytest.raises((ValueError, OSError), match=message):
            run_or_plan("mote", overrides(tiny, data, tmp_path / "run", override))
        assert not (tmp_path / "run").exists()  # a run that could not start leaves nothing


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("ic", ["model.pooling=latent_attention", "model.layers=[0]"], r"layers, pooling: for models with experts"),
        (
            "ic",
            ["training.start_weight={shared: 0.25}"],
            "start_weight: a model of the kind 'dense' has no task expert",
        ),
        ("tlr", ["training.only_experts=[clustering]"], r"of the kind 'token_routed' has no task experts"),
    ],
)
def test_settings_that_do_not_suit_the_model(
    recipe: str, more: list[str], message: str, tiny: Path, data: Path, tmp_path: Path
) -> None:
    for run_or_plan in (train, plan):
        with pytest.raises(ValueError, match=message):
            run_or_plan(recipe, overrides(tiny, data, tmp_path / "run", *more))


def test_the_best_model_is_that_of_the_best_score(tiny: Path, data: Path, tmp_path: Path) -> None:
    best = ("training.eval_steps=1", "training.load_best_model_at_end=true")
    recipe = load_recipe("mote", overrides(tiny, data, tmp_path / "run", *best))
    run = TrainingRun(recipe).prepare()
    run.train()
    state = run.trainer.state
    assert run.trainer.args.metric_for_best_model == "validation_mean"
    assert state.best_metric == max(
        line["eval_validation_mean"] for line in state.log_history if "eval_runtime" in line
    )


@pytest.mark.long
def test_accelerate_and_the_recipe_agree_on_the_precision(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="launched with mixed precision bf16, but the recipe says no"):
        train("mote", overrides(tiny, data, tmp_path / "run"))
    train("mote", overrides(tiny, data, tmp_path / "run", "training.bf16=true"))


def test_reserved_arguments_are_refused_with_what_to_set_instead() -> None:
    known = SentenceTransformerTrainingArguments.__dataclass_fields__
    assert TrainingSettings.RESERVED.keys() <= {*known, "warmup_ratio"}
    for name, instead in TrainingSettings.RESERVED.items():
        with pytest.raises(ValueError, match=f"'{name}' cannot be set here: {re.escape(instead)}"):
            load_recipe("mote", [f"training.{name}=1"])


def test_a_token_router_in_fp16_is_refused() -> None:
    source = open_checkpoint(str(SMALL_ENCODER))
    with pytest.raises(ValueError, match="load-balancing loss of a token router is not scaled"):
        names_of(load_recipe("tlr", ["training.fp16=true"]), source)
    names_of(load_recipe("tlr", ["training.fp16=true", "model.router_aux_loss_coef=0"]), source)
