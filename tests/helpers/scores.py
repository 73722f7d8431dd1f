"""Scores of made-up models, stored as the benchmarks store them."""

from pathlib import Path

from benchmarks.paper.kept import SEED, KeptScores, ScoresOfTypes
from mote import Evaluation


def store_scores(file: Path, scores: ScoresOfTypes, *, seed: int | None = None, start: str = "abc") -> None:
    """Store the scores of a model that was trained from some start."""
    types = {dataset: kind for kind, of_type in scores.items() for dataset in of_type}
    every = {dataset: score for of_type in scores.values() for dataset, score in of_type.items()}
    settings = {} if seed is None else {SEED: seed}
    kept = KeptScores(file.parent, file.parent / "locks")
    kept.get(file.stem, settings, lambda: {"start": start}, lambda: [Evaluation({"model": every}, types)])
