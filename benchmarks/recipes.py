"""Compare shipped recipes: same model, same data, same sweep of learning rates.

    python -m benchmarks.recipes mote em ic … [KEY=VALUE …] --model MODEL --data DATA --out RUNS

The learning rate of each recipe is chosen by its mean score on validation texts, which are held out from the training
splits and equal for all recipes. Finished runs are reused, interrupted ones resume. Prints a table; writes
`scores.json`, `recipes.png`, and settings, record and curves of each recipe's best run to RUNS/best.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from mote.checkpoints.provenance import read_steps
from mote.reporting import console_logging
from mote.training.train import train

KEPT = ("recipe.yaml", "mote.json", "curves.png", "README.md")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE or KEY=VALUE")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[5e-5, 1.5e-4, 5e-4])
    arguments = parser.parse_args()
    console_logging()
    recipes = [name for name in arguments.recipes if "=" not in name]
    overrides = [name for name in arguments.recipes if "=" in name]
    overrides += [f"model.source={arguments.model}", f"data.folder={arguments.data}"]
    records = {}
    for rate in arguments.learning_rates:
        for recipe in recipes:
            folder = arguments.out / f"{recipe}-{rate:g}"
            if not (folder / "model").exists():
                print(f"== {recipe}, learning rate {rate:g}", flush=True)
                train(recipe, [*overrides, f"training.learning_rate={rate}", f"output={folder}"])
            records[recipe, rate] = read_steps(folder / "model")[-1]
    compare(records, arguments.out)


def compare(records: dict[tuple[str, float], dict[str, Any]], out: Path) -> None:
    """Choose the learning rate of each recipe; print and write the scores."""
    best: dict[str, float] = {}
    for recipe, rate in records:
        if recipe not in best or _score(records[recipe, rate]) > _score(records[recipe, best[recipe]]):
            best[recipe] = rate
    tasks = [key for key in next(iter(records.values()))["validation"]["after"] if "/" not in key]
    print("| recipe | learning rate | " + " | ".join(key.removeprefix("validation_") for key in tasks) + " | seconds |")
    print("| --- " * (len(tasks) + 3) + "|")
    scores = {}
    for recipe, rate in best.items():
        record = records[recipe, rate]
        before, after = record["validation"]["before"], record["validation"]["after"]
        cells = [f"{before[key]:.2f} → {after[key]:.2f}" if key in after else "" for key in tasks]
        print(f"| {recipe} | {rate:g} | {' | '.join(cells)} | {record['seconds']:.0f} |")
        sweep = {f"{other:g}": _score(records[recipe, other]) for name, other in records if name == recipe}
        scores[recipe] = {"learning_rate": rate, "sweep": sweep, "before": before, "after": after}
        kept = out / "best" / recipe
        kept.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            shutil.copy(out / f"{recipe}-{rate:g}" / "model" / name, kept / name)
    (out / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    _draw(scores, out / "recipes.png")


def _score(record: dict[str, Any]) -> float:
    return float(record["validation"]["after"]["validation_mean"])


def _draw(scores: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    tasks = ["retrieval", "classification", "clustering"]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 0.35 * len(scores) + 1.5), sharey=True, layout="constrained")
    for axis, task in zip(axes, tasks, strict=True):
        key = f"validation_{task}"
        measured = [(name, of["before"][key], of["after"][key]) for name, of in scores.items() if key in of["after"]]
        for name, before, after in measured:
            axis.plot([before, after], [name, name], color="0.7")
            axis.plot(before, name, "o", color="0.5")
            axis.plot(after, name, "o", color="C0" if name.startswith("mote") else "C1")
        axis.set(title=task, xlabel="validation score, x 100")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.suptitle("before training (grey) and after: MoTE (blue), baselines (orange)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
