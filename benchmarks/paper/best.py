"""The best recipe with experts and the best dense recipes, all improved by the same rule on validation sets."""

from statistics import mean
from typing import TypedDict

from benchmarks.paper.improvements import FOR_ALL, ON_LABELS, SEPARATE, WAYS_FOR_UNSEEN
from benchmarks.paper.runs import Runs
from mote.reporting import markdown_table

BASES = ("em", "ic", "task-lora", SEPARATE, "mote")
ORDER = (
    ("homogeneous",),
    ("expert-rates",),
    ("distilled",),
    ("mined",),
    ("pretrained",),
    tuple(way for way in WAYS_FOR_UNSEEN if way != ON_LABELS),
    ("to-mean-0.25", "to-mean-0.5"),
)
"""Improvements in the order of the trials, alternatives grouped together."""


class Step(TypedDict):
    """One trial.

    Attributes:
        name: Variant with the improvement.
        score: Mean over the task types of the validation sets.
        kept: Whether it was better than the variant before.
    """

    name: str
    score: float
    kept: bool


def improve(runs: Runs, base: str, timeout: float = -1) -> list[Step]:
    """Try each improvement that applies to the base, and keep it if the validation score rises.

    Raises:
        filelock.Timeout: If another command works on a trial for longer than `timeout`, in seconds.
    """
    steps = [Step(name=base, score=mean(runs.validated(base, timeout).values()), kept=True)]
    for alternatives in ORDER:
        before = best_of(steps)
        able = [name for name in alternatives if base == "mote" or name in FOR_ALL]
        if "pretrained" in able and runs.pretrained is None:
            runs.report(f"{base}: not pre-trained, as --pretrained is not given")
            continue
        scores = {name: mean(runs.validated(f"{before['name']}+{name}", timeout).values()) for name in able}
        best = max(scores, key=scores.__getitem__, default=None)
        for name, score in scores.items():
            kept = name == best and score > before["score"]
            steps.append(Step(name=f"{before['name']}+{name}", score=score, kept=kept))
    return steps


def best_of(steps: list[Step]) -> Step:
    """Return the last step that was kept."""
    return [step for step in steps if step["kept"]][-1]


def steps_table(every: dict[str, list[Step]]) -> str:
    """Format all trials."""
    every_step = [step for steps in every.values() for step in steps]
    rows = [[step["name"], f"{step['score']:.2f}", "yes" if step["kept"] else "no"] for step in every_step]
    return markdown_table(["", "mean over the types of validation sets", "kept"], rows)
