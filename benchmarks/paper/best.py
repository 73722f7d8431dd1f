"""The best recipe with experts and the best dense recipes, all improved by the same rule on validation sets."""

from functools import partial
from statistics import mean
from typing import TypedDict

from benchmarks.locking import share
from benchmarks.paper.experiments import SWEPT
from benchmarks.paper.improvements import DATA, FOR_ALL, SEPARATE, improved
from benchmarks.paper.runs import Runs
from mote.reporting import markdown_table

BASES = ("mote", "ic")
LIKE_IC = ("em", "task-lora", SEPARATE)
"""Further dense models, which get the improvements of IC."""
Order = tuple[tuple[str, ...], ...]
ORDER: Order = (
    ("late",),
    ("search-expert", "matching-by-search"),
    ("homogeneous",),
    ("expert-rates",),
    ("distilled",),
    ("mined",),
    ("pretrained",),
    ("shared", "unseen-by-mean"),
    ("to-mean-0.25", "to-mean-0.5"),
)
"""Improvements in the order of the trials, alternatives grouped together."""
ORDER_IN_FULL: Order = (("no-instructions",), ("to-start-0.25", "to-start-0.5"))
"""Improvements that are tried in full, after the trials."""


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


class Validation(TypedDict):
    """All that was tried.

    Attributes:
        data: Kind of data, as a suffix of a variant's name → variant → mean over the task types.
        steps: Base → its trials.
        in_full: Base → what was tried in full.
    """

    data: dict[str, dict[str, float]]
    steps: dict[str, list[Step]]
    in_full: dict[str, list[Step]]


def scores_of_data(runs: Runs) -> dict[str, dict[str, float]]:
    """Score each kind of data that all bases may train on, as in `Validation`."""
    suffixes = ("", *(f"+{data}" for data in DATA))
    share(partial(runs.validated, name + suffix) for suffix in suffixes for name in SWEPT)
    return {suffix: {name: mean(runs.validated(name + suffix).values()) for name in SWEPT} for suffix in suffixes}


def best_data(scores: dict[str, dict[str, float]]) -> str:
    """Return the suffix of the data with the best mean over the variants: one choice for all, as for the rate."""
    return max(scores, key=lambda suffix: mean(scores[suffix].values()))


def improve(runs: Runs, order: Order, base: str, timeout: float = -1) -> list[Step]:
    """Try each improvement that applies to the base, and keep it if the validation score rises.

    Args:
        runs: The trials, or the full runs.
        order: Improvements in the order of the trials, alternatives grouped together.
        base: Variant to improve.
        timeout: Seconds to wait for another command that works on a trial; -1: no limit.

    Raises:
        filelock.Timeout: If the other command takes longer.
    """
    steps = [Step(name=base, score=mean(runs.validated(base, timeout).values()), kept=True)]
    for alternatives in order:
        before = best_of(steps)
        able = [name for name in alternatives if base.startswith("mote") or name in FOR_ALL]
        names = {name: improved(before["name"], name) for name in able}
        if "pretrained" in able and runs.pretrained is None and not runs.is_validated(names["pretrained"]):
            runs.report(f"{base}: not pre-trained, as --pretrained is not given")
            continue
        scores = {name: mean(runs.validated(name, timeout).values()) for name in names.values()}
        best = max(scores, key=scores.__getitem__, default=None)
        for name, score in scores.items():
            steps.append(Step(name=name, score=score, kept=name == best and score > before["score"]))
    return steps


def best_of(steps: list[Step]) -> Step:
    """Return the last step that was kept."""
    return [step for step in steps if step["kept"]][-1]


def validation_tables(validation: Validation) -> str:
    """Format the scores of all kinds of data, and all trials."""
    parts = [
        _data_table(validation["data"]),
        _steps_table(validation["steps"], "trial"),
        _steps_table(validation["in_full"], "in full"),
    ]
    return "\n\n".join(parts)


def _data_table(scores: dict[str, dict[str, float]]) -> str:
    chosen = best_data(scores)
    rows = []
    for suffix, of_data in scores.items():
        name = suffix.removeprefix("+") or "pairs"
        cells = [f"{score:.2f}" for score in (*of_data.values(), mean(of_data.values()))]
        rows.append([f"**{name}**" if suffix == chosen else name, *cells])
    return markdown_table(["trained on", *scores[""], "mean"], rows)


def _steps_table(every: dict[str, list[Step]], tried: str) -> str:
    every_step = [step for steps in every.values() for step in steps]
    rows = [[step["name"], f"{step['score']:.2f}", "yes" if step["kept"] else "no"] for step in every_step]
    return markdown_table([tried, "mean over the types of validation sets", "kept"], rows)
