"""The best recipe with experts and the best dense recipes, all improved by the same rule on validation sets."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from statistics import mean
from typing import TypedDict

from benchmarks.locking import share
from benchmarks.paper.claims import ALL, Claim, Table
from benchmarks.paper.experiments import START, SWEPT, base_of
from benchmarks.paper.improvements import (
    DATA,
    FOR_ONE_MODEL,
    HALF_RATE,
    IMPROVEMENTS,
    LABELS,
    SEPARATE,
    SHARED_RATE,
    TWO_EPOCHS,
    improved,
    training_of,
)
from benchmarks.paper.runs import Runs, Scores
from benchmarks.paper.tables import Measured, compared, labels_of, legend_of, p_value, table_of
from mote.reporting import markdown_table

BASES = ("mote", "ic")
"""Variants with trials of their own."""
DENSE = ("ic", "em")
"""Variants that try, in full, the training of IC's trials and that of MoTE's."""
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
TO_START = ("to-start-0.25", "to-start-0.5")
ORDER_IN_FULL: Order = (
    (SHARED_RATE,),
    (*LABELS, f"labels-four-times+{SHARED_RATE}"),
    (HALF_RATE,),
    ("unseen-near-start",),
    ("search-to-start-0.25", "search-to-start-0.5"),
    TO_START,
    (TWO_EPOCHS,),
)
"""Improvements that are tried in full, after the trials."""
TRAINED_AS_MOTE = ", trained as mote"
"""Suffix of a dense base with the training of the best MoTE, even where validation sets are against it."""
AT_HALF_RATE = f"{TRAINED_AS_MOTE}, at half the rate"
"""Suffix of one with this training at `HALF_RATE`, which may suit a dense model and not MoTE."""


class Step(TypedDict):
    """One trial.

    Attributes:
        name: Variant with the improvement.
        score: Mean over the task types of the validation sets.
        kept: Whether the steps that follow improve it.
    """

    name: str
    score: float
    kept: bool


class Validation(TypedDict):
    """All that was tried.

    Attributes:
        data: Kind of data, as a suffix of a variant's name → variant → mean over the task types.
        steps: Base → its trials.
        in_full: Base, or dense base with `TRAINED_AS_MOTE` or `AT_HALF_RATE` → what was tried in full.
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


def candidates(best: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the variants that are tried in full, by base.

    Args:
        best: Base → what its trials have made of it.
    """
    trainings = (best["ic"].removeprefix("ic"), training_of(best["mote"]))
    return {"mote": (best["mote"],), **{base: tuple(base + one for one in dict.fromkeys(trainings)) for base in DENSE}}


def improve(runs: Runs, order: Order, bases: tuple[str, ...], timeout: float = -1) -> list[Step]:
    """Try each improvement that applies to the best of some variants, and keep it if the validation score rises.

    Args:
        runs: The trials, or the full runs.
        order: Improvements in the order of the trials, alternatives grouped together.
        bases: Variants of one kind, the best of which is improved.
        timeout: Seconds to wait for another command that works on a trial; -1: no limit.

    Raises:
        filelock.Timeout: If the other command takes longer.
    """
    scores = {name: mean(runs.validated(name, timeout).values()) for name in bases}
    base = max(scores, key=scores.__getitem__)
    steps = [Step(name=name, score=score, kept=name == base) for name, score in scores.items()]
    for alternatives in order:
        before = best_of(steps)
        possible = IMPROVEMENTS if base_of(base) == "mote" else FOR_ONE_MODEL
        left = possible.keys() - {*before["name"].split("+")}
        names = [improved(before["name"], one) for one in alternatives if left >= {*one.split("+")}]
        if left_out := [name for name in names if not runs.can_validate(name)]:
            runs.report(f"not tried: {', '.join(left_out)}")
        scores = {name: mean(runs.validated(name, timeout).values()) for name in names if name not in left_out}
        best = max(scores, key=scores.__getitem__, default=None)
        for name, score in scores.items():
            steps.append(Step(name=name, score=score, kept=name == best and score > before["score"]))
    return steps


def try_improvements(runs: Runs) -> Validation:
    """Try the improvements of all bases: in trials, then in full."""
    trials = runs.choosing.trials
    of_data = scores_of_data(trials)
    data = best_data(of_data)
    share(partial(improve, trials, ORDER, (base + data,)) for base in BASES)
    steps = {base: improve(trials, ORDER, (base + data,)) for base in BASES}
    tried = candidates({base: best_of(of_base)["name"] for base, of_base in steps.items()})
    possible = {base: tuple(filter(runs.can_validate, names)) for base, names in tried.items()}
    share(partial(runs.validated, name) for names in possible.values() for name in names)
    share(partial(improve, runs, ORDER_IN_FULL, names) for names in possible.values() if names)
    in_full = {base: improve(runs, ORDER_IN_FULL, names) for base, names in possible.items() if names}
    own = {base: training_of(best_of(of_base)["name"], (SHARED_RATE,)) for base, of_base in in_full.items()}
    if "mote" in in_full:
        training = at_full_rate(training_of(best_of(in_full["mote"])["name"]))
        as_mote = {TRAINED_AS_MOTE: training, AT_HALF_RATE: improved(training, HALF_RATE)}
        for base, (suffix, one) in product(DENSE, as_mote.items()):
            if one != own.get(base) and runs.can_validate(base + one):
                in_full[base + suffix] = improve(runs, (TO_START,), (base + one,))
    return Validation(data=of_data, steps=steps, in_full=in_full)


def at_full_rate(name: str) -> str:
    """Return the variant, or the suffix, without `HALF_RATE`."""
    return name.replace(f"+{HALF_RATE}", "")


def best_of(steps: list[Step]) -> Step:
    """Return the last step that was kept."""
    return [step for step in steps if step["kept"]][-1]


def scored(best: dict[str, str]) -> tuple[str, ...]:
    """Return the variants that are scored on the test sets: the best, and others with the best MoTE's training.

    Dense models are also scored with one rate for all weights, at the full rate, and there with as many steps on
    labelled texts as each of `LABELS` gives: they may tolerate fewer.

    Args:
        best: Base, or dense base with `TRAINED_AS_MOTE` or `AT_HALF_RATE` → the best variant of it.
    """
    training = training_of(best["mote"])
    full_rate = at_full_rate(training)
    labels = next((one for one in LABELS if one in training.split("+")), None)
    others = [full_rate.replace(labels, one) for one in LABELS if labels]
    of_dense = [training_of(best["mote"], (SHARED_RATE,)), training, full_rate, *others]
    divided = [training_of(best["mote"], ("matching-by-search",))]
    names = [best["mote"], *best.values()]
    names += [base + one for base in DENSE for one in of_dense]
    names += [base + one for base in ("task-lora", SEPARATE) for one in divided]
    return tuple(dict.fromkeys(names))


def rivals(names: Iterable[str], data: str) -> tuple[str, ...]:
    """Return those models without experts that train on this kind of data: the goal is over the best of all of them.

    A better choice on validation sets must not remove one that is better on the test sets.

    Args:
        names: Variants with scores on the test sets.
        data: Kind of data, as a suffix of a variant's name.
    """
    return tuple(name for name in names if base_of(name) in (*DENSE, "task-lora") and data_of(name) == data)


def data_of(name: str) -> str:
    """Return the kind of data that a variant is trained on, as a suffix of its name."""
    return "".join(f"+{one}" for one in name.split("+")[1:] if one in DATA)


def best_table(names: tuple[str, ...], starts: tuple[str, ...]) -> Table:
    """Return the table of the best MoTE, which is the first variant, of others, and of what they start from."""
    best, *others = names
    reference = next(name for name in others if base_of(name) == "ic")
    claims = tuple(Claim(best, name, over) for over in (ALL, "Retrieval") for name in (*others, *starts))
    return Table("The best of each", (*starts, *names), reference, claims=claims)


def goal_table(table: Table, scores: Scores) -> str:
    """Format what question 4 of the plan requires of the best MoTE, and whether it holds.

    Args:
        table: The best MoTE, others with as many seeds, and what they start from.
        scores: Scores of these, and of dense models, task LoRAs and separate models with fewer seeds.
    """
    starts = [name for name in table.variants if base_of(name) == START]
    best, *shown = (name for name in table.variants if name not in starts)
    labels = labels_of(table.variants)

    def measured(other: str, over: str = ALL) -> Measured:
        return compared(Claim(best, other, over), table, scores)

    def gain_over(other: str) -> float:
        return measured(other).tests.gain

    rival = min((name for name in shown if base_of(name) != SEPARATE), key=gain_over)
    comparable = [name for name in scores.every if scores.common_seeds(best, name)]
    rest = [name for name in rivals(comparable, data_of(best)) if name not in table.variants]
    separate = [name for name in comparable if base_of(name) == SEPARATE and data_of(name) == data_of(best)]
    dense = labels[rival]
    overall, retrieval = measured(rival), measured(rival, "Retrieval").tests.gain
    gain, p, gains = overall.tests.gain, overall.tests.paired_t, overall.with_seeds
    with_seeds = f"{', '.join(f'{one:+.2f}' for one in gains)} (p over the seeds: {p_value(overall.over_seeds)})"
    rows: list[tuple[str, str, bool | None]] = [
        (f"over {dense}, the best of the others in one model: at least +1.0", f"{gain:+.2f}", gain >= 1),
        ("one-sided paired p below 0.05", p_value(p), p is not None and p < 0.05),
        ("with each of three seeds", with_seeds, len(gains) >= 3 and min(gains) > 0),
        (f"retrieval not below {dense}", f"{retrieval:+.2f}", retrieval >= 0),
    ]
    if rest:
        gain = min(map(gain_over, rest))
        what = f"over each of {len(rest)} others, with the seeds that they have: at least +1.0"
        rows.append((what, f"{gain:+.2f} or more", gain >= 1))
    for start in starts:
        both = [measured(start, over).tests.gain for over in (ALL, "Retrieval")]
        rows.append((f"above {start}, on all sets and in retrieval", "{:+.2f}, {:+.2f}".format(*both), min(both) > 0))
    what = "over three separate models, with the seeds that they have: at least -0.2"
    gain = min(map(gain_over, separate), default=-inf)
    rows.append((what, f"{gain:+.2f}" if separate else "not scored", gain >= -0.2 if separate else None))
    answers = {True: "yes", False: "no", None: ""}
    return markdown_table(["condition", "mote", "holds"], [[what, here, answers[holds]] for what, here, holds in rows])


def goal_report(table: Table, scores: Scores) -> str:
    """Format the conditions of question 4, and the scores that they are about."""
    labels = labels_of(table.variants)
    return "\n\n".join([goal_table(table, scores), table_of(table, scores), legend_of(labels)])


def labels_report(table: Table, scores: Scores) -> str:
    """Format the scores on datasets of labelled texts (learned in five tasks) and on all others."""
    kinds = {
        name: "labelled texts" if kind in ("Classification", "Clustering") else "others"
        for name, kind in scores.types.items()
    }
    split = replace(table, types=("labelled texts", "others"), claims=())
    return table_of(split, replace(scores, types=kinds))


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
