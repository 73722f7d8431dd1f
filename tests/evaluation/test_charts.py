"""The chart of gains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mote import Evaluation
from mote.evaluation.charts import draw_gains

TYPES = {"s1": "STS", "s2": "STS", "r1": "Retrieval", "x1": "BitextMining"}


def test_the_chart_of_gains(tmp_path: Path) -> None:
    from matplotlib.image import imread

    random = np.random.default_rng(0)
    types = {f"dataset-{index:02}": TYPES[["s1", "r1", "x1"][index % 3]] for index in range(60)}
    scores = {name: dict(zip(types, random.uniform(30, 60, 60).tolist(), strict=True)) for name in "abc"}
    draw_gains(Evaluation(scores, types, reference="a"), tmp_path / "gains.png")
    image = imread(tmp_path / "gains.png")
    assert image.shape[0] > 60 * 20  # pixels for each dataset
    colours = np.unique((255 * image[..., :3]).round().astype(int) @ [1 << 16, 1 << 8, 1])
    assert {0x0072B2, 0xE69F00} <= {*colours.tolist()}


def test_long_and_strange_names_stay_in_the_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def remember(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", remember)
    names = ["dense", r"cost $\no-formula", *(f"runs/a-long-name-of-a-model-{index}/model" for index in range(5))]
    scores = {name: {"s1": 50.0 + len(name)} for name in names}
    draw_gains(Evaluation(scores, TYPES, reference="dense"), tmp_path / "gains.png")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == names[1:]
    box, (width, _) = legend.get_window_extent(), 120 * drawn[0].get_size_inches()
    assert 0 <= box.x0 < box.x1 <= width
