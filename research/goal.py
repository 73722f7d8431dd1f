"""Question 4 of the plan: the best recipe with experts and the best dense recipes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from statistics import mean
from typing import Any

from mote.reporting import table as markdown_table
from research.claims import ALL, Claim, Table
from research.scores import FIVE_TASKS, SEPARATE, START, Scores, base_of
from research.tables import Means, Measured, compared, labels_of, legend_of, p_value, table_of

IN_ONE_MODEL = ("ic", "em", "task-lora")
"""Models without experts that serve all tasks: the goal is over the best of all of them."""
TYPES_SEEN = ("Retrieval", "Classification", "Clustering")
TYPES_UNSEEN = ("STS", "PairClassification", "Reranking")
LOSS = 0.5  # largest acceptable loss of a seen type


def rivals(names: Iterable[str], best: str) -> tuple[str, ...]:
    """Return those models without experts that train on the data of the best MoTE.

    A better choice on validation sets must not remove one that is better on the test sets.
    """
    return tuple(name for name in names if base_of(name) in IN_ONE_MODEL and _same_data(name, best))


def _same_data(name: str, other: str) -> bool:
    return (FIVE_TASKS in name.split("+")) == (FIVE_TASKS in other.split("+"))


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
    rest = [name for name in rivals(comparable, best) if name not in table.variants]
    separate = [name for name in comparable if base_of(name) == SEPARATE and _same_data(name, best)]
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


def ways_table(scores: Mapping[str, Means]) -> str:
    """Format how well tasks without training data are served: way → means over the types of validation sets.

    In bold, the way that is best for unseen types among those that cost no seen type more than `LOSS`.
    """
    base = scores["mote"]
    harmless = [name for name, own in scores.items() if all(own[kind] >= base[kind] - LOSS for kind in TYPES_SEEN)]
    best = max(harmless, key=lambda name: mean(scores[name][kind] for kind in TYPES_UNSEEN))
    rows = []
    for name, of_way in scores.items():
        unseen = [of_way[kind] for kind in TYPES_UNSEEN]
        cells = [*unseen, mean(unseen), *(of_way[kind] for kind in TYPES_SEEN)]
        rows.append([f"**{name}**" if name == best else name, *(f"{score:.2f}" for score in cells)])
    return markdown_table(["on validation sets", *TYPES_UNSEEN, "mean", *TYPES_SEEN], rows)


def choices_tables(choices: Mapping[str, Any], trials: Mapping[str, float], in_full: Mapping[str, float]) -> str:
    """Format what was tried on validation sets, and whether it was kept.

    Args:
        choices: Suffixes of the kinds of `data`; `steps` and `in_full`: base → names tried, and whether each was kept.
        trials: Trial → mean over the types of validation sets.
        in_full: Full run → the same.
    """
    data = {suffix: [trials[name + suffix] for name in ("em", "ic", "mote")] for suffix in choices["data"]}
    chosen = max(data, key=lambda suffix: mean(data[suffix]))
    rows = []
    for suffix, of_data in data.items():
        name = suffix.removeprefix("+") or "pairs"
        cells = [f"{score:.2f}" for score in (*of_data, mean(of_data))]
        rows.append([f"**{name}**" if suffix == chosen else name, *cells])
    parts = [markdown_table(["trained on", "em", "ic", "mote", "mean"], rows)]
    for title, part, scores in (("trial", "steps", trials), ("in full", "in_full", in_full)):
        steps = [step for of_base in choices[part].values() for step in of_base]
        rows = [[name, f"{scores[name]:.2f}", "yes" if kept else "no"] for name, kept in steps]
        parts.append(markdown_table([title, "mean over the types of validation sets", "kept"], rows))
    return "\n\n".join(parts)
