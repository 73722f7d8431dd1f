"""Records of what was written, and warnings."""

import hashlib
import json
import logging
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from helpers.checkpoints import contents, dense_checkpoint, edit_weights, read_json, to_bin, trusted
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from mote import WriteOptions, transform, upcycle
from mote.checkpoints.provenance import new_step, read_steps
from mote.checkpoints.reading import open_checkpoint
from mote.checkpoints.writing import Repository
from mote.cli import main
from mote.experts import add, export
from mote.remote.sentence_transformer_mote import MoTETransformer


def test_the_record(dense: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"experts": ["a", "b"], "layers": [1], "instructions": {"a": "it's a: "}}
    out = upcycle(str(dense), tmp_path / "out", **options)
    record = read_json(out / "mote.json")
    assert record["format"] == 1
    assert set(record["files"]) == contents(out).keys()
    (step,) = record["steps"]
    digest = hashlib.sha256((dense / "model.safetensors").read_bytes()).hexdigest()
    source = {"name": "tiny", "revision": None, "weights": {"model.safetensors": digest}}
    assert (step["step"], step["sources"], step["settings"]) == ("upcycle", [source], options)
    command = """mote upcycle --src tiny --out out --expert a --expert b --layers 1 --instruction 'a=it'"'"'s a: '"""
    assert step["command"] == command
    assert set(step["versions"]) == {"python", "mote-embeddings", "torch", "transformers", "sentence-transformers"}
    assert datetime.fromisoformat(step["date"]).tzinfo is not None


def test_the_recorded_command_makes_the_same_model(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "experts": ["search_query", "b-2"],
        "tasks": {"c d": "b-2", "e": "search_query"},
        "instructions": {"c d": 'Say "so":\n\t', "e": ""},
        "layers": "every_other",
        "default_task": "c d",
        "pooling": "cls",
        "dtype": "bfloat16",
        "max_shard_size": "10KB",
    }
    out = upcycle(str(dense), tmp_path / "out", **options)
    command = shlex.split(read_steps(out)[-1]["command"])
    out.rename(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(dense)
    assert command[0] == "mote"
    assert main(command[1:]) == 0
    first, second = (contents(folder) | {"mote.json": b""} for folder in (tmp_path / "first", out))
    assert first == second


SETTINGS = {
    "SentenceTransformer": [{}, {"instructions": False}, {"routing": "token"}],
    "SparseEncoder": [{"retrieval": "sparse"}, {"retrieval": "hybrid"}],
    "MultiVectorEncoder": [{}],
}


@pytest.mark.parametrize(("encoder", "settings"), [(name, one) for name in SETTINGS for one in SETTINGS[name]])
def test_the_line_that_says_how_to_load_a_model_runs(
    encoder: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mote")
    source = dense_checkpoint(tmp_path / "source", head="mlm" if encoder == "SparseEncoder" else None)
    if encoder == "MultiVectorEncoder":
        MultiVectorEncoder(str(source)).save(str(source))
    folders = [upcycle(str(source), tmp_path / "out", **settings)]
    if "retrieval" not in settings and "routing" not in settings:
        folders.append(transform(folders[0], tmp_path / "dense", export, "clustering"))
        transform(folders[0], tmp_path / "more", add, "legal")
        assert caplog.messages[-1].endswith('prompt_name="legal")')  # the newest task
    for folder in folders:
        line = next(line for line in caplog.messages if line.startswith(f'{encoder}("{folder}"'))
        assert len(eval(line, {**vars(sentence_transformers), "texts": ["a", "b"]})) == 2
        assert f"import {encoder}\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_weights_that_are_not_finite_are_named(
    value: float, file_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = dense_checkpoint(tmp_path / "source", dtype=torch.float16)
    edit_weights(source, embeddings__LayerNorm__bias=torch.tensor([value] * 16, dtype=torch.float16))
    if file_format == "bin":
        to_bin(source)
    upcycle(str(source), tmp_path / "out")
    expected = f"Weights of {source} hold NaN or infinite values: embeddings.LayerNorm.bias"
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [expected]


def test_modules_of_installed_classes_are_named_as_without_the_package(upcycled: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(upcycled, tmp_path / "source")
    first, *others = read_json(copy / "modules.json")
    first["type"] = f"mote.remote.{first['type']}"
    (copy / "modules.json").write_text(json.dumps([first, *others]))
    model = SentenceTransformer(str(copy), trust_remote_code=True)
    assert type(model[0]) is MoTETransformer
    source = open_checkpoint(str(copy))
    steps = [new_step("train", made="trained from")]
    out = Repository(model, source, steps).write(tmp_path / "out", WriteOptions(), "out")
    types = [module["type"] for module in read_json(out / "modules.json")]
    assert types[0] == "sentence_transformer_mote.MoTETransformer"
    assert (trusted(out).encode(["a"], task="clustering") == trusted(upcycled).encode(["a"], task="clustering")).all()
