"""Train the MoTE of `examples/small-mote`, and compare it with dense models that get the same training.

    python -m scripts.train_small_mote --data DATA --work-dir RUNS

The recipe is `scripts/small_mote.yaml`. Rows that share a text with a test split of DATA are left out. An interrupted
command resumes when it is run again; models whose scores are in `research/scores.jsonl.gz` are not trained again. A
MoTE is stored with 8-bit experts and all other weights in float16, that of `OWN_SEED` in `examples/small-mote`. Its
card gets the scores of every model on all test splits, averaged over the seeds, and the sources and licences of the
training texts. `python -m research.pages` writes tables of the scores.
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
from mote.reporting import console_logging, table
from mote.training.recipe import Recipe, load_recipe
from mote.training.run_folder import fixed_settings
from research import scores as stored
from research.data import copy_without_tests, digest_of_rows, digest_of_tests
from research.experiments import LIMITS
from research.gains import readme_table
from research.pages import SMALL_MOTE, stored_table
from research.run import commit, evaluate, hash_of_weights
from research.scores import START, ScoredModel, Store
from research.tables import claims_of
from scripts.text_sets import MOTE_SETS

logger = logging.getLogger("mote.train_small_mote")  # `console_logging` prints what is logged below `mote`

RECIPE = Path("scripts/small_mote.yaml")
OWN_SEED = 42  # of the model in the repository
SEEDS = (42, 43, 44)
VARIANTS = {
    "mote": (),
    "em": ("model.kind=dense",),
    "ic": ("model.kind=dense", "model.instructions=true"),
}
"""Trained model → its changes of the recipe."""
MAX_BYTES = 10_000_000
SECTIONS = Path("scripts/small_mote_card.md")
"""Sections of its card."""


def datasets_of(recipe: Recipe) -> list[str]:
    """Return the names of the recipe's datasets, each once."""
    return sorted({dataset.path for task in recipe.tasks.values() for dataset in task.datasets})


@dataclass(frozen=True)
class Comparison:
    """The models that are trained and scored.

    Attributes:
        data: Data folder.
        work: Folder for training texts, trained models and scores.
        out: Folder of the stored MoTE, which is that of `OWN_SEED`.
    """

    data: Path
    work: Path
    out: Path

    def texts(self) -> Path:
        """Return the folder of the training texts; write it first if it does not exist."""
        return copy_without_tests(self.data, datasets_of(load_recipe(RECIPE)), self.work / "data")

    def model(self, name: str, seed: int) -> Path:
        """Return the folder of a model; train it first if it does not exist. A MoTE is stored as in the repository."""
        if name == START:
            return Path(load_recipe(RECIPE).model.source)
        folder = self.work / f"{name}-seed{seed}"
        if not (folder / "model").exists():
            changes = [f"data.folder={self.texts()}", f"output={folder}", f"training.seed={seed}"]
            mote.train(load_recipe(RECIPE, [*changes, *VARIANTS[name]]))
        if name != "mote":
            return folder / "model"
        out = self.out if seed == OWN_SEED else folder / "stored"
        store(folder / "model", out)
        return out

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
        for name, seed in ((START, OWN_SEED), *product(VARIANTS, seeds)):
            if ScoredModel(SMALL_MOTE, name, seed, {}).key not in done:
                every = every.with_models([self.scored(name, seed)])
                stored.write(every, kept)
        return every


def store(model: Path, out: Path) -> None:
    """Write a MoTE with 8-bit experts, and its other weights in float16.

    Raises:
        ValueError: If it is too large for the repository, or a weight is too large for float16.
    """
    mote.transform(model, out, mote.experts.compress, bits=8, options=mote.WriteOptions(overwrite=True), after=halve)
    size = sum(path.stat().st_size for path in out.rglob("*"))
    logger.info("%s: %.1f MB", out, size / 1e6)
    if size > MAX_BYTES:
        raise ValueError(f"{out} has {size} bytes; the repository takes {MAX_BYTES}")


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


def licences(recipe: Recipe) -> str:
    """Format the sources and licences of the recipe's datasets."""
    sets = {one.path: one for one in MOTE_SETS}
    rows = [[name, sets[name].source, sets[name].licence] for name in datasets_of(recipe)]
    return table(["texts", "from", "licence"], rows, align="lll")


def compare(data: Path, out: Path, kept: Path, work: Path, seeds: Sequence[int]) -> None:
    """Train and score what is missing; write the scores, and the sections of the stored model's card.

    Args:
        data: Data folder.
        out: Folder of the stored model.
        kept: File of the stored scores.
        work: Folder for models.
        seeds: Seeds of the trained models, with `OWN_SEED` among them.
    """
    comparison = Comparison(data, work, out)
    every = comparison.completed(kept, seeds)
    if not out.exists():  # its scores were stored without it
        comparison.model("mote", OWN_SEED)
    scores = stored.scores_of(every.of_scale(SMALL_MOTE))
    sections = SECTIONS.read_text(encoding="utf-8").format(
        scores=readme_table(scores),
        tests=claims_of(stored_table(every.contents("table", SMALL_MOTE)[SMALL_MOTE]), scores),
        count=len(scores.types),
        seeds=", ".join(map(str, seeds)),
        own_seed=OWN_SEED,
        texts=licences(load_recipe(RECIPE)),
    )
    card = out / "README.md"
    own, _, _ = card.read_text(encoding="utf-8").partition("\n## Scores\n")
    card.write_text(f"{own}\n{sections}", encoding="utf-8")
    mote.write_card(out)
    logger.info("%s", sections)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data folder")
    parser.add_argument("--out", type=Path, default=Path("examples/small-mote"), help="folder of the stored model")
    parser.add_argument("--kept", type=Path, default=stored.FILE, help="file of the scores")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/small-mote"), help="folder for models")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds (default: %(default)s)")
    options = parser.parse_args()
    if OWN_SEED not in options.seeds:
        parser.error(f"--seeds must include {OWN_SEED}, the seed of the stored model")
    console_logging()
    compare(options.data, options.out, options.kept, options.work_dir, options.seeds)


if __name__ == "__main__":
    main()
