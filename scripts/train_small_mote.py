"""Train a small MoTE of the paper's tasks, and compare it with dense models that get the same training.

    python -m scripts.train_small_mote --data DATA --work-dir RUNS

The recipe is `scripts/small_mote.yaml`. Rows that share a text with a test split of DATA are left out. An interrupted
command resumes when it is run again; models whose scores are in `research/scores.jsonl.gz` are not trained again. A
MoTE is scored as it would be published: 8-bit experts, all other weights in float16. `python -m research.pages` writes
tables of the scores. (The MoTE in `examples/small-mote` is another one: `scripts/make_small_mote.py`.)
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

import mote
from mote.checkpoints.reading import open_mote
from mote.checkpoints.tensors import MappedFiles
from mote.remote.weights_mote import WeightFiles
from mote.reporting import console_logging
from mote.training.recipe import Recipe, load_recipe
from mote.training.run_folder import fixed_settings
from research import scores as stored
from research.data import copy_without_tests, digest_of_rows, digest_of_tests
from research.experiments import LIMITS
from research.pages import SMALL_MOTE
from research.run import commit, evaluate, hash_of_weights
from research.scores import START, ScoredModel, Store

logger = logging.getLogger("mote.train_small_mote")  # `console_logging` prints what is logged below `mote`

RECIPE = Path("scripts/small_mote.yaml")
SEEDS = (42, 43, 44)
VARIANTS = {
    "mote": (),
    "em": ("model.kind=dense",),
    "ic": ("model.kind=dense", "model.instructions=true"),
}
"""Trained model → its changes of the recipe."""


def datasets_of(recipe: Recipe) -> list[str]:
    """Return the names of the recipe's datasets, each once."""
    return sorted({dataset.path for task in recipe.tasks.values() for dataset in task.datasets})


@dataclass(frozen=True)
class Comparison:
    """The models that are trained and scored.

    Attributes:
        data: Data folder.
        work: Folder for training texts, trained models and scores.
    """

    data: Path
    work: Path

    def texts(self) -> Path:
        """Return the folder of the training texts; write it first if it does not exist."""
        return copy_without_tests(self.data, datasets_of(load_recipe(RECIPE)), self.work / "data")

    def model(self, name: str, seed: int) -> Path:
        """Return the folder of a model; train it first if it does not exist. A MoTE is then stored."""
        if name == START:
            return Path(load_recipe(RECIPE).model.source)
        folder = self.work / f"{name}-seed{seed}"
        if not (folder / "model").exists():
            changes = [f"data.folder={self.texts()}", f"output={folder}", f"training.seed={seed}"]
            mote.train(load_recipe(RECIPE, [*changes, *VARIANTS[name]]))
        if name != "mote":
            return folder / "model"
        store(folder / "model", folder / "stored")
        return folder / "stored"

    def scored(self, name: str, seed: int) -> ScoredModel:
        """Score one model; make it first if it does not exist."""
        scores = evaluate(self.model(name, seed), self.data, LIMITS, self.work / "scores" / f"{name}-seed{seed}")
        settings: dict[str, Any] = {"variant": name, "data": digest_of_rows(self.texts())}
        if name != START:
            settings |= fixed_settings(load_recipe(RECIPE, VARIANTS[name]), given_only=True)
        settings |= {f"limit of {' '.join(patterns)}": limit for patterns, limit in LIMITS.items()}
        tests = digest_of_tests(self.data, chain(*LIMITS))
        hashes = {"start": hash_of_weights(self.model(START, seed)), "tests": tests}
        source, command = f"scripts.train_small_mote@{commit()}", "python -m scripts.train_small_mote --data DATA"
        described: dict[str, Any] = {"settings": settings, "hashes": hashes, "source": source, "command": command}
        return ScoredModel(SMALL_MOTE, name, seed, scores, **described)

    def completed(self, kept: Path, seeds: Sequence[int]) -> Store:
        """Return the stored scores, with those of all models that were missing; store these at once."""
        every = stored.read(kept)
        done = {one.key for one in every.models}
        for name, seed in ((START, seeds[0]), *product(VARIANTS, seeds)):
            if ScoredModel(SMALL_MOTE, name, seed, {}).key not in done:
                every = every.with_models([self.scored(name, seed)])
                stored.write(every, kept)
        return every


def store(model: Path, out: Path) -> None:
    """Write a MoTE with 8-bit experts, and its other weights in float16.

    Raises:
        ValueError: If a weight is too large for float16.
    """
    mote.transform(model, out, mote.experts.compress, bits=8, options=mote.WriteOptions(overwrite=True), after=halve)


def halve(folder: Path) -> dict[str, str]:
    """Store a model's weights in float16, other than integers; they are still loaded as float32.

    Returns:
        Details for `mote.json`.
    """
    opened = open_mote(str(folder))
    weights = {
        name: one.half() if one.is_floating_point() else one for name, one in MappedFiles(opened.weights).items()
    }
    infinite = [name for name, one in weights.items() if one.is_floating_point() and not torch.isfinite(one).all()]
    if infinite:
        raise ValueError(f"These weights are too large for float16: {', '.join(infinite)}")
    WeightFiles(weights, opened.config, folder).write()
    return {"other_weights": "float16"}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--kept", type=Path, default=stored.FILE, help="file of the scores")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/small-mote"), help="folder for models")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds (default: %(default)s)")
    options = parser.parse_args()
    console_logging()
    Comparison(options.data, options.work_dir).completed(options.kept, options.seeds)


if __name__ == "__main__":
    main()
