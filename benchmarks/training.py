"""Cost of training: pairs per second compared with the dense model, memory of a large batch.

    python -m benchmarks.training speed [--model MODEL] [--seconds N] [--steps N]
    python -m benchmarks.training memory [--model MODEL] [--batch-size N] [--recipe NAME]

`speed` trains MoTE alternating with the dense model (with instructions), with token routing and with task LoRAs, on the
same batches with the same trainer. `memory` measures one step in a separate process, with and without gradient caching.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.pairing import compare
from mote.training.train import TrainingRun

ROOT = Path(__file__).parents[1]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"
DATA = ROOT / "examples" / "data"
LABELS = {"ic": "dense", "tlr": "token routing", "task-lora": "task LoRAs"}
COMMON = (f"data.folder={DATA}", "validation.share=0", "training.save_strategy='no'")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory", "one-step"))
    parser.add_argument("--model", default=str(SMALL_ENCODER), help="dense checkpoint (default: the repository's)")
    parser.add_argument("--seconds", type=float, default=60, help="duration of each speed comparison, at least 7 pairs")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run in a speed comparison")
    parser.add_argument("--batch-size", type=int, default=6144)
    parser.add_argument("--mini-batch-size", type=int, default=None)
    parser.add_argument("--recipe", default="mote", help="recipe of the memory benchmark")
    options = parser.parse_args()
    {"speed": speed, "memory": memory, "one-step": one_step}[options.what](options)


def speed(options: argparse.Namespace) -> None:
    """Print pairs per second and ratios."""

    def ready(name: str, folder: str) -> TrainingRun:
        out = Path(folder) / name
        settings = [*COMMON, f"model.source={options.model}", f"output={out}", "training.batch_size=64"]
        settings += ["training.mini_batch_size=32", "model.max_length=64", f"training.max_steps={options.steps}"]
        return TrainingRun(name, [*settings, "training.disable_tqdm=true"]).prepare()

    print(f"{Path(options.model).name}, medians of alternating runs of {options.steps} steps")
    print("| model | pairs per second | MoTE, pairs per second | MoTE / model |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: ready(name, folder) for name in ("mote", *LABELS)}
        for name in LABELS:
            runs[name].trainer.train()
            # The same seed draws the same rows for all.
            rows = sum(of_set["rows"] for of_set in runs[name].tracker.training_sets.values())
            measured = compare(runs[name].trainer.train, runs["mote"].trainer.train, seconds=options.seconds)
            cells = (f"{rows / measured.baseline:.1f}", f"{rows / measured.candidate:.1f}", f"{1 / measured.ratio:.3f}")
            print(f"| {LABELS[name]} | {' | '.join(cells)} |", flush=True)


def memory(options: argparse.Namespace) -> None:
    """Print the peak memory of one step of a large batch, minus that of a small step."""
    print(f"{Path(options.model).name}, batch of {options.batch_size} pairs of 16 tokens, one step")
    print("| mini-batch | peak, MB | over a small step, MB | seconds |")
    print("| --- | --- | --- | --- |")
    floor = None
    for batch_size, mini_batch_size in ((16, 16), (options.batch_size, 256), (options.batch_size, None)):
        command = [sys.executable, "-m", "benchmarks.training", "one-step", "--model", options.model]
        command += ["--batch-size", str(batch_size), "--recipe", options.recipe]
        command += [] if mini_batch_size is None else ["--mini-batch-size", str(mini_batch_size)]
        # return freed blocks at once, so that the peak counts only memory in use
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        peak, seconds = map(float, printed.split()[-2:])
        floor = floor or peak
        shown = "none: no caching" if mini_batch_size is None else mini_batch_size
        print(f"| {batch_size} in {shown} | {peak:,.0f} | {peak - floor:,.0f} | {seconds:.1f} |", flush=True)


def one_step(options: argparse.Namespace) -> None:
    """Run one step on synthetic texts in this process; print its peak memory in MB and its time in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(options.recipe, options.model, Path(folder), options.batch_size, options.mini_batch_size)
        began = time.perf_counter()
        run.trainer.train()
        seconds = time.perf_counter() - began
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, seconds)


def prepare(
    recipe: str, model: str, folder: Path, rows: int, mini: int | None, *others: str, length: int = 16
) -> TrainingRun:
    """Prepare a run of one step on a batch of made-up pairs of `length` tokens."""
    draw = random.Random(0)
    data = folder / "data" / "retrieval" / "made"
    data.mkdir(parents=True)
    nouns = ("gold", "water", "river", "stone", "house", "light")
    words = [" ".join(draw.choices(nouns, k=length + 8)) for _ in range(500)]
    with (data / "train.jsonl").open("w") as file:
        for row in range(rows):
            pair = {"query": f"{row} {words[row % 500]}", "positive": f"{row} {words[-row % 500]}"}
            file.write(json.dumps(pair) + "\n")
    task = "{anchor: search_query, positive: search_document, batches: homogeneous, datasets: [retrieval/*]}"
    settings = [*COMMON, f"model.source={model}", f"output={folder}/run", f"model.max_length={length}"]
    settings += [f"tasks={{retrieval: {task}}}", f"data.folder={folder}/data", "training.max_steps=1"]
    settings += [f"training.batch_size={rows}", f"training.mini_batch_size={'null' if mini is None else mini}"]
    return TrainingRun(recipe, [*settings, *others]).prepare()


if __name__ == "__main__":
    main()
