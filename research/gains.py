"""Table and chart of the small MoTE: the dense model without and with instructions, and MoTE, by task type."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from mote.reporting import COLORS, table
from research.claims import SEEN, UNSEEN
from research.scores import START, Scores
from research.tables import cell, datasets_of

NAMES = {START: "source encoder", "em": "dense", "ic": "dense, instructions", "mote": "MoTE"}
"""Variant → its name in the table."""

ROWS: dict[str, tuple[str, ...]] = {
    **{kind.lower(): (kind,) for kind in SEEN},
    "tasks without training data": UNSEEN,
    "all": (),
}
"""Row of the table → task types."""

Gains = dict[str, dict[str, list[float]]]
"""Name → group of datasets → gains over the dense model without instructions, one per seed."""


def types_table(scores: Scores) -> str:
    """Format means over datasets and seeds, with the best of each row in bold."""
    rows = []
    for label, kinds in ROWS.items():
        datasets = datasets_of(scores, kinds, tuple(NAMES))
        means = [cell(scores, name, datasets).mean for name in NAMES]
        shown = [f"**{mean:.2f}**" if mean == max(means) else f"{mean:.2f}" for mean in means]
        rows.append([f"{label} ({len(datasets)})", *shown])
    return table(["test sets", *NAMES.values()], rows, align="l" * (1 + len(NAMES)))


def gains_of(scores: Scores) -> Gains:
    """Compute the gains over `em` on each task type and on all datasets, seed by seed; `start` has no seeds."""
    scores = scores.with_common_seeds(*NAMES)
    groups = {kind: datasets_of(scores, (kind,), tuple(NAMES)) for kind in (*SEEN, *UNSEEN)}
    groups["all"] = datasets_of(scores, (), tuple(NAMES))
    gains: Gains = {label: {} for name, label in NAMES.items() if name != "em"}
    for kind, datasets in groups.items():
        means = {name: np.mean([scores.every[name][one] for one in datasets], axis=0) for name in NAMES}
        for name, label in NAMES.items():
            if name != "em":
                of_seeds = (means[name] - means["em"]).tolist()
                gains[label][f"{kind} ({len(datasets)})"] = [round(gain, 2) for gain in of_seeds]
    return gains


def draw_gains(gains: Gains, path: Path) -> None:
    """Draw mean gains as bars and the gains of each seed as points; the numbers are also stored in the file."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    groups = list(next(iter(gains.values())))
    width = 0.8 / len(gains)
    for number, ((label, of_label), color) in enumerate(zip(gains.items(), ("0.7", *COLORS[1::-1]), strict=True)):
        places = np.arange(len(groups)) + (number - (len(gains) - 1) / 2) * width
        axes.bar(places, [np.mean(of_label[group]) for group in groups], width, color=color, label=label)
        points = [(place, gain) for place, group in zip(places, groups, strict=True) for gain in of_label[group]]
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=7, color="black", linewidths=0, zorder=3)
    axes.axhline(0, color="black", linewidth=0.8)
    for place in (len(SEEN) - 0.5, len(groups) - 1.5):
        axes.axvline(place, color="0.6", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), [group.replace(" ", "\n") for group in groups], fontsize=8)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylabel("gain over the dense\nmodel, points of 100")
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=len(gains), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Description": json.dumps(gains)})


def drawn_gains(path: Path) -> Gains | None:
    """Read the numbers that a chart shows; None if there is no chart, or if it does not store them."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        text = image.info.get("Description")
    return json.loads(text) if text else None
