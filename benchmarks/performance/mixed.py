"""A batch of 64 rows of four tasks, compared with the dense model on the same rows."""

from functools import partial

import torch

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
SHORT = "rows of 16 tokens"


def measure(options: Options) -> Benchmark:
    """Compare on rows of equal length and on real texts padded to the longest."""
    dense = load_dense(options)
    mote = make_mote(dense)
    texts = real_texts(options, ROWS // len(TASKS))
    tasks = TASKS * (ROWS // len(TASKS))  # alternating: no two neighbours share an expert
    batches = {
        SHORT: (made_up(dense, ROWS, 16), tasks),
        "rows of 128 tokens": (made_up(dense, ROWS, 128), tasks),
        "rows of 128 tokens, sorted by task": (made_up(dense, ROWS, 128), sorted(tasks)),
        "real texts": (tokenize(options, [text for row in zip(*texts.values(), strict=True) for text in row]), tasks),
        "real texts of one length": (_sorted_slice(options), tasks),
    }
    rows, targets = [], []
    for name, (inputs, of_rows) in batches.items():
        with torch.inference_mode():
            _check(dense, mote, inputs, of_rows)
            found = compare(
                partial(dense, **inputs),
                partial(mote, **inputs, task=of_rows),
                seconds=seconds(options),
            )
        tokens = int(inputs["attention_mask"].sum())
        rows.append(
            [
                name,
                f"{tokens:,} of {inputs['input_ids'].numel():,}",
                milliseconds(found.baseline),
                milliseconds(found.candidate),
                f"{found.ratio:.3f}",
            ]
        )
        if name != SHORT:
            targets.append(Target(f"64 rows of four tasks, {name}", found.ratio, 1.05))
    columns = ["batch", "tokens, without padding", "dense, ms", "MoTE, ms", "MoTE / dense"]
    notes = [
        f"{SHORT.capitalize()} have no target, because four passes of such short rows through a small model are mostly "
        "Python overhead.",
        "The dense model computes all padding of the batch; MoTE groups rows by expert and length and trims each group "
        "to its longest row. The MoTE's time includes its pooling.",
        "Real texts: 16 per task, with alternating tasks. `real texts of one length` are 64 consecutive texts out of "
        "1,024 sorted by length, as `SentenceTransformer.encode` batches them.",
    ]
    return Benchmark(
        "mixed", "64 rows of four tasks, compared with the dense model on the same rows", columns, rows, targets, notes
    )


def _sorted_slice(options: Options) -> dict[str, torch.Tensor]:
    """Return the middle batch of many texts sorted by length."""
    many = [text for of_task in real_texts(options, 256).values() for text in of_task]
    many.sort(key=len)
    return tokenize(options, many[len(many) // 2 :][:ROWS])


def _check(dense: torch.nn.Module, mote: torch.nn.Module, inputs: dict[str, torch.Tensor], tasks: list[str]) -> None:
    mask = inputs["attention_mask"].bool()
    expected, found = (out.last_hidden_state[mask] for out in (dense(**inputs), mote(**inputs, task=tasks)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
