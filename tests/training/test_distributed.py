"""Several processes that train together, each with a part of every batch, against one process."""

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.runs import overrides, read_log, train_step, weights

from mote import upcycle
from mote.checkpoints.reading import open_checkpoint
from mote.training.model import build_model
from mote.training.recipe_files import load_recipe

EXAMPLES = ROOT / "examples" / "data"
SETTINGS = (
    "training.max_steps=5",
    "training.save_steps=2",
    "training.learning_rate=1e-4",
    "data.limit=null",
    "validation.share=0",
)

FSDP_SCRIPT = ("-m", "helpers.fsdp_on_cpu")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "MoTEBlock",
    "PYTHONPATH": str(ROOT / "tests"),
}


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


def launch(
    processes: int, data: Path, out: Path, *more: str, recipe: str = "mote", script: Sequence[str] = ("-m", "mote")
) -> tuple[list[str], dict[str, str]]:
    """Make the command and the environment of `mote train` under as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    command = [*launcher, *script, "train", recipe, *overrides(SMALL_ENCODER, data, out, *SETTINGS, *more)]
    return command, {**os.environ, "HF_MODULES_CACHE": str(out.parent / "modules"), "OMP_NUM_THREADS": "1"}


def train(
    processes: int, data: Path, out: Path, *more: str, code: int = 0, fsdp: dict[str, str] | None = None, **others: Any
) -> str:
    """Run it, under FSDP with settings of its own; return what it writes to stderr."""
    script = ("-m", "mote") if fsdp is None else FSDP_SCRIPT
    cache = {"HF_ASSETS_CACHE": str(others.pop("cache", out.parent / "cache"))}
    command, environment = launch(processes, data, out, *more, script=script, **others)
    environment |= cache if fsdp is None else {**cache, **FSDP, **fsdp}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stderr


def as_killed(data: Path, folder: Path, *settings: str) -> dict[str, torch.Tensor]:
    """Train under FSDP, undisturbed, and killed and resumed; return the weights, which must be the same."""
    train(2, data, folder / "whole" / "run", *settings, fsdp={})
    train(2, data, folder / "killed" / "run", *settings, fsdp={"DIE_AT_STEP": "4"}, code=1)
    train(2, data, folder / "killed" / "run", *settings, fsdp={})
    whole, killed = (weights(folder / name / "run" / "model") for name in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    assert train_step(folder / "killed" / "run" / "model")["resumed_from_step"] == 2
    return whole


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert (one[key] - other[key]).abs().max().item() <= within, key


BLENDED = [
    *(f"tasks.{task}.batches=blended" for task in ("retrieval", "classification", "clustering")),
    "tasks.classification.pairs=label_text",
    "tasks.classification.in_batch_negatives=false",
]
ROUTER = ["model.router_aux_loss_coef=0"]


@pytest.mark.parametrize(("recipe", "more"), [("mote", []), ("mote", BLENDED), ("tlr", ROUTER)])
def test_two_processes_learn_what_one_does(recipe: str, more: list[str], data: Path, tmp_path: Path) -> None:
    """SGD with a learning rate of 1, so that a step is the gradient itself: Adam would hide its size."""
    settings = (
        "training.optim=sgd",
        "training.learning_rate=1",
        "training.lr_scheduler_type=constant",
        "training.weight_decay=0",
        "training.max_grad_norm=1e-3",
    )
    for processes in (1, 2):
        train(processes, data, tmp_path / str(processes) / "run", *settings, *more, recipe=recipe)
    one, two = (weights(tmp_path / name / "run" / "model") for name in "12")
    logs = [read_log(tmp_path / name / "run") for name in "12"]
    assert [(line["step"], line["training_set"], line["rows"]) for line in logs[0]] == [
        (line["step"], line["training_set"], line["rows"]) for line in logs[1]
    ]
    assert len({line["task"] for line in logs[0]}) == (1 if more is BLENDED else 3)
    for first, second in zip(*logs, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    settings = overrides(SMALL_ENCODER, data, tmp_path / "unused", *SETTINGS)
    start = build_model(load_recipe(recipe, settings), open_checkpoint(str(SMALL_ENCODER)), tmp_path)[0][
        0
    ].model.state_dict()
    moved = 0.0
    for key in one:  # the norm of all steps together is at most 5e-3
        assert (one[key] - two[key]).abs().max().item() <= 1e-7, key
        moved = max(moved, (one[key] - start[key]).abs().max().item())
    assert moved > 1e-4
    records = [train_step(tmp_path / name / "run" / "model") for name in "12"]
    assert [record["processes"] for record in records] == [1, 2]
    assert records[0]["tasks"] == records[1]["tasks"]  # texts and tokens, over all processes


ADAPTERS = (
    "training.peft={r: 4, alpha: 8, dropout: 0, targets: all-linear}",
    "training.optim=sgd",
    "training.learning_rate=1",
    "training.lr_scheduler_type=constant",
    "training.weight_decay=0",
    "training.max_grad_norm=0.1",
)


def test_two_processes_train_the_adapters_of_one(data: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        train(processes, data, tmp_path / str(processes) / "run", *ADAPTERS)
    one, two = (weights(tmp_path / name / "run" / "model") for name in "12")
    start = weights(upcycle(str(SMALL_ENCODER), tmp_path / "start"))
    assert max((one[key] - two[key]).abs().max().item() for key in one) <= 1e-6
    assert max((one[key] - start[key]).abs().max().item() for key in one) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [(), ("training.peft.base_dtype=bfloat16", "training.bf16=true")], ids=["", "bf16"])
def test_adapters_under_fsdp(rounded: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Killed, resumed bit for bit, and merged to the weights of two replicas."""
    whole = as_killed(data, tmp_path, *ADAPTERS, *rounded, "training.gradient_checkpointing=true")
    train(2, data, tmp_path / "replicas" / "run", *ADAPTERS, *rounded)
    # Replicas round activations, parts of FSDP their weights and inputs.
    assert_close(whole, weights(tmp_path / "replicas" / "run" / "model"), 1e-4 if rounded else 1e-6)


def test_two_killed_processes_are_resumed_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """With the recipe's own optimiser; the same bit for bit as two that were not."""
    settings = ("training.max_steps=-1", "training.num_train_epochs=2")
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


@pytest.mark.slow
def test_fsdp_checkpoints_are_resumed(data: Path, tmp_path: Path) -> None:
    """Checkpoints in parts, from which a run is resumed bit for bit; at the end a whole model, that of two replicas."""
    settings = ("training.optim=sgd", "training.learning_rate=1", "training.max_grad_norm=1e-3")
    full = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    assert "SHARDED_STATE_DICT" in train(2, data, tmp_path / "full" / "run", *settings, fsdp=full, code=1)
    whole = as_killed(data, tmp_path, *settings)
    train(2, data, tmp_path / "replicas" / "run", *settings)
    assert_close(whole, weights(tmp_path / "replicas" / "run" / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mlm", "cot-mae"])
def test_pretraining_under_fsdp(recipe: str, tmp_path: Path) -> None:
    """As above: killed, resumed bit for bit, and the weights of two replicas."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    source = dense_checkpoint(tmp_path / "tiny", head="mlm", **still)
    settings = [
        f"model.source={source}",
        "model.max_length=16",
        f"data.folder={EXAMPLES}",
        "data.limit=16",
        "training.batch_size=8",
        "training.max_steps=4",
        "training.save_steps=2",
        "training.eval_steps=2",
        "training.optim=sgd",
        "training.learning_rate=1",
        "training.max_grad_norm=1e-2",
        "validation.limit=8",
    ]
    for name, script, changes, code in (
        ("whole", FSDP_SCRIPT, FSDP, 0),
        ("killed", FSDP_SCRIPT, {**FSDP, "DIE_AT_STEP": "4"}, 1),
        ("killed", FSDP_SCRIPT, FSDP, 0),
        ("replicas", ("-m", "mote"), {}, 0),
    ):
        command, environment = launch(2, tmp_path, tmp_path / name / "run", script=script)
        words = [*command[: command.index("train")], "pretrain", recipe, *settings, f"output={tmp_path / name / 'run'}"]
        done = subprocess.run(words, env={**environment, **changes}, capture_output=True, text=True, timeout=400)
        assert done.returncode == code, done.stderr[-4000:]
    whole, killed, replicas = (weights(tmp_path / name / "run" / "model") for name in ("whole", "killed", "replicas"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    assert_close(whole, replicas)


SPARSE = (  # without FLOPS losses, which are quadratic in a batch: of its parts they are others
    "retrieval.sparse_from=embeddings",
    "retrieval.query_regularizer_weight=0",
    "retrieval.document_regularizer_weight=0",
    "tasks.retrieval.datasets=[retrieval/arxiv]",
    "training.mini_batch_size=null",
)
LATENT_ATTENTION = (
    "model.experts=[search_query, search_document]",
    "model.pooling=latent_attention",
    "model.pooling_latents=8",
    "model.pooling_head_dim=16",
    "tasks.classification=null",
    "tasks.clustering=null",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [("sparse", SPARSE), ("hybrid", SPARSE), ("mote", LATENT_ATTENTION)],
    ids=["sparse", "hybrid", "latent"],
)
def test_one_process_replicas_and_parts(recipe: str, more: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Replicas, and parts of FSDP, learn what one process does."""
    settings = (
        *more,
        "training.optim=sgd",
        "training.learning_rate=1",
        "training.lr_scheduler_type=constant",
        "training.weight_decay=0",
        "training.max_grad_norm=1e-2",
    )
    for name, processes, fsdp in (("one", 1, None), ("replicas", 2, None), ("parts", 2, {})):
        train(processes, data, tmp_path / name / "run", *settings, recipe=recipe, fsdp=fsdp)
    one, replicas, parts = (weights(tmp_path / name / "run" / "model") for name in ("one", "replicas", "parts"))
    assert_close(one, replicas)
    assert_close(one, parts)
    start = weights(upcycle(str(SMALL_ENCODER), tmp_path / "start", experts=["search_query", "search_document"]))
    assert max((one[key] - start[key]).abs().max().item() for key in start) > 1e-4


def test_the_weights_of_a_loss_are_one_for_all_processes(data: Path, tmp_path: Path) -> None:
    """A projection to a teacher's width, which DDP does not know of: its gradient goes into the model's."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    source = dense_checkpoint(tmp_path / "tiny", sentence_transformers={"max_seq_length": 24}, **still)
    settings = (
        f"model.source={source}",
        "tasks={retrieval: {anchor: search_query, batches: homogeneous, loss: EmbedDistillLoss, "
        f"teacher: {{source: {SMALL_ENCODER}}}, datasets: [retrieval/arxiv]}}}}",
        "training.optim=sgd",
        "training.learning_rate=1",
        "training.max_grad_norm=0",
    )
    for processes in (1, 2):
        train(processes, data, tmp_path / str(processes) / "run", *settings, cache=tmp_path / "cache")
    one, two = (weights(tmp_path / name / "run" / "model") for name in "12")
    assert max((one[key] - two[key]).abs().max().item() for key in one) <= 1e-5


def test_a_loss_that_is_not_cached_needs_one_expert(data: Path, tmp_path: Path) -> None:
    """DDP would stop in the first step: "Expected to mark a variable ready only once"."""
    loss = (
        "tasks={retrieval: {anchor: search_query, positive: search_document, batches: homogeneous, loss: TripletLoss, "
        "datasets: [retrieval/arxiv]}}"
    )
    errors = train(2, data, tmp_path / "run", loss, code=1)
    assert "TripletLoss cannot send the columns of a row through 2 experts" in errors
    assert "Traceback" not in errors.split("torch/distributed")[0]


def test_a_batch_that_cannot_be_shared_evenly(data: Path, tmp_path: Path) -> None:
    assert "15 cannot be divided evenly among 2" in train(2, data, tmp_path / "run", "training.batch_size=15", code=1)
