"""`SentenceTransformer.encode` with different batch sizes."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options
from benchmarks.performance.models import real_texts, seconds, waiting
from mote import upcycle

DEFAULT = 32
SIZES = (4, 8, 16, 32, 64, 128)


def measure(options: Options) -> Benchmark:
    """Compare each batch size with the default, 32."""
    with tempfile.TemporaryDirectory() as folder:
        upcycle(str(options.checkpoint), Path(folder) / "mote")
        model = SentenceTransformer(f"{folder}/mote", trust_remote_code=True, device=options.device)
    texts = [text for of_task in real_texts(options, 32).values() for text in of_task]
    encoded = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
    lengths = [len(tokens) for tokens in encoded]
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # by characters, as in `encode`

    def encode(size: int) -> np.ndarray:
        return model.encode(texts, task="clustering", batch_size=size, show_progress_bar=False)

    expected = encode(DEFAULT)
    rows = []
    for size in (8, 128) if options.quick else SIZES:
        np.testing.assert_allclose(encode(size), expected, atol=1e-4)
        found = compare(
            partial(encode, DEFAULT),
            partial(encode, size),
            seconds=seconds(options),
            synchronize=waiting(options),
        )
        batches = [longest_first[start : start + size] for start in range(0, len(texts), size)]
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        speed = f"{len(texts) / found.candidate:,.0f}"
        rows.append([str(size), f"{padded / sum(lengths):.2f}", speed, f"{1 / found.ratio:.3f}"])
    columns = ["batch size", "padded tokens / tokens", "texts per second", "speed-up over 32"]
    notes = [
        f"{len(texts):,} real texts of four tasks, {min(lengths)} to {max(lengths)} tokens, median "
        f"{int(np.median(lengths))}. `encode` sorts texts by length before it forms batches."
    ]
    return Benchmark("batch_size", "Batch size of `encode`", columns, rows, [], notes)
