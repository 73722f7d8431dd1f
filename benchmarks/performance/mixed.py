"""Batches of four tasks, compared with the dense model on the same rows, and in one pass with a pass for each."""

from functools import partial

import torch

import mote
from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.models import (
    TASKS,
    load_dense,
    made_up,
    make_mote,
    milliseconds,
    real_texts,
    seconds,
    tokenize,
)

ROWS = 64
SHAPES = ((4, 8), (4, 16), (4, 64), (16, 16), (16, 32), (16, 64), (ROWS, 16), (ROWS, 128))  # rows, length


def measure(options: Options) -> Benchmark:
    """Compare on rows of equal length and on real texts padded to the longest."""
    dense = load_dense(options)
    model, together = make_mote(dense), make_mote(dense)
    mote.speed_up(together, one_pass=True)
    texts = real_texts(options, ROWS // len(TASKS))
    tasks = TASKS * (ROWS // len(TASKS))  # alternating: no two neighbours share an expert
    batches = {
        **{f"{rows} x {length}": (made_up(dense, rows, length), tasks[:rows]) for rows, length in SHAPES},
        f"{ROWS} x 128, sorted by task": (made_up(dense, ROWS, 128), sorted(tasks)),
        "real texts": (tokenize(options, [text for row in zip(*texts.values(), strict=True) for text in row]), tasks),
        "real texts of one length": (_sorted_slice(options), tasks),
    }
    rows, targets = [], []
    for name, (inputs, of_rows) in batches.items():
        with torch.inference_mode():
            _check(dense, model, inputs, of_rows)
            apart, time = partial(model, **inputs, task=of_rows), seconds(options)
            found = compare(partial(dense, **inputs), apart, seconds=time)
            in_one = compare(apart, partial(together, **inputs, task=of_rows), seconds=time)
        tokens = int(inputs["attention_mask"].sum())
        rows.append(
            [
                name,
                f"{tokens:,} of {inputs['input_ids'].numel():,}",
                milliseconds(found.baseline),
                milliseconds(found.candidate),
                f"{found.ratio:.3f}",
                f"{in_one.ratio:.3f}",
            ]
        )
        if inputs["input_ids"].numel() > ROWS * 16:  # fewer are mostly Python
            targets.append(Target(f"four tasks, {name}", found.ratio, 1.05))
        targets.append(Target(f"four tasks, {name}, one pass / a pass for each", in_one.ratio, 1.05))
    columns = ["batch", "tokens, without padding", "dense, ms", "MoTE, ms", "MoTE / dense", "one pass / MoTE"]
    notes = [
        "The dense model computes all padding of the batch; MoTE groups rows by expert and length and trims each group "
        "to its longest row. The MoTE's time includes its pooling.",
        "Real texts: 16 per task, with alternating tasks. `real texts of one length` are 64 consecutive texts out of "
        "1,024 sorted by length, as `SentenceTransformer.encode` batches them.",
    ]
    return Benchmark(
        "mixed", "Rows of four tasks, compared with the dense model on the same rows", columns, rows, targets, notes
    )


def _sorted_slice(options: Options) -> dict[str, torch.Tensor]:
    """Return the middle batch of many texts sorted by length."""
    many = [text for of_task in real_texts(options, 256).values() for text in of_task]
    many.sort(key=len)
    return tokenize(options, many[len(many) // 2 :][:ROWS])


def _check(dense: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, torch.Tensor], tasks: list[str]) -> None:
    mask = inputs["attention_mask"].bool()
    expected, found = (out.last_hidden_state[mask] for out in (dense(**inputs), model(**inputs, task=tasks)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
