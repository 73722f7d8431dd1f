"""Charts of an analysis, in palettes that readers with any color vision can tell apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from mote.analysis.measures import Samples
from mote.reporting import COLORS

_DPI = 120
_PLAIN_TEXT = rc_context({"text.parse_math": False})  # a $ in a name does not start a formula


@_PLAIN_TEXT
def draw_similarity(similarities: Mapping[str, Samples], path: str | Path) -> None:
    """Draw the results of `similarity_of` by model, over the same pairs of tasks, as distributions, in a PNG."""
    count = len(similarities)
    pairs = list(next(iter(similarities.values())))
    figure = Figure(figsize=(max(2.2 + len(pairs) * (0.55 + 0.45 * count), 7.0), 4.4), layout="constrained")
    figure.suptitle("Inter-task similarity: the same texts under each task")
    axes = figure.subplots()
    colors = [COLORS[number % len(COLORS)] for number in range(count)]
    for number, (similarity, color) in enumerate(zip(similarities.values(), colors, strict=True)):
        places = np.arange(len(pairs)) + (number - (count - 1) / 2) * 0.8 / count
        values = [np.round(similarity[pair], 6) for pair in pairs]  # so that no density of rounding errors is drawn
        drawn: Any = axes.violinplot(values, places, widths=0.75 / count, showmedians=True, showextrema=False)
        for body in drawn["bodies"]:
            body.set(facecolor=color, edgecolor=color, alpha=0.6)
        drawn["cmedians"].set(color="black", linewidth=1.5)
    axes.set_xticks(range(len(pairs)), [pair.replace(" / ", "\n") for pair in pairs], fontsize=9)
    axes.set_xlim(-0.6, len(pairs) - 0.4)
    axes.set_ylabel("cosine similarity of the two\nembeddings of a text (line: median)")
    axes.grid(axis="y", alpha=0.3)
    patches = [Patch(color=color, alpha=0.6, label=label) for color, label in zip(colors, similarities, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=_DPI)


@_PLAIN_TEXT
def draw_tsne(layouts: Mapping[str, NDArray[np.float64]], path: str | Path) -> None:
    """Draw the points of `tsne` by model, a panel each, in a PNG; a line joins a query and its document."""
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
