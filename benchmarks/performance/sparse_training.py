"""Forward and backward pass of a hybrid model in training, compared with keeping all vocabulary logits in memory."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SparseEncoder

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.models import real_texts, seconds, waiting
from mote import upcycle


def measure(options: Options) -> Benchmark:
    """Compare both ways, in float32 and bfloat16, with a fresh model: about half of its weights are active."""
    with tempfile.TemporaryDirectory() as folder:
        upcycle(str(options.checkpoint), Path(folder) / "mote", retrieval="hybrid", pooling="cls")
        model = SparseEncoder(f"{folder}/mote", trust_remote_code=True, device=options.device)
    pooling: Any = model[-1]
    texts = [text for of_task in real_texts(options, 16).values() for text in of_task][:32]
    model.max_seq_length = 48
    features = model.preprocess(texts, task="search_document")
    features = {name: value.to(options.device) if hasattr(value, "to") else value for name, value in features.items()}
    fused = type(pooling)._highest

    def whole(self: Any, states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logits = states @ self.network.get_input_embeddings().weight.T
        return logits.masked_fill(~kept[..., None], 0).amax(dim=1)

    def step(highest: Any, dtype: torch.dtype) -> None:
        type(pooling)._highest = highest
        with torch.autocast(options.device, dtype, enabled=dtype != torch.float32):
            vectors = model.train()(dict(features))["sentence_embedding"]
        vectors.float().square().sum().backward()
        model.zero_grad()

    rows, targets = [], []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found = compare(
            partial(step, whole, dtype),
            partial(step, fused, dtype),
            seconds=seconds(options),
            synchronize=waiting(options),
        )
        rows.append([name, f"{found.baseline:.3f}", f"{found.candidate:.3f}", f"{found.ratio:.3f}"])
        targets.append(Target(f"time in {name} / with all logits", found.ratio, 1.0))
    length = features["input_ids"].shape[1]
    notes = [f"{len(texts)} texts of {length} tokens; vocabulary of {pooling.network.config.vocab_size:,}."]
    columns = ["dtype", "with all logits, s", "without, s", "ratio"]
    return Benchmark("sparse_training", "Training sparse and hybrid models", columns, rows, targets, notes)
