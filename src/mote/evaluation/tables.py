"""Scores as tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from mote.reporting import markdown_table, table

if TYPE_CHECKING:
    from mote.evaluation.scores import Evaluation

Format = Literal["text", "markdown"]


def mean_table(evaluation: "Evaluation", format: Format = "text") -> str:  # noqa: A002
    """Lay out mean scores: a row for each task type, for all datasets and for all types; a column for each model."""
    means = {model: evaluation.means(model) for model in evaluation.models}
    counts = Counter(evaluation.types[name] for name in evaluation.common)
    rows = {
        f"{task_type} ({counts[task_type]})": {model: means[model].get(task_type) for model in evaluation.models}
        for task_type in evaluation.task_types
    }
    rows[f"mean over datasets ({counts.total()})"] = {model: evaluation.mean(model) for model in evaluation.models}
    rows[f"mean over types ({len(counts)})"] = {model: evaluation.mean_over_types(model) for model in evaluation.models}
    cells = [[name, *_cells(evaluation, scores, format)] for name, scores in rows.items()]
    return _with_notes(evaluation, ["", *evaluation.models], cells, "l" + "r" * len(evaluation.models), format)


def dataset_table(evaluation: "Evaluation", format: Format = "text") -> str:  # noqa: A002
    """Lay out scores: a row for each dataset, a column for each model."""
    rows = []
    for name in evaluation.datasets:
        cells = _cells(evaluation, {model: scores.get(name) for model, scores in evaluation.scores.items()}, format)
        for column, model in enumerate(evaluation.models):
            if name in evaluation.failures.get(model, {}):
                cells[column] = "failed"
        rows.append([name, evaluation.types[name], evaluation.metrics.get(name, ""), *cells])
    header = ["dataset", "type", "score", *evaluation.models]
    return _with_notes(evaluation, header, rows, "lll" + "r" * len(evaluation.models), format)


def _cells(evaluation: "Evaluation", scores: Mapping[str, float | None], format: Format) -> list[str]:  # noqa: A002
    """Format the score of each model: the best one marked, with the gain over the reference."""
    known = {model: score for model, score in scores.items() if score is not None and score == score}  # not NaN
    best = f"{max(known.values()):.2f}" if len(known) > 1 else None
    base = known.get(evaluation.reference) if evaluation.reference is not None else None
    cells = []
    for model in scores:
        if model not in known:
            cells.append("-")
            continue
        cell = f"{known[model]:.2f}"
        if format == "markdown":
            cell = f"**{cell}**" if cell == best else cell
        else:
            cell += "*" if cell == best else " "
        if base is not None and model != evaluation.reference:
            cell += f" ({round(known[model] - base, 2) + 0.0:+.2f})"  # + 0.0: no minus before a zero
        cells.append(cell)
    return cells


def _with_notes(
    evaluation: "Evaluation",
    header: list[str],
    rows: list[list[str]],
    align: str,
    format: Format,  # noqa: A002
) -> str:
    """Add a heading above a table and notes below it."""
    layout, bullet = (markdown_table, "- ") if format == "markdown" else (table, "")
    lines = [f"{'; '.join(_heading(evaluation, format))}.", "", layout(header, rows, align=align)]
    notes = [bullet + note for note in _notes(evaluation)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _heading(evaluation: "Evaluation", format: Format) -> Iterator[str]:  # noqa: A002
    yield "Main scores of MTEB x 100"
    if versions := evaluation.settings.get("mteb"):
        yield f"mteb {', '.join(versions)}"
    if dtype := evaluation.settings.get("dtype"):
        yield f"weights in {dtype}"
    if retrieval := evaluation.settings.get("retrieval"):
        yield f"vectors: {', '.join(retrieval)}"
    if instructions := evaluation.settings.get("instructions"):
        yield f"instructions given by --definition for {', '.join(instructions)}"
    if limit := evaluation.settings.get("limit"):
        yield f"datasets cut by --limit {limit}, not comparable with scores on full datasets"
    if len(evaluation.models) > 1:
        if evaluation.reference is not None:
            yield f"in brackets: gain over {evaluation.reference}"
        yield "best in bold" if format == "markdown" else "* best"


def _notes(evaluation: "Evaluation") -> Iterator[str]:
    common, every = len(evaluation.common), len(evaluation.types)
    if common < every:
        yield f"Means are over the {common} of {every} datasets that all models have scores on."
    yield from (f"Failed: {failure}" for failure in evaluation.failed())
    yield from (f"{comparison}." for comparison in evaluation.comparisons())
