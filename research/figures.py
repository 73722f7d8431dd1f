"""Figures 4 to 7 of the paper as a table: batches and temperature, one task at a time."""

from mote.reporting import table as markdown_table
from research.scores import TASKS, Scores
from research.tables import Cell, cell

TEMPERATURES = (0.01, 0.03, 0.06)
BATCHES = ("homogeneous", "heterogeneous")


def ablation_table(scores: Scores) -> str:
    """Format the scores of models `sem-TASK-BATCHES-TEMPERATURE`, with the best of each task in bold."""
    rows = []
    for task in TASKS:
        names = {(kind, step): f"sem-{task}-{kind}-{step:g}" for kind in BATCHES for step in TEMPERATURES}
        known = {pair: name for pair, name in names.items() if name in scores.every}
        if not known:
            continue
        datasets = [one for one in scores.types if all(one in scores.every[name] for name in known.values())]
        cells: dict[tuple[str, float], Cell] = {pair: cell(scores, name, datasets) for pair, name in known.items()}
        best = max(cells, key=lambda pair: cells[pair].mean)
        for batches in BATCHES:
            row = [(batches, step) for step in TEMPERATURES]
            shown = [f"**{cells[pair]}**" if pair == best else cells.get(pair, "") for pair in row]
            rows.append([task, batches, *shown])
    return markdown_table(["task", "batches", *(f"temperature {step:g}" for step in TEMPERATURES)], rows, align="llrrr")
