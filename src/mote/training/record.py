"""Record and summary of a finished run."""

from collections.abc import Mapping
from typing import Any

import torch

from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import table
from mote.training.data import TrainingData
from mote.training.processes import processes
from mote.training.progress import Tracker
from mote.training.recipe import Recipe

Scores = dict[str, float] | None


def build_record(
    recipe: Recipe,
    names: MoTEConfig,
    data: TrainingData,
    tracker: Tracker,
    **others: Any,
) -> dict[str, Any]:
    """Build the record of a finished run, the details of its step in `mote.json`, with `others` among them."""
    rows = sum(seen["rows"] for seen in tracker.training_sets.values())
    device = processes().device
    experts: dict[str, dict[str, int]] = {}
    if recipe.model.kind == "mote":
        experts = {expert: {"texts": 0, "tokens": 0} for expert in names.experts}
        for task, seen in tracker.tasks.items():
            for key, count in seen.items():
                experts[names.tasks[task]][key] += count
    return {
        "recipe": recipe.name,
        "steps": tracker.step,
        "seconds": round(tracker.seconds, 1),
        "rows_per_second": round(rows / tracker.seconds, 1),
        "processes": processes().num_processes,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads",
        "tasks": tracker.tasks,
        "training_sets": tracker.training_sets,
        "experts": experts,
        **others,
        "data": [report.__dict__ for report in data.reports],
    }


def summary(record: dict[str, Any]) -> str:
    """Summarize a run as tables: texts of each expert, losses, validation before and after."""
    seen = [
        (name, f"{count['texts']:,}", f"{count['tokens']:,}")
        for name, count in (record["experts"] or record["tasks"]).items()
    ]
    losses = [
        (name, f"{count['steps']:,}", f"{count['rows']:,}", f"{count['loss'] / count['steps']:.4f}")
        for name, count in record["training_sets"].items()
    ]
    parts = [
        f"{record['steps']} steps in {record['seconds']:,.0f} s on {record['device']}",
        table(["expert" if record["experts"] else "task", "texts", "tokens"], seen),
        table(["training set", "steps", "rows", "mean loss"], losses),
    ]
    scores = scores_of_tasks(record["validation"])
    if scores:
        parts.append(table(["validation, x 100", "before", "after"], scores))
    return "\n\n".join(parts)


def scores_of_tasks(validation: Mapping[str, Scores]) -> list[tuple[str, str, str]]:
    """List the mean and the tasks with their scores before and after; those of datasets are in the record."""
    before, after = validation["before"] or {}, validation["after"] or {}
    return [
        (name.removeprefix("validation_"), f"{before[name]:.2f}" if name in before else "", f"{value:.2f}")
        for name, value in after.items()
        if "/" not in name
    ]
