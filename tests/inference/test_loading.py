"""A model that would run with random weights is refused, by the names of these weights."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint, edit_json
from helpers.paths import SMALL_ENCODER
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from mote.inference.loading import all_weights


def without(folder: Path, part: str) -> Path:
    """The checkpoint in a folder, less all weights with this in their names."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    with all_weights("ours"):
        return AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("on_a_terminal", [False, True])
@pytest.mark.parametrize("level", [logging.ERROR, logging.WARNING])
def test_missing_weights_are_named(
    level: int, on_a_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = without(dense_checkpoint(tmp_path / "dense", "bert"), "layer.1.output.dense")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_a_terminal)  # where the library writes in colours
    caplog.set_level(level, "transformers")
    named = r"ours lacks weights .*: encoder\.layer\.1\.output\.dense\.bias, encoder\.layer\.1\.output\.dense\.weight\."
    with pytest.raises(ValueError, match=named):
        load(folder)
    assert not caplog.records  # the library's own report says no more
    logger = logging.getLogger("transformers.modeling_utils")
    assert (logger.level, logger.filters) == (logging.NOTSET, [])


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path / "dense", "bert")
    edit_json(folder / "config.json", intermediate_size=48)
    with pytest.raises(ValueError, match=r"ours lacks weights .*: encoder\.layer\.\{0, 1\}\.intermediate\.dense\.bias"):
        load(folder)


def test_a_pooler_may_be_missing(tmp_path: Path) -> None:
    load(without(dense_checkpoint(tmp_path / "dense", "bert"), "pooler"))
    load(SMALL_ENCODER)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), all_weights("ours"):
        _ = 1 / 0
