"""The model that a recipe starts from: all its weights, of the recipe's kind."""

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import published_nomic
from helpers.runs import overrides
from safetensors.torch import load_file, save_file

from mote.checkpoints.reading import load_dense, open_checkpoint, open_dense
from mote.training.model import build_model
from mote.training.recipe import Recipe, load_recipe
from mote.training.run_folder import START_FOLDER
from mote.training.train import train


def dense_recipe(source: Path) -> Recipe:
    return load_recipe("ic", [f"model.source={source}", "data.folder=examples/data"])


@pytest.mark.parametrize("prefix", [True, False])
def test_nomics_published_formats_start_with_their_weights(prefix: bool, tmp_path: Path) -> None:
    source = published_nomic(tmp_path / "nomic", prefix)
    model, names = build_model(dense_recipe(source), open_checkpoint(str(source)), tmp_path / "run")
    expected = load_dense(open_dense(str(source)))[0].state_dict()
    weights = model[0].model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert names.instruction_of("clustering") == model.prompts["clustering"] == "clustering: "
    assert (tmp_path / "run" / START_FOLDER).is_dir()


def test_weights_that_are_missing_are_named(dense: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in dense.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    gone = next(name for name in weights if name.endswith("intermediate.dense.weight"))
    del weights[gone]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"broken lacks weights .*intermediate\.dense\.weight"):
        build_model(dense_recipe(broken), open_checkpoint(str(broken)), tmp_path / "run")


def test_the_source_is_of_the_recipes_kind(fresh_folder: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a MoTE"):
        train("ic", overrides(fresh_folder, data, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"of the kind 'mote', but the recipe says model.kind=token_routed"):
        train("tlr", overrides(fresh_folder, data, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"differs from the recipe in model.layers. Its experts: .* 0, 1, 2"):
        train("mote-every-other", overrides(fresh_folder, data, tmp_path / "run"))
    with pytest.raises(ValueError, match=r"differs from the recipe in model.experts, model.tasks"):
        train("mote-objectives", overrides(fresh_folder, data, tmp_path / "run"))
