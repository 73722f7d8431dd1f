"""Charts of an analysis, in palettes that readers with any color vision can tell apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from mote.analysis.similarity import Similarity
from mote.analysis.weight_change import WeightChange
from mote.reporting import COLORS

_DPI = 120
_PLAIN_TEXT = rc_context({"text.parse_math": False})  # a $ in a name does not start a formula
_CHANGE = "Frobenius norm of the change, % of the start's (gray: no experts)"


@_PLAIN_TEXT
def draw_similarity(similarities: Mapping[str, Similarity], path: str | Path, title: str = "") -> None:
    """Draw the similarity between tasks: a heat map of means for each model, and below the distributions.

    Args:
        similarities: Label of a model → result of `inter_task_similarity`, over the same pairs of tasks.
        path: PNG to write.
        title: Title of the figure. Default: a description.
    """
    first = next(iter(similarities.values()))
    tasks = list(dict.fromkeys(task for pair in first for task in pair))
    width = max(3.8 * len(similarities), 2.2 + len(first) * (0.55 + 0.45 * len(similarities)), 7.0)
    height = max(3.6, 1.4 + 0.6 * len(tasks))
    figure = Figure(figsize=(width, height + 4.4), layout="constrained")
    figure.suptitle(title or f"Inter-task similarity: the same {len(first[tasks[0], tasks[1]])} texts under each task")
    upper, lower = _split(figure, (2, 1), height_ratios=[height, 4.0])
    _heat_maps(upper, similarities, tasks)
    _violins(lower.subplots(), similarities)
    figure.savefig(path, dpi=_DPI)


def _split(figure: Figure, shape: tuple[int, int], **ratios: Any) -> Any:
    """Split a figure into several parts; matplotlib's type hints promise only one."""
    return figure.subfigures(*shape, **ratios)


def _heat_maps(figure: Any, similarities: Mapping[str, Similarity], tasks: list[str]) -> None:
    """Draw the mean of each pair, all models on one scale."""
    matrices = [_matrix(similarity, tasks) for similarity in similarities.values()]
    lowest = min(np.nanmin(matrix) for matrix in matrices)
    scale = {"vmin": min(lowest, 0.99), "vmax": 1.0, "cmap": "viridis"}
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axis, matrix, label in zip(axes, matrices, similarities, strict=True):
        image = _heat_map(axis, matrix, tasks, tasks, scale, "{:.2f}")
        axis.set_title(label)
    for axis in axes[1:]:
        axis.set_yticklabels([])
    figure.colorbar(image, ax=list(axes), label="mean cosine similarity", shrink=0.9)


def _heat_map(
    axis: Any, matrix: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str], scale: dict, form: str
) -> Any:
    """Draw a matrix with its numbers; cells without a number stay gray."""
    axis.set_facecolor("#D9D9D9")
    image = axis.imshow(matrix, aspect="auto", **scale)
    axis.set_xticks(range(len(columns)), columns, rotation=30 if max(map(len, columns)) > 4 else 0, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    for row, column in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
        red, green, blue, _ = image.cmap(image.norm(matrix[row, column]))
        ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
        axis.text(column, row, form.format(matrix[row, column]), ha="center", va="center", color=ink, fontsize=9)
    return image


def _matrix(similarity: Similarity, tasks: list[str]) -> NDArray[np.float64]:
    """Arrange means as a symmetric matrix, without the diagonal, which is 1 by definition."""
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for (a, b), values in similarity.items():
        row, column = tasks.index(a), tasks.index(b)
        matrix[row, column] = matrix[column, row] = values.mean()
    return matrix


def _violins(axis: Any, similarities: Mapping[str, Similarity]) -> None:
    """Draw the distribution over the texts for each pair, the models side by side."""
    count = len(similarities)
    pairs = list(next(iter(similarities.values())))
    for number, similarity in enumerate(similarities.values()):
        color = COLORS[number % len(COLORS)]
        places = np.arange(len(pairs)) + (number - (count - 1) / 2) * 0.8 / count
        values = [np.round(similarity[pair], 6) for pair in pairs]  # so that no density of rounding errors is drawn
        drawn = axis.violinplot(values, places, widths=0.75 / count, showmedians=True, showextrema=False)
        for body in drawn["bodies"]:
            body.set(facecolor=color, edgecolor=color, alpha=0.6)
        drawn["cmedians"].set(color="black", linewidth=1.5)
    axis.set_xticks(range(len(pairs)), [f"{a}\n{b}" for a, b in pairs], fontsize=9)
    axis.set_xlim(-0.6, len(pairs) - 0.4)
    axis.set_ylabel("cosine similarity of the two\nembeddings of a text (line: median)")
    axis.grid(axis="y", alpha=0.3)
    colors = [COLORS[number % len(COLORS)] for number in range(count)]
    patches = [Patch(color=color, alpha=0.6, label=label) for color, label in zip(colors, similarities, strict=True)]
    axis.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)  # above the violins


@_PLAIN_TEXT
def draw_tsne(layouts: Mapping[str, NDArray[np.float64]], path: str | Path, title: str = "") -> None:
    """Draw the t-SNE of queries and documents, a panel for each model; a line joins a query and its document.

    Args:
        layouts: Label of a model → points [2 N, 2], the queries first, as `tsne` gives them.
        path: PNG to write.
        title: Title of the figure. Default: a description.
    """
    figure = Figure(figsize=(0.8 + 4.6 * len(layouts), 5.2), layout="constrained")
    figure.suptitle(title or "Queries and documents (t-SNE of the embeddings, cosine distance)")
    axes = figure.subplots(1, len(layouts), squeeze=False)[0]
    for axis, (label, points) in zip(axes, layouts.items(), strict=True):
        queries, documents = np.split(points, 2)
        for pair in zip(queries, documents, strict=True):
            axis.plot(*np.transpose(pair), color="#999999", linewidth=0.5, zorder=1)
        axis.scatter(*queries.T, s=18, color=COLORS[0], marker="o", label="query", zorder=2)
        axis.scatter(*documents.T, s=18, color=COLORS[1], marker="^", label="document", zorder=2)
        axis.set(title=label, xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    axes[0].plot([], [], color="#999999", linewidth=0.8, label="query and its document")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=_DPI)


@_PLAIN_TEXT
def draw_weight_change(changes: Mapping[str, WeightChange], path: str | Path, title: str = "") -> None:
    """Draw the weight change of each expert in each layer, and the cosines between them; a row for each model.

    Args:
        changes: Label of a model → result of `weight_change_of`.
        path: PNG to write.
        title: Title of the figure. Default: a description.
    """
    tables = {label: _table(change) for label, change in changes.items()}
    heights = [1.9 + 0.42 * len(rows) for rows, _ in tables.values()]
    layers = max(matrix.shape[1] for _, matrix in tables.values())
    wide = max(6.0, 2.5 + 0.6 * layers)
    figure = Figure(figsize=(wide + 6.0, sum(heights) + 1.2), layout="constrained")
    figure.suptitle(title or "Relative weight change of the experts")
    highest = max(np.nanmax(matrix) for _, matrix in tables.values())
    left, right = _split(figure, (1, 2), width_ratios=[wide, 6.0])
    grids = [side.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0] for side in (left, right)]
    scale = {"vmin": 0.0, "vmax": highest or 1.0, "cmap": "cividis"}
    directions = []
    for axis, beside, (label, (rows, matrix)) in zip(*grids, tables.items(), strict=True):
        columns = [str(layer) for layer in range(matrix.shape[1])]
        image = _heat_map(axis, matrix, rows, columns, scale, "{:.1f}" if layers > 12 else "{:.2f}")
        axis.set(title=f"{label}, from {changes[label].start}", xlabel="layer")
        directions += _directions(beside, label, changes[label])
    left.colorbar(image, ax=list(grids[0]), location="bottom", label=_CHANGE)
    if directions:
        right.colorbar(directions[0], ax=list(grids[1]), location="bottom", label="cosine between changes, all layers")
    figure.savefig(path, dpi=_DPI)


def _table(change: WeightChange) -> tuple[list[str], NDArray[np.float64]]:
    """Arrange changes in percent: a row for each expert, the shared weights last."""
    rows = {**change.experts, **({"shared": change.shared} if change.shared else {})}
    return list(rows), 100 * np.array(list(rows.values()), dtype=np.float64)  # None becomes NaN


def _directions(axis: Any, label: str, change: WeightChange) -> list[Any]:
    """Draw the cosine between the changes of each two experts; with a single expert, draw nothing."""
    experts = list(change.experts)
    matrix = np.full((len(experts), len(experts)), np.nan)
    for (a, b), cosine in change.overall_cosines.items():
        row, column = experts.index(a), experts.index(b)
        matrix[row, column] = matrix[column, row] = np.nan if cosine is None else cosine
    if len(experts) < 2:
        axis.axis("off")
        return []
    axis.set_title(f"{label}: do they change the same way?")
    return [_heat_map(axis, matrix, experts, experts, {"vmin": -1.0, "vmax": 1.0, "cmap": "PuOr"}, "{:.2f}")]
