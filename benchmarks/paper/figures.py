"""Figures of the paper: 1 and 3, similarity between tasks; 4 to 7, batching and temperature, one task at a time."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.experiments import BATCHES, OF_THE_RECIPE, START, TASKS, TEMPERATURES, ablations
from benchmarks.paper.runs import Scores
from benchmarks.paper.tables import Cell, cell
from mote import Analysis
from mote.reporting import COLORS, markdown_table

TITLES = {
    "claims": "the paper's claims in short",
    "goal": "question 4 of the plan in short",
    "validation": "all scores on validation sets, seed 42",
    "models": "all models with the scale's own data, seed by seed",
    "five-tasks": "all models of five tasks, seed by seed",
    "sweep": "learning rates, by the mean over six task types of validation sets",
    "figure1": "similarity between the tasks of the dense model with instructions",
    "figure3": "similarity between the tasks of MoTE, and of the dense model with instructions",
    "figures4to7": "batches and temperature of each task",
}
"""Titles of the output that is not a table with claims."""


def kept_analysis(analysis: Analysis) -> dict[str, Any]:
    """Return the numbers that the tables of an analysis need, with six digits, without its texts and its t-SNE."""
    kept: dict[str, Any] = _rounded(analysis.to_dict())
    kept["texts"]["texts"] = [""] * kept["texts"]["count"]
    kept["models"] = [{**model, "layout": None} for model in kept["models"]]
    return kept


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def analysis_tables(kept: dict[str, Any]) -> str:
    """Format a stored analysis, without its title, as a section with third-level headings."""
    return re.sub(r"^#", "##", Analysis.from_dict(kept).to_markdown().partition("\n")[2].strip(), flags=re.MULTILINE)


def _cells(task: str, scores: Scores) -> tuple[dict[tuple[str, float], Cell], list[str]]:
    """Average the scores of a task's ablations: batches and temperature → mean over datasets, and these."""
    known = {name: pair for name, pair in ablations(task).items() if name in scores.every}
    datasets = [one for one in scores.types if known and all(one in scores.every[name] for name in known)]
    return {pair: cell(scores, name, datasets) for name, pair in known.items()}, datasets


def ablation_table(scores: Scores) -> str:
    """Format the scores, with the best of each task in bold; models without scores have empty cells."""
    rows = []
    for task in TASKS:
        cells, _ = _cells(task, scores)
        if not cells:
            continue
        best = max(cells, key=lambda pair: cells[pair].mean)
        for batches in BATCHES:
            row = [(batches, step) for step in TEMPERATURES]
            shown = [f"**{cells[pair]}**" if pair == best else cells.get(pair, "") for pair in row]
            rows.append([task, batches, *shown])
    header = ["task", "batches", *(f"temperature {step:g}" for step in TEMPERATURES)]
    return markdown_table(header, rows, align="ll" + "r" * len(TEMPERATURES))


def draw_ablations(scores: Scores, start: Scores, path: Path) -> None:
    """Plot scores over temperature, one panel per task: the recipe's batches as a line, the others as a point."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(4 * len(TASKS), 3.6), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        cells, datasets = _cells(task, scores)
        before = float(np.mean([start.every[START].get(dataset, np.nan) for dataset in datasets]))
        axis.axhline(before, color="0.6", linestyle=":", label="before training")
        for batches, colour, marker in zip(BATCHES, COLORS, "os", strict=False):
            steps = [step for step in TEMPERATURES if (batches, step) in cells]
            axis.errorbar(
                steps,
                [cells[batches, step].mean for step in steps],
                yerr=[cells[batches, step].spread or 0.0 for step in steps],
                color=colour,
                marker=marker,
                capsize=3,
                label=f"{batches} batches",
            )
        axis.set_xscale("log")
        axis.set_xticks(TEMPERATURES, [f"{step:g}" for step in TEMPERATURES])
        axis.minorticks_off()
        axis.set(
            title=f"{task} ({len(datasets)} datasets)", xlabel=f"temperature (the recipe's: {OF_THE_RECIPE[task][1]:g})"
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean score on the test splits, x 100")
    axes[-1].legend(fontsize="small")
    figure.suptitle("Dense models with instructions, each trained on one task: batches and temperature")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
