"""Verbs over experts, in memory and on disk as the command line calls them, and what comes out."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.families import batch

import mote
from mote import WriteOptions
from mote.data.texts import read_texts
from mote.experts import list_experts
from mote.experts.artefact import ExpertArtefact, open_word
from mote.inference.runtimes import convert

# Each verb over a model of the experts alpha and beta, in memory.
VERBS: dict[str, Callable[[Any], Any]] = {
    "add": lambda model: mote.experts.add(model, "new", "alpha"),
    "average": mote.experts.average,
    "compress": lambda model: mote.experts.compress(model, bits=8),
    "export": lambda model: mote.experts.export(model, "alpha"),
    "interpolate": lambda model: mote.experts.interpolate(model, 0.5),
    "merge": lambda model: mote.experts.merge(model, {"alpha": 1, "beta": 1}, "new"),
    "remove": lambda model: mote.experts.remove(model, "alpha"),
    "rename": lambda model: mote.experts.rename(model, "alpha", "new"),
    "weights": lambda model: mote.experts.weights(model, "alpha"),
}


def add(src: Path, start: str | Path, out: Path | None, name: str | None = None, **settings: Any) -> Path:
    found = open_word(str(start))
    name = name or (found.name if isinstance(found, ExpertArtefact) else str(found))
    options = WriteOptions(overwrite=settings.pop("overwrite", False))
    return mote.transform(src, out, mote.experts.add, name, found, options=options, **settings)


def merge(src: Path, experts: Mapping[str, float], name: str, out: Path, **settings: Any) -> Path:
    found = {open_word(word): weight for word, weight in experts.items()}
    return mote.transform(src, out, mote.experts.merge, found, name, **settings)


def average(src: Path, out: Path) -> Path:
    return mote.transform(src, out, mote.experts.average)


def interpolate(src: Path, out: Path, weight: Any) -> Path:
    return mote.transform(src, out, mote.experts.interpolate, weight)


def compress(src: Path, out: Path, **way: int) -> Path:
    return mote.transform(src, out, mote.experts.compress, **way)


def export(
    src: Path, out: Path, expert: str, backend: str = "torch", quantize: str | None = None, **options: Any
) -> Path:
    after = None
    if backend != "torch":
        after = partial(convert, backend=backend, quantize=quantize, texts=read_texts())
    return mote.transform(src, out, mote.experts.export, expert, after=after, options=WriteOptions(**options))


def base_hash(folder: Path) -> str:
    """The base that `mote experts list` names."""
    return list_experts(str(folder)).base_hash


def last_hidden(model: Any, **task: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(), **task).last_hidden_state


def hidden(folder: Path, task: str) -> torch.Tensor:
    return last_hidden(mote.load(folder).eval(), task=task)
