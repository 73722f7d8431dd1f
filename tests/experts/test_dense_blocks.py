"""Experts made of the blocks of a dense model, as of the one that a MoTE was trained from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.families import batch
from helpers.on_disk import add, hidden
from safetensors.torch import load_file
from transformers import AutoModel

import mote
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts import open_expert
from mote.remote.modeling_mote import MoTEModel


def test_an_expert_of_the_dense_blocks_is_the_dense_model(trained: Path, dense: Path, tmp_path: Path) -> None:
    out = add(trained, dense, tmp_path / "out", name="start", tasks=["sts"])
    with torch.no_grad():
        expected = AutoModel.from_pretrained(dense).eval()(**batch()).last_hidden_state
    assert hidden(out, "sts").equal(expected)  # the MoTE's shared weights are still the dense model's
    assert not hidden(trained, "sts").allclose(expected, atol=1e-3)
    assert hidden(out, "clustering").equal(hidden(trained, "clustering"))


def test_an_expert_halfway_to_the_dense_model(trained: Path, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["merge", str(trained), "search_query", str(dense), "--name", "near_start", "--task", "sts"]
    assert main(["experts", *words, "--out", str(out)]) == 0
    start, after = load_file(dense / "model.safetensors"), load_file(out / "model.safetensors")
    added = {name: weight for name, weight in after.items() if ".experts.near_start." in name}
    assert added
    for name, weight in added.items():
        query = after[name.replace("near_start", "search_query")]
        of_dense = start[name.removeprefix("backbone.").replace("experts.near_start.", "")]
        assert weight.equal(((query.double() + of_dense.double()) / 2).float())
    assert MoTEModel.from_pretrained(out).config.tasks["sts"] == "near_start"
    step = read_steps(out)[-1]
    assert step["command"].startswith("mote experts merge tiny-mote search_query=1 tiny=1 --name near_start --task sts")
    assert [source["name"] for source in step["sources"]] == ["tiny-mote", "tiny"]
    assert step["sources"][1] == read_steps(trained)[0]["sources"][0]  # with its hash: the source of upcycling
    assert "`search_query=1`, `tiny=1`" in (out / "README.md").read_text(encoding="utf-8")


def test_the_blocks_have_the_dtype_of_the_mote(trained: Path, dense: Path) -> None:
    model = MoTEModel.from_pretrained(trained, dtype=torch.bfloat16)
    mote.experts.merge(model, {open_expert(dense): 1, "clustering": 1}, "near_start")
    assert {weight.dtype for weight in mote.experts.weights(model, "near_start").values()} == {torch.bfloat16}


def wider(dense: Path, folder: Path) -> Path:
    return dense_checkpoint(folder / "wider", intermediate_size=96)


def deeper(dense: Path, folder: Path) -> Path:
    return dense_checkpoint(folder / "deeper", num_hidden_layers=3)


def other_vocabulary(dense: Path, folder: Path) -> Path:
    return dense_checkpoint(folder / "other", max_position_embeddings=77)


@pytest.mark.parametrize("change", [wider, deeper, other_vocabulary])
def test_a_dense_model_that_does_not_fit(
    change: Callable[[Path, Path], Path], trained: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = change(dense, tmp_path)
    for words in (["add", str(trained), str(other)], ["merge", str(trained), "clustering", str(other)]):
        assert main(["experts", *words, "--name", "x", "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert f"error: The blocks of {other} do not fit {trained}: " in error
        assert "What works: the dense model that" in error
    assert not (tmp_path / "out").exists()
