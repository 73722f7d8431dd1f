"""Scores on held-out texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.datasets import RETRIEVAL, recipe_of

from mote.data.columns import Example
from mote.data.rows import Location
from mote.training.cleaning import DatasetRows
from mote.training.recipe import DatasetSettings
from mote.training.validation import Validation


class ByFirstWord:
    """Embeds texts alike that begin with the same word, and others at right angles."""

    device = torch.device("cpu")
    parameters = list

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        return np.stack([np.eye(8)[int(text.split()[0])] for text in texts])


@pytest.mark.parametrize("space", ["", " "])
def test_all_positives_of_an_anchor_are_right(space: str, tmp_path: Any) -> None:
    """Each has a row, and the anchor may be spelt with other spaces there."""
    recipe = recipe_of(tmp_path, tasks={"retrieval": {**RETRIEVAL, "datasets": ["made"]}})
    dataset = DatasetRows(Location("made", DatasetSettings(path="made")), "retrieval", recipe)
    dataset.row_type = "pairs"
    dataset.held_out = [
        Example(f"{number}{space * part}", (f"{number} part {part}",)) for number in range(4) for part in range(3)
    ]
    validation = Validation([dataset], {"search_query": {}, "search_document": {}})
    assert validation(ByFirstWord())["validation_mean"] == pytest.approx(100)  # type: ignore[arg-type]
