"""The chart of gains."""

import math
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mote.evaluation.scores import Evaluation
from mote.reporting import COLORS

HATCHES = ("", "////", "....", "xxxx")  # each with all colors
LEGEND_WIDTH = 100  # characters in a row


@rc_context({"text.parse_math": False})  # a $ in a name does not start a formula
def draw_gains(evaluation: Evaluation, path: Path) -> None:
    """Draw the gain of each model over the reference on each dataset, grouped by task type.

    Args:
        evaluation: Scores of two models or more; some dataset has those of the reference and of another model.
        path: PNG to write.
    """
    gains = evaluation.gains(str(evaluation.reference))
    names = [name for name in evaluation.datasets if any(name in of_model for of_model in gains.values())]
    places = _places([evaluation.types[name] for name in names])
    thickness = 0.8 / len(gains)
    inches_per_dataset = max(0.22, 0.11 * len(gains))
    columns = max(1, min(len(gains), LEGEND_WIDTH // (max(map(len, gains)) + 8)))
    height = 1.4 + 0.2 * math.ceil(len(gains) / columns) + inches_per_dataset * (places[-1] + 1)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    for index, (model, of_model) in enumerate(gains.items()):
        shift = (index - (len(gains) - 1) / 2) * thickness
        axes.barh(
            [place + shift for place, name in zip(places, names, strict=True) if name in of_model],
            [of_model[name] for name in names if name in of_model],
            height=thickness,
            color=COLORS[index % len(COLORS)],
            hatch=HATCHES[index // len(COLORS) % len(HATCHES)],
            edgecolor="white",
            linewidth=0.3,
            label=model,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(places[-1] + 1, -1)  # the first dataset on top
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("gain in main score of MTEB, points of 100")
    _name_types(axes, [evaluation.types[name] for name in names], places)
    limit = evaluation.settings.get("limit")
    figure.suptitle(f"Gain over {evaluation.reference} on each dataset" + (f" (--limit {limit})" if limit else ""))
    figure.legend(loc="outside lower center", ncols=columns)
    figure.savefig(path, dpi=120, format="png")


def _places(types: list[str]) -> list[float]:
    """Positions of the bars of each dataset, with space between task types."""
    places, place = [], 0.0
    for before, now in zip([types[0], *types], types, strict=False):
        place += 0.0 if before == now else 0.8
        places.append(place)
        place += 1
    return places


def _name_types(axes: Axes, types: list[str], places: list[float]) -> None:
    """Write each task type to the right of its datasets, and draw lines between types."""
    for task_type in dict.fromkeys(types):
        own = [place for place, other in zip(places, types, strict=True) if other == task_type]
        axes.text(
            1.01, sum(own) / len(own), task_type, transform=axes.get_yaxis_transform(), va="center", fontweight="bold"
        )
        if own[-1] != places[-1]:
            axes.axhline(own[-1] + 0.9, color="grey", linewidth=0.5, linestyle=":")
