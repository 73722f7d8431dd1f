"""Scores on held-out texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from mote.training.data import ValidationSet
from mote.training.validation import Validation


class ByFirstWord:
    """Embeds texts alike that begin with the same word, and others at right angles."""

    device = torch.device("cpu")

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        return np.stack([np.eye(8)[int(text.split()[0])] for text in texts])


@pytest.mark.parametrize("space", ["", " "])
def test_all_positives_of_an_anchor_are_right(space: str) -> None:
    """Each has a row, and the anchor may be spelt with other spaces there."""
    rows = [(f"{number}{space * part}", f"{number} part {part}") for number in range(4) for part in range(3)]
    anchors, positives = zip(*rows, strict=True)
    table = Dataset.from_dict({"anchor": anchors, "positive": positives})
    held_out = ValidationSet("made", "retrieval", "pairs", table, "query", "document")
    validation, model = Validation([held_out], {"query": {}, "document": {}}), ByFirstWord()
    _, _, right = validation.embedded_pairs(model, held_out)
    assert np.array_equal(right, np.kron(np.eye(4), np.ones((3, 3))))
    assert validation(model)["validation_mean"] == pytest.approx(100)
