"""Several processes that train together, each with a part of every batch, against one process."""

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, SMALL_ENCODER
from test_training import overrides, weights

from mote.training.models import build_model
from mote.training.progress import read_log
from mote.training.recipe import load_recipe

EXAMPLES = ROOT / "examples" / "data"
SETTINGS = (
    "training.max_steps=5",
    "training.save_every=2",
    "training.learning_rate=1e-4",
    "data.limit=null",
    "validation.share=0",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real texts, in numbers that one process and two cut into the same batches."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("retrieval/arxiv", "classification/banking77", "clustering/arxiv_titles"):
        text = gzip.decompress((EXAMPLES / name / "train.jsonl.gz").read_bytes()).decode()
        rows = [json.loads(line) for line in text.splitlines()]
        if "label" in rows[0]:
            frequent = Counter(row["label"] for row in rows).most_common(4)
            rows = [row for label, _ in frequent for row in [r for r in rows if r["label"] == label][:8]]
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    return folder


def launch(processes: int, data: Path, out: Path, *more: str, recipe: str = "mote") -> tuple[list[str], dict[str, str]]:
    """Make the command and the environment of `mote train` under as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    command = [*launcher, "-m", "mote", "train", recipe, *overrides(SMALL_ENCODER, data, out, *SETTINGS, *more)]
    return command, {**os.environ, "HF_MODULES_CACHE": str(out.parent / "modules"), "OMP_NUM_THREADS": "1"}


def train(
    processes: int, data: Path, out: Path, *more: str, recipe: str = "mote", check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run it."""
    command, environment = launch(processes, data, out, *more, recipe=recipe)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    if check:
        assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.parametrize("recipe", ["mote", "tlr"])
def test_two_processes_learn_what_one_does(recipe: str, data: Path, tmp_path: Path) -> None:
    """SGD with a learning rate of 1, so that a step is the gradient itself: Adam would hide its size."""
    settings = (
        "training.optimizer=sgd",
        "training.learning_rate=1",
        "training.schedule=constant",
        "training.weight_decay=0",
        "training.max_grad_norm=1e-3",
        "model.load_balancing=0",
    )
    for processes in (1, 2):
        train(processes, data, tmp_path / str(processes) / "run", *settings, recipe=recipe)
    one, two = (weights(tmp_path / name / "run" / "model") for name in "12")
    logs = [read_log(tmp_path / name / "run") for name in "12"]
    assert [(line["step"], line["set"], line["rows"]) for line in logs[0]] == [
        (line["step"], line["set"], line["rows"]) for line in logs[1]
    ]
    assert len({line["task"] for line in logs[0]}) == 3
    for first, second in zip(*logs, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    settings = overrides(SMALL_ENCODER, data, tmp_path / "unused", *SETTINGS)
    start = build_model(load_recipe(recipe, settings), tmp_path)[0][0].model.state_dict()
    moved = 0.0
    for key in one:  # the norm of all steps together is at most 5e-3
        assert (one[key] - two[key]).abs().max().item() <= 1e-7, key
        moved = max(moved, (one[key] - start[key]).abs().max().item())
    assert moved > 1e-4
    records = [json.loads((tmp_path / name / "run" / "model" / "training.json").read_text()) for name in "12"]
    assert [record["processes"] for record in records] == [1, 2]
    assert records[0]["tasks"] == records[1]["tasks"]  # texts and tokens, over all processes
    assert records[0]["experts"] == records[1]["experts"]


def test_two_processes_that_were_killed_go_on(data: Path, tmp_path: Path) -> None:
    """With the recipe's own optimiser; the same bit for bit as two that were not."""
    settings = ("training.max_steps=null", "training.epochs=2")
    train(2, data, tmp_path / "whole" / "run", *settings)
    out = tmp_path / "killed" / "run"
    command, environment = launch(2, data, out, *settings)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (out / "checkpoints" / "checkpoint-4" / "checkpoint.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for one_of_them in [*psutil.Process(process.pid).children(recursive=True), process]:
        one_of_them.kill()
    process.wait()
    assert not (out / "model").exists()
    train(2, data, out, *settings)
    one, two = (weights(tmp_path / name / "run" / "model") for name in ("whole", "killed"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_batch_that_cannot_be_shared_out(data: Path, tmp_path: Path) -> None:
    done = train(2, data, tmp_path / "run", "training.batch_size=15", check=False)
    assert done.returncode != 0
    assert "15 cannot be shared out among 2" in done.stderr
