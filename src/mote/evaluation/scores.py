"""Scores of models on datasets: means, gains, comparisons, tables."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mote.files import replaced
from mote.remote.configuration_mote import alternatives
from mote.reporting import Report, table
from mote.statistics import Comparison, compare_scores

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
OVER_DATASETS, OVER_TYPES = "mean over datasets", "mean over types"


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
        experts: MoTE → dataset → its expert, or those of queries and of documents.
        settings: Settings of the evaluation, and metadata of the models.
        reference: Model that gains are computed against. Default: no gains in tables.
        further: Model → dataset → its other scores, x 100: MRR@10 and Recall@k of retrieval, those of each language.
    """

    scores: Mapping[str, dict[str, float]]
    types: Mapping[str, str]
    metrics: Mapping[str, str] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    experts: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None
    further: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reference is not None:
            self._of(self.reference)

    @property
    def models(self) -> list[str]:
        """Labels of the models."""
        return list(self.scores)

    @property
    def datasets(self) -> list[str]:
        """All datasets, by task type."""
        order, scored = self.task_types, (name for scores in self.scores.values() for name in scores)
        return sorted(dict.fromkeys([*self.types, *scored]), key=lambda name: order.index(self.types[name]))

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
        """Means over the common datasets: of each task type, over all, and over the types; empty without scores."""
        scores = self._of(model)
        groups: dict[str, list[float]] = {}
        for name in self.common if scores else ():
            groups.setdefault(self.types[name], []).append(scores[name])
        means = {task_type: sum(values) / len(values) for task_type, values in groups.items()}
        if means:
            means[OVER_TYPES] = sum(means.values()) / len(means)
            means[OVER_DATASETS] = sum(scores[name] for name in self.common) / len(self.common)
        return means

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
        """Mean scores: a row for each task type, for all datasets and for all types; a column for each model."""
        types = Counter(self.types[name] for name in self.common)
        counts = {**types, OVER_DATASETS: types.total(), OVER_TYPES: len(types)}
        means = [self.means(model) for model in self.models]
        rows = [
            [f"{name} ({counts.get(name, 0)})", *self._cells([of_model.get(name) for of_model in means])]
            for name in (*self.task_types, OVER_DATASETS, OVER_TYPES)
        ]
        notes = [f"Failed: {failure}" for failure in self.failed()]
        notes += [f"{comparison}." for comparison in self.comparisons()]
        if len(self.common) < len(self.types):
            missing = f"{len(self.common)} of {len(self.types)} datasets"
            notes.insert(0, f"Means are over the {missing} that all models have scores on.")
        blocks = [
            f"{'; '.join(self._heading())}.",
            table(["", *self.models], rows),
            "\n".join(f"- {note}" for note in notes),
        ]
        return "\n\n".join(filter(None, blocks))

    def per_dataset(self) -> str:
        """Scores: a row for each dataset, a column for each model; of a MoTE, with the expert."""
        rows = []
        for name in self.datasets:
            cells = self._cells([scores.get(name) for scores in self.scores.values()])
            for column, model in enumerate(self.models):
                if name in self.failures.get(model, {}):
                    cells[column] = "failed"
                elif expert := self.experts.get(model, {}).get(name):
                    cells[column] += f" {expert}"
            rows.append([name, self.types[name], self.metrics.get(name, ""), *cells])
        return table(["dataset", "type", "score", *self.models], rows, align="lll" + "r" * len(self.models))

    def further_scores(self) -> str:
        """Scores beside the main ones: a row for each dataset and score, a column for each model; "" without any."""
        of_models = [self.further.get(model, {}) for model in self.models]
        names = dict.fromkeys((data, name) for data in self.datasets for one in of_models for name in one.get(data, ()))
        rows = [[*key, *self._cells([one.get(key[0], {}).get(key[1]) for one in of_models])] for key in names]
        return table(["dataset", "score", *self.models], rows, align="ll" + "r" * len(self.models)) if rows else ""

    def failed(self) -> list[str]:
        """Each failure in one line."""
        return [
            f"{model} on {name}: {message}" for model, some in self.failures.items() for name, message in some.items()
        ]

    def to_json(self) -> str:
        """Serialize to JSON, with means and comparisons, which `from_json` computes again."""
        means = {model: self.means(model) for model in self.models}
        comparisons = [asdict(comparison) for comparison in self.comparisons()]
        content = {"means": means, "averaged over": self.common, "comparisons": comparisons, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Evaluation":
        """Read what `to_json` wrote, as from scores.json."""
        content = json.loads(text)
        return cls(**{field.name: content[field.name] for field in fields(cls) if field.name in content})

    def save(self, folder: str | Path) -> None:
        """Write scores.md, the tables, and scores.json; those of an earlier run are replaced once both are complete."""
        tables = filter(None, (str(self), self.per_dataset(), self.further_scores()))
        texts = {"scores.md": "\n\n".join(tables) + "\n", "scores.json": self.to_json()}
        with ExitStack() as files:
            for name, text in texts.items():
                files.enter_context(replaced(Path(folder, name))).write_text(text, encoding="utf-8")

    def _cells(self, scores: Iterable[float | None]) -> list[str]:
        """Format the score of each model: the best one in bold, with the gain over the reference."""
        known = {model: score for model, score in zip(self.models, scores, strict=True) if score is not None}
        best = f"{max(known.values()):.2f}" if len(known) > 1 else None
        base = known.get(self.reference) if self.reference is not None else None
        cells = []
        for model in self.models:
            cell = f"{known[model]:.2f}" if model in known else "-"
            cell = f"**{cell}**" if cell == best else cell
            if base is not None and model in known and model != self.reference:
                gain = round(known[model] - base, 2) + 0.0  # no minus before a zero
                cell += f" ({gain:+.2f})"
            cells.append(cell)
        return cells

    def _heading(self) -> Iterator[str]:
        yield "Main scores of MTEB x 100"
        for name in ("mteb", "dtype", "retrieval", "instructions"):
            if found := self.settings.get(name):
                yield f"{name}: {found if isinstance(found, str) else ', '.join(found)}"
        if length := self.settings.get("max_length"):
            yield f"texts cut to {length} tokens"
        if limit := self.settings.get("limit"):
            yield f"datasets cut by --limit {limit}, not comparable with scores on full datasets"
        if len(self.models) > 1:
            if self.reference is not None:
                yield f"in brackets: gain over {self.reference}"
            yield "best in bold"

    def _of(self, model: str) -> Mapping[str, float]:
        if model not in self.scores:
            raise ValueError(f"Unknown model {model!r}." + alternatives(model, self.scores))
        return self.scores[model]
