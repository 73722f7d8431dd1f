"""Results of an analysis: as tables, as JSON, and as files."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from mote.analysis import plots
from mote.analysis.measures import Array, Samples
from mote.analysis.weight_change import WeightChange
from mote.data.texts import Texts
from mote.files import replaced
from mote.reporting import Report, table
from mote.statistics import WelchTest, decimals, welch_test

CHARTS = ("similarity.png", "tsne.png")


@dataclass(frozen=True)
class ModelAnalysis:
    """Results for one model."""

    label: str  # in tables and charts
    instructions: dict[str, str]  # compared task → its prompt
    experts: dict[str, str]  # task → its expert; empty for models that do not route by task
    similarity: Samples  # of `similarity_of`; empty if there are no tasks to compare
    divergence: Samples = field(default_factory=dict)  # of `divergence_of`; empty if there are no roles of search
    layout: Array | None = None  # t-SNE of queries and documents, [2 N, 2], queries first
    weight_change: WeightChange | None = None  # from the start, if one is given


@dataclass(frozen=True, repr=False)
class Analysis(Report):
    """Results for some models.

    Attributes:
        models: Results of each model.
        texts: Texts that were embedded under each task.
        pairs: Queries and documents; None if the same texts took both roles.
        seed: Random seed of samples and t-SNE.
        retrieval: Kind of vectors that was analyzed. Default: the models' own.
    """

    models: tuple[ModelAnalysis, ...]
    texts: Texts
    pairs: Texts | None
    seed: int
    retrieval: str | None = None

    def tests(self) -> dict[str, dict[str, WelchTest]]:
        """Test the first model against each other one: label → measure → test of whether the first one's is lower."""
        first, *others = self.models
        return {
            other.label: {
                name: welch_test(values, measured[name])
                for name, values in {**first.similarity, **first.divergence}.items()
                if name in (measured := {**other.similarity, **other.divergence})
            }
            for other in others
        }

    def __str__(self) -> str:
        """Format as Markdown."""
        pairs = (
            f"{len(self.pairs.texts)}, {self.pairs.source}" if self.pairs else "none; the same texts took both roles"
        )
        about = [
            f"Texts: {len(self.texts.texts)}, {self.texts.source}.",
            f"Pairs: {pairs}.",
            *([f"Vectors: {self.retrieval}."] if self.retrieval else []),
            *(f"Tasks of {model.label}: {_tasks_of(model)}." for model in self.models),
        ]
        similarity = {model.label: model.similarity for model in self.models if model.similarity}
        divergence = {model.label: model.divergence for model in self.models if model.divergence}
        blocks = ["# How far the experts have specialised", "  \n".join(about)]
        if similarity:
            title = f"Inter-task similarity: mean (standard deviation) of the cosine of {len(self.texts.texts)} texts"
            blocks += [f"## {title}", _samples_table("tasks", similarity)]
        if divergence:
            blocks.append("## Queries and documents: divergence in nats, mean (standard deviation)")
            blocks.append(_samples_table("of each pair", divergence))
        for label, tests in self.tests().items():
            blocks.append(f"## Is {self.models[0].label} lower than {label}? One-sided Welch's t-test")
            rows = [
                [name, f"{test.mean_first - test.mean_second:+.2g}", *_test_cells(test)] for name, test in tests.items()
            ]
            blocks.append(table(["", "difference", "t", "degrees of freedom", "p"], rows))
        for model in self.models:
            blocks += _weight_tables(model.label, model.weight_change) if model.weight_change else []
        return "\n\n".join(blocks)

    def to_json(self) -> str:
        """Serialize all numbers, the texts and the pairs."""
        return TypeAdapter(Analysis).dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Analysis":
        """Read what `to_json` wrote, as from analysis.json."""
        return TypeAdapter(Analysis).validate_json(text)

    def save(self, folder: str | Path) -> None:
        """Write analysis.json, analysis.md and charts; those of an earlier run are replaced once all are complete."""
        folder = Path(folder)
        charts: dict[str, Callable[[Path], object]] = {}
        if similarities := {model.label: model.similarity for model in self.models if model.similarity}:
            charts["similarity.png"] = partial(plots.draw_similarity, similarities)
        if layouts := {model.label: model.layout for model in self.models if model.layout is not None}:
            charts["tsne.png"] = partial(plots.draw_tsne, layouts)
        page = "\n\n".join([str(self), "## Charts", *(f"![{name}]({name})" for name in charts)])
        with ExitStack() as files:
            for name, text in {"analysis.json": self.to_json(), "analysis.md": f"{page}\n"}.items():
                files.enter_context(replaced(folder / name)).write_text(text, encoding="utf-8")
            for name, draw in charts.items():
                draw(files.enter_context(replaced(folder / name)))
        for name in CHARTS:
            if name not in charts:
                (folder / name).unlink(missing_ok=True)


def _samples_table(title: str, samples: Mapping[str, Samples]) -> str:
    """Lay out a row for each measure, a column for each model."""
    names = dict.fromkeys(name for of_model in samples.values() for name in of_model)
    rows = [[name, *(_mean_and_std(of_model[name]) for of_model in samples.values())] for name in names]
    return table([title, *samples], rows)


def _mean_and_std(values: Array) -> str:
    return f"{decimals(values.mean())} ({decimals(values.std(ddof=1))})"


def _test_cells(test: WelchTest) -> list[str]:
    return ["-"] * 3 if test.p is None else [f"{test.t:.2f}", f"{test.degrees_of_freedom:.1f}", f"{test.p:.2g}"]


def _weight_tables(label: str, change: WeightChange) -> list[str]:
    layers = [str(layer) for layer in range(len(change.shared))]
    rows = [[name, *map(_percent, [*values, change.overall[name]])] for name, values in change.experts.items()]
    rows.append(["shared", *map(_percent, change.shared), ""])
    rows.append(["outside of the layers", *[""] * len(layers), _percent(change.outside)])
    blocks = [
        f"## Weight change of {label} from {change.start}: relative Frobenius norm",
        table(["change in %, layer", *layers, "all"], rows),
    ]
    if change.cosines:
        cosines = [[pair, "-" if cosine is None else f"{cosine:.3f}"] for pair, cosine in change.cosines.items()]
        blocks.append(table(["experts", "cosine between changes"], cosines))
    return [*blocks, "shared: the attention, and the whole of a layer without experts."]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _tasks_of(model: ModelAnalysis) -> str:
    """List the prompt and the expert of each task."""
    experts = {task: f", expert {expert}" for task, expert in model.experts.items()}
    told = [f"{task} ({text.strip()!r}{experts.get(task, '')})" for task, text in model.instructions.items()]
    return ", ".join(told) + ("" if model.divergence else "; none for search, so no divergence")
