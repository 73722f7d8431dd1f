"""`mote.json`, the command lines in it, and the hash of a folder."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.paths import SMALL_ENCODER

from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.provenance import command_line, new_step, plain, read_steps, recorded_files, write_steps


def test_steps_are_written_and_read(tmp_path: Path) -> None:
    steps = [new_step("upcycle", settings={"experts": ["a"]}), new_step("rename", sources=[{"name": "m"}])]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    write_steps(steps, tmp_path)
    assert read_steps(tmp_path) == steps
    assert recorded_files(tmp_path) == ["1_Pooling/config.json", "mote.json"]
    assert read_steps(tmp_path / "1_Pooling") == []


def test_records_of_other_versions(tmp_path: Path) -> None:
    for content, found in (("{}", None), ('{"format": 2, "steps": "in another way"}', 2)):
        (tmp_path / "mote.json").write_text(content)
        with pytest.raises(ValueError, match=f"mote.json has format {found}; this version of mote reads 1: update"):
            read_steps(tmp_path)


def test_command_lines() -> None:
    options: dict[str, Any] = {
        "out": Path("/some/where/out"),
        "experts": ["a", "b"],
        "tasks": {"c d": "a"},
        "instructions": {"a": "it's: "},
        "weight": {"a": 0.5},
        "rank": 16,
        "overwrite": True,
        "norm_topk_prob": False,
        "instruction": None,
    }
    assert command_line("experts", "add", "m", **options) == (
        "mote experts add m --out out --expert a --expert b --task 'c d=a' --instruction 'a=it'\"'\"'s: ' "
        "--weight a=0.5 --rank 16 --overwrite --no-norm-topk-prob"
    )


def test_values_for_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    values = {"start": SimpleNamespace(public_name="user/legal"), "path": tmp_path / "a", "dtype": torch.int8}
    values |= {"text": f"../{tmp_path.name}/a", "weights": {"layer.weight": torch.ones(2)}}
    expected = {"start": "user/legal", "path": "a", "dtype": "torch.int8", "text": "a", "weights": "weights"}
    assert plain(values) == expected
    unchanged = ["query/", "/not here", "a" * 5000, 1.5, None, True]
    assert plain(unchanged) == unchanged
    json.dumps(plain({"any": object(), "of": {1: {2, 3}}}))


def test_cards_pictures_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "model")
    before = folder_hash(folder)
    (folder / "README.md").write_text("another card")
    (folder / "chart.png").write_bytes(b"another picture")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("main")
    assert folder_hash(folder) == before
    (folder / "modeling.py").write_text("")
    assert folder_hash(folder) != before
