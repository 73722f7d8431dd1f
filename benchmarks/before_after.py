"""Compare the speed of two checkouts: forward passes of a MoTE and training steps.

    python -m benchmarks.before_after --before OLD/.venv/bin/python --after NEW/.venv/bin/python

Each checkout is used through an interpreter that imports it; it upcycles the same dense model and runs in its own
processes. Both processes are alive at the same time and take turns, one forward pass or training step at a time, so
that both see the same noise; only the medians of paired ratios are meaningful. The default dense model has the shape of
all-MiniLM-L6-v2 and random weights.

The benchmark only uses what every version has: `mote.upcycle(source, folder)`, `AutoModel.from_pretrained(folder,
trust_remote_code=True)`, and `mote train`. Put recipe keys that only one checkout knows into `--train-before` and
`--train-after`. The same interpreter on both sides measures the noise.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mote.reporting import markdown_table

ROOT = Path(__file__).parents[1]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"
SHAPES = {"1x16": 20, "32x16": 2, "32x128": 1}  # rows x length → forward passes per measurement

# Code of the processes. They answer each line "go" on stdin with the seconds of one measurement.
MAKE_DENSE = """
import shutil, sys
from transformers import AutoModel, BertConfig
out, tokenizer, hidden, layers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = BertConfig(vocab_size=30522, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
                    intermediate_size=4 * hidden)
AutoModel.from_config(config).save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{tokenizer}/{name}", out)
"""
UPCYCLE = """
import sys
import mote
mote.upcycle(sys.argv[1], sys.argv[2])
print(mote.__file__)
"""
FORWARD = """
import sys, time
import torch
from transformers import AutoModel
folder, rows, length, repeats = sys.argv[1], *map(int, sys.argv[2:])
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
ids = torch.randint(5, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
with torch.inference_mode():
    for _ in range(3):
        model(**inputs, task="search_query")
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(repeats):
            model(**inputs, task="search_query")
        print((time.perf_counter() - started) / repeats, flush=True)
"""
TRAIN = """
import os, sys, time
from transformers.trainer_callback import CallbackHandler
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # progress goes to stderr
end_step, started = CallbackHandler.on_step_end, None

def on_step_end(self, *args, **kwargs):  # from one step's end to the next: data, forward, backward, optimizer
    global started
    result = end_step(self, *args, **kwargs)
    print("ready" if started is None else time.perf_counter() - started, file=answers, flush=True)
    if not sys.stdin.readline():
        os._exit(0)
    started = time.perf_counter()
    return result

CallbackHandler.on_step_end = on_step_end
from mote.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


class Checkout:
    """A version of the code, used through an interpreter that imports it."""

    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        self.name, self.folder = name, folder / name
        self.python = str(Path(python).absolute()) if os.sep in python else python
        self.folder.mkdir()
        self.environment = {
            **os.environ,
            "HF_MODULES_CACHE": str(self.folder / "modules"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }

    def run(self, code: str, *arguments: object) -> str:
        """Run code to its end; return its output."""
        done = subprocess.run(
            [self.python, "-c", code, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} ({self.python}) failed:\n{done.stderr[-3000:]}")
        return done.stdout

    @contextmanager
    def start(self, code: str, *arguments: object) -> Iterator["Worker"]:
        """Start a process that measures on request."""
        errors = self.folder / "errors.log"
        with (
            errors.open("w") as log,
            subprocess.Popen(
                [self.python, "-c", code, *map(str, arguments)],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                yield Worker(process, errors)
            finally:
                process.kill()


class Worker:
    """A process that measures on request."""

    def __init__(self, process: subprocess.Popen, errors: Path) -> None:
        self.process, self.errors = process, errors
        self.answer()  # "ready"

    def answer(self) -> str:
        """Read a line."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"the process ended early:\n{self.errors.read_text()[-3000:]}")
        return line

    def measure(self) -> float:
        """Return the seconds of one measurement."""
        print("go", file=self.process.stdin, flush=True)
        return float(self.answer())


def compare(before: Worker, after: Worker, pairs: int) -> list[tuple[float, float]]:
    """Measure both in turn, swapping their order from pair to pair."""
    found = []
    for pair in range(pairs):
        if pair % 2:
            new, old = after.measure(), before.measure()
        else:
            old, new = before.measure(), after.measure()
        found.append((old, new))
    return found


def row(label: str, found: list[tuple[float, float]]) -> list[str]:
    """Format the medians."""
    ratios = sorted(new / old for old, new in found)
    quarter = len(ratios) // 4
    times = [f"{1e3 * statistics.median(times):.2f}" for times in zip(*found, strict=True)]
    return [
        label,
        *times,
        f"{statistics.median(ratios):.3f}",
        f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}",
        str(len(found)),
    ]


def main() -> None:
    """Print a table that compares both checkouts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before_after",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--before", required=True, metavar="PYTHON", help="interpreter that imports the old checkout")
    add("--after", required=True, metavar="PYTHON", help="interpreter that imports the new checkout")
    add("--dense", help="dense checkpoint (default: random weights in the shape of all-MiniLM-L6-v2)")
    add("--data", default=str(ROOT / "examples" / "data"), help="training data (default: the repository's)")
    add("--pairs", type=int, default=20, help="measurements per process (default: %(default)s)")
    add("--rounds", type=int, default=3, help="pairs of processes per row of the table (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="rows of a training step (default: %(default)s)")
    add("--train-before", nargs="*", default=[], metavar="KEY=VALUE", help="more recipe settings of the old checkout")
    add("--train-after", nargs="*", default=[], metavar="KEY=VALUE", help="more recipe settings of the new checkout")
    add("--quick", action="store_true", help="a tiny model and few pairs, to check that it runs")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.rounds = 3, 1
    with TemporaryDirectory() as name:
        folder = Path(name)
        before = Checkout("before", options.before, folder, options.threads)
        after = Checkout("after", options.after, folder, options.threads)
        rows = list(measure(options, before, after, folder))
    header = ["", "before, ms", "after, ms", "after / before", "middle half of the ratios", "pairs"]
    print(markdown_table(header, rows))


def measure(options: argparse.Namespace, before: Checkout, after: Checkout, folder: Path) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    dense = options.dense and Path(options.dense).resolve()
    if dense is None:
        dense = folder / "dense"
        before.run(MAKE_DENSE, dense, SMALL_ENCODER, *((64, 2) if options.quick else (384, 6)))
    for checkout in (before, after):
        place = checkout.run(UPCYCLE, dense, checkout.folder / "upcycled").splitlines()[-1]
        print(f"{checkout.name}: {place}", file=sys.stderr)
    for shape, repeats in SHAPES.items():
        print(f"forward, {shape}", file=sys.stderr)
        found = []
        for _ in range(options.rounds):
            arguments = (*shape.split("x"), repeats)
            with (
                before.start(FORWARD, before.folder / "upcycled", *arguments) as old,
                after.start(FORWARD, after.folder / "upcycled", *arguments) as new,
            ):
                found += compare(old, new, options.pairs)
        yield row(f"forward, {shape}", found)
    print("training", file=sys.stderr)
    found = []
    for number in range(options.rounds):
        settings = [
            f"model.source={dense}",
            "model.max_length=64",
            f"data.folder={Path(options.data).resolve()}",
            "data.limit=2000",
            "validation.share=0",
            f"training.batch_size={options.batch_size}",
            f"training.mini_batch_size={options.batch_size}",
            "training.max_steps=100000",
            f"output=run{number}",
        ]
        with (
            before.start(TRAIN, "mote", *settings, *options.train_before) as old,
            after.start(TRAIN, "mote", *settings, *options.train_after) as new,
        ):
            found += compare(old, new, options.pairs)
    yield row(f"training step, {options.batch_size} pairs", found)


if __name__ == "__main__":
    main()
