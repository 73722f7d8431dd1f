"""Learned positions replaced by rotary ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, e5_checkpoint, read_json, tensors_of
from helpers.families import batch, dense_model, difference
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from mote import WriteOptions, lengthen, upcycle
from mote.checkpoints.cards import write_card
from mote.checkpoints.provenance import read_steps
from mote.lengthening import LENGTHENED, with_rotary_positions

BEYOND = "many words " * 20  # of letters that are tokens each
OF_EACH_KIND = [pytest.param(family, marks=() if family == "bert" else pytest.mark.families) for family in LENGTHENED]


def without_positions(model: PreTrainedModel) -> PreTrainedModel:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("position_embeddings.weight", "rotary_emb.inv_freq")):
            torch.nn.init.zeros_(tensor)
    return model


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_all_weights_but_the_positions_are_the_sources(family: str) -> None:
    encoder = without_positions(dense_model(family, type_vocab_size=2, layer_norm_eps=1e-3, hidden_act="relu"))
    with_head = AutoModelForMaskedLM.from_config(dense_model(family, type_vocab_size=2).config).eval()
    for name, weight in [*encoder.named_parameters(), *with_head.named_parameters()]:
        if ".attention.self." in name:
            torch.nn.init.normal_(weight)  # so that positions matter
    inputs = batch()
    inputs["token_type_ids"] = torch.arange(9).remainder(2).expand(4, 9)
    for dense in (encoder, without_positions(with_head)):
        rotary = with_rotary_positions(dense, 600)
        assert rotary.config.max_position_embeddings == 600
        other_positions = rotary(**inputs)[0]
        expected = dense(**inputs)[0][inputs["attention_mask"].bool()]
        found = without_positions(rotary)(**inputs)[0][inputs["attention_mask"].bool()]
        assert difference(expected, found) <= 2e-6
        assert difference(expected, other_positions[inputs["attention_mask"].bool()]) > 1e-3
        alone = {name: value[:, :1] for name, value in inputs.items()}  # one token has no neighbour to be far from
        assert difference(dense(**alone)[0], with_rotary_positions(dense, 600)(**alone)[0]) <= 2e-6


@pytest.fixture(scope="module")
def lengthened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Sentence-Transformers model that takes 11 tokens of at most 32, and the same for 64."""
    folder = tmp_path_factory.mktemp("lengthened")
    source = e5_checkpoint(folder / "short")
    model = dense_model("bert", max_position_embeddings=32)
    model.save_pretrained(source)
    return source, lengthen(str(source), folder / "long", length=64)


@pytest.mark.long
def test_the_result_is_the_same_sentence_transformer_for_longer_texts(lengthened: tuple[Path, Path]) -> None:
    source, out = lengthened
    before, after = SentenceTransformer(str(source)), SentenceTransformer(str(out))
    assert (before.max_seq_length, after.max_seq_length, after.tokenizer.model_max_length) == (11, 64, 64)
    assert after.prompts == before.prompts
    assert [type(module) for module in after] == [type(module) for module in before]
    assert after[1].pooling_mode == before[1].pooling_mode == "cls"
    assert after[0].auto_model.config.rope_parameters["rope_theta"] == 10_000
    assert after.tokenize([BEYOND])["input_ids"].shape == (1, 64)
    assert torch.isfinite(after.encode([BEYOND], convert_to_tensor=True)).all()
    long, shorter = after.encode([BEYOND, BEYOND[:55]], convert_to_tensor=True)  # 64 tokens, 47 tokens
    assert difference(long, shorter) > 1e-5
    step = read_steps(out)[-1]
    assert step["step"] == "lengthen"
    assert step["command"] == "mote lengthen short --length 64 --out long"
    card = (out / "README.md").read_text()
    assert "rotary positions, for texts of up to 64 tokens, in place of the learned ones of [short]" in card
    assert "Not trained with these positions yet" in card
    assert "model.source=long model.new_head=true" in card
    assert "| `passage` | `passage: ` |" in card
    assert write_card(out) == card


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_head_stays(family: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", family, head="mlm", max_position_embeddings=32)
    out = lengthen(str(source), tmp_path / "out", length=64)
    with_head = AutoModelForMaskedLM.from_pretrained(out)
    tokens = torch.full((1, 64), 7)
    one = AutoModelForMaskedLM.from_pretrained(source)
    without_positions(one)
    assert difference(one(tokens[:, :1]).logits, with_head(tokens[:, :1]).logits) <= 2e-6
    assert with_head(tokens).logits.shape == (1, 64, 60)
    assert "new_head" not in (out / "README.md").read_text()
    assert not any("position" in key for key in tensors_of(out))
    routed = upcycle(str(out), tmp_path / "mote", with_head=True)
    assert read_json(routed / "config.json")["architectures"] == ["MoTEForMaskedLM"]
    assert [step["step"] for step in read_steps(routed)] == ["lengthen", "upcycle"]


def test_what_does_not_suit_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("nomic_bert", {}, "is a 'nomic_bert', but .* learned positions"),
        ("mpnet", {}, "is a 'mpnet', but .* of the types bert, roberta, xlm-roberta, camembert"),
        ("bert", {"is_decoder": True}, "is a 'decoder', but"),
        ("bert", {"max_position_embeddings": 64}, "already takes texts of 64 tokens: `--length` must be above that"),
        ("roberta", {"max_position_embeddings": 65}, "already takes texts of 64 tokens"),  # after the padding's index
    ]
    for family, settings, message in cases:
        source = dense_checkpoint(tmp_path / "source", family, **settings)
        with pytest.raises(ValueError, match=message):
            lengthen(str(source), tmp_path / "out", length=64)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_mote_is_refused_and_nothing_is_replaced_unasked(upcycled: Path, lengthened: tuple[Path, Path]) -> None:
    source, out = lengthened
    with pytest.raises(ValueError, match="is a 'mote', but `mote lengthen` takes encoders"):
        lengthen(str(upcycled), out, length=1024)
    before = contents(out)
    with pytest.raises(FileExistsError, match="is in use"):
        lengthen(str(source), out, length=128)
    with pytest.raises(FileExistsError, match="holds something other than a MoTE: it is not overwritten"):
        lengthen(str(source), source, length=128, options=WriteOptions(overwrite=True))
    assert contents(out) == before
    assert AutoConfig.from_pretrained(source).max_position_embeddings == 32
