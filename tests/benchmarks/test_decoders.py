"""benchmarks.decoders: each model is trained and scored once, also if the command is run again."""

from pathlib import Path
from typing import Any

import pytest
from helpers.paths import SMALL_ENCODER

import mote
from benchmarks.decoders import Comparison
from mote.training.recipe import Recipe
from mote.training.run_folder import as_yaml


def test_a_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(recipe: Recipe) -> None:
        folder = Path(recipe.output)
        trained.append(folder.name)
        (folder / "model").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(as_yaml(recipe))

    def evaluate(models: dict[str, str], tasks: list[str], **settings: Any) -> mote.Evaluation:
        ((label, folder),) = models.items()
        assert Path(folder) == tmp_path / label / "model"
        assert Path(folder).is_dir()
        return mote.Evaluation({label: {tasks[0]: 40.0}}, {tasks[0]: "STS"})

    monkeypatch.setattr(mote, "train", train)
    monkeypatch.setattr(mote, "evaluate", evaluate)
    monkeypatch.setattr(Comparison, "decoder", lambda self: SMALL_ENCODER)
    monkeypatch.setattr(Comparison, "mined", lambda self: tmp_path / "mined")
    comparison = Comparison(tmp_path / "data", tmp_path, [42, 43], quick=True)
    scores = comparison.scores()
    assert len(trained) == len(set(trained)) == 8
    assert scores.every["causal, mean"] == {"beir/*": [40.0, 40.0], "classification/*": [40.0, 40.0]}
    assert comparison.scores() == scores
    assert len(trained) == 8
    with pytest.raises(ValueError, match=r"causal-mean-seed42 was trained with other settings.*training.max_steps"):
        Comparison(tmp_path / "data", tmp_path, [42], quick=False).scores()
