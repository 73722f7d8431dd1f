"""Small training runs."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import Dataset
from helpers.checkpoints import assert_same, tensors_of
from helpers.paths import EXAMPLE_DATA

from mote.checkpoints.provenance import read_steps
from mote.reporting import HOW_TO_RESUME
from mote.training.data import TrainingSet
from mote.training.losses import build_loss
from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.progress import Tracker
from mote.training.recipe import Recipe, load_recipe
from mote.training.train import TrainingRun, train


def overrides(source: Path, data: Path, out: Path, *more: str) -> list[str]:
    """A small run: two steps of 16 rows unless `more` says otherwise."""
    return [
        f"model.source={source}",
        f"data.folder={data}",
        f"output={out}",
        "data.limit=40",
        "training.batch_size=16",
        "training.mini_batch_size=8",
        "training.max_steps=2",
        "training.learning_rate=1e-3",
        "training.warmup_steps=0",
        "training.save_steps=1",
        "validation.share=0.1",
        "validation.limit=8",
        "training.eval_steps=null",
        *more,
    ]


def assert_same_weights(found: Path, expected: Path) -> None:
    assert_same(tensors_of(found), tensors_of(expected))


def train_step(folder: Path) -> dict[str, Any]:
    """The record of the run that trained a model."""
    step = read_steps(folder)[-1]
    assert step["step"] == "train"
    return step


def read_log(run: Path) -> list[dict[str, Any]]:
    """The lines of a finished run's log, without the trainer's summary."""
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    return [line for line in state["log_history"] if "train_runtime" not in line]


def pretraining_recipe(name: str, *overrides: str) -> PretrainingRecipe:
    """A shipped recipe of pre-training, on the repository's data."""
    return load_recipe(name, ["model.source=x", f"data.folder={EXAMPLE_DATA}", *overrides], PretrainingRecipe)


def plan(recipe: Any, settings: Sequence[str]) -> str:
    """What `mote train --dry-run` prints."""
    return TrainingRun(recipe, settings).plan()


def built_loss(
    model: Any, training: Any = None, retrieval: Any = None, teacher_dimension: int | None = None, **task: Any
) -> Any:
    """The loss that a recipe gives a training set of a task with these settings."""
    own = {"datasets": ["x"], "anchor": "search_query", "batches": "homogeneous", **task}
    given = {"model": {"source": "x"}, "tasks": {"t": own}, "training": training or {}, "retrieval": retrieval or {}}
    recipe = Recipe.model_validate(given)
    label = [0.0] * (teacher_dimension or 0)
    label_type: Any = "pairs" if teacher_dimension is None else "embeddings"
    rows = Dataset.from_dict({"label": [label]})
    return build_loss(model, TrainingSet("x", "t", recipe.tasks["t"], rows, {}, label_type, {}), recipe)


def command(*arguments: str) -> list[str]:
    """The command line of a run in a process of its own."""
    return [sys.executable, "-m", "mote", "train", *arguments]


def launcher(processes: int) -> list[str]:
    """The start of the command line of a program in several processes, as `accelerate launch` starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, f"--nproc_per_node={processes}", f"--master_port={port}"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}


def kill_after(written: Path, command: Sequence[str], tmp_path: Path) -> None:
    """Start a run, and kill all its processes once a file is there."""
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment(tmp_path), **quiet)
    deadline = time.monotonic() + 240
    while not written.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for one_of_them in [*psutil.Process(process.pid).children(recursive=True), process]:
        one_of_them.kill()
    process.wait()


def break_off(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, at: int, recipe: str = "mote", start: Any = train
) -> None:
    """Stop a run before its step `at`, as Ctrl-C does."""
    record = Tracker.record

    def interrupted(tracker: Any, *args: Any) -> None:
        if tracker.step + 1 == at:
            raise KeyboardInterrupt
        record(tracker, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Tracker, "record", interrupted)
        with pytest.raises(KeyboardInterrupt, match=re.escape(HOW_TO_RESUME)):
            start(recipe, settings)
