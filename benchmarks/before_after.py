"""Compare the speed of two checkouts: forward passes of a MoTE and training steps.

    python -m benchmarks.before_after --before OLD/.venv/bin/python --after NEW/.venv/bin/python

Each checkout is used through an interpreter that imports it, upcycles the same dense model, and runs in its own
process. Both processes take turns, one forward pass or training step at a time, so that both see the same noise; only
the medians of paired ratios are meaningful. The default dense model has the shape of all-MiniLM-L6-v2 and random
weights. Only what every version has is used: `mote.upcycle(source, folder)`, `AutoModel.from_pretrained(folder,
trust_remote_code=True)`, and `mote train`. The same interpreter on both sides measures the noise.
"""

import argparse
import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mote.reporting import table as markdown_table

ROOT = Path(__file__).parents[1]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"
SHAPES = {"1x16": 20, "32x16": 2, "32x128": 1}  # rows x length → forward passes per measurement

# Code of the processes. They answer each line on stdin with the seconds of one measurement.
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
UPCYCLE = "import sys, mote; mote.upcycle(sys.argv[1], sys.argv[2])"
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


@dataclass(frozen=True)
class Checkout:
    """A version of the code, used through an interpreter that imports it, in a folder of its own."""

    python: str
    folder: Path
    threads: int

    def command(self, code: str, *arguments: object) -> list[str]:
        """Return the command that runs code."""
        return [str(Path(self.python).absolute()), "-c", code, *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process."""
        own = {"HF_MODULES_CACHE": str(self.folder / "modules"), "OMP_NUM_THREADS": str(self.threads)}
        return {**os.environ, **own, "HF_HUB_OFFLINE": "1"}

    def run(self, code: str, *arguments: object) -> None:
        """Run code to its end."""
        subprocess.run(self.command(code, *arguments), cwd=self.folder, env=self.environment(), check=True)

    @contextmanager
    def worker(self, code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """Start a process that measures on request; wait until it is ready."""
        with (self.folder / "errors.log").open("w") as log:
            process = subprocess.Popen(
                self.command(code, *arguments),
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        with process:
            try:
                if not answer(process):
                    raise RuntimeError(f"{self.python} failed:\n{(self.folder / 'errors.log').read_text()[-3000:]}")
                yield process
            finally:
                process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    """Read a line; empty if the process has ended."""
    return process.stdout.readline().strip() if process.stdout is not None else ""


def seconds_of(process: subprocess.Popen[str]) -> float:
    """Return the seconds of one measurement."""
    print("go", file=process.stdin, flush=True)
    return float(answer(process))


def compared(checkouts: list[Checkout], code: str, arguments: list[list[object]], pairs: int) -> list[list[float]]:
    """Measure both checkouts in turn, swapping their order from pair to pair."""
    with ExitStack() as stack:
        before, after = (
            stack.enter_context(one.worker(code, *own)) for one, own in zip(checkouts, arguments, strict=True)
        )
        found = []
        for pair in range(pairs):
            first, second = (after, before) if pair % 2 else (before, after)
            times = {first.pid: seconds_of(first), second.pid: seconds_of(second)}
            found.append([times[before.pid], times[after.pid]])
        return found


def row(label: str, found: list[list[float]]) -> list[str]:
    """Format the medians."""
    ratios = sorted(new / old for old, new in found)
    quarter = len(ratios) // 4
    times = [f"{1e3 * statistics.median(times):.2f}" for times in zip(*found, strict=True)]
    spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
    return [label, *times, f"{statistics.median(ratios):.3f}", spread, str(len(found))]


def measure(options: argparse.Namespace, checkouts: list[Checkout], folder: Path) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    dense = options.dense and Path(options.dense).resolve()
    if dense is None:
        dense = folder / "dense"
        checkouts[0].run(MAKE_DENSE, dense, SMALL_ENCODER, *((64, 2) if options.quick else (384, 6)))
    for checkout in checkouts:
        checkout.run(UPCYCLE, dense, checkout.folder / "upcycled")
    pairs, rounds = (3, 1) if options.quick else (options.pairs, options.rounds)
    for shape, repeats in SHAPES.items():
        found = []
        for _ in range(rounds):
            arguments = [[one.folder / "upcycled", *shape.split("x"), repeats] for one in checkouts]
            found += compared(checkouts, FORWARD, arguments, pairs)
        yield row(f"forward, {shape}", found)
    settings = ["mote", f"model.source={dense}", "model.max_length=64", f"data.folder={ROOT / 'examples' / 'data'}"]
    settings += ["data.limit=2000", "validation.share=0", "training.batch_size=32", "training.mini_batch_size=32"]
    found = []
    for number in range(rounds):
        own = [*settings, "training.max_steps=100000", f"output=run{number}"]
        changes = [[*own, *options.train_before], [*own, *options.train_after]]
        found += compared(checkouts, TRAIN, changes, pairs)
    yield row("training step, 32 pairs", found)


def main() -> None:
    """Print a table that compares both checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--before", required=True, metavar="PYTHON", help="interpreter that imports the old checkout")
    add("--after", required=True, metavar="PYTHON", help="interpreter that imports the new checkout")
    add("--dense", help="dense checkpoint (default: random weights in the shape of all-MiniLM-L6-v2)")
    add("--pairs", type=int, default=20, help="measurements per process (default: %(default)s)")
    add("--rounds", type=int, default=3, help="pairs of processes per row of the table (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add("--train-before", nargs="*", default=[], metavar="KEY=VALUE", help="more recipe settings of the old checkout")
    add("--train-after", nargs="*", default=[], metavar="KEY=VALUE", help="more recipe settings of the new checkout")
    add("--quick", action="store_true", help="a tiny model and few pairs, to check that it runs")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkouts = []
        for which in ("before", "after"):
            (folder / which).mkdir()
            checkouts.append(Checkout(getattr(options, which), folder / which, options.threads))
        rows = list(measure(options, checkouts, folder))
    header = ["", "before, ms", "after, ms", "after / before", "middle half of the ratios", "pairs"]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()
