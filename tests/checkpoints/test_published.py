"""What published checkpoints have that the tiny ones of other tests do not: code, added tokens, old names, heads."""

from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import dense_checkpoint, edit_json, read_json, trusted
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

import mote
from mote.checkpoints.reading import open_dense
from mote.checkpoints.sentence_transformers import source_pooling

TEXTS = ["whales breathe air", "bread"]


def test_no_code_of_the_source_is_asked_for(tmp_path: Path) -> None:
    """A source of a native architecture that names code of its own, as gte-Qwen2 and EuroBERT do."""
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={})
    edit_json(source / "config.json", auto_map={"AutoModel": "modeling_own.OwnModel"})
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})
    expected = SentenceTransformer(str(source)).encode(TEXTS)
    made = mote.upcycle(str(source), tmp_path / "mote")
    assert np.array_equal(trusted(made).encode(TEXTS, task="clustering"), expected)
    dense = mote.transform(str(made), tmp_path / "dense", mote.experts.export, "clustering")
    for trust in (False, True):
        model = SentenceTransformer(str(dense), trust_remote_code=trust)
        assert np.array_equal(model.encode(TEXTS, prompt=""), expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_plain_decoder_pools_as_in_sentence_transformers(bidirectional: bool, tmp_path: Path) -> None:
    """Which looks for the head in the config: the last token, unless attention has both directions."""
    source = dense_checkpoint(tmp_path / "source", "llama", head="causal")
    made = trusted(mote.upcycle(str(source), tmp_path / "mote", bidirectional=bidirectional))
    assert made[0].model.config.pooling == ("mean" if bidirectional else "last_token")
    if not bidirectional:
        expected = SentenceTransformer(str(source)).encode(TEXTS)
        assert np.array_equal(made.encode(TEXTS, task="clustering"), expected)
        assert source_pooling(open_dense(str(source))) == "last_token"


def test_tokens_without_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3's tokenizer has one for images; one that the tokenizer itself adds to texts is an error."""
    source = dense_checkpoint(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(source)
    made = mote.upcycle(str(source), tmp_path / "mote")
    assert "has no embeddings for <image>: texts must not contain them" in caplog.text
    assert np.isfinite(trusted(made).encode(TEXTS, task="clustering")).all()
    tokenizer.sep_token = "<end>"
    tokenizer.add_special_tokens({"sep_token": "<end>"})
    tokenizer.save_pretrained(source)
    with pytest.raises(ValueError, match=r"has 62 tokens, but .* has embeddings for 60 only"):
        mote.upcycle(str(source), tmp_path / "other")


def test_settings_under_an_old_name(tmp_path: Path) -> None:
    settings = {"max_seq_length": 7}
    source = dense_checkpoint(tmp_path / "source", "roberta", sentence_transformers=settings)
    (source / "sentence_bert_config.json").rename(source / "sentence_roberta_config.json")
    model = trusted(mote.upcycle(str(source), tmp_path / "mote"))
    assert model.max_seq_length == SentenceTransformer(str(source)).max_seq_length == 7
    assert read_json(tmp_path / "mote" / "sentence_bert_config.json")["max_seq_length"] == 7
