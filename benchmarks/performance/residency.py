"""Memory with one of four experts on the device, compared with the dense model."""

import gc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModel

from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.loading import LOADS, small_models
from benchmarks.performance.models import TASKS, load_dense, made_up, make_mote
from benchmarks.performance.processes import load_in_turn
from mote import MoTEModel, load


def measure(options: Options) -> Benchmark:
    """Measure the bytes of weights, the GPU's allocated memory, and on a CPU the memory of processes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        dense = load_dense(options).cpu()
        dense.register_module("pooler", None)  # a MoTE has none
        dense.save_pretrained(folder / "dense")
        make_mote(dense).save_pretrained(folder / "mote")
        kinds: dict[str, Callable[[], Any]] = {
            "dense": lambda: AutoModel.from_pretrained(folder / "dense", add_pooling_layer=False, **arguments),
            'MoTE, offload="disk"': lambda: load(folder / "mote", offload="disk", **arguments),
            "MoTE, all experts": lambda: MoTEModel.from_pretrained(folder / "mote", **arguments),
        }
        arguments: dict[str, Any] = {"dtype": options.dtype, "device_map": options.device}

        if options.device != "cpu":
            kinds['MoTE, offload="cpu"'] = lambda: load(folder / "mote", offload="cpu", **arguments)
        found = {kind: _on_device(options, load) for kind, load in kinds.items()}
        if options.device == "cpu":
            _add_processes(found, folder)
    columns = list(found["dense"])
    ratios = {kind: [found[kind][what] / found["dense"][what] for what in columns] for kind in found}
    return Benchmark(
        "residency",
        f"Memory with one of four experts of {options.checkpoint.name} resident, {options.device}",
        ["", *(f"{what}, MB (/ dense)" for what in columns)],
        [
            [kind, *(f"{found[kind][what] / 1e6:.2f} ({ratios[kind][i]:.3f})" for i, what in enumerate(columns))]
            for kind in found
        ],
        [
            Target(f"{what}, {kind} / dense", ratios[kind][i], 1.02)
            for kind in found
            if "offload=" in kind
            for i, what in enumerate(columns)
        ],
        [
            "Weights: bytes on the device after one call for each of the four tasks. Process: resident memory of a "
            "separate process after using the model, minus its resident memory after loading and using small models."
        ],
    )


def _on_device(options: Options, load: Callable[[], Any]) -> dict[str, float]:
    """Return the bytes on the device after each task has been called once."""
    gc.collect()
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    model = load()
    inputs = made_up(model, 1, 8)
    with torch.inference_mode():
        for task in TASKS:
            model(**inputs, **({"task": task} if model.config.model_type == "mote" else {}))
    tensors = chain(model.parameters(), model.buffers())
    found = {"weights": float(sum(tensor.nbytes for tensor in tensors if tensor.device == model.device))}
    if cuda:
        del inputs
        found["allocated"] = float(torch.cuda.memory_allocated() - before)
    return found


def _add_processes(found: dict[str, dict[str, float]], folder: Path) -> None:
    places = {"dense": folder / "dense", "offloaded to disk": folder / "mote", "all experts": folder / "mote"}
    loads = [LOADS[kind].format(str(place)) for kind, place in places.items()]
    for kind, [run] in zip(found, load_in_turn(loads, small_models(folder), 1), strict=True):
        found[kind]["process"] = float(run.after)
