"""Tables of our scores, and the paper's claims compared with them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf
from statistics import mean

import numpy as np

from mote.evaluation.scores import TASK_TYPES
from mote.reporting import table as markdown_table
from mote.statistics import Comparison, compare_scores
from research.claims import ALL, SEEN, UNSEEN, Claim, Table
from research.scores import Scores, ScoresOfTypes

Means = dict[str, float]
"""Task type → mean over its datasets."""

COLUMNS = (
    "claim",
    "over",
    "paper",
    "here",
    "with each seed",
    "one-sided p: Welch",
    "paired t",
    "Wilcoxon",
    "over seeds",
    "higher on",
    "verdict",
)
"""Columns of a table of claims."""


@dataclass(frozen=True)
class Cell:
    """A mean score and its spread over the seeds.

    Attributes:
        mean: Mean over the datasets of a group and over the seeds.
        spread: Standard deviation over the seeds; None: one model.
    """

    mean: float
    spread: float | None

    def __str__(self) -> str:
        """Format as `58.81 ± 0.12`."""
        return f"{self.mean:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f}")


def datasets_of(scores: Scores, types: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """Return the datasets of some task types (empty: all) for which all these variants have scores."""
    of_types = [dataset for dataset, kind in scores.types.items() if not types or kind in types]
    return [dataset for dataset in of_types if all(dataset in scores.every[name] for name in names)]


def cell(scores: Scores, name: str, datasets: list[str]) -> Cell:
    """Average a variant's scores over datasets, then over seeds."""
    of_seeds = np.mean([scores.every[name][dataset] for dataset in datasets], axis=0)
    several = np.ptp(of_seeds) > 0  # one start has the same score for each seed
    return Cell(float(of_seeds.mean()), float(of_seeds.std(ddof=1)) if several else None)


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return what tables call variants: by their base, with those improvements that not all of this base have."""
    every = {name: name.split("+") for name in names}

    def label(base: str, improvements: list[str]) -> str:
        same = [other for other in every.values() if other[0] == base]
        return "+".join([base, *(one for one in improvements if not all(one in other for other in same))])

    return {name: label(base, improvements) for name, (base, *improvements) in every.items()}


def legend_of(labels: dict[str, str]) -> str:
    """List the improvements of the variants that are called by their base."""
    improved = [f"- `{label}`: {', '.join(name.split('+')[1:])}" for name, label in labels.items() if name != label]
    return "\n".join(improved)


def table_of(table: Table, scores: Scores) -> str:
    """Format one of the paper's tables with our scores, with the seeds that all of its variants have."""
    names = table.variants
    scores = scores.with_common_seeds(*names)
    datasets = datasets_of(scores, table.types, names)
    types = table.types or TASK_TYPES
    groups = {kind: [dataset for dataset in datasets if scores.types[dataset] == kind] for kind in types}
    rows = {f"{kind} ({len(group)})": group for kind, group in groups.items() if group}
    rows[f"mean over all ({len(datasets)})"] = datasets
    lines = []
    for label, group in rows.items():
        cells = {name: cell(scores, name, group) for name in names}
        best = max(cells, key=lambda name: cells[name].mean)
        shown = []
        for name in names:
            text = f"**{cells[name]}**" if name == best else str(cells[name])
            gain = cells[name].mean - cells[table.reference].mean
            shown.append(text if name == table.reference else f"{text} ({gain:+.2f})")
        lines.append([label, *shown])
    return markdown_table(["", *labels_of(names).values()], lines, align="l" * (1 + len(names)))


def paper_of(table: Table) -> str:
    """Format the paper's own scores; empty if it has none."""
    if not table.paper:
        return ""
    rows = len(next(iter(table.paper.values()))) - 1
    types = {len(SEEN): SEEN, len(UNSEEN): UNSEEN}.get(rows, (*SEEN, *UNSEEN))
    lines = [
        [kind, *(f"{scores[number]:.2f}" for scores in table.paper.values())]
        for number, kind in enumerate((*types, "over all datasets"))
    ]
    return markdown_table(["the paper's", *table.paper], lines)


@dataclass(frozen=True)
class Measured:
    """A claim, measured on our scores.

    Attributes:
        tests: Tests over the datasets, with each score averaged over the seeds.
        with_seeds: Gain with each of the seeds that both have; empty if that is one.
        over_seeds: One-sided p of a paired t-test over these seeds; None if there are fewer than three.
        relative: Gain of `better` over that of `other`, minus 1; None if `other` has no significant gain, or if no
            relative gain is claimed.
    """

    tests: Comparison
    with_seeds: tuple[float, ...]
    over_seeds: float | None
    relative: float | None

    @property
    def verdict(self) -> str:
        """Whether the direction agrees with the paper, by the paired t-test at 5 % and each seed; sizes are ignored."""
        tests = self.tests
        one_seed = "" if self.with_seeds else ", one seed"
        if tests.paired_t is None:
            return "not tested"
        if tests.gain > 0:
            found = tests.paired_t < 0.05 and all(gain > 0 for gain in self.with_seeds)
            return f"same direction{one_seed}" if found else "same direction, not significant"
        found = tests.paired_t > 0.95 and all(gain < 0 for gain in self.with_seeds)
        return f"**disagrees**{one_seed}" if found else "other direction, not significant"


def compared(claim: Claim, table: Table, scores: Scores) -> Measured:
    """Measure a claim on our scores, with the seeds that all of its variants have."""
    names = (claim.better, claim.other, *([claim.relative_to] if claim.relative_to else []))
    scores = scores.with_common_seeds(*names)
    datasets = datasets_of(scores, table.types if claim.over == ALL else (claim.over,), names)
    shape = len(datasets), len(scores.seeds[claim.better])
    of = {name: np.array([scores.every[name][dataset] for dataset in datasets]).reshape(shape) for name in names}

    def over(axis: int, better: str, other: str) -> Comparison:
        """Test over datasets (axis 1 averaged) or over seeds (axis 0)."""
        return compare_scores(better, other, of[better].mean(axis=axis).tolist(), of[other].mean(axis=axis).tolist())

    tests = over(1, claim.better, claim.other)
    gains = (of[claim.better] - of[claim.other]).mean(axis=0).tolist() if datasets else []
    with_seeds = tuple(gains) if len(gains) > 1 else ()
    over_seeds = over(0, claim.better, claim.other).paired_t if len(gains) > 2 else None
    relative = None
    if claim.relative_to is not None:
        before = over(1, claim.other, claim.relative_to)
        if before.gain > 0 and before.paired_t is not None and before.paired_t < 0.05:
            relative = over(1, claim.better, claim.relative_to).gain / before.gain - 1
    return Measured(tests, with_seeds, over_seeds, relative)


def measured(claim: Claim, table: Table, scores: Scores) -> dict[str, str]:
    """Format a claim next to our measurement: one of `COLUMNS` → cell."""
    found = compared(claim, table, scores)
    tests = found.tests
    labels = labels_of((*table.variants, claim.better, claim.other))
    paper = [] if claim.gain is None else [f"{claim.gain:+.2f}"]
    here = [f"{tests.gain:+.2f}"]
    if claim.relative is not None:
        paper.append(f"gain over {claim.relative_to} {claim.relative:+.0%}")
        here.append("no significant gain to compare with" if found.relative is None else f"gain {found.relative:+.0%}")
    cells = (
        f"{labels[claim.better]} over {labels[claim.other]}",
        "all rows" if claim.over == ALL else claim.over,
        ", ".join(paper) or "better",
        ", ".join(here),
        ", ".join(f"{gain:+.2f}" for gain in found.with_seeds),
        *map(p_value, (tests.welch, tests.paired_t, tests.wilcoxon)),
        "" if found.over_seeds is None else p_value(found.over_seeds),
        f"{tests.higher} of {tests.datasets}",
        found.verdict,
    )
    return dict(zip(COLUMNS, cells, strict=True))


def claims_of(table: Table, scores: Scores) -> str:
    """Format the claims next to our measurements; claims that are not the paper's have no verdict."""
    rows = [measured(claim, table, scores) for claim in table.claims]
    columns = [column for column in COLUMNS if table.paper or column not in ("paper", "verdict")]
    columns = [column for column in columns if any(row[column] for row in rows)]
    return markdown_table(columns, [[row[name] for name in columns] for row in rows], align="l" * len(columns))


def report(table: Table, scores: Scores) -> str:
    """Format our scores, the paper's, and the claims."""
    legend = legend_of(labels_of(table.variants))
    return "\n\n".join(filter(None, [table_of(table, scores), legend, paper_of(table), claims_of(table, scores)]))


def summary_of(tables: Mapping[str, Table], scores: Scores) -> str:
    """Format the paper's claims of all tables in one short table."""
    left_out = ("with each seed", "one-sided p: Welch", "Wilcoxon", "over seeds")
    columns = [column for column in COLUMNS if column not in left_out]
    rows = [
        [name, *(row[column] for column in columns)]
        for name, table in tables.items()
        for row in (measured(claim, table, scores) for claim in table.claims)
    ]
    header = ["", *(column.replace("paired", "one-sided p: paired") for column in columns)]
    return markdown_table(header, rows, align="l" * len(header))


def models_table(found: Mapping[str, Mapping[int, ScoresOfTypes]]) -> str:
    """Format all models of a scale: means over all datasets, by seed and over all seeds, and over each type.

    One of three separate models, which serves some of the types, has no mean over all datasets.

    Args:
        found: Variant → seed → its scores.
    """
    seeds = sorted({seed for of_seeds in found.values() for seed in of_seeds})
    types = [kind for kind in TASK_TYPES if any(kind in one for of in found.values() for one in of.values())]
    labels = labels_of(found)
    rows = []
    for name, of_seeds in found.items():
        whole = {
            seed: mean(chain.from_iterable(of_type.values() for of_type in one.values()))
            for seed, one in of_seeds.items()
            if one.keys() >= {*types}
        }
        of_types = [[mean(one[kind].values()) for one in of_seeds.values() if kind in one] for kind in types]
        over_seeds = [mean(whole.values()) if len(whole) == len(seeds) else None] if len(seeds) > 1 else []
        means = [*map(whole.get, seeds), *over_seeds, *(mean(of_type) if of_type else None for of_type in of_types)]
        rows.append([labels[name], *("" if one is None else f"{one:.2f}" for one in means)])
    columns = [*(f"seed {seed}" for seed in seeds), *(["all seeds"] if len(seeds) > 1 else [])]
    table = markdown_table(["mean over the test sets", *columns, *types], rows)
    return "\n\n".join(filter(None, [table, legend_of(labels)]))


def means_of(scores: ScoresOfTypes) -> Means:
    """Average scores over the datasets of each task type."""
    return {kind: mean(of_type.values()) for kind, of_type in scores.items()}


def means_table(found: Mapping[str, Means]) -> str:
    """Format the means over task types, and the mean of these, which variants are sorted by.

    One of three separate models, which serves some of the types, has no mean over all types, and comes last.

    Args:
        found: Variant → its means.
    """
    types = [kind for kind in TASK_TYPES if any(kind in of_types for of_types in found.values())]
    over_types = {name: mean(of.values()) if of.keys() >= {*types} else None for name, of in found.items()}
    rows = [
        [name, *("" if one is None else f"{one:.2f}" for one in (over_types[name], *map(found[name].get, types)))]
        for name in sorted(found, key=lambda name: over_types[name] or -inf, reverse=True)
    ]
    return markdown_table(["mean over the validation sets", "over the types", *types], rows)


def sweep_table(sweep: dict[str, dict[float, float]]) -> str:
    """Format scores at several learning rates (variant → rate → score), with the best of each variant in bold."""
    rates = sorted({rate for of_rates in sweep.values() for rate in of_rates})
    rows = []
    for name, of_rates in sweep.items():
        best = max(of_rates, key=of_rates.__getitem__)
        shown = {rate: f"**{score:.2f}**" if rate == best else f"{score:.2f}" for rate, score in of_rates.items()}
        rows.append([name, *(shown.get(rate, "") for rate in rates)])
    return markdown_table(["learning rate", *(f"{rate:g}" for rate in rates)], rows)


def p_value(value: float | None) -> str:
    """Format a p-value; "none" if the test is undefined."""
    return "none" if value is None else f"{value:.2g}"
