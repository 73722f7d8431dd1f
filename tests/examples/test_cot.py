"""The two stages of CoT-MoTE, as a script of commands that resume by themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import contents, dense_checkpoint
from helpers.paths import ROOT
from helpers.rows import read_rows, write_rows

ANIMALS = ["whale", "otter", "heron", "badger", "lynx"]
PLACES = ["river", "forest", "desert", "island"]
ROWS = [
    {"query": f"{animal} {place}", "positive": f"the {animal} of the {place}"} for animal in ANIMALS for place in PLACES
]
SETTINGS = ("batch_size=10", "max_steps=2", "warmup_steps=0", "mini_batch_size=null")


@pytest.mark.processes
def test_both_stages_and_the_same_command_again(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    model = dense_checkpoint(tmp_path / "dense", sentence_transformers={})
    write_rows(tmp_path / "data/retrieval/animals/train.jsonl", ROWS)
    out = tmp_path / "out"
    command = ["bash", str(ROOT / "examples/cot.sh"), str(model), str(tmp_path / "data"), str(out)]
    settings = [*(f"training.{setting}" for setting in SETTINGS), "validation.share=0.2"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run() -> None:
        done = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    run()
    for stage in ("stage1", "stage2"):
        (row, *_) = read_rows(next((out / stage / "mined/retrieval/animals").glob("train.jsonl*")))
        assert row["negative_1"]
        assert (out / stage / "train/model/modeling_mote.py").is_file()
    before = contents(out)
    run()
    assert contents(out) == before
