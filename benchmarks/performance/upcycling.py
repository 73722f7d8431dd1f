"""Upcycling compared with copying its result: wall time and peak memory, each run in its own process."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoModel, BertConfig

from benchmarks.performance.benchmark import SMALL_ENCODER, Benchmark, Options, Target

SHARD = 500_000_000  # bytes per file of the large model
BASE = 200_000_000  # bytes allowed in addition to one shard of the source and one of the result

# Runs `mote upcycle`; prints the seconds of imports and work, the memory after the imports, and the peak memory.
_RUN = """
import json, re, sys, time
from pathlib import Path

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

started = time.perf_counter()
import mote.upcycling.upcycle
from mote.cli import main
imported, before = time.perf_counter(), peak()
assert main(sys.argv[1:]) == 0
print(json.dumps([imported - started, time.perf_counter() - imported, before, peak()]))
"""


class Run(NamedTuple):
    """Seconds of one upcycling and one copy of its result, and bytes of memory."""

    whole: float
    imports: float
    work: float
    copy: float
    imported: int
    peak: int


def measure(options: Options) -> Benchmark:
    """Measure the checkpoint and a large model with random weights: 4 GB, 200 MB if quick."""
    rows, targets = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = write_large_model(folder / "large", *((512, 10) if options.quick else (2048, 13)))
        for label, source in ((options.checkpoint.name, options.checkpoint), ("large", large)):
            runs = run_pairs(source, folder, 2 if options.quick else 7)
            sizes = [_largest(source), _largest(folder / "mote")]
            written = sum(path.stat().st_size for path in (folder / "mote").rglob("*") if path.is_file())
            rows.append(_row(label, written, runs))
            peak = max(run.peak for run in runs) / (sum(sizes) + BASE)
            beyond = max(run.peak - run.imported for run in runs) / (sum(sizes) + BASE)
            targets.append(Target(f"{label}: memory beyond the imports / (shard + shard + 200 MB)", beyond, 1.0))
            if source is large:
                targets.append(Target("large: peak memory, imports included / (shard + shard + 200 MB)", peak, 1.0))
                targets.append(
                    Target("large: whole process / cp", _median(runs, lambda run: run.whole / run.copy), 1.3)
                )
            targets.append(
                Target(f"{label}: work after the imports / cp", _median(runs, lambda run: run.work / run.copy), 1.3)
            )
    return Benchmark(
        "upcycling",
        "Upcycling compared with copying its result",
        ["model", "written, MB", "whole, s", "imports, s", "work, s", "cp, s", "whole / cp", "work / cp", "peak, MB"],
        rows,
        targets,
        [
            "`mote upcycle` and `cp -r` of its result alternate, each in a separate process, with the sources in the "
            "page cache. Dirty pages are written to disk between runs, outside the measured time. Times are medians, "
            "and ratios are medians of paired ratios.",
            "Peak: the highest resident memory of all runs, including pages of mapped files. Imports: mainly torch and "
            "transformers.",
        ],
    )


def run_pairs(source: Path, folder: Path, count: int) -> list[Run]:
    """Upcycle and copy in turn; the first pair is a warm-up. The last result stays as `mote`."""
    runs = []
    for _ in range(count + 1):
        seconds, told = _timed([sys.executable, "-c", _RUN, "upcycle", "--src", str(source)], folder / "mote", "--out")
        imports, work, imported, peak = json.loads(told.splitlines()[-1])
        reflink = ["--reflink=never"] if sys.platform == "linux" else []  # copy the bytes, not references to them
        copy, _ = _timed(["cp", "-r", *reflink, str(folder / "mote")], folder / "copy")
        runs.append(Run(seconds, imports, work, copy, imported, peak))
    return runs[1:]


def _timed(command: list[str], out: Path, *option: str) -> tuple[float, str]:
    """Time a command that writes `out`, its last argument; dirty pages are written to disk first."""
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(["sync"], check=True)
    started = perf_counter()
    done = subprocess.run([*command, *option, str(out)], check=True, capture_output=True, text=True)
    return perf_counter() - started, done.stdout


def _row(label: str, written: int, runs: list[Run]) -> list[str]:
    times = [statistics.median(of_runs) for of_runs in list(zip(*runs, strict=True))[:4]]
    times += [_median(runs, lambda run: run.whole / run.copy), _median(runs, lambda run: run.work / run.copy)]
    peak = max(run.peak for run in runs) / 1e6
    return [label, f"{written / 1e6:,.1f}", *(f"{time:.2f}" for time in times), f"{peak:,.0f}"]


def _median(runs: list[Run], of: Callable[[Run], float]) -> float:
    return statistics.median(of(run) for run in runs)


def _largest(folder: Path) -> int:
    """Return the bytes of the largest weights file."""
    return max(path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))


def write_large_model(folder: Path, hidden: int, layers: int, shard: int = SHARD) -> Path:
    """Write a BERT with random bfloat16 weights, shard by shard, and the small encoder's tokenizer.

    Args:
        folder: Folder to write.
        hidden: Width.
        layers: Number of layers.
        shard: Bytes per shard.
    """
    folder.mkdir()
    settings = json.loads((SMALL_ENCODER / "config.json").read_text())
    config = BertConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        dtype=torch.bfloat16,
    )
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL_ENCODER / name, folder)
    with torch.device("meta"):
        weights = AutoModel.from_config(config).to(torch.bfloat16).state_dict()
    split = split_torch_state_dict_into_shards(weights, max_shard_size=shard)
    generator = torch.Generator().manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: torch.empty_like(weights[name], device="cpu") for name in names}
        for tensor in tensors.values():
            tensor.normal_(generator=generator)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
