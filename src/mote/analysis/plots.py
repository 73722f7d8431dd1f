"""Charts of an analysis, in palettes that readers with any color vision can tell apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from mote.analysis.similarity import ALL_PAIRS, Samples
from mote.reporting import COLORS

_DPI = 120
_PLAIN_TEXT = rc_context({"text.parse_math": False})  # a $ in a name does not start a formula


@_PLAIN_TEXT
def draw_similarity(similarities: Mapping[str, Samples], path: str | Path) -> None:
    """Draw the similarity between tasks: a heat map of means for each model, and below the distributions.

    Args:
        similarities: Label of a model → result of `inter_task_similarity`, over the same pairs of tasks.
        path: PNG to write.
    """
    first = next(iter(similarities.values()))
    pairs = {pair: tuple(pair.split(" / ")) for pair in first if pair != ALL_PAIRS}
    tasks = list(dict.fromkeys(task for pair in pairs.values() for task in pair))
    width = max(3.8 * len(similarities), 2.2 + len(pairs) * (0.55 + 0.45 * len(similarities)), 7.0)
    height = max(3.6, 1.4 + 0.6 * len(tasks))
    figure = Figure(figsize=(width, height + 4.4), layout="constrained")
    figure.suptitle(f"Inter-task similarity: the same {len(first[ALL_PAIRS])} texts under each task")
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, 4.0])
    matrices = {
        label: _matrix({pairs[name]: similarity[name].mean() for name in pairs}, tasks)
        for label, similarity in similarities.items()
    }
    _heat_maps(parts[0], matrices, tasks)
    _violins(parts[1].subplots(), similarities, list(pairs))
    figure.savefig(path, dpi=_DPI)


def _matrix(means: Mapping[tuple[str, ...], float], tasks: list[str]) -> NDArray[np.float64]:
    """Arrange means as a symmetric matrix, without the diagonal, which is 1 by definition."""
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    for (a, b), mean in means.items():
        row, column = tasks.index(a), tasks.index(b)
        matrix[row, column] = matrix[column, row] = mean
    return matrix


def _heat_maps(figure: Any, matrices: Mapping[str, NDArray[np.float64]], tasks: list[str]) -> None:
    """Draw the mean of each pair with its number, all models on one scale; the diagonal stays gray."""
    lowest = min(0.99, *(np.nanmin(matrix) for matrix in matrices.values()))
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axis, (label, matrix) in zip(axes, matrices.items(), strict=True):
        axis.set_facecolor("#D9D9D9")
        image = axis.imshow(matrix, aspect="auto", vmin=lowest, vmax=1.0, cmap="viridis")
        axis.set_title(label)
        axis.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
        axis.set_yticks(range(len(tasks)), tasks if axis is axes[0] else [""] * len(tasks))
        for row, column in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
            ink = "black" if image.norm(matrix[row, column]) > 0.5 else "white"  # the upper half is bright
            axis.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", color=ink, fontsize=9)
    figure.colorbar(image, ax=list(axes), label="mean cosine similarity", shrink=0.9)


def _violins(axis: Any, similarities: Mapping[str, Samples], pairs: list[str]) -> None:
    """Draw the distribution over the texts for each pair, the models side by side."""
    count = len(similarities)
    colors = [COLORS[number % len(COLORS)] for number in range(count)]
    for number, (similarity, color) in enumerate(zip(similarities.values(), colors, strict=True)):
        places = np.arange(len(pairs)) + (number - (count - 1) / 2) * 0.8 / count
        values = [np.round(similarity[pair], 6) for pair in pairs]  # so that no density of rounding errors is drawn
        drawn = axis.violinplot(values, places, widths=0.75 / count, showmedians=True, showextrema=False)
        for body in drawn["bodies"]:
            body.set(facecolor=color, edgecolor=color, alpha=0.6)
        drawn["cmedians"].set(color="black", linewidth=1.5)
    axis.set_xticks(range(len(pairs)), [pair.replace(" / ", "\n") for pair in pairs], fontsize=9)
    axis.set_xlim(-0.6, len(pairs) - 0.4)
    axis.set_ylabel("cosine similarity of the two\nembeddings of a text (line: median)")
    axis.grid(axis="y", alpha=0.3)
    patches = [Patch(color=color, alpha=0.6, label=label) for color, label in zip(colors, similarities, strict=True)]
    axis.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)  # above the violins


@_PLAIN_TEXT
def draw_tsne(layouts: Mapping[str, NDArray[np.float64]], path: str | Path) -> None:
    """Draw the t-SNE of queries and documents, a panel for each model; a line joins a query and its document.

    Args:
        layouts: Label of a model → points [2 N, 2], the queries first, as `tsne` gives them.
        path: PNG to write.
    """
    figure = Figure(figsize=(0.8 + 4.6 * len(layouts), 5.2), layout="constrained")
    figure.suptitle("Queries and documents (t-SNE of the embeddings, cosine distance)")
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
