"""Tokens that a tokenizer adds: one behind each text, which truncation leaves there, and padding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, llama_tokenizer, trusted
from helpers.tokenizer_kinds import byte_level, fast, sentence_piece, sentence_piece_bpe
from transformers import AutoTokenizer

import mote
from mote.checkpoints.reading import open_dense
from mote.checkpoints.tokens import with_end_token, with_padding_token
from mote.training.model import build_model
from mote.training.recipe import load_recipe

TOKENIZERS = {
    "LlamaTokenizer": sentence_piece_bpe,
    "GemmaTokenizer": sentence_piece_bpe,
    "Qwen2Tokenizer": lambda: byte_level(trim=False),
    "TokenizersBackend": lambda: byte_level(trim=True),
}
TEXTS = ["whales breathe air", "bread"]
LONG = "how do whales breathe and what do they eat"


def saved(name: str, folder: Path, **settings: Any) -> Path:
    fast(TOKENIZERS[name]()).save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=name, **settings)
    return folder


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_each_text_ends_with_it(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved(name, tmp_path, add_eos_token=True))
    before = tokenizer(LONG)["input_ids"]
    assert before[-1] != tokenizer.eos_token_id  # transformers ignores add_eos_token: else this is not needed
    assert with_end_token(tokenizer) is tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert one(LONG)["input_ids"] == [*before, one.eos_token_id]
        cut = one(LONG, truncation=True, max_length=6)["input_ids"]
        assert cut == [*before[:5], one.eos_token_id]
        pair = one("a", "b")
        ends = [index for index, token in enumerate(pair["input_ids"]) if token == one.eos_token_id]
        assert ends == [pair.sequence_ids().index(1) - 1, len(pair["input_ids"]) - 1]
        assert with_end_token(one)(LONG)["input_ids"] == [*before, one.eos_token_id]  # once


def test_what_is_there_already(dense: Path) -> None:
    assert with_padding_token(AutoTokenizer.from_pretrained(dense)).pad_token == "[PAD]"
    with pytest.raises(ValueError, match=r"has no token 'eos' to append"):
        with_end_token(AutoTokenizer.from_pretrained(dense))
    with pytest.raises(ValueError, match=r"already appends '\[SEP\]' to texts"):
        with_end_token(AutoTokenizer.from_pretrained(dense), "[MASK]")
    with pytest.raises(ValueError, match="has no token '<end>'"):
        with_end_token(fast(sentence_piece()), "<end>")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose published tokenizer asks for an end token."""
    folder = dense_checkpoint(tmp_path_factory.mktemp("decoder") / "tiny", "mistral", tokenizer=False, vocab_size=400)
    return saved("LlamaTokenizer", folder, add_eos_token=True)


@pytest.mark.long
def test_upcycling_and_set(decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = trusted(mote.upcycle(decoder, tmp_path / "asked", pooling="last_token"))
    assert "appends no end token" not in caplog.text
    edit_json(decoder / "tokenizer_config.json", add_eos_token=None)
    without = mote.upcycle(decoder, tmp_path / "without", pooling="last_token")
    assert "appends no end token: long texts end where they are truncated" in caplog.text
    told = trusted(mote.upcycle(decoder, tmp_path / "told", pooling="last_token", end_token="</s>"))
    set_later = trusted(mote.configure(without, tmp_path / "set", end_token="eos"))
    edit_json(decoder / "tokenizer_config.json", add_eos_token=True)
    for model in (asked, told, set_later):
        model.max_seq_length = 6
        assert model.preprocess([LONG], task="clustering")["input_ids"][0, -1] == model.tokenizer.eos_token_id
        assert np.array_equal(model.encode([LONG], task="clustering"), asked.encode([LONG], task="clustering"))
    plain = trusted(without)
    assert plain.preprocess([LONG], task="clustering")["input_ids"][0, -1] != plain.tokenizer.eos_token_id


def test_the_end_token_pads_where_there_is_no_other(tmp_path: Path) -> None:
    source = llama_tokenizer(tmp_path / "decoder")
    assert AutoTokenizer.from_pretrained(source).pad_token is None
    dense_checkpoint(source, "mistral", tokenizer=False)
    model = trusted(mote.upcycle(str(source), tmp_path / "mote"))
    assert model.tokenizer.pad_token == "</s>"
    together = model.encode(TEXTS, task="clustering", convert_to_tensor=True)
    alone = [model.encode(text, task="clustering", convert_to_tensor=True) for text in TEXTS]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-6, rtol=0)
    recipe = load_recipe("em", [f"model.source={source}", f"output={tmp_path}"])
    dense, _ = build_model(recipe, open_dense(str(source)), tmp_path)
    assert dense.tokenizer.pad_token == "</s>"
    assert dense.encode(TEXTS).shape == (2, 16)
