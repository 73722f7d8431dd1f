"""Switching experts from the CPU's memory and from disk, compared with the time that moving the bytes takes."""

import copy
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.performance.benchmark import Benchmark, Options
from benchmarks.performance.models import TASKS, load_dense, make_mote, milliseconds, waiting
from mote import MoTEModel, offload


def measure(options: Options) -> Benchmark:
    """Measure fetching one expert after another, where each has to make room for the next."""
    repeats = 5 if options.quick else 40
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = make_mote(load_dense(options))
        whole.save_pretrained(folder)
        from_cpu, from_disk = copy.deepcopy(whole), MoTEModel.from_pretrained(folder).to(options.device)
        offload(from_cpu, "cpu")
        offload(from_disk, "disk")
        size = sum(t.nbytes for block in whole.blocks for t in block.experts[TASKS[0]].state_dict().values())
        rows = [
            _row("from the CPU", options, from_cpu, repeats, _copying(options, from_cpu), size),
            _row("from disk (in the page cache)", options, from_disk, repeats, _reading(folder, size), size),
        ]
    return Benchmark(
        "switching",
        f"Switching experts of {options.checkpoint.name} ({size / 1e6:.1f} MB each), {options.device}",
        ["", "switch, ms", "bytes alone, ms", "ratio", "GB/s of the bytes alone"],
        rows,
        [],
        [
            f"Medians of {repeats} switches, each to another of four experts, with keep=1. Bytes alone: the same "
            "number of bytes, copied in one piece from memory (pinned memory on a GPU) or read from their files.",
        ],
    )


def _switching(options: Options, model: MoTEModel) -> Callable[[], None]:
    wait, names = waiting(options), cycle(TASKS)

    def switch() -> None:
        with model.offloading.expert(next(names)):
            pass
        wait()

    for _ in TASKS:  # the first switches write to pages that were shared with the file
        switch()
    return switch


def _row(
    what: str,
    options: Options,
    model: MoTEModel,
    repeats: int,
    bytes_alone: Callable[[], None],
    size: int,
) -> list[str]:
    switch = _switching(options, model)
    pairs = []
    for _ in range(repeats):
        pairs.append((_time(switch), _time(bytes_alone)))
    switched, moved = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    return [what, milliseconds(switched), milliseconds(moved), f"{ratio:.2f}", f"{size / moved / 1e9:.2f}"]


def _time(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _copying(options: Options, model: MoTEModel) -> Callable[[], None]:
    """Copy an expert's bytes in one piece, each time from another place, as with four experts."""
    store = model.offloading.store.weights
    size = sum(weight.nbytes for weight in store.values()) // len(TASKS)
    pin = torch.cuda.is_available()
    sources = cycle([torch.ones(size, dtype=torch.uint8, pin_memory=pin) for _ in TASKS])
    target, wait = torch.zeros(size, dtype=torch.uint8, device=options.device), waiting(options)

    def copy_bytes() -> None:
        target.copy_(next(sources), non_blocking=True)
        wait()

    return copy_bytes


def _reading(folder: Path, size: int) -> Callable[[], None]:
    """Read as many bytes in one piece into existing memory, each time from another expert's file."""
    target, files = memoryview(bytearray(size)), cycle(sorted(folder.glob("model-expert-*.safetensors")))

    def read() -> None:
        with next(files).open("rb") as stream:
            stream.readinto(target)

    return read
