"""The trainer's arguments, and settings that are refused before training."""

import re
from pathlib import Path

import pytest
from helpers.runs import overrides, plan
from sentence_transformers import SentenceTransformerTrainingArguments

from mote.training.recipe import load_recipe
from mote.training.train import TrainingRun, train
from mote.training.trainer_settings import TrainingSettings


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("mote", "tasks.retrieval.anchor=search_qury", r"Unknown task 'search_qury'. Did you mean 'search_query'"),
        ("mote", "tasks.retrieval.datasets=[retrieval/arxive]", r"arxive"),
        ("mote", "model.source=/nowhere", r"nowhere"),
        ("mote", "tasks.retrieval.loss=InfoNCELos", r"unknown loss 'InfoNCELos'"),
        ("mote", "training.load_best_model_at_end=true", r"(?s)load_best_model_at_end requires .*strategy: \S*NO"),
        ("mote", "training.adam_beta2=x", r"adam_beta2: Input should be a valid number, .*, got 'x'"),
        ("mote", "model.layers=[99]", r"99"),
        ("mote", "model.max_length=513", r"model.max_length is 513, and .* for 512 tokens"),
        ("em", "model.max_length=513", r"model.max_length is 513, and .* for 512 tokens"),
        ("mote", "training.start_weight={search: 0.5}", r"Unknown part of the model: 'search'\..*'shared'"),
        ("mote", "model.experts=[search_query]", r"Unknown task 'search_document'"),
        ("ic", "model.layers=[0]", r"layers: for models with experts"),
        ("ic", "training.start_weight={shared: 0.25}", r"start_weight: .* 'dense' has no task expert"),
        ("tlr", "training.only_experts=[clustering]", r"only_experts: .* 'token_routed' has no task experts"),
        ("task-lora", "training.peft.base_dtype=bfloat16", "set training.bf16=true"),
        ("task-lora", "training.start_weight=0.5", "for weaker adapters, lower training.peft.alpha"),
        ("task-lora", "training.peft.merge=false", "or upcycle it first"),
        ("tlr", "training.peft={targets: experts}", "stacked weights"),
    ],
)
def test_invalid_settings(recipe: str, override: str, message: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    for run_or_plan in (train, plan):
        with pytest.raises((ValueError, OSError), match=message):
            run_or_plan(recipe, overrides(tiny, data, tmp_path / "run", override))
        assert not (tmp_path / "run").exists()  # a run that could not start leaves nothing


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
