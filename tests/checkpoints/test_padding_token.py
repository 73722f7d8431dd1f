"""Tokenizers that come without a padding token, as Mistral's and Llama's do."""

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, llama_tokenizer, trusted
from transformers import AutoTokenizer

import mote
from mote.checkpoints.reading import open_dense
from mote.checkpoints.tokens import with_padding_token
from mote.training.model import build_model
from mote.training.recipe_files import load_recipe

TEXTS = ["whales breathe air", "bread"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose tokenizer has an end token, but no padding token."""
    folder = llama_tokenizer(tmp_path_factory.mktemp("decoder") / "tiny")
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    return dense_checkpoint(folder, "mistral", tokenizer=False)


def test_texts_of_different_lengths_are_embedded_together(decoder: Path, tmp_path: Path) -> None:
    model = trusted(mote.upcycle(str(decoder), tmp_path / "mote"))
    assert model.tokenizer.pad_token == "</s>"
    together = model.encode(TEXTS, task="clustering", convert_to_tensor=True)
    alone = [model.encode(text, task="clustering", convert_to_tensor=True) for text in TEXTS]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-6, rtol=0)


def test_a_dense_model_to_train_has_one(decoder: Path, tmp_path: Path) -> None:
    recipe = load_recipe("em", [f"model.source={decoder}", f"output={tmp_path}"])
    model, _ = build_model(recipe, open_dense(str(decoder)), tmp_path)
    assert model.tokenizer.pad_token == "</s>"
    assert model.encode(TEXTS).shape == (2, 16)


def test_one_that_is_there_stays(dense: Path) -> None:
    assert with_padding_token(AutoTokenizer.from_pretrained(dense)).pad_token == "[PAD]"
