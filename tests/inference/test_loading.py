"""Loading: MoTEs, and encoders with all their weights."""

import json
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, tiny_tokenizer
from helpers.families import batch, dense_model, mote_config, trained_mote
from safetensors.torch import load_file, save_file

import mote
from mote.experts import compress
from mote.remote.configuration_mote import MoTEConfig


def without(folder: Path, part: str) -> Path:
    """The checkpoint in a folder, less all weights with this in their names."""
    file = next(folder.rglob("model.safetensors"))
    weights = load_file(file)
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def test_weights_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    folder = without(dense_checkpoint(tmp_path / "dense"), "pooler")
    mote.load_encoder(folder)  # a pooler may be missing
    tokenizer = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"dense lacks weights or .*: the vocabulary of its tokenizer"):
        mote.load_encoder(folder)
    tokenizer.rename(folder / "tokenizer.json")
    without(folder, "layer.1.output.dense")
    with pytest.raises(ValueError, match=r"dense lacks weights .*: encoder\.layer\.1\.output\.dense\.bias, encoder"):
        mote.load_encoder(folder)
    edit_json(folder / "config.json", intermediate_size=48)
    with pytest.raises(ValueError, match=r"dense does not load in Sentence-Transformers: "):
        mote.load_encoder(folder)


def test_a_mote_and_some_of_its_experts(tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path)
    expected = model(**batch(), task="beta").pooler_output
    for loaded in (mote.load(tmp_path), mote.load(tmp_path, experts=["beta"]), mote.load(tmp_path, experts="beta")):
        assert torch.equal(loaded.eval()(**batch(), task="beta").pooler_output, expected)
    (tmp_path / "modules.json").unlink(missing_ok=True)
    tiny_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"without modules\.json, so tasks would be ignored"):
        mote.load_encoder(tmp_path, trust_remote_code=True)
    assert mote.load(tmp_path, experts=["beta"]).config.available_experts == ["beta"]
    compress(model, rank=2).save_pretrained(tmp_path / "compressed")
    assert mote.load(tmp_path / "compressed").config.model_type == "mote_compressed"


def test_a_dense_model_is_not_a_mote(tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path / "dense", "bert")
    for load in (mote.load, lambda path: mote.load_encoder(path, offload="disk")):
        with pytest.raises(ValueError, match="is not a MoTE but a 'bert': `mote upcycle --src"):
            load(folder)


def test_a_format_of_a_newer_release_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2, of a newer MoTE: pip install -U"):
        MoTEConfig.from_dict({**mote_config(dense_model("bert")).to_dict(), "mote_format": 2})


@pytest.mark.parametrize(("made_by", "warnings"), [("99.1", 1), ("0.0.1", 0), ("garbled", 0)])
def test_a_model_of_a_newer_release(
    made_by: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_mote("bert").save_pretrained(tmp_path)
    (tmp_path / "mote.json").write_text(json.dumps({"steps": [{"versions": {"mote-embeddings": made_by}}]}))
    for _ in range(2):  # said once
        mote.load(tmp_path)
    said = [each for each in caplog.messages if f"made by mote-embeddings {made_by}, but 0.1" in each]
    assert len(said) == warnings
