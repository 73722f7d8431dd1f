"""Scores of models on datasets: means, gains, tables."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mote.evaluation.statistics import Comparison, compare_scores

# The paper's order; other types of MTEB follow by name.
TASK_TYPES = (
    "Retrieval",
    "Classification",
    "Clustering",
    "Reranking",
    "PairClassification",
    "STS",
    "Summarization",
)

Format = Literal["text", "markdown"]
_NOTHING = "-"


@dataclass(frozen=True)
class Evaluation:
    """The scores of some models on some datasets.

    Means are taken over the datasets that all models have a score for, so that columns can be compared. A model without
    any score takes no part in this.

    Attributes:
        scores: Model → dataset → main score, x 100.
        types: Dataset → task type of MTEB.
        metrics: Dataset → name of the main score.
        failures: Model → dataset → what went wrong.
        settings: How the scores came about.
        reference: The model that gains are taken over. Default: no gains in tables.
    """

    scores: Mapping[str, Mapping[str, float]]
    types: Mapping[str, str]
    metrics: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None

    def __post_init__(self) -> None:
        untyped = sorted({name for of_model in self.scores.values() for name in of_model} - set(self.types))
        if untyped:
            raise ValueError(f"Datasets without a task type: {', '.join(untyped)}")
        if self.reference is not None:
            self._check_model(self.reference)

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(self.scores)

    @property
    def datasets(self) -> list[str]:
        """All datasets, by task type."""
        types = _in_order(self.types.values())
        return sorted(self.types, key=lambda name: types.index(self.types[name]))

    @property
    def common(self) -> list[str]:
        """The datasets that all models (which have any) have a score for, by task type."""
        scored = [of_model for of_model in self.scores.values() if of_model]
        return [name for name in self.datasets if scored and all(name in of_model for of_model in scored)]

    def means(self, model: str) -> dict[str, float]:
        """Task type → mean score over the common datasets of that type. Empty for a model without scores."""
        scores = self._of(model)
        groups: dict[str, list[float]] = {}
        for name in self.common if scores else ():
            groups.setdefault(self.types[name], []).append(scores[name])
        return {task_type: _mean(values) for task_type, values in groups.items()}

    def mean(self, model: str) -> float:
        """Mean score over the common datasets; nan where there is none."""
        scores = self._of(model)
        return _mean([scores[name] for name in self.common] if scores else [])

    def mean_over_types(self, model: str) -> float:
        """Mean of `means`; nan where there is none."""
        return _mean(list(self.means(model).values()))

    def gains(self, reference: str) -> dict[str, dict[str, float]]:
        """Model → dataset → score less that of the reference, where both have one. The reference itself is left out."""
        base = self._of(reference)
        return {
            model: {name: scores[name] - base[name] for name in self.datasets if name in scores and name in base}
            for model, scores in self.scores.items()
            if model != reference
        }

    def compare(self, model: str, reference: str) -> Comparison:
        """Test whether a model is better than another, over the datasets that both have scores for."""
        ours, theirs = self._of(model), self._of(reference)
        names = [name for name in self.datasets if name in ours and name in theirs]
        return compare_scores(model, reference, [ours[name] for name in names], [theirs[name] for name in names])

    def comparisons(self) -> list[Comparison]:
        """Each model beside the reference; none where there is no reference."""
        reference = self.reference
        return [self.compare(model, reference) for model in self.models if reference is not None and model != reference]

    def table(self, format: Format = "text") -> str:  # noqa: A002
        """Mean scores: a row for each task type and for the whole, a column for each model."""
        means = {model: self.means(model) for model in self.models}
        counts = Counter(self.types[name] for name in self.common)
        rows = {
            f"{task_type} ({counts[task_type]})": {model: means[model].get(task_type) for model in self.models}
            for task_type in _in_order(self.types.values())
        }
        rows[f"mean over datasets ({counts.total()})"] = {model: self.mean(model) for model in self.models}
        rows[f"mean over types ({len(counts)})"] = {model: self.mean_over_types(model) for model in self.models}
        cells = [[label, *self._cells(values, format)] for label, values in rows.items()]
        lines = [self._heading(format), "", _render(["", *self.models], cells, format), *self._notes(format)]
        return "\n".join(lines)

    def per_dataset(self, format: Format = "text") -> str:  # noqa: A002
        """Scores: a row for each dataset, a column for each model."""
        rows = []
        for name in self.datasets:
            cells = self._cells({model: scores.get(name) for model, scores in self.scores.items()}, format)
            for column, model in enumerate(self.models):
                if name in self.failures.get(model, {}):
                    cells[column] = "failed"
            rows.append([name, self.types[name], self.metrics.get(name, ""), *cells])
        table = _render(["dataset", "type", "score", *self.models], rows, format, left=3)
        return "\n".join([self._heading(format), "", table, *self._notes(format)])

    def failed(self) -> list[str]:
        """Each failure in one line."""
        return [
            f"{model} on {name}: {message}" for model, some in self.failures.items() for name, message in some.items()
        ]

    def to_json(self) -> str:
        """As JSON, with means and comparisons for those who read it; they are made anew by `from_json`."""
        content = {
            "settings": dict(self.settings),
            "reference": self.reference,
            "means": {
                model: {
                    **self.means(model),
                    "mean over datasets": _or_none(self.mean(model)),
                    "mean over types": _or_none(self.mean_over_types(model)),
                }
                for model in self.models
            },
            "averaged over": self.common,
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
            "scores": {model: dict(of_model) for model, of_model in self.scores.items()},
            "types": dict(self.types),
            "metrics": dict(self.metrics),
            "failures": {model: dict(some) for model, some in self.failures.items()},
        }
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Evaluation":
        """What `to_json` wrote.

        Raises:
            ValueError: If it is something else.
        """
        content = json.loads(text)
        names = ("scores", "types", "metrics", "failures", "settings", "reference")
        missing = [name for name in names if not isinstance(content, dict) or name not in content]
        if missing:
            raise ValueError(f"These are no scores of `mote evaluate`: {', '.join(missing)} missing")
        return cls(**{name: content[name] for name in names})

    def _cells(self, values: Mapping[str, float | None], format: Format) -> list[str]:  # noqa: A002
        """A cell for each model: its value, marked where it is the best, and the gain."""
        values = {model: _or_none(value) for model, value in values.items()}
        known = [value for value in values.values() if value is not None]
        best = f"{max(known):.2f}" if len(known) > 1 else None
        base = values.get(self.reference) if self.reference is not None else None
        return [self._cell(model, value, best, base, format) for model, value in values.items()]

    def _cell(self, model: str, value: float | None, best: str | None, base: float | None, format: Format) -> str:  # noqa: A002
        if value is None:
            return _NOTHING
        text = f"{value:.2f}"
        if format == "markdown":
            text = f"**{text}**" if text == best else text
        else:
            text += "*" if text == best else " "
        if base is None or model == self.reference:
            return text
        return f"{text} ({round(value - base, 2) + 0.0:+.2f})"  # + 0.0: no minus before a zero

    def _heading(self, format: Format) -> str:  # noqa: A002
        """What the numbers are, and how they came about."""
        parts = ["Main scores of MTEB x 100", *_described(self.settings)]
        if self.reference is not None and len(self.models) > 1:
            parts.append(f"in brackets the gain over {self.reference}")
        if len(self.models) > 1:
            parts.append("best in bold" if format == "markdown" else "* best")
        return "; ".join(parts) + "."

    def _notes(self, format: Format) -> list[str]:  # noqa: A002
        """What a reader of the table must know."""
        notes = []
        common, every = len(self.common), len(self.types)
        if common < every:
            notes.append(f"Means are over those {common} of {every} datasets that all models have scores on.")
        notes += [f"Failed: {failure}" for failure in self.failed()]
        notes += [f"{comparison}." for comparison in self.comparisons()]
        bullet = "- " if format == "markdown" else ""
        return ["", *(bullet + note for note in notes)] if notes else []

    def _of(self, model: str) -> Mapping[str, float]:
        self._check_model(model)
        return self.scores[model]

    def _check_model(self, model: str) -> None:
        if model not in self.scores:
            raise ValueError(f"{model!r} is none of the models: {', '.join(self.scores)}")


def _described(settings: Mapping[str, Any]) -> Iterable[str]:
    """The settings that change what scores mean."""
    if versions := settings.get("mteb"):
        yield f"mteb {', '.join(versions)}"
    if dtype := settings.get("dtype"):
        yield f"weights in {dtype}"
    if limit := settings.get("limit"):
        yield f"sets cut down by --limit {limit}, not comparable with scores of whole sets"


def _in_order(types: Iterable[str]) -> list[str]:
    """Task types without repetition, the paper's first."""
    found = set(types)
    return [name for name in TASK_TYPES if name in found] + sorted(found - set(TASK_TYPES))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _render(header: list[str], rows: list[list[str]], format: Format, left: int = 1) -> str:  # noqa: A002
    """Lay out cells; the first `left` columns are aligned left, the others right."""
    if format == "markdown":
        rule = ["---"] * left + ["---:"] * (len(header) - left)
        return "\n".join("| " + " | ".join(_escaped(cells)) + " |" for cells in (header, rule, *rows))
    widths = [max(len(cells[column]) for cells in (header, *rows)) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (header, rule, *rows)
    )


def _escaped(cells: list[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]
