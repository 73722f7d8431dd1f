"""Training and scoring of the paper's models: their recipes, and the whole command."""

import pytest

from research.experiments import BEST, SCALES, VARIANTS, recipe_of
from research.run import Experiment, main, parse
from research.scores import read


@pytest.mark.parametrize("name", SCALES)
def test_every_variant_is_a_valid_recipe(name: str) -> None:
    scale = SCALES[name]
    for variant in scale.variants.values():
        recipe = recipe_of(scale, variant, "SOURCE", "DATA", 7)
        assert recipe.training.seed == 7
        assert (recipe.model.source, recipe.data.folder) == ("SOURCE", "DATA")
        assert variant.average_of is None or variant.average_of in scale.variants


def test_settings_of_variants() -> None:
    medium, best = SCALES["medium"], SCALES["best"]
    recipe = recipe_of(medium, VARIANTS["sem-retrieval"], "S", "D", 42)
    assert [one.max_length for one in recipe.tasks["retrieval"].datasets] == [64]  # texts are cut in training alone
    assert recipe.model.max_length == 128
    assert recipe_of(medium, VARIANTS["task-lora"], "S", "D", 42).training.learning_rate == pytest.approx(4e-3)
    separate = [recipe_of(best, BEST[f"sem-{task}"], "S", "D", 42) for task in ("retrieval", "classification")]
    assert [list(one.tasks) for one in separate] == [["retrieval", "paraphrases"], ["classification"]]
    for name in ("ic", "mote", "tlr", "task-lora"):
        recipe = recipe_of(best, BEST[name], "S", "D", 42)
        assert {task: one.batches for task, one in recipe.tasks.items()} == dict.fromkeys(recipe.tasks, "homogeneous")
        assert [recipe.tasks[task].weight for task in ("classification", "clustering")] == [2, 2]
        assert recipe.training.num_train_epochs == 1.1


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(["mote", "sem", "--scale", "best", "--data", "DATA", "--out", "OUT", "training.max_steps=1"])
    assert given.variants == ["mote", "sem-retrieval", "sem-classification", "sem-clustering"]
    assert (given.changes, given.seeds) == (("training.max_steps=1",), (42, 43, 44))
    for words, said in {
        ("mot", "--scale", "smoke"): "unknown variant 'mot'; known: start, em,",
        ("mote", "--scale", "small"): "--scale small needs --data",
    }.items():
        with pytest.raises(SystemExit):
            parse([*words, "--out", "OUT"])
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_models_are_trained_scored_and_stored(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path_factory.mktemp("research")
    names = ["start", "em", "ic", "mote", "mote-average", "tlr", "task-lora", "sem"]
    words = [*names, "--scale", "smoke", "--out", str(out), "training.max_steps=1"]
    main(words)
    printed = capsys.readouterr().out
    assert "| mote over ic | Retrieval | +1.94, gain over em +59% |" in printed
    stored = read(out / "smoke" / "scores.jsonl")
    assert [one.variant for one in stored.models][:3] == ["start", "em", "ic"]
    assert stored.models[3].settings["training.max_steps"] == 1
    monkeypatch.setattr(Experiment, "scored", None)  # nothing is trained or scored again
    main(words)
    assert capsys.readouterr().out.strip() in printed
