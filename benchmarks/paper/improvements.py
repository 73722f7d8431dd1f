"""Possible improvements of a variant, one change at a time: `mote+distilled+mined` is `mote` with two of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mote
from benchmarks.paper.experiments import KIND_OF_TASK, MATCHED, SERVED, TASKS, VARIANTS, Making, Variant, made_by
from benchmarks.paper.interpolation import add_near_start, move_experts, move_experts_to_start, towards_start
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS, UNSEEN_TASKS, alternatives
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe

SEPARATE = "sem"  # a dense model for each task
UNSEEN = ("sts", "pair_classification", "summarization")
"""Tasks without training data, other than search."""
MATCHING = "text_matching"
"""Expert of these tasks where `classification` is trained on labels."""
PARAPHRASED = "paraphrases"
"""Training task of this expert."""
PARAPHRASES = f"tasks.{PARAPHRASED}={{anchor: {MATCHING}, batches: heterogeneous, datasets: [{PARAPHRASED}/*]}}"
SEARCH = ("search_query", "search_document")
EXPERTS = ("clustering", *SEARCH)
LABELS_IN_TRIALS = 0.25
"""Share of the labelled rows in trials of five tasks: its many datasets are too small for the limit of a trial."""

OF_EXPERTS = r"\bencoder\.layer\.\d+\.(?!shared\.|attention\.(self|output\.dense)\.)"
"""Weights of a BERT that an expert has, or would have in a MoTE: feed-forward networks and both norms of each block."""

OWN_MOVES = {"classification": (0.0, -0.25), "clustering": (-0.25, 0.0)}
"""Expert → weights of the mean of the experts and of the start, chosen on validation sets at `medium-cpu`.

That for search stays as trained.
"""
SHARED_MOVE = 0.25
"""Weight of the start for the shared weights, where they are moved, too."""
MOVES_WITH_SHARED = {"classification": (0.0, -0.5)}
"""As `OWN_MOVES`, for experts whose shared weights are moved: chosen on validation sets, with mined negatives."""

Improvement = Callable[[Variant, str], Variant]
"""Function that takes a variant and its name, and returns the improved variant."""


def _changed(variant: Variant, *changes: str) -> Variant:
    return replace(variant, changes=(*variant.changes, *changes))


def _recipe(variant: Variant) -> Recipe:
    return load_recipe(variant.recipe, variant.changes)


def _homogeneous(variant: Variant, name: str) -> Variant:
    return _changed(variant, *(f"tasks.{task}.batches=homogeneous" for task in _recipe(variant).tasks))


def _label_weights(variant: Variant, times: float) -> tuple[str, ...]:
    """Use each row of classification and clustering `times` times in one epoch."""
    labelled = [task for task in ("classification", "clustering") if task in _recipe(variant).tasks]
    return tuple(f"tasks.{task}.weight={times:g}" for task in labelled)


def _labels(times: int) -> Improvement:
    return lambda variant, name: _changed(variant, *_label_weights(variant, times))


def _epochs(times: float) -> Improvement:
    """Train for `times` as many epochs."""
    return lambda variant, name: _changed(
        variant, f"training.num_train_epochs={times * _recipe(variant).training.num_train_epochs:g}"
    )


def _shared_rate(part: float) -> Improvement:
    """Lower the learning rate of all weights except the experts, so that each task disturbs the others less.

    In a dense model, the exception is what a MoTE has once per expert.
    """
    return lambda variant, name: replace(
        variant,
        rate_factor=variant.rate_factor * part,
        expert_rate_factor=(variant.expert_rate_factor or 1) / part,  # experts keep their rate
    )


def _served_together(expert: str, tasks: tuple[str, ...]) -> Improvement:
    """Give tasks one expert in place of their own, and let them keep their instructions.

    An instruction that stands for an expert which stays is that expert's alone: such a task gets the first task's.

    Args:
        expert: The expert, or a task whose expert it is.
        tasks: The tasks; those that the model lacks are left out.
    """

    def improve(variant: Variant, name: str) -> Variant:
        model = _recipe(variant).model
        experts = model.experts or [*PAPER_INSTRUCTIONS]
        served = {**UNSEEN_TASKS, **{one: one for one in experts}, **model.tasks}  # task → expert
        instructions = {**PAPER_INSTRUCTIONS, **model.instruction_texts}
        own = [task for task in tasks if task in served]
        shared = served.get(expert, expert)
        others = [one for one in experts if one not in (shared, *own)]
        routes = [f"model.tasks.{task}={shared}" for task in own]
        named = {task: served[task] if served[task] not in others else own[0] for task in own}
        texts = [f"model.instruction_texts.{task}='{instructions[of]}'" for task, of in named.items()]
        return _changed(variant, f"model.experts=[{', '.join([*others, shared])}]", *routes, *texts)

    return improve


def _five_tasks(variant: Variant, name: str) -> Variant:
    """Train on class labels, and on the paper's pairs of `classification` for text matching, with an expert of its own.

    Of separate models, the one for classification also gets these pairs.
    """
    recipe = _recipe(variant)
    changed = _changed(
        variant,
        f"model.experts=[{', '.join([*(recipe.model.experts or PAPER_INSTRUCTIONS), MATCHING])}]",
        *(f"model.tasks.{task}={MATCHING}" for task in UNSEEN),
        f"model.instruction_texts.{MATCHING}='{MATCHING}: '",
        *([PARAPHRASES] if "classification" in recipe.tasks else []),
    )
    return replace(changed, trained_on="five_tasks", trial_changes=_label_weights(variant, LABELS_IN_TRIALS))


def _matching_by_search(variant: Variant, name: str) -> Variant:
    """Let search and text matching share an expert; of separate models, the one for retrieval does both."""
    together = _served_together("search", (*SEARCH, MATCHING, *UNSEEN))(variant, name)
    if variant.trained_on == "five_tasks" and variant.recipe == "sem-retrieval":
        return replace(_changed(together, PARAPHRASES), datasets=(*SERVED["retrieval"], *MATCHED))
    if variant.trained_on == "five_tasks" and variant.recipe == "sem-classification":
        return replace(_changed(together, f"tasks.{PARAPHRASED}=null"), datasets=(KIND_OF_TASK["classification"],))
    return together


def _of(making: Making) -> Improvement:
    return lambda variant, name: replace(variant, made_of=name, made_by=making, last_stage=None)


def _then_learns(made: Variant, *stage: str) -> Variant:
    return replace(made, last_stage=stage, after_training=(*made.after_training, *stage))


def _served_by(expert: str) -> Improvement:
    return _of(lambda source, out, start: mote.configure(source, out, tasks=dict.fromkeys(UNSEEN, expert)))


def _to_start(weight: float) -> Improvement:
    return _of(lambda source, out, start: towards_start(source, out, start, weight))


def _shared_to_start(weight: float) -> Improvement:
    """Interpolate the weights that a MoTE's experts share, or in a dense model their counterparts, with the start."""
    return _of(lambda source, out, start: towards_start(source, out, start, weight, OF_EXPERTS))


def _unseen_tasks(variant: Variant) -> tuple[str, ...]:
    """Return the unseen tasks, and text matching, too, if it shares its instruction with them."""
    return (*UNSEEN, *(task for task in _recipe(variant).model.tasks if task == MATCHING))


def _unseen_by_mean(variant: Variant, name: str) -> Variant:
    """Serve unseen tasks by the mean of all experts."""
    return _of(made_by(mote.experts.add, "mean", "mean", tasks=_unseen_tasks(variant)))(variant, name)


def _unseen_near_start(variant: Variant, name: str) -> Variant:
    """Serve unseen tasks by an expert halfway between the one that was trained for them and the start."""
    trained_for_them = _recipe(variant).model.tasks.get("sts", UNSEEN_TASKS["sts"])
    tasks = _unseen_tasks(variant)

    def making(source: Path, out: Path, start: Path) -> Path:
        return mote.transform(source, out, add_near_start, start, trained_for_them, tasks)

    return _of(making)(variant, name)


def _distilled_alone(variant: Variant, name: str, expert: str, task: str, *changes: str, **settings: Any) -> Variant:
    """Let a copy of the expert for text matching learn the teacher's embeddings of its texts, with all else frozen.

    With five tasks this takes a tenth of an epoch's steps. If all tasks have pairs, the texts are those of
    classification.

    Args:
        variant: The variant.
        name: Its name.
        expert: Name of the copy.
        task: Unseen task that the texts are embedded for.
        changes: Further overrides.
        settings: For `mote.experts.add`.
    """
    tasks = _recipe(variant).tasks
    matching = PARAPHRASED if PARAPHRASED in tasks else "classification"
    trained_for_them = _recipe(variant).model.tasks.get("sts", UNSEEN_TASKS["sts"])
    making = made_by(mote.experts.add, expert, trained_for_them, **settings)
    stage = (
        "model.experts=null",  # those of the MoTE that it starts from
        "model.tasks={}",
        *(f"tasks.{one}=null" for one in tasks if one != matching),
        *(f"tasks.{matching}.{setting}" for setting in (f"anchor={task}", f"positive={task}", "batches=heterogeneous")),
        f"training.only_experts=[{expert}]",
        "training.num_train_epochs=0.8",
        *changes,
    )
    return _then_learns(_of(making)(variant, name), *stage)


def _matching_distilled(variant: Variant, name: str) -> Variant:
    """Serve all unseen tasks by an expert that learns the teacher's embeddings alone."""
    return _distilled_alone(variant, name, "distilled", "sts", tasks=_unseen_tasks(variant))


def _summaries_distilled(variant: Variant, name: str) -> Variant:
    """Serve summarization by an expert that learns the teacher's embeddings alone, at a higher rate."""
    task = "summarization"
    own = f"{task}: "  # that of text matching is another expert's
    changes = ("training.learning_rate=1.6e-3", "model.instruction_texts={}")
    return _distilled_alone(variant, name, task, task, *changes, instruction=own)


def _distilled_last(variant: Variant, name: str) -> Variant:
    """Let all weights learn the teacher's embeddings of all texts, in a further tenth of an epoch's steps."""
    unchanged = _of(lambda source, out, start: source)
    return _then_learns(unchanged(variant, name), "training.num_train_epochs=0.1")


def _own_moves(moves: Mapping[str, tuple[float, float]], shared: float = 0.0) -> Improvement:
    """Move each expert by its own amounts, and the shared weights, in place of `to-mean`."""
    amounts = [f"{expert} moved by {of_mean:g}, {of_start:g}" for expert, (of_mean, of_start) in moves.items()]
    if shared:
        amounts.append(f"shared weights moved by {shared:g}")

    def making(source: Path, out: Path, start: Path) -> Path:
        return mote.transform(source, out, move_experts, start, moves, shared)

    def improve(variant: Variant, name: str) -> Variant:
        return replace(_of(making)(variant, name), after_training=(*variant.after_training, *amounts))

    return improve


def _search_to_start(weight: float) -> Improvement:
    """Interpolate the experts of search with the start, as `to-start` does with all weights."""
    return _of(lambda source, out, start: mote.transform(source, out, move_experts_to_start, start, SEARCH, weight))


DATA: dict[str, Improvement] = {"five-tasks": _five_tasks}
"""Other data than the paper's kind of pairs, for models of any kind."""

LABELS: dict[str, Improvement] = {"labels-twice": _labels(2), "labels-four-times": _labels(4)}
"""More steps on labelled texts, for models of any kind."""

_MADE_FOR_ALL = {
    **{f"to-start-{weight:g}": _to_start(weight) for weight in (0.25, 0.5)},
    "shared-to-start-0.25": _shared_to_start(0.25),
    "distilled-last": _distilled_last,
}
_SERVED_UNSEEN = {
    **{f"unseen-by-{expert}": _served_by(expert) for expert in EXPERTS},
    "unseen-by-mean": _unseen_by_mean,
    "unseen-near-start": _unseen_near_start,
    "matching-distilled": _matching_distilled,
}
_MADE_FOR_EXPERTS = {
    **{f"to-mean-{part:g}": _of(made_by(mote.experts.interpolate, part)) for part in (0.25, 0.5)},
    **_SERVED_UNSEEN,
    **{f"search-to-start-{weight:g}": _search_to_start(weight) for weight in (0.25, 0.5)},
    "own-moves": _own_moves(OWN_MOVES),
    "own-moves-and-shared": _own_moves(MOVES_WITH_SHARED, SHARED_MOVE),
    "summaries-distilled": _summaries_distilled,
}
MADE_AFTER_TRAINING = {**_MADE_FOR_ALL, **_MADE_FOR_EXPERTS}
"""Changes of a trained model; some also train it further."""

HALF_RATE = "rate-0.5"
SHARED_RATE = "shared-rate-0.25"
TWO_EPOCHS = "two-epochs"
TENTH_LESS = "epochs-0.9"
TENTH_MORE = "epochs-1.1"
_LAST = (HALF_RATE, TWO_EPOCHS, TENTH_LESS, TENTH_MORE, SHARED_RATE)
"""Changes of the training that follow all others in a name, so that one model has one name."""

FOR_ALL: dict[str, Improvement] = {
    **DATA,
    "homogeneous": _homogeneous,
    "late": lambda variant, name: replace(_changed(variant, "training.num_train_epochs=0.5"), late=True),
    "distilled": lambda variant, name: replace(variant, start="distilled"),
    "mined": lambda variant, name: replace(variant, mined=True),
    **LABELS,
    HALF_RATE: lambda variant, name: replace(variant, rate_factor=variant.rate_factor * 0.5),
    TWO_EPOCHS: _epochs(2),
    TENTH_LESS: _epochs(0.9),
    TENTH_MORE: _epochs(1.1),
    "pretrained": lambda variant, name: replace(variant, start="pretrained"),
    **_MADE_FOR_ALL,
}
FOR_ONE_MODEL: dict[str, Improvement] = {**FOR_ALL, SHARED_RATE: _shared_rate(0.25)}
"""For a model that serves all tasks, and trains all of its weights: not for adapters or separate models."""
FOR_EXPERTS: dict[str, Improvement] = {
    "search-expert": _served_together("search", SEARCH),
    "matching-by-search": _matching_by_search,
    "expert-rates": lambda variant, name: replace(variant, expert_rate_factor=3.0),
    "shared": _served_together("search_document", ("clustering",)),
    **_MADE_FOR_EXPERTS,
}
IMPROVEMENTS = {**FOR_ONE_MODEL, **FOR_EXPERTS}


@cache
def variant_of(name: str) -> Variant:
    """Return a variant of `VARIANTS`, with the improvements in its name.

    Raises:
        ValueError: If a part of the name is unknown, or an improvement that changes the training follows one that is
            applied after training.
    """
    base, *improvements = name.split("+")
    for part, known in [(base, [*VARIANTS]), *((one, [*IMPROVEMENTS]) for one in improvements)]:
        if part not in known:
            raise ValueError(f"Unknown part {part!r} of variant {name!r}." + alternatives(part, known))
    variant = VARIANTS[base]
    for improvement in improvements:
        if variant.made_of is not None and improvement not in MADE_AFTER_TRAINING:
            raise ValueError(f"{name}: {improvement} changes the training, and must precede what is made after it")
        variant = IMPROVEMENTS[improvement](variant, base)
        base = f"{base}+{improvement}"
    return variant


def improved(name: str, improvement: str) -> str:
    """Add one or more improvements to a variant's name: changes of the training before all that is made after it.

    What serves unseen tasks replaces what served them before.

    Args:
        name: The variant, or a suffix of variants' names.
        improvement: Names of improvements, joined by "+".
    """
    added = improvement.split("+")
    kept = name.split("+")
    if _SERVED_UNSEEN.keys() & {*added}:
        kept = [one for one in kept if one not in _SERVED_UNSEEN]

    def place(one: str) -> tuple[bool, int]:
        return one in MADE_AFTER_TRAINING, _LAST.index(one) if one in _LAST else -1

    return "+".join(sorted([*kept, *added], key=place))


def training_of(name: str, also: tuple[str, ...] = ()) -> str:
    """Return those improvements of a variant's training, as a suffix, that suit all kinds of models.

    Args:
        name: The improved variant.
        also: Further improvements to return.
    """
    kept = (one for one in name.split("+")[1:] if one in FOR_ALL or one in also)
    return "".join(f"+{one}" for one in kept if one not in MADE_AFTER_TRAINING)


def parts_of(name: str) -> list[str]:
    """Return the names of a variant's models: one, or for `sem` and its improvements one per task."""
    base, *improvements = name.split("+")
    return ["+".join([f"sem-{task}", *improvements]) for task in TASKS] if base == SEPARATE else [name]
