"""Instructions left out of the pooling: which tokens are pooled, whatever tokenizer, padding and truncation."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, trusted
from helpers.families import assert_near, make_different
from helpers.steps import assert_cached_equals_plain
from helpers.tokenizer_kinds import byte_level, fast, sentence_piece, sentence_piece_bpe
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

import mote
from mote.remote.modeling_mote import MoTEModel

DEFINITION = "Given a question, retrieve passages that answer it"
QUERY = mote.instruction_with(DEFINITION)
TEXTS = ["how do whales breathe", "bread", "  two spaces, naïve 中文 🐳 e\u0301", "Whales come up for air " * 3]
TOKENIZERS = {
    "WordPiece": None,
    "byte-level BPE": lambda: byte_level(trim=False),
    "byte-level BPE, trimmed": lambda: byte_level(trim=True),
    "SentencePiece": sentence_piece,
    "SentencePiece BPE": sentence_piece_bpe,
}


@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MoTE whose experts differ, which leaves its instructions out of the pooling."""
    dense = dense_checkpoint(tmp_path_factory.mktemp("dense") / "tiny", vocab_size=400, max_position_embeddings=256)
    folder = tmp_path_factory.mktemp("instructed") / "tiny"
    instructions = {"search_query": QUERY, "search_document": ""}
    mote.upcycle(dense, folder, instructions=instructions, instruction_pooling="excluded")
    make_different(MoTEModel.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(instructed: Path) -> SentenceTransformer:
    return trusted(instructed)


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def with_tokenizer(request: pytest.FixtureRequest, model: SentenceTransformer) -> SentenceTransformer:
    """The model, with the tokens of one of the tokenizers."""
    result = copy.deepcopy(model)
    if (make := TOKENIZERS[request.param]) is not None:
        result[0].processor = fast(make())
    return result


def surface(tokens: list[str], special: set[str]) -> str:
    """What tokens look like, without blanks and marks of them."""
    joined = "".join(token.removeprefix("##") for token in tokens if token not in special)
    if any(token.startswith("Ġ") for token in tokens):
        return re.sub("[ĠĊ]", "", joined)
    return joined.replace("▁", "").replace("\n", "")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("blank", [" ", ""], ids=["blank", "no blank"])
def test_the_pooled_tokens_are_those_of_the_text(with_tokenizer: SentenceTransformer, side: str, blank: str) -> None:
    transformer, tokenizer = with_tokenizer[0], with_tokenizer.tokenizer
    tokenizer.padding_side = side
    special = set(tokenizer.all_special_tokens) - {tokenizer.unk_token}
    prompt = QUERY.rstrip() + blank
    features = transformer.preprocess(TEXTS, prompt=prompt, task="search_query")
    instruction = tokenizer.convert_ids_to_tokens(tokenizer(prompt.strip())["input_ids"])
    for row, text in enumerate(TEXTS):
        mask, pooled = features["attention_mask"][row].bool(), features["pooling_mask"][row].bool()
        tokens = tokenizer.convert_ids_to_tokens(features["input_ids"][row])
        of_text = [token for token, keep in zip(tokens, pooled, strict=True) if keep]
        left_out = [token for token, real, keep in zip(tokens, mask, pooled, strict=True) if real and not keep]
        alone = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        assert surface(of_text, special) == surface(alone, special)
        assert surface(left_out, special) == surface(instruction, special)
        assert not (pooled & ~mask).any()
        if tokens[-1] == "</s>":  # behind the text, so with it
            assert of_text[-1] == "</s>"
    tokenizer.padding_side = "right"


def pooled_by_hand(folder: Path, instruction: str, task: str) -> np.ndarray:
    """The mean over the tokens of the text and `[SEP]`, in WordPiece, whose tokens do not cross a blank."""
    network, tokenizer = MoTEModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        left_out = len(tokenizer(instruction)["input_ids"]) - 1 if instruction else 0  # with [CLS], without [SEP]
        batch = tokenizer(instruction + text, return_tensors="pt", truncation=True, max_length=200)
        with torch.no_grad():
            hidden = network(**batch, task=task).last_hidden_state[0]
        rows.append(hidden[left_out:].mean(dim=0))
    return torch.stack(rows).numpy()


def test_embeddings_are_of_the_text_alone(model: SentenceTransformer, instructed: Path) -> None:
    assert [type(module).__name__ for module in model] == ["InstructedMoTETransformer", "TextPooling"]
    queries = pooled_by_hand(instructed, QUERY, "search_query")
    ways: list[Any] = [{"prompt_name": "search_query"}, {"prompt": QUERY}, {"prompt_name": "Retrieval-query"}]
    for way in ways:
        assert_near(model.encode(TEXTS, **way), queries)
    assert_near(model.encode_query(TEXTS), queries)
    assert_near(model.encode_document(TEXTS), pooled_by_hand(instructed, "", "search_document"))
    assert np.abs(model.encode(TEXTS, task="search_query") - queries).max() > 1e-3  # not attended to
    other = "Instruct: Another task\nQuery: "
    assert_near(model.encode_query(TEXTS, prompt=other), pooled_by_hand(instructed, other, "search_query"))


def test_instructions_in_the_texts_themselves(model: SentenceTransformer) -> None:
    model = copy.deepcopy(model)
    in_front = [QUERY, "clustering: ", QUERY, "classification: "]
    model[0].config.instructions |= {"clustering": "clustering: ", "classification": "classification: "}
    texts = [start + text for start, text in zip(in_front, TEXTS, strict=True)]
    together = model.encode(texts)
    for row, (start, text) in enumerate(zip(in_front, TEXTS, strict=True)):
        assert_near(together[row], model.encode(text, prompt=start), 1e-5)
    model[0].config.route_by_text = False  # for untrusted texts
    strange = model[0].preprocess(texts, task="clustering")
    assert torch.equal(strange["pooling_mask"], strange["attention_mask"])


def test_the_attention_mask_stays(model: SentenceTransformer) -> None:
    """Otherwise a second pass over the same features would not attend to the instruction."""
    features = model.preprocess(TEXTS, prompt=QUERY)
    before = features["attention_mask"].clone()
    once, twice = (model(features)["sentence_embedding"] for _ in range(2))
    assert torch.equal(features["attention_mask"], before)
    assert not torch.equal(features["pooling_mask"], before)
    assert torch.equal(once, twice)
    tokens = model.encode_query(TEXTS[0], output_value="token_embeddings")
    assert len(tokens) == int(before[0].sum())


def test_cached_losses_equal_plain_ones(instructed: Path) -> None:
    documents = [start + text for start, text in zip([QUERY, ""] * 2, TEXTS[::-1], strict=True)]
    assert_cached_equals_plain(
        "CachedMultipleNegativesRankingLoss",
        lambda: trusted(instructed).eval(),
        lambda model: [
            model.preprocess(TEXTS, prompt=QUERY),
            model.preprocess(documents, task="search_document"),
        ],
    )


def test_truncation(model: SentenceTransformer) -> None:
    length = len(model.tokenizer(QUERY)["input_ids"])  # [CLS], instruction, [SEP]
    whole = model[0].preprocess([TEXTS[3]], prompt=QUERY)
    model = copy.deepcopy(model)
    model.max_seq_length = length + 3
    cut = model[0].preprocess([TEXTS[3]], prompt=QUERY)
    assert cut["pooling_mask"][0].tolist() == [0] * (length - 1) + [1] * 4  # three tokens of the text, and [SEP]
    assert torch.equal(cut["input_ids"][0, :-1], whole["input_ids"][0, : length + 2])
    for fits in (length, length - 4):
        model.max_seq_length = fits
        with pytest.raises(ValueError, match=r"'Whales .*' has no token to pool: its instruction 'Instruct: .* fill"):
            model.encode_query(TEXTS)
        model.encode_document(TEXTS)


def test_texts_without_a_token(model: SentenceTransformer, with_tokenizer: SentenceTransformer) -> None:
    assert np.isfinite(model.encode_query(["", " "])).all()  # [SEP] is pooled
    tokenizer = with_tokenizer.tokenizer
    if tokenizer("a")["input_ids"][-1] not in tokenizer.all_special_ids:
        with pytest.raises(ValueError, match=r"The text '' has no token to pool$"):
            with_tokenizer.encode_query(["whales", ""])


@pytest.mark.parametrize("pooling", ["cls", "last_token"])
def test_other_poolings(instructed: Path, pooling: str) -> None:
    """As Sentence-Transformers has them: the first token of the text, and the last of all."""
    model = trusted(instructed)
    model[1].pooling_mode = {"cls": "cls", "last_token": "lasttoken"}[pooling]
    features = model.preprocess(TEXTS, prompt=QUERY)
    out = model(features)
    mask = features["pooling_mask"]
    at = mask.argmax(dim=1) if pooling == "cls" else features["attention_mask"].sum(dim=1) - 1
    assert torch.equal(out["sentence_embedding"], out["token_embeddings"][torch.arange(4), at])
    config = model[0].config
    config.pooling = pooling
    inputs = {name: features[name] for name in ("input_ids", "attention_mask", "pooling_mask")}
    assert torch.allclose(model[0].model(**inputs, task="search_query").pooler_output, out["sentence_embedding"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_count_of_nv_embed(model: SentenceTransformer, side: str) -> None:
    """Of n tokens that the instruction has without `<s>`, positions 0 to n - 1 are left out, `<s>` being the first."""
    counting = copy.deepcopy(model)
    counting[0].processor = fast(sentence_piece_bpe())
    counting[0].instruction_pooling = "excluded_by_count"
    counting.tokenizer.padding_side = side
    for row, (prompt, shorter) in enumerate(((QUERY, 0), ("Query:", 1), ("", 0), (QUERY.rstrip(), 1))):
        counting[0].instruction_pooling = "excluded_by_count"
        features = counting[0].preprocess(TEXTS, prompt=prompt, task="search_query")
        count = len(counting.tokenizer(prompt, add_special_tokens=False)["input_ids"]) if prompt else 0
        real = features["pooling_mask"][row][features["attention_mask"][row].bool()]
        assert real.tolist() == [0] * count + [1] * (len(real) - count)
        counting[0].instruction_pooling = "excluded"
        exact = counting[0].preprocess(TEXTS, prompt=prompt, task="search_query")
        # Without the template's trailing space, the instruction's last token is pooled: `<s>` is left out in its place.
        assert (features["pooling_mask"] - exact["pooling_mask"])[row].sum() == shorter


def test_a_default_prompt_of_another_task_is_left_out(instructed: Path, model: SentenceTransformer) -> None:
    with_default = trusted(instructed, default_prompt_name="search_query")
    assert np.array_equal(with_default.encode(TEXTS), model.encode(TEXTS, prompt_name="search_query"))
    for task in ("clustering", "search_document"):
        assert np.array_equal(with_default.encode(TEXTS, task=task), model.encode(TEXTS, task=task))
