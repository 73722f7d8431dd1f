"""`encode` of an exported expert in every runtime for a CPU, compared with Sentence-Transformers' default.

The default is `SentenceTransformer(dense).encode(texts)`: torch, float32, batches of 32 sorted by length. Every runtime
embeds the same texts in the same batches, with the same number of threads and without an instruction, so that only the
runtime differs. The expert is a fresh copy of the dense model, and all embeddings are compared with the dense model's.
"""

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import mote
from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from mote.data.texts import find_texts, read_texts
from mote.inference.runtimes import FILES, INT8, convert

EXPERT = "search_query"
LOWEST_MEAN = 0.99
COLUMNS = ["runtime", "texts/s", "speed-up over the default", "mean cosine", "lowest cosine", "MB on disk"]

Way = tuple[str, Callable[[], SentenceTransformer], Path]


def measure(options: Options) -> Benchmark:
    """Measure texts per second and cosines of each runtime."""
    texts = list(find_texts(folder=options.data, limit=32 if options.quick else 512).texts)
    default = SentenceTransformer(str(options.checkpoint), device="cpu")
    expected = default.encode(texts)
    rows: list[list[str]] = []
    notes = [_describe(texts, default)]
    best: tuple[float, str, float, float] = (0.0, "none", 0.0, 0.0)
    with TemporaryDirectory() as folder:
        for name, load, weights in _paths(options, Path(folder), notes):
            model = load()
            mean, lowest = _cosines(expected, model.encode(texts, prompt=""))
            result = compare(
                partial(default.encode, texts),
                partial(model.encode, texts, prompt=""),
                seconds=options.seconds,
            )
            faster, rate = 1 / result.ratio, len(texts) / result.candidate
            rows.append(
                [name, f"{rate:.0f}", f"{faster:.2f}", f"{mean:.5f}", f"{lowest:.5f}", f"{_megabytes(weights):.1f}"]
            )
            if mean >= LOWEST_MEAN:
                best = max(best, (faster, name, mean, lowest))
    faster, name, mean, lowest = best
    notes.append(
        f"Fastest runtime with a mean cosine of at least {LOWEST_MEAN}: {name} (mean {mean:.5f}, lowest {lowest:.5f})."
    )
    target = Target(f"encode with {name}, speed-up over the default", faster, 2.0, at_least=True)
    return Benchmark("exported", "Encoding with an exported expert, on a CPU", COLUMNS, rows, [target], notes)


def _paths(options: Options, folder: Path, notes: list[str]) -> Iterator[Way]:
    """Export the expert for every runtime; yield its name, a function that loads it, and the path of its weights."""
    moted, dense = str(folder / "mote"), folder / "torch"
    with redirect_stdout(StringIO()):
        mote.upcycle(str(options.checkpoint), moted)
        mote.transform(moted, dense, mote.experts.export, EXPERT)
    weights = dense / "model.safetensors"
    yield "torch, float32", lambda: _in_torch(dense, torch.float32), weights
    yield "torch, bfloat16", lambda: _in_torch(dense, torch.bfloat16), weights
    yield "torch, float32, compiled", lambda: _in_torch(dense, torch.float32, compiled=True), weights
    for backend, title in (("onnx", "ONNX Runtime"), ("openvino", "OpenVINO")):
        for quantize in (None, "int8"):
            out = folder / f"{backend}-{quantize}"
            try:
                with redirect_stdout(StringIO()):  # progress bars of NNCF
                    conversion = partial(convert, backend=backend, quantize=quantize, texts=read_texts())
                    mote.transform(moted, out, mote.experts.export, EXPERT, after=conversion)
            except (OSError, ValueError) as error:
                notes.append(f"{title}{', int8' if quantize else ''} was not measured: {error}")
                continue
            file = out / (INT8 if quantize else FILES)[backend]  # OpenVINO has two, ONNX a file for each precision
            weights = file if backend == "onnx" else file.parent
            for precision, settings in _precisions(backend):
                name = ", ".join(filter(None, (title, quantize, precision)))
                yield name, partial(mote.load_exported, out, backend, ov_config=settings), weights


def _precisions(backend: str) -> list[tuple[str, dict[str, str] | None]]:
    """Return names and settings of the dtypes for computations that are not in int8."""
    if backend == "onnx":
        return [("float32", None)]
    return [("float32", {"INFERENCE_PRECISION_HINT": "f32"}), ("the CPU's preferred precision", None)]


def _in_torch(folder: Path, dtype: torch.dtype, *, compiled: bool = False) -> SentenceTransformer:
    model: Any = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    if compiled:
        model[0].model.compile(dynamic=True)
    return model


def _cosines(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    found = found.astype(expected.dtype)
    products = (expected * found).sum(axis=1)
    cosines = products / np.linalg.norm(expected, axis=1) / np.linalg.norm(found, axis=1)
    return float(cosines.mean()), float(cosines.min())


def _megabytes(place: Path) -> float:
    found = [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in found) / 1e6


def _describe(texts: list[str], model: SentenceTransformer) -> str:
    lengths = sorted(len(ids) for ids in model.tokenizer(texts, truncation=True)["input_ids"])
    return (
        f"{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), batch size "
        f"32, threads: {torch.get_num_threads()}. The default is the dense model in torch, float32; cosines compare "
        "with its embeddings."
    )
