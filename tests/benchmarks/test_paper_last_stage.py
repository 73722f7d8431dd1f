"""benchmarks.paper: a last stage of training, in which a model learns a teacher's embeddings."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.paths import SMALL_ENCODER

from benchmarks.paper import experiments, improvements, runs
from mote.checkpoints.reading import open_checkpoint, open_mote
from mote.training.names import names_of
from mote.training.recipe import Recipe

StagesOf = Callable[[str], list[Recipe]]


@pytest.fixture
def stages_of(trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagesOf:
    """Return the function that gives the recipes of all stages of a variant; each result is the trained model."""

    def stages_of(variant: str) -> list[Recipe]:
        stages: list[Recipe] = []
        monkeypatch.setattr(runs, "trained", lambda recipe, *_: stages.append(recipe) or trained_folder)
        given = runs.Runs(experiments.SCALES["smoke"], str(SMALL_ENCODER), "DATA", tmp_path, teacher="TEACHER")
        assert given.model(variant, 42) == trained_folder
        return stages

    monkeypatch.setattr(runs.Runs, "source_of", lambda *_: str(SMALL_ENCODER))
    monkeypatch.setattr(runs.Runs, "prepared", lambda _: tmp_path)
    monkeypatch.setattr(runs, "digest_of", lambda _: "DIGEST")
    monkeypatch.setattr(improvements, "MATCHING", "classification")  # the expert of the trained model
    return stages_of


def test_an_expert_is_distilled_last_and_alone(stages_of: StagesOf) -> None:
    before, last = stages_of("mote+five-tasks+distilled+epochs-0.9+matching-distilled")
    assert improvements.variant_of("mote+matching-distilled").has_teacher
    assert not improvements.variant_of("mote+matching-distilled+to-mean-0.25").last_stage
    names_of(last, open_checkpoint(last.model.source))  # it suits what it starts from
    assert (before.training.num_train_epochs, before.model.source) == (0.9, str(SMALL_ENCODER))
    config = open_mote(last.model.source).config
    assert {one for one, expert in config.tasks.items() if expert == "distilled"} >= {"distilled", *improvements.UNSEEN}
    assert last.training.only_experts == ["distilled"]
    ((name, task),) = last.tasks.items()
    assert (name, task.anchor, task.positive) == ("paraphrases", "sts", "sts")
    assert (task.loss, task.teacher and task.teacher.source) == ("EmbedDistillLoss", "TEACHER")


def test_summarization_gets_an_expert_that_is_distilled_last(stages_of: StagesOf) -> None:
    last = stages_of("mote+five-tasks+distilled+summaries-distilled")[-1]
    names_of(last, open_checkpoint(last.model.source))
    config = open_mote(last.model.source).config
    assert [task for task, expert in config.tasks.items() if expert == "summarization"] == ["summarization"]
    assert config.instruction_of("summarization") == "summarization: "
    assert config.tasks["sts"] == "classification"
    assert last.training.only_experts == ["summarization"]
    assert last.training.learning_rate == 1.6e-3
    ((_, task),) = last.tasks.items()
    assert (task.anchor, task.positive, task.loss) == ("summarization", "summarization", "EmbedDistillLoss")


def test_a_dense_model_is_distilled_last_as_a_whole(stages_of: StagesOf, trained_folder: Path) -> None:
    before, last = stages_of("ic+epochs-1.1+distilled-last")
    assert (before.training.num_train_epochs, last.training.num_train_epochs) == (1.1, 0.1)
    assert (last.model.source, last.model.kind) == (str(trained_folder), "dense")
    assert not last.training.only_experts
    assert last.tasks.keys() == before.tasks.keys()
    assert {(task.loss, task.teacher and task.teacher.source) for task in last.tasks.values()} == {
        ("EmbedDistillLoss", "TEACHER")
    }
