"""Results of an analysis: as tables, as JSON, and as files."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from mote.analysis import plots
from mote.analysis.divergence import Divergence
from mote.analysis.similarity import Array, Similarity, WelchTest
from mote.analysis.weight_change import WeightChange
from mote.data.texts import TextPairs, Texts
from mote.files import replaced
from mote.reporting import Report, table

CHARTS = ("similarity.png", "tsne.png", "weight_change.png")


@dataclass(frozen=True)
class ModelAnalysis:
    """Results for one model.

    Attributes:
        label: Name in tables and charts.
        instructions: Compared task → its prompt.
        experts: Task → its expert; empty for models that do not route by task.
        similarity: Inter-task similarity, as from `inter_task_similarity`; empty if a model has no tasks to compare.
        divergence: Divergence between queries and documents; None if the model knows no such roles.
        layout: t-SNE of queries and documents, [2 N, 2], queries first.
        weight_change: Weight change from the start; None if it cannot be measured.
        notes: Caveats about the results.
    """

    label: str
    instructions: dict[str, str]
    experts: dict[str, str]
    similarity: Similarity
    divergence: Divergence | None = None
    layout: Array | None = None
    weight_change: WeightChange | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Analysis(Report):
    """Results for some models.

    Attributes:
        models: Results of each model.
        tests: Tests of the first model against each other one.
        texts: Texts that were embedded under each task.
        pairs: Queries and documents; None if the same texts took both roles.
        seed: Random seed of samples and t-SNE.
        retrieval: Kind of vectors that was analyzed. Default: the models' own.
    """

    models: tuple[ModelAnalysis, ...]
    tests: tuple[WelchTest, ...]
    texts: Texts
    pairs: TextPairs | None
    seed: int
    retrieval: str | None = None

    def __str__(self) -> str:
        """Format as Markdown."""
        pairs = (
            f"{len(self.pairs.queries)}, {self.pairs.source}" if self.pairs else "none; the same texts took both roles"
        )
        about = [
            f"Texts: {len(self.texts.texts)}, {self.texts.source}.",
            f"Pairs: {pairs}.",
            *([f"Vectors: {self.retrieval}."] if self.retrieval else []),
            *(f"Tasks of {model.label}: {_tasks_of(model)}." for model in self.models),
        ]
        measured = {model.label: model.divergence for model in self.models if model.divergence is not None}
        blocks = ["# How far the experts have specialised", "  \n".join(about)]
        if self.models[0].similarity:
            blocks += _similarity_tables(self)
        if measured:
            blocks += _divergence_tables(measured, [test for test in self.tests if test.measure != "similarity"])
        for model in self.models:
            blocks += _weight_tables(model.label, model.weight_change) if model.weight_change else []
        notes = [f"- {model.label}: {note}" for model in self.models for note in model.notes]
        return "\n\n".join([*blocks, *(["## Notes", "\n".join(notes)] if notes else [])])

    def to_json(self) -> str:
        """Serialize all numbers, the texts and the pairs."""
        return _serializer().dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Analysis":
        """Read what `to_json` wrote, as from analysis.json."""
        return _serializer().validate_json(text)

    def save(self, folder: str | Path) -> None:
        """Write analysis.json, analysis.md and the charts.

        Args:
            folder: Folder, created if needed; files of an earlier analysis are replaced once all are complete.
        """
        folder = Path(folder)
        charts: dict[str, Callable[[Path], object]] = {}
        if similarities := {model.label: model.similarity for model in self.models if model.similarity}:
            charts["similarity.png"] = partial(plots.draw_similarity, similarities)
        if layouts := {model.label: model.layout for model in self.models if model.layout is not None}:
            charts["tsne.png"] = partial(plots.draw_tsne, layouts)
        if changes := {model.label: model.weight_change for model in self.models if model.weight_change}:
            charts["weight_change.png"] = partial(plots.draw_weight_change, changes)
        page = "\n\n".join([str(self), "## Charts", *(f"![{name}]({name})" for name in charts)])
        with ExitStack() as files:
            for name, text in {"analysis.json": self.to_json(), "analysis.md": f"{page}\n"}.items():
                files.enter_context(replaced(folder / name)).write_text(text, encoding="utf-8")
            for name, draw in charts.items():
                draw(files.enter_context(replaced(folder / name)))
        for name in CHARTS:
            if name not in charts:
                (folder / name).unlink(missing_ok=True)


@cache
def _serializer() -> "TypeAdapter[Analysis]":
    return TypeAdapter(Analysis)


# Tables --------------------------------------------------------------------------------------------------------------


def _similarity_tables(analysis: Analysis) -> list[str]:
    first, *others = analysis.models
    pairs = {f"{a} / {b}": [model.similarity[a, b] for model in analysis.models] for a, b in first.similarity}
    pairs["all pairs"] = [np.mean(list(model.similarity.values()), axis=0) for model in analysis.models]
    rows = [[name, *(_mean_and_std(each) for each in values)] for name, values in pairs.items()]
    count = len(analysis.texts.texts)
    blocks = [
        f"## Inter-task similarity: mean (standard deviation) of the cosine of {count} texts",
        table(["tasks", *(model.label for model in analysis.models)], rows),
    ]
    for other in others:
        rows = []
        for test in analysis.tests:
            if test.second == other.label and test.measure == "similarity":
                name = "all pairs (mean of each text)" if test.tasks is None else " / ".join(test.tasks)
                rows.append([name, f"{test.mean_first - test.mean_second:+.3f}", *_test_cells(test)])
        blocks += [
            f"## Is {first.label} less similar over tasks than {other.label}? One-sided Welch's t-test",
            table(["tasks", "difference", "t", "degrees of freedom", "p"], rows),
            f"A small p says that it is; a p near 1 says the opposite, that {first.label} is more similar.",
        ]
    return blocks


def _divergence_tables(measured: Mapping[str, Divergence], tests: list[WelchTest]) -> list[str]:
    per_pair = "of each pair, mean (standard deviation)"
    rows = {
        "KL(query ‖ document)": [each.kl_query_document for each in measured.values()],
        "KL(document ‖ query)": [each.kl_document_query for each in measured.values()],
        "JS": [each.js for each in measured.values()],
        "cosine": [each.cosine for each in measured.values()],
    }
    cells = [[name, *(f"{each.mean:.3f} ({each.std:.3f})" for each in spreads)] for name, spreads in rows.items()]
    of_sets = [(each.sets_kl_query_document, each.sets_kl_document_query, each.sets_js) for each in measured.values()]
    of_means = "of the mean query and the mean document, KL, KL, JS"
    cells.append([of_means, *(", ".join(f"{value:.3f}" for value in values) for values in of_sets)])
    neighbors = [
        [label, *(f"{each.mean():.2e} ({each.std(ddof=1):.2e})" for each in (found.neighbors_kl, found.neighbors_js))]
        for label, found in measured.items()
    ]
    blocks = [
        "## Queries and documents: divergence in nats",
        table([per_pair, *measured], cells),
        "## The same by distances to all others, as in the CoT-MoTE paper",
        table([per_pair, "KL(query ‖ document)", "JS"], neighbors),
    ]
    if tests:
        tested = [[f"{test.measure}: {test.first}, {test.second}", *_test_cells(test)] for test in tests]
        title = "one-sided Welch's t-test: is the first lower?"
        blocks.append(table([title, "t", "degrees of freedom", "p"], tested))
    return blocks


def _weight_tables(label: str, change: WeightChange) -> list[str]:
    layers = [*map(str, range(len(next(iter(change.experts.values()))))), "all"]
    rows = [[name, *map(_percent, [*values, change.overall[name]])] for name, values in change.experts.items()]
    if change.shared:
        rows.append(["shared", *map(_percent, change.shared), ""])
    if change.outside is not None:
        rows.append(["outside of the layers", *[""] * (len(layers) - 1), _percent(change.outside)])
    blocks = [
        f"## Weight change of {label} from {change.start}: relative Frobenius norm",
        table(["change in %, layer", *layers], rows),
    ]
    if change.cosines:
        cosines = [
            [" / ".join(pair), *map(_cosine, [*values, change.overall_cosines[pair]])]
            for pair, values in change.cosines.items()
        ]
        blocks.append(table(["cosine between changes, layer", *layers], cosines))
    if change.shared:
        blocks.append("shared: the attention, and the whole of a layer without experts.")
    return blocks


def _test_cells(test: WelchTest) -> list[str]:
    """Format t, degrees of freedom and p."""
    return ["-"] * 3 if test.p is None else [f"{test.t:.2f}", f"{test.degrees_of_freedom:.1f}", f"{test.p:.2g}"]


def _mean_and_std(values: Any) -> str:
    return f"{values.mean():.3f} ({values.std(ddof=1):.3f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _tasks_of(model: ModelAnalysis) -> str:
    """List the prompt and the expert of each task."""
    experts = {task: f", expert {expert}" for task, expert in model.experts.items()}
    return ", ".join(f"{task} ({text.strip()!r}{experts.get(task, '')})" for task, text in model.instructions.items())
