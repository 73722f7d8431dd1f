"""Forward pass with 1 to 64 experts."""

from functools import partial

import torch

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.models import load_dense, made_up, make_mote, milliseconds, seconds


def measure(options: Options) -> Benchmark:
    """Compare each number of experts with one expert."""
    dense = load_dense(options)
    one = make_mote(dense, ["task0"])
    rows, targets = [], []
    for count in (4, 64) if options.quick else (4, 16, 64):
        many = make_mote(dense, [f"task{number}" for number in range(count)])
        for batch, length in ((1, 128), (32, 128)):
            inputs = made_up(dense, batch, length)
            with torch.inference_mode():
                found = compare(
                    partial(one, **inputs, task="task0"),
                    partial(many, **inputs, task=f"task{count - 1}"),
                    seconds=seconds(options),
                )
            times = [milliseconds(found.baseline), milliseconds(found.candidate)]
            rows.append([str(count), f"{batch} x {length}", *times, f"{found.ratio:.3f}"])
            if count == 64:
                targets.append(Target(f"64 experts / 1, {batch} x {length}", found.ratio, 1.02))
    columns = ["experts", "rows x length", "one expert, ms", "all experts, ms", "all / one"]
    notes = ["Each batch belongs to one task, whose expert is the last of the list."]
    return Benchmark("many_experts", "Forward pass with 1 to 64 experts", columns, rows, targets, notes)
