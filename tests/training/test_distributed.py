"""Several processes that train together, each with a part of every batch, against one process."""

import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, tensors_of
from helpers.paths import EXAMPLE_DATA, ROOT, SMALL_ENCODER
from helpers.rows import read_rows, write_rows
from helpers.runs import (
    assert_same_weights,
    environment,
    kill_after,
    launcher,
    overrides,
    read_log,
    train_step,
)

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import open_checkpoint
from mote.training.model import build_model
from mote.training.recipe import load_recipe

SETTINGS = (
    "training.max_steps=5",
    "training.save_steps=2",
    "training.learning_rate=1e-4",
    "data.limit=null",
    "validation.share=0",
)

# SGD with a learning rate of 1, so that a step is the gradient itself: Adam would hide its size.
GRADIENT_STEPS = (
    "training.optim=sgd",
    "training.learning_rate=1",
    "training.lr_scheduler_type=constant",
    "training.weight_decay=0",
)
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
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
        rows = read_rows(EXAMPLE_DATA / name / "train.jsonl.gz")
        if "label" in rows[0]:
            frequent = Counter(row["label"] for row in rows).most_common(4)
            rows = [row for label, _ in frequent for row in [r for r in rows if r["label"] == label][:8]]
        write_rows(folder / name / "train.jsonl", rows[:32])
    return folder


def settings(data: Path, out: Path, *more: str, recipe: str = "mote") -> list[str]:
    return ["train", recipe, *overrides(SMALL_ENCODER, data, out, *SETTINGS, *more)]


def run(processes: int, out: Path, words: Sequence[str], *, fsdp: bool = False, code: int = 0, **changes: str) -> str:
    """Run `mote` in some processes, with changes of the environment; return what it wrote to the standard error."""
    script = ["-m", "helpers.fsdp_on_cpu" if fsdp else "mote"]
    own = {**environment(out.parent), "HF_ASSETS_CACHE": str(out.parent / "cache"), **(FSDP if fsdp else {}), **changes}
    command = [*launcher(processes), *script, *words]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stderr


def trained(folder: Path, *names: str) -> list[dict[str, torch.Tensor]]:
    return [tensors_of(folder / name / "run" / "model") for name in names]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[key] - other[key]).abs().max().item() for key in other)


def assert_resumed_under_fsdp(folder: Path, words: Callable[[Path], list[str]], within: float = 1e-6) -> None:
    """Killed and resumed bit for bit under FSDP, with the weights of two replicas."""
    for name, fsdp, changes, code in (
        ("whole", True, {}, 0),
        ("killed", True, {"DIE_AT_STEP": "4"}, 1),
        ("killed", True, {}, 0),
        ("replicas", False, {}, 0),
    ):
        out = folder / name / "run"
        run(2, out, words(out), fsdp=fsdp, code=code, **changes)
    whole, killed, replicas = trained(folder, "whole", "killed", "replicas")
    assert whole.keys() == killed.keys() == replicas.keys()
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    assert difference(whole, replicas) <= within
    assert read_steps(folder / "killed" / "run" / "model")[-1]["resumed_from_step"] == 2


BLENDED = [
    *(f"tasks.{task}.batches=blended" for task in ("retrieval", "classification", "clustering")),
    "tasks.classification.pairs=label_text",
    "tasks.classification.in_batch_negatives=false",
]
PLAIN = [  # all columns are embedded, by several experts, before one backward pass
    "tasks.retrieval.loss=MultipleNegativesRankingLoss",
    *("training.gradient_caching=false", "training.mini_batch_size=4"),
]
ROUTER = ["model.router_aux_loss_coef=0"]


@pytest.mark.parametrize(("recipe", "more"), [("mote", []), ("mote", BLENDED), ("mote", PLAIN), ("tlr", ROUTER)])
def test_two_processes_learn_what_one_does(recipe: str, more: list[str], data: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        out = tmp_path / str(processes) / "run"
        own = (*GRADIENT_STEPS, "training.max_grad_norm=1e-3", *more)
        run(processes, out, settings(data, out, *own, recipe=recipe))
    one, two = trained(tmp_path, "1", "2")
    logs = [read_log(tmp_path / name / "run") for name in "12"]
    assert [(line["step"], line["training_set"], line["rows"]) for line in logs[0]] == [
        (line["step"], line["training_set"], line["rows"]) for line in logs[1]
    ]
    assert len({line["task"] for line in logs[0]}) == (1 if more is BLENDED else 3)
    for first, second in zip(*logs, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    unused = load_recipe(recipe, settings(data, tmp_path / "unused")[2:])
    start = build_model(unused, open_checkpoint(str(SMALL_ENCODER)), tmp_path)[0]
    assert difference(one, two) <= 1.2e-7  # of a weight of 1, the last bit; the norm of all steps is at most 5e-3
    assert difference(start[0].model.state_dict(), one) > 1e-4
    records = [train_step(tmp_path / name / "run" / "model") for name in "12"]
    assert [record["processes"] for record in records] == [1, 2]
    assert records[0]["training_sets"] == records[1]["training_sets"]  # rows over all processes


ADAPTERS = (
    *GRADIENT_STEPS,
    "training.peft={r: 4, alpha: 8, dropout: 0, targets: all-linear}",
    "training.max_grad_norm=0.1",
)


def test_two_processes_train_the_adapters_of_one(data: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        out = tmp_path / str(processes) / "run"
        run(processes, out, settings(data, out, *ADAPTERS))
    one, two = trained(tmp_path, "1", "2")
    start = tensors_of(upcycle(str(SMALL_ENCODER), tmp_path / "start"))
    assert difference(one, two) <= 1e-6
    assert difference(one, start) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [(), ("training.peft.base_dtype=bfloat16", "training.bf16=true")], ids=["", "bf16"])
def test_adapters_under_fsdp(rounded: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Merged to the weights of two replicas; these round activations, parts of FSDP their weights and inputs."""
    more = (*ADAPTERS, *rounded, "training.gradient_checkpointing=true")
    assert_resumed_under_fsdp(tmp_path, lambda out: settings(data, out, *more), within=1e-4 if rounded else 1e-6)


def test_two_killed_processes_are_resumed_bit_for_bit(data: Path, tmp_path: Path) -> None:
    more = ("training.max_steps=-1", "training.num_train_epochs=2")
    run(2, tmp_path / "whole" / "run", settings(data, tmp_path / "whole" / "run", *more))
    out = tmp_path / "killed" / "run"
    words = settings(data, out, *more)
    sealed = out / "checkpoints" / "checkpoint-4" / "checkpoint.json"
    kill_after(sealed, [*launcher(2), "-m", "mote", *words], out.parent)
    assert not (out / "model").exists()
    run(2, out, words)
    assert_same_weights(out / "model", tmp_path / "whole" / "run" / "model")


@pytest.mark.slow
def test_fsdp_checkpoints_are_resumed(data: Path, tmp_path: Path) -> None:
    """Checkpoints in parts, from which a run is resumed bit for bit; at the end a whole model, that of two replicas."""
    more = ("training.optim=sgd", "training.learning_rate=1", "training.max_grad_norm=1e-3")
    out = tmp_path / "full" / "run"
    error = run(2, out, settings(data, out, *more), fsdp=True, code=1, FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
    assert "SHARDED_STATE_DICT" in error
    assert_resumed_under_fsdp(tmp_path, lambda out: settings(data, out, *more))


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
    for name, processes in (("one", 1), ("replicas", 2), ("parts", 2)):
        out = tmp_path / name / "run"
        own = (*more, *GRADIENT_STEPS, "training.max_grad_norm=1e-2")
        run(processes, out, settings(data, out, *own, recipe=recipe), fsdp=name == "parts")
    one, replicas, parts = trained(tmp_path, "one", "replicas", "parts")
    assert one.keys() == replicas.keys() == parts.keys()
    assert difference(one, replicas) <= 1e-6
    assert difference(one, parts) <= 1e-6
    start = tensors_of(upcycle(str(SMALL_ENCODER), tmp_path / "start", experts=["search_query", "search_document"]))
    assert difference(one, start) > 1e-4


def test_the_weights_of_a_loss_are_one_for_all_processes(data: Path, tmp_path: Path) -> None:
    """A projection to a teacher's width, which DDP does not know of: its gradient goes into the model's."""
    source = dense_checkpoint(tmp_path / "tiny", sentence_transformers={"max_seq_length": 24}, **STILL)
    more = (
        f"model.source={source}",
        "tasks={retrieval: {anchor: search_query, batches: homogeneous, loss: EmbedDistillLoss, "
        f"teacher: {{source: {SMALL_ENCODER}}}, datasets: [retrieval/arxiv]}}}}",
        "training.optim=sgd",
        "training.learning_rate=1",
        "training.max_grad_norm=0",
    )
    for processes in (1, 2):
        out = tmp_path / str(processes) / "run"
        run(processes, out, settings(data, out, *more), HF_ASSETS_CACHE=str(tmp_path / "cache"))
    assert difference(*trained(tmp_path, "1", "2")) <= 1e-5


def test_a_batch_has_equal_parts(data: Path, tmp_path: Path) -> None:
    error = run(2, tmp_path / "run", settings(data, tmp_path / "run", "training.batch_size=15"), code=1)
    assert "15 cannot be divided evenly among 2" in error
    assert "Traceback" not in error.split("torch/distributed")[0]
