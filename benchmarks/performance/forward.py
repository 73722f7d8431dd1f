"""Forward pass of one task compared with the native dense model."""

import copy
from functools import partial

import torch

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.models import load_dense, made_up, make_mote, milliseconds, seconds
from mote.remote.modeling_mote import pool


def measure(options: Options) -> Benchmark:
    """Compare both as loaded by `AutoModel`; the dense model also with the MoTE's pooling and with a copy of itself."""
    dense = load_dense(options)
    mote, twin = make_mote(dense), copy.deepcopy(dense)
    without_pooler = copy.deepcopy(dense)
    without_pooler.register_module("pooler", None)
    mode, rows, targets = mote.config.pooling, [], []
    for batch, length in [(batch, length) for batch in (1, 32) for length in (16, 128, 512)]:
        if length > getattr(dense.config, "max_position_embeddings", length) or (options.quick and length > 128):
            continue
        inputs = made_up(dense, batch, length)

        run_dense, run_twin = partial(dense, **inputs), partial(twin, **inputs)
        run_mote = partial(mote, **inputs, task="search_query")

        def run_pooled(inputs: dict[str, torch.Tensor] = inputs) -> torch.Tensor:
            return pool(without_pooler(**inputs).last_hidden_state, inputs["attention_mask"], mode)

        with torch.inference_mode():
            if not torch.equal(run_dense().last_hidden_state, run_mote().last_hidden_state):
                raise AssertionError(f"MoTE and the dense model differ for {batch} x {length}")
            found = compare(run_dense, run_mote, seconds=seconds(options))
            pooled = compare(run_pooled, run_mote, seconds=seconds(options))
            noise = compare(run_dense, run_twin, seconds=seconds(options))
        times = [milliseconds(time) for time in (found.baseline, pooled.baseline, found.candidate)]
        ratios = [f"{ratio:.3f}" for ratio in (found.ratio, pooled.ratio, noise.ratio)]
        rows.append([f"{batch} x {length}", *times, *ratios])
        targets.append(Target(f"forward, {batch} x {length}", found.ratio, 1.01))
    columns = ["rows x length", "dense, ms", "dense and pooling, ms", "MoTE, ms", "MoTE / dense"]
    columns += ["MoTE / dense and pooling", "dense / dense"]
    notes = [
        "Both models are loaded with `AutoModel`. The MoTE's time includes pooling over the tokens; the dense model's "
        "time includes its pooler, if it has one. In `dense and pooling`, the MoTE's pooling replaces that pooler.",
        "`dense / dense` compares the dense model with a copy of itself, which shows the noise of a ratio.",
        f"Threads: {torch.get_num_threads()}.",
    ]
    return Benchmark(
        "forward", "Forward pass of one task compared with the native dense model", columns, rows, targets, notes
    )
