"""The two stages of CoT-MoTE's fine-tuning, as a script of commands that resume."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.checkpoints import dense_checkpoint
from helpers.paths import ROOT
from helpers.rows import write_rows
from helpers.runs import train_step, weights
from sentence_transformers import SparseEncoder

ANIMALS = ["whale", "otter", "heron", "badger", "lynx"]
PLACES = ["river", "forest", "desert", "island"]
SETTINGS = ("batch_size=10", "max_steps=3", "learning_rate=1e-2", "warmup_steps=0", "save_steps=1")


@pytest.mark.processes
def test_a_killed_script_ends_with_the_same_model(tmp_path: Path) -> None:
    for library in ("faiss", "bm25s"):
        pytest.importorskip(library, reason="the extra `corpora` is not installed")
    dense_checkpoint(tmp_path / "dense", sentence_transformers={})
    rows = [{"query": f"{one} {place}", "positive": f"the {one} of the {place}"} for one in ANIMALS for place in PLACES]
    write_rows(tmp_path / "data/retrieval/animals/train.jsonl", rows)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}

    def start(out: str) -> subprocess.Popen[bytes]:
        command = ["bash", ROOT / "examples/cot.sh", tmp_path / "dense", tmp_path / "data", tmp_path / out]
        settings = [f"training.{setting}" for setting in SETTINGS]
        return subprocess.Popen([*command, *settings, "validation.share=0.2"], env=environment, start_new_session=True)

    killed = start("killed")
    deadline = time.monotonic() + 300
    while not any((tmp_path / "killed/stage1/train").glob("checkpoints/checkpoint-*/checkpoint.json")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed/stage1/train/model").exists()
    for out in ("killed", "whole", "whole"):  # the last one has nothing left to do
        assert start(out).wait() == 0
    one, other = (weights(tmp_path / out / "stage2/train/model") for out in ("killed", "whole"))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())
    model = tmp_path / "whole/stage2/train/model"
    assert train_step(model)["recipe"] == "cot-stage2"
    assert SparseEncoder(str(model), trust_remote_code=True).encode_query(["a whale"]).shape[0] == 1
