"""What may make a variant better, one change at a time: `mote+distilled+mined` is `mote` with two of them."""

from collections.abc import Callable
from dataclasses import replace

import mote
from benchmarks.paper.experiments import SHARED_EXPERT, TASKS, VARIANTS, Variant, made_by
from mote.training.recipe_files import load_recipe

SEPARATE = "separate"  # a dense model for each task
UNSEEN = ("sts", "pair_classification", "summarization")
"""Tasks that nothing is trained on, and whose texts are not searched."""
EXPERTS = ("clustering", "search_query", "search_document")

Improvement = Callable[[Variant, str], Variant]
"""Takes a variant and its name, returns the improved variant."""


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
"""Ways in which a MoTE may serve tasks that no expert is trained on; the paper's is the classification expert."""

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
    """Return a variant of `VARIANTS`, with the improvements that its name has.

    Raises:
        ValueError: If an improvement of the training follows one that is made after it.
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
    """Name the models of a variant: one, or of `separate` and its improvements one for each task."""
    base, *improvements = name.split("+")
    return ["+".join([f"sem-{task}", *improvements]) for task in TASKS] if base == SEPARATE else [name]
