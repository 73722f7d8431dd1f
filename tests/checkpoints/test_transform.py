"""Verbs on disk: open, load, call, write, record."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, e5_checkpoint, edit_json, files_in, read_json
from sentence_transformers import SentenceTransformer

from mote import UpcyclingOptions, WriteOptions, configure, experts, transform, upcycle
from mote.checkpoints import reading
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.transform import Verb
from mote.remote.modeling_mote import MoTEModel


@pytest.fixture(scope="module")
def mote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = e5_checkpoint(tmp_path_factory.mktemp("sources") / "e5")
    return upcycle(str(source), tmp_path_factory.mktemp("motes") / "e5-mote", UpcyclingOptions(experts=["a", "b"]))


def scale(model: Any, factor: float, *, experts: list[str] | None = None) -> None:
    """Change a model in place."""
    with torch.no_grad():
        for block in model.blocks:
            for name in experts or model.config.experts:
                for parameter in block.experts[name].parameters():
                    parameter.mul_(factor)


@Verb("export", "the expert `{name}` of", options={"name": "expert"}, loads="name")
def take_out(model: Any, name: str) -> Any:
    return experts.export(model, name)


def test_a_change_by_another_process_while_the_model_is_opened(
    mote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, find = shutil.copytree(mote, tmp_path / "mote"), reading.find_files

    def find_later(*args: Any, **settings: Any) -> list[str]:
        monkeypatch.setattr(reading, "find_files", find)
        configure(place, default_task="a")
        return find(*args, **settings)

    monkeypatch.setattr(reading, "find_files", find_later)
    with pytest.raises(ValueError, match="was changed by another process in the meantime"):
        configure(place, default_task="b")
    assert read_json(place / "config.json")["default_task"] == "a"


def test_a_model_is_changed_and_recorded(mote: Path, tmp_path: Path) -> None:
    out = transform(mote, tmp_path / "out", scale, 0.5, experts=["b"])
    assert files_in(out) == files_in(mote)
    before, after = MoTEModel.from_pretrained(mote).state_dict(), MoTEModel.from_pretrained(out).state_dict()
    for name, weight in before.items():
        assert after[name].equal(weight * 0.5 if ".experts.b." in name else weight), name
    first, step = read_steps(out)
    assert first == read_steps(mote)[0]
    assert (step["step"], step["settings"]) == ("scale", {"factor": 0.5, "experts": ["b"]})
    assert step["command"] == "mote scale e5-mote --factor 0.5 --expert b --out out"
    assert [source["name"] for source in step["sources"]] == ["e5-mote"]
    assert {*step["sources"][0]["weights"]} == {path.name for path in mote.glob("*.safetensors")}
    card = (out / "README.md").read_text()
    assert "made by `scale` of" in card
    assert step["command"] in card
    assert "Not trained yet" not in card
    assert "Not trained yet" in (transform(mote, tmp_path / "same", scale, 1.0) / "README.md").read_text()
    assert read_json(out / "config_sentence_transformers.json") == read_json(mote / "config_sentence_transformers.json")


def test_a_hook_adds_to_the_folder_and_the_record(mote: Path, tmp_path: Path) -> None:
    def convert(folder: Path) -> dict[str, Any]:
        assert (folder / "model.safetensors").is_file()
        assert folder.parent.parent == tmp_path
        (folder / "onnx").mkdir()
        (folder / "onnx" / "model.onnx").write_text("x")
        return {"opset": 20}

    recorded = {"backend": "onnx"}
    out = transform(mote, tmp_path / "out", take_out, "a", after=convert, recorded=recorded)
    step = read_steps(out)[-1]
    assert (step["opset"], step["settings"]) == (20, {"name": "a", "backend": "onnx"})
    assert step["command"] == "mote export e5-mote --expert a --backend onnx --out out"
    assert "onnx/model.onnx" in read_json(out / "mote.json")["files"]
    assert "the expert `a` of [e5-mote]" in (out / "README.md").read_text()
    assert "passage" not in SentenceTransformer(str(out)).prompts  # which the expert does not serve


def fail(model: Any) -> None:
    raise ValueError("cannot be done")


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")  # torch, about its own call
def test_nothing_is_left_of_a_failure(mote: Path, tmp_path: Path) -> None:
    dense = dense_checkpoint(tmp_path / "dense")
    broken, partial, misshapen = (shutil.copytree(mote, tmp_path / name) for name in ("broken", "partial", "misshapen"))
    os.truncate(next(broken.glob("model-expert-b-*")), 1000)
    edit_json(partial / "config.json", loaded_experts=["a"])
    backbone = read_json(mote / "config.json")["backbone_config"]
    edit_json(misshapen / "config.json", backbone_config=backbone | {"vocab_size": 61})
    before = contents(tmp_path)
    out = tmp_path / "out"

    def break_hook(folder: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="cannot be done"):
        transform(mote, out, fail)
    with pytest.raises(OSError, match=r"out could not be written, nothing was left behind: .*No space"):
        transform(mote, out, scale, 2.0, after=break_hook)
    for source, place, message in (
        (dense, out, "is not a MoTE but a 'bert'"),
        (broken, out, "broken/model-expert-b-.*safetensors cannot be read"),
        (partial, out, "Unknown expert 'b'. Available: 'a'"),
        (misshapen, out, r"1 mismatched keys \(\('backbone.embeddings.word_embeddings.weight'"),
        (tmp_path / "nowhere", out, "nowhere is neither a folder nor"),
        (mote, None, "Name the folder to write with `--out`$"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            transform(source, place, experts.average, options=WriteOptions(overwrite=True))
    with pytest.raises(ValueError, match="Unknown expert 'c'"):
        transform(mote, out, take_out, "c")
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        transform(mote, out, scale)
    with pytest.raises(ValueError, match="quantised"):
        transform(mote, out, torch.ao.quantization.quantize_dynamic)
    assert contents(tmp_path) == before
