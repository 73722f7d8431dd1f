"""What is written down of a run that has ended, beside the weights and for people."""

import json
import platform
import shutil
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from mote.checkpoints.staging import Staging
from mote.training import card
from mote.training.card import CURVES_FILE, RECIPE_FILE, RECORD_FILE
from mote.training.processes import processes
from mote.training.progress import draw_curves, read_log
from mote.training.run_folder import RunFolder, as_yaml, step_of

if TYPE_CHECKING:
    from mote.training.train import Report, Run


def finish(run: "Run", folder: RunFolder, before: dict[str, float] | None, report: "Report") -> None:
    """Score the model, write it with all that belongs to it, and sum the run up."""
    after = run.validate()
    log = read_log(folder.path)
    rates = [line["pairs_per_second"] for line in log if "pairs_per_second" in line]
    record = {
        "recipe": run.recipe.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "steps": run.trainer.state.global_step,
        "seconds": round(run.tracker.seconds, 1),
        "went_on_from_step": None if run.checkpoint is None else step_of(run.checkpoint),
        "pairs_per_second": rates[-1] if rates else None,
        "processes": processes().num_processes,
        "device": _device_name(),
        "tasks": run.tracker.tasks,
        "sets": run.tracker.sets,
        "experts": _texts_of_experts(run),
        "validation": {"before": before, "after": after},
        "data": [report_of.__dict__ for report_of in run.data.reports],
        "versions": {
            "python": platform.python_version(),
            **{
                name: version(name)
                for name in ("mote-embeddings", "torch", "transformers", "sentence-transformers", "datasets")
            },
        },
    }
    with Staging(folder.model) as staged:
        run.model.save(str(staged), create_model_card=False)
        (staged / RECIPE_FILE).write_text(as_yaml(run.recipe), encoding="utf-8")
        (staged / RECORD_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draw_curves(log, staged / CURVES_FILE, f"{run.recipe.name}: {record['steps']} steps")
        card.write(run.recipe, run.names, record, staged)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    report(summary(record))
    report(f"Wrote {folder.model}")


def _texts_of_experts(run: "Run") -> dict[str, dict[str, int]]:
    """Count what each expert has seen: the texts of the tasks that go to it."""
    if run.recipe.model.kind != "mote":
        return {}
    experts = {expert: {"texts": 0, "tokens": 0} for expert in run.names.experts}
    for task, seen in run.tracker.tasks.items():
        for key, count in seen.items():
            experts[run.names.tasks[task]][key] += count
    return experts


def summary(record: dict[str, Any]) -> str:
    """Sum a run up for people: what each expert saw, the losses, the scores before and after."""
    lines = [f"{record['steps']} steps in {record['seconds']:,.0f} s on {record['device']}"]
    kind = "expert" if record["experts"] else "task"
    lines.append(f"{kind:<24}{'texts':>12}{'tokens':>14}")
    for name, seen in (record["experts"] or record["tasks"]).items():
        lines.append(f"{name:<24}{seen['texts']:>12,}{seen['tokens']:>14,}")
    lines.append(f"{'training set':<40}{'steps':>8}{'rows':>10}{'mean loss':>11}")
    for name, seen in record["sets"].items():
        lines.append(f"{name:<40}{seen['steps']:>8,}{seen['rows']:>10,}{seen['loss'] / seen['steps']:>11.4f}")
    before, after = record["validation"]["before"] or {}, record["validation"]["after"] or {}
    if after:
        lines.append(f"{'validation, x 100':<40}{'before':>9}{'after':>9}")
        for name, value in after.items():
            if "/" not in name:
                shown = f"{before[name]:>9.2f}" if name in before else f"{'-':>9}"
                lines.append(f"{name.removeprefix('validation_'):<40}{shown}{value:>9.2f}")
    return "\n".join(lines)


def _device_name() -> str:
    device = processes().device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
