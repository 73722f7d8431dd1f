"""Time and peak memory of loading one expert of a MoTE, compared with a dense checkpoint of the same size."""

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoModel
from transformers.utils import logging

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import SMALL_ENCODER, Benchmark, Options, Target
from benchmarks.performance.models import load_dense, milliseconds, seconds, waiting
from benchmarks.performance.processes import Memory, memory_of
from mote import MoTEConfig, MoTEModel, load, upcycle

FIRST = "search_query"
LOADS = {
    "dense": "use(AutoModel.from_pretrained(sys.argv[3], add_pooling_layer=False))",
    "one expert": f"use(MoTEModel.from_pretrained(sys.argv[3], experts=[{FIRST!r}]), task={FIRST!r})",
    "offloaded to disk": (
        "model = mote.load(sys.argv[3], offload='disk')\n"
        "for task in model.config.available_experts: use(model, task=task)"
    ),
    "all experts": f"use(MoTEModel.from_pretrained(sys.argv[3]), task={FIRST!r})",
}


def measure(options: Options) -> Benchmark:
    """Measure with the files in the page cache."""
    logging.disable_progress_bar()
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write(options, folder)
        rows, targets = _times(options, folder)
        if options.device == "cpu":
            more_rows, more_targets = _memory(options, folder)
            rows, targets = rows + more_rows, targets + more_targets
    return Benchmark(
        "loading",
        f"Loading one expert of {options.checkpoint.name}, {options.device}",
        ["", "baseline", "measured", "ratio"],
        rows,
        targets,
        [
            "Time: `from_pretrained` of the installed classes, all in one process, after the imports, with the files "
            "in the page cache. By remote code (`trust_remote_code=True`), transformers also checks and imports the "
            "model's code.",
            "Memory: each model is loaded in a separate process. The value is its peak resident memory minus its "
            "resident memory after loading and using a small dense model and a small MoTE. Every weight is read once, "
            "because loading only maps the file. In parentheses: the peak including the libraries.",
            "With 64 experts, the file header is many times as long as with one, and safetensors parses all of it.",
        ],
    )


def _write(options: Options, folder: Path) -> None:
    """Write the dense model, and MoTEs made from it with 1, 4 and 64 experts."""
    dense = load_dense(options).cpu()
    dense.register_module("pooler", None)  # a MoTE has none
    dense.save_pretrained(folder / "dense")
    for count in (1, 4, 8 if options.quick else 64):
        names = [FIRST, *(f"expert{i}" for i in range(1, count))]
        model = MoTEModel(MoTEConfig(backbone_config=dense.config, experts=names), load_dense(options).cpu())
        model.save_pretrained(folder / f"mote{count}")
    upcycle(str(SMALL_ENCODER), folder / "small")


def _loader(options: Options, path: Path) -> Callable[[], object]:
    arguments: dict[str, Any] = {"dtype": options.dtype, "device_map": options.device}
    if path.name == "dense":
        return lambda: AutoModel.from_pretrained(path, add_pooling_layer=False, **arguments)
    return lambda: MoTEModel.from_pretrained(path, experts=[FIRST], **arguments)


def _times(options: Options, folder: Path) -> tuple[list[list[str]], list[Target]]:
    most = 8 if options.quick else 64
    arguments: dict[str, Any] = {"dtype": options.dtype, "device_map": options.device}
    dense, one, four, many = (_loader(options, folder / name) for name in ("dense", "mote1", "mote4", f"mote{most}"))
    pairs = {
        "one of 4 experts / dense": (dense, four, 1.05),
        f"one of {most} experts / one of 1": (one, many, 1.05),
        "offloaded to disk / dense": (
            dense,
            lambda: load(folder / "mote4", offload="disk", **arguments),
            None,
        ),
        "by remote code, one of 4 / dense": (
            dense,
            lambda: AutoModel.from_pretrained(folder / "mote4", experts=[FIRST], trust_remote_code=True, **arguments),
            None,
        ),
        "dense / dense": (dense, dense, None),
    }
    rows, targets = [], []
    for what, (baseline, candidate, limit) in pairs.items():
        found = compare(baseline, candidate, seconds=seconds(options), synchronize=waiting(options))
        row = [milliseconds(found.baseline) + " ms", milliseconds(found.candidate) + " ms", f"{found.ratio:.3f}"]
        rows.append([f"time, {what}", *row])
        if limit is not None:
            targets.append(Target(f"time, {what}", found.ratio, limit))
    return rows, targets


def _memory(options: Options, folder: Path) -> tuple[list[list[str]], list[Target]]:
    warm_up = (SMALL_ENCODER, folder / "small")
    found: dict[str, Memory] = {}
    for kind, code in LOADS.items():
        path = folder / ("dense" if kind == "dense" else "mote4")
        runs = [memory_of(code, warm_up, path) for _ in range(1 if options.quick else 5)]
        found[kind] = Memory(*(int(statistics.median(values)) for values in zip(*runs, strict=True)))
    rows, targets = [], []
    for kind in list(LOADS)[1:]:
        ratio = found[kind].peak / found["dense"].peak
        rows.append(
            [f"peak memory, {kind} / dense", _megabytes(found["dense"]), _megabytes(found[kind]), f"{ratio:.3f}"]
        )
        if kind != "all experts":
            targets.append(Target(f"peak memory, {kind} / dense", ratio, 1.02))
    return rows, targets


def _megabytes(memory: Memory) -> str:
    return f"{memory.peak / 1e6:.1f} MB ({memory.raw / 1e6:.0f})"
