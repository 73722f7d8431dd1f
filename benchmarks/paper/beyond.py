"""Variants beyond the paper. The interpolation weight is chosen on validation texts."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from benchmarks.paper.runs import Runs
from mote.checkpoints.models import load_tokenizer
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import is_mote, open_checkpoint, open_mote
from mote.corpora.folder import write_whole
from mote.reporting import markdown_table
from mote.training.data import ValidationSet, load_data
from mote.training.names import encodings
from mote.training.recipe_files import load_recipe
from mote.training.validation import Validation

INTERPOLATED = ("mote", "mote-to-mean-0.25", "mote-to-mean-0.5", "mote-to-mean-0.75")
TRAINED = ("mote-expert-rates", "mote-shared", "mote-homogeneous")


def validation_scores(runs: Runs, name: str) -> dict[str, float]:
    """Score a variant on texts held out from the training splits: means over tasks and seeds."""
    of_seeds = [_of_model(runs, name, seed) for seed in runs.seeds_of(name)]
    return {key: float(np.mean([scores[key] for scores in of_seeds])) for key in of_seeds[0] if "/" not in key}


def _of_model(runs: Runs, name: str, seed: int) -> dict[str, float]:
    folder = runs.model(name, seed)
    steps = read_steps(folder)
    if steps and steps[-1]["step"] == "train":  # training ends with these scores
        return steps[-1]["validation"]["after"]
    kept = runs.out / "validation" / f"{folder.name}.json"  # its name contains the hash of the source
    if not kept.is_file():
        trained = runs.model("mote", seed)
        names: Any = open_mote(str(trained)).config
        kind = "mote" if is_mote(open_checkpoint(str(folder)).config) else "dense"
        model = SentenceTransformer(str(folder), trust_remote_code=kind == "mote")
        scores = Validation(_held_out(trained / "recipe.yaml"), encodings(names, kind))(model)
        kept.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(scores, indent=1) + "\n"
        write_whole(kept, lambda unfinished: unfinished.write_text(content, encoding="utf-8"))
    return json.loads(kept.read_text(encoding="utf-8"))


@lru_cache  # reading the data takes longer than scoring
def _held_out(recipe_file: Path) -> list[ValidationSet]:
    recipe = load_recipe(recipe_file)
    return load_data(recipe, load_tokenizer(open_checkpoint(recipe.model.source)), with_teachers=False).validation


def validation_table(scores: dict[str, dict[str, float]]) -> str:
    """Format the validation scores, the best mean in bold."""
    keys = list(next(iter(scores.values())))
    best = max(scores, key=lambda name: scores[name]["validation_mean"])
    header = ["on validation texts", *(key.removeprefix("validation_") for key in keys)]
    rows = [
        [f"**{name}**" if name == best else name, *(f"{of_name[key]:.2f}" for key in keys)]
        for name, of_name in scores.items()
    ]
    return markdown_table(header, rows)
