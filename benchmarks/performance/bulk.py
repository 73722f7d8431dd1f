"""Bulk encoding: batches of about as many tokens each, beside `encode` with a number of rows."""

import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from benchmarks.pairing import compare
from benchmarks.performance.figures import Figure, Options
from benchmarks.performance.models import real_texts, seconds, waiting
from mote import encode, upcycle
from mote.inference.bulk import cut

BUDGETS = (1024, 2048, 4096, 8192)


def measure(options: Options) -> Figure:
    """Compare budgets, and other numbers of rows, with `encode(batch_size=32)`."""
    with tempfile.TemporaryDirectory() as folder:
        upcycle(str(options.checkpoint), Path(folder) / "mote")
        model = SentenceTransformer(f"{folder}/mote", trust_remote_code=True, device=options.device)
    texts = [text for of_task in real_texts(options, 32).values() for text in of_task]
    lengths = [
        len(tokens) for tokens in model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
    ]

    def by_rows(rows: int) -> np.ndarray:
        return model.encode(texts, task="clustering", batch_size=rows, show_progress_bar=False)

    def by_tokens(budget: int) -> np.ndarray:
        return np.asarray(encode(model, texts, task="clustering", batch_tokens=budget))

    by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # in characters, as encode does
    expected = by_rows(32)
    ways = {f"{rows} rows": (by_rows, rows) for rows in (8, 32, 128)}
    ways |= {f"{budget:,} tokens": (by_tokens, budget) for budget in (BUDGETS[1:2] if options.quick else BUDGETS)}
    table = []
    for name, (way, size) in ways.items():
        np.testing.assert_allclose(way(size), expected, atol=1e-4)
        found = compare(
            lambda: by_rows(32),
            lambda way=way, size=size: way(size),
            seconds=seconds(options),
            synchronize=waiting(options),
        )
        batches = (
            cut(lengths, size)
            if way is by_tokens
            else [by_length[start : start + size] for start in range(0, len(texts), size)]
        )
        computed = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        times = [f"{len(texts) / time:,.0f}" for time in (found.baseline, found.candidate)]
        table.append([name, f"{computed / sum(lengths):.2f}", *times, f"{1 / found.ratio:.3f}"])
    columns = [
        "batches of",
        "tokens computed / tokens",
        "32 rows, texts per second",
        "texts per second",
        "speed-up over 32 rows",
    ]
    notes = [
        f"{len(texts):,} real texts of four tasks, {min(lengths)} to {max(lengths)} tokens, median "
        f"{int(np.median(lengths))}. `encode` sorts by length in either case; the budget is for the padded batch.",
        "Batches of tokens are `mote.encode`, which tokenises all texts once more to know their lengths.",
    ]
    return Figure("bulk", "Bulk encoding in batches of equal tokens", columns, table, [], notes)
