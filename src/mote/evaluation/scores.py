"""Scores of models on datasets: means, gains, comparisons."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mote.evaluation.statistics import Comparison, compare_scores
from mote.evaluation.tables import Format, dataset_table, mean_table
from mote.remote.configuration_mote import alternatives
from mote.reporting import Report

TASK_TYPES = (
    "Retrieval",
    "Classification",
    "Clustering",
    "Reranking",
    "PairClassification",
    "STS",
    "Summarization",
)
"""Task types of MTEB in the paper's order."""


@dataclass(frozen=True, repr=False)
class Evaluation(Report):
    """Scores of models on datasets.

    Means are taken over the datasets that all models have a score for, so that columns can be compared. Models without
    any score are ignored here.

    Attributes:
        scores: Model → dataset → main score, x 100.
        types: Dataset → task type of MTEB.
        metrics: Dataset → name of the main score.
        failures: Model → dataset → error message.
        settings: Settings of the evaluation, and metadata of the models.
        reference: Model that gains are computed against. Default: no gains in tables.
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
            self._of(self.reference)

    @property
    def models(self) -> list[str]:
        """Labels of the models."""
        return list(self.scores)

    @property
    def datasets(self) -> list[str]:
        """All datasets, by task type."""
        order = self.task_types
        return sorted(self.types, key=lambda name: order.index(self.types[name]))

    @property
    def task_types(self) -> list[str]:
        """Task types of the datasets, in the paper's order, others after them by name."""
        found = set(self.types.values())
        return [name for name in TASK_TYPES if name in found] + sorted(found - set(TASK_TYPES))

    @property
    def common(self) -> list[str]:
        """The datasets that all models with any score have a score for, by task type."""
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
        """Model → dataset → score minus the reference's, if both have one; without the reference itself."""
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
        """Compare each model with the reference, if there is one."""
        reference = self.reference
        return [self.compare(model, reference) for model in self.models if reference is not None and model != reference]

    def __str__(self) -> str:
        """Format mean scores by task type as text."""
        return self.table()

    def to_markdown(self) -> str:
        """Format mean scores by task type as Markdown."""
        return self.table("markdown")

    def table(self, format: Format = "text") -> str:  # noqa: A002
        """Mean scores by task type, as text or Markdown."""
        return mean_table(self, format)

    def per_dataset(self, format: Format = "text") -> str:  # noqa: A002
        """Scores by dataset, as text or Markdown."""
        return dataset_table(self, format)

    def failed(self) -> list[str]:
        """Each failure in one line."""
        return [
            f"{model} on {name}: {message}" for model, some in self.failures.items() for name, message in some.items()
        ]

    def to_json(self) -> str:
        """Serialize to JSON, with means and comparisons, which `from_json` computes again."""
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
        """Read what `to_json` wrote.

        Raises:
            ValueError: If it is something else.
        """
        content = json.loads(text)
        names = ("scores", "types", "metrics", "failures", "settings", "reference")
        missing = [name for name in names if not isinstance(content, dict) or name not in content]
        if missing:
            raise ValueError(f"Not the scores.json of `mote evaluate`: {', '.join(missing)} missing")
        return cls(**{name: content[name] for name in names})

    def _of(self, model: str) -> Mapping[str, float]:
        if model not in self.scores:
            raise ValueError(f"Unknown model {model!r}." + alternatives(model, self.scores))
        return self.scores[model]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
