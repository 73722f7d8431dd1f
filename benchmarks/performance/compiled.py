"""`torch.compile`: compilation time, number of graphs, and speed-up."""

import copy
import time
from functools import partial

import torch
from torch._dynamo.utils import counters

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options
from benchmarks.performance.models import TASKS, load_dense, made_up, make_mote, milliseconds, seconds, waiting
from mote.remote.modeling_mote import MoTEModel

LENGTHS = (16, 24, 48, 96, 128)
ROWS = (1, 8, 32)


def measure(options: Options) -> Benchmark:
    """Compare the eager model with compiled layers and with a backbone compiled as a whole."""
    mote = make_mote(load_dense(options))
    ways = {"layers: model.compile()": lambda model: model.compile()}
    if not options.quick:
        ways["whole: model.backbone.compile(dynamic=True)"] = lambda model: model.backbone.compile(dynamic=True)
    rows = []
    for name, compile_model in ways.items():
        compiled = copy.deepcopy(mote)
        compile_model(compiled)
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=4 * len(TASKS)):
            graphs, started = counters["stats"]["unique_graphs"], time.perf_counter()
            visit(compiled)
            first = time.perf_counter() - started
            graphs = counters["stats"]["unique_graphs"] - graphs
            for batch in ROWS:
                inputs = made_up(mote, batch, 96)
                found = compare(
                    partial(mote, **inputs, task="search_query"),
                    partial(compiled, **inputs, task="search_query"),
                    seconds=seconds(options),
                    synchronize=waiting(options),
                )
                times = [milliseconds(found.baseline), milliseconds(found.candidate)]
                rows.append([name, str(graphs), f"{first:.0f}", f"{batch} x 96", *times, f"{1 / found.ratio:.3f}"])
    columns = ["compiled", "graphs", "first calls, s", "rows x length", "not compiled, ms", "compiled, ms", "speed-up"]
    notes = [
        f"Graphs and first calls: {len(TASKS)} tasks x {len(LENGTHS)} lengths x batches of {', '.join(map(str, ROWS))} "
        "rows, each combination called once."
    ]
    return Benchmark("compiled", "torch.compile", columns, rows, [], notes)


def visit(model: MoTEModel) -> None:
    """Run every task with every length and number of rows."""
    for task in TASKS:
        for batch in ROWS:
            for length in LENGTHS:
                model(**made_up(model.backbone, batch, length), task=task)
