"""Figures 4 to 7 of the paper: batching and temperature, one task at a time."""

from pathlib import Path

import numpy as np
from experiments import TASKS, TEMPERATURES, ablation_name
from runs import Scores

COLOURS = {"homogeneous": "#0072B2", "heterogeneous": "#D55E00"}  # Okabe and Ito's, told apart by all
MARKERS = {"homogeneous": "o", "heterogeneous": "s"}


def ablation_names() -> list[str]:
    """Name the models of Figures 4 to 7."""
    return [ablation_name(task, batches, step) for task in TASKS for batches in COLOURS for step in TEMPERATURES]


def ablation_means(scores: Scores) -> dict[str, tuple[float, float]]:
    """Return the mean score of each of these models over its task's datasets, and its spread over the seeds."""
    means = {}
    for name in ablation_names():
        of_seeds = np.mean(list(scores.every[name].values()), axis=0)
        means[name] = (float(of_seeds.mean()), float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else 0.0)
    return means


def ablation_table(scores: Scores) -> str:
    """Write the scores, the best of each task in bold."""
    means = ablation_means(scores)
    lines = [
        "| task | batches | " + " | ".join(f"temperature {step:g}" for step in TEMPERATURES) + " |",
        "| --- " * (len(TEMPERATURES) + 2) + "|",
    ]
    for task in TASKS:
        best = max(means[ablation_name(task, batches, step)] for batches in COLOURS for step in TEMPERATURES)
        for batches in COLOURS:
            row = [means[ablation_name(task, batches, step)] for step in TEMPERATURES]
            shown = [f"**{mean:.2f}**" if (mean, spread) == best else f"{mean:.2f}" for mean, spread in row]
            lines.append(f"| {task} | {batches} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def draw_ablations(scores: Scores, start: Scores, path: Path) -> None:
    """Draw score over temperature for both kinds of batches, a panel for each task."""
    from matplotlib import pyplot

    means = ablation_means(scores)
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(4 * len(TASKS), 3.6), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        datasets = scores.every[ablation_name(task, "homogeneous", TEMPERATURES[0])]
        before = float(np.mean([start.every["start"].get(dataset, np.nan) for dataset in datasets]))
        axis.axhline(before, color="0.6", linestyle=":", label="before training")
        for batches, colour in COLOURS.items():
            row = [means[ablation_name(task, batches, step)] for step in TEMPERATURES]
            axis.errorbar(
                TEMPERATURES,
                [mean for mean, _ in row],
                yerr=[spread for _, spread in row],
                color=colour,
                marker=MARKERS[batches],
                capsize=3,
                label=f"{batches} batches",
            )
        axis.set_xscale("log")
        axis.set_xticks(TEMPERATURES, [f"{step:g}" for step in TEMPERATURES])
        axis.minorticks_off()
        axis.set(title=f"{task} ({len(datasets)} datasets)", xlabel="temperature of the loss")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean score on the test parts, x 100")
    axes[-1].legend(fontsize="small")
    figure.suptitle("Dense models with instructions, each trained on one task: batches and temperature")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
