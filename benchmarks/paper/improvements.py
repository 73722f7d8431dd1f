"""Possible improvements of a variant, one change at a time: `mote+distilled+mined` is `mote` with two of them."""

from collections.abc import Callable
from dataclasses import replace

import mote
from benchmarks.paper.experiments import SHARED_EXPERT, TASKS, VARIANTS, Variant, made_by
from mote.training.recipe_files import load_recipe

SEPARATE = "separate"  # a dense model for each task
UNSEEN = ("sts", "pair_classification", "summarization")
"""Tasks without training data, other than search."""
EXPERTS = ("clustering", "search_query", "search_document")

Improvement = Callable[[Variant, str], Variant]
"""Function that takes a variant and its name, and returns the improved variant."""


def _homogeneous(variant: Variant, name: str) -> Variant:
    tasks = load_recipe(variant.recipe, variant.changes).tasks
    return replace(variant, changes=(*variant.changes, *(f"tasks.{task}.batches=homogeneous" for task in tasks)))


def _five_tasks(variant: Variant, name: str) -> Variant:
    paraphrases = "tasks.paraphrases={anchor: text_matching, batches: heterogeneous, datasets: [paraphrases/*]}"
    return replace(variant, recipe="mote-objectives", trained_on="five_tasks", changes=(*variant.changes, paraphrases))


def _of(making: Callable) -> Improvement:
    return lambda variant, name: replace(variant, made_of=name, made_by=making)


def _served_by(expert: str) -> Improvement:
    return _of(lambda source, out: mote.configure(source, out, tasks=dict.fromkeys(UNSEEN, expert)))


WAYS_FOR_UNSEEN: dict[str, Improvement] = {
    **{f"unseen-by-{expert}": _served_by(expert) for expert in EXPERTS},
    "unseen-by-mean": _of(made_by(mote.experts.add, "mean", "mean", tasks=UNSEEN)),
    "text-matching": lambda variant, name: replace(variant, recipe="mote-objectives"),
    "five-tasks": _five_tasks,
    "shared": lambda variant, name: replace(variant, changes=(*variant.changes, *SHARED_EXPERT)),
}
"""Ways for a MoTE to serve tasks that no expert is trained on; the paper uses the classification expert."""

ON_LABELS = "five-tasks"
"""The way that trains on texts of the validation sets of classification and clustering; scores there mean nothing."""

FOR_ALL: dict[str, Improvement] = {
    "homogeneous": _homogeneous,
    "distilled": lambda variant, name: replace(variant, start="distilled"),
    "mined": lambda variant, name: replace(variant, mined=True),
    "pretrained": lambda variant, name: replace(variant, start="pretrained"),
}
FOR_EXPERTS: dict[str, Improvement] = {
    "expert-rates": lambda variant, name: replace(variant, expert_rate_factor=3.0),
    **{f"to-mean-{part:g}": _of(made_by(mote.experts.interpolate, part)) for part in (0.25, 0.5)},
    **WAYS_FOR_UNSEEN,
}
IMPROVEMENTS = {**FOR_ALL, **FOR_EXPERTS}


def variant_of(name: str) -> Variant:
    """Return a variant of `VARIANTS`, with the improvements in its name.

    Raises:
        ValueError: If an improvement that changes the training follows one that is applied after training.
    """
    base, *improvements = name.split("+")
    variant = VARIANTS[base]
    for improvement in improvements:
        made_of = variant.made_of
        variant = IMPROVEMENTS[improvement](variant, base)
        if made_of is not None and variant.made_of == made_of:
            raise ValueError(f"{name}: {improvement} changes the training, and must precede what is made after it")
        base = f"{base}+{improvement}"
    return variant


def parts_of(name: str) -> list[str]:
    """Return the names of a variant's models: one, or for `separate` and its improvements one per task."""
    base, *improvements = name.split("+")
    return ["+".join([f"sem-{task}", *improvements]) for task in TASKS] if base == SEPARATE else [name]
