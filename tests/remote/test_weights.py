"""The files of weights: their names, what belongs together, and what is left after a kill."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import assert_same, edit_weights, files_in, read_json
from helpers.families import batch, fresh_mote, make_different, trained_mote
from safetensors import safe_open

from mote.remote.modeling_mote import MoTEModel
from mote.remote.weights_mote import read_index


def test_any_reader_of_shards_reads_them(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = trained_mote("bert")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    stored: dict[str, list[str]] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert {*file.metadata()} == {"format", "mote"}
            stored |= dict.fromkeys(file.keys(), path.name)
    assert stored == read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    assert stored.keys() == model.state_dict().keys()
    again = fresh_mote("bert")
    accelerate.load_checkpoint_in_model(again, tmp_path)
    assert_same(again.state_dict(), model.state_dict())
    on_disk = MoTEModel.from_pretrained(tmp_path, device_map={"": "disk"})
    assert on_disk(**batch(), task="beta").pooler_output.equal(model.eval()(**batch(), task="beta").pooler_output)


def test_names_of_experts_that_cannot_be_names_of_files(tmp_path: Path) -> None:
    experts = ["Legal", "legal", "con", "économie_法", "x" * 300]
    model = make_different(fresh_mote("bert", experts=experts, instructions={}))
    model.save_pretrained(tmp_path)
    files = read_index(tmp_path)["experts"]
    assert len({name.lower() for name in files.values()}) == len(experts)
    assert all(name.isascii() and len(name) < 130 for name in files.values())
    one = MoTEModel.from_pretrained(tmp_path, experts=["économie_法"])
    assert_same(one.state_dict(), {key: model.state_dict()[key] for key in one.state_dict()})


@pytest.mark.parametrize("swap", ["of another base", "under another name", "missing"])
def test_files_that_do_not_belong_together(swap: str, tmp_path: Path) -> None:
    trained_mote("bert").save_pretrained(tmp_path / "one")
    other = trained_mote("bert")
    with torch.no_grad():
        next(iter(other.blocks[0].shared.parameters())).add_(1)
    other.save_pretrained(tmp_path / "two")
    (mine,), (theirs,) = ((tmp_path / name).glob("model-expert-beta-*") for name in ("one", "two"))
    (alpha,) = (tmp_path / "one").glob("model-expert-alpha-*")
    error: type[Exception] = ValueError
    if swap == "missing":
        error = OSError
        mine.unlink()
    else:
        shutil.copy(theirs if swap == "of another base" else alpha, mine)
    message = "lacks the files of the experts 'beta'" if swap == "missing" else f"{mine.name} does not belong"
    with pytest.raises(error, match=message):
        MoTEModel.from_pretrained(tmp_path / "one")
    MoTEModel.from_pretrained(tmp_path / "one", experts=["alpha"])


def test_the_old_layout_becomes_the_new_one(tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path)
    names = files_in(tmp_path)
    edit_weights(tmp_path)
    assert "model.safetensors" in files_in(tmp_path)
    one = MoTEModel.from_pretrained(tmp_path, experts=["beta"])
    assert_same(one.state_dict(), {key: model.state_dict()[key] for key in one.state_dict()})
    MoTEModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert files_in(tmp_path) == names


def test_a_kill_while_a_model_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = trained_mote("bert")
    old.save_pretrained(tmp_path / "old")
    new = MoTEModel.from_pretrained(tmp_path / "old")
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(2)
    states, calls, limit = [], 0, 0

    def counted(original: Any) -> Any:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += self.parent == tmp_path / "mote"
            if calls > limit:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for method in ("replace", "write_text", "open", "unlink"):
            patched.setattr(Path, method, counted(getattr(Path, method)))
        for limit in range(40):
            shutil.rmtree(tmp_path / "mote", ignore_errors=True)
            shutil.copytree(tmp_path / "old", tmp_path / "mote")
            calls = 0
            with contextlib.suppress(KeyboardInterrupt):
                new.save_pretrained(tmp_path / "mote")
            limit = 10**6  # while it is read
            found = MoTEModel.from_pretrained(tmp_path / "mote").state_dict()
            same = [all(map(torch.equal, found.values(), one.state_dict().values())) for one in (old, new)]
            states.append(same)
    assert states == sorted(states, reverse=True)  # the old one, then the new one
    assert {*map(tuple, states)} == {(True, False), (False, True)}
