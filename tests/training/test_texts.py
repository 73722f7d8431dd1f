"""Texts of pre-training, spans of documents, and masked batches of both."""

import gzip
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rows import write_rows
from helpers.runs import pretraining_recipe
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mote.remote.configuration_mote import MoTEConfig
from mote.training.pretraining_recipe import MaskingSettings, SpanSettings
from mote.training.texts import (
    MaskedBatches,
    Masking,
    SplitDocument,
    TextData,
    TextRows,
    load_texts,
    rows_of,
    split_into_spans,
)


def load(folder: Path, tokenizer: Any, *changes: str, recipe: str = "mlm") -> TextData:
    return load_texts(pretraining_recipe(recipe, f"data.folder={folder}", *changes), tokenizer)


def test_texts(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [{"query": f"question {i}", "answer": f"answer {i}", "negative": f"no {i}"} for i in range(50)]
    write_rows(tmp_path / "pairs.jsonl", [*pairs, pairs[0]])
    for name, text in {"plain": "one\n\n two \none\n", "other": "three\n"}.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    tasks = """{search_query: {datasets: [pairs.jsonl], texts: anchors},
        search_document: {datasets: [pairs.jsonl], texts: positives},
        clustering: {datasets: [pairs.jsonl, {path: '*.txt.gz', exclude: [other]}]}}"""
    data = load(tmp_path, tokenizer, f"tasks={tasks}", "validation.share=0.2")
    everything = {task: {*data.texts[task], *data.held_out[task]} for task in data.texts}
    assert everything["search_query"] == {row["query"] for row in pairs}
    assert everything["search_document"] == {row["answer"] for row in pairs}
    assert everything["clustering"] == {text for row in pairs for text in row.values()} | {"one", "two"}
    held_out = {text for texts in data.held_out.values() for text in texts}
    assert len(held_out) > 5
    assert not held_out & {text for texts in data.texts.values() for text in texts}
    assert [report.dropped.get("repeated") for report in data.reports] == [1, 1, 3, 1]


def test_texts_beyond_the_limit_of_validation_are_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    for name, count in (("some", 30), ("all", 60)):
        (tmp_path / f"{name}.txt").write_text("".join(f"text {number}\n" for number in range(count)))
    tasks = "tasks={search_query: {datasets: [some.txt]}, clustering: {datasets: [all.txt]}}"
    data = load(tmp_path, tokenizer, tasks, "validation={share: 0.5, limit: 3}")
    assert {task: len(texts) for task, texts in data.held_out.items()} == {"search_query": 3, "clustering": 3}
    held_out = {text for texts in data.held_out.values() for text in texts}
    for report in data.reports:
        everything = {f"text {number}" for number in range(report.read)}
        assert set(data.texts[report.task]) == everything - held_out
        assert report.read == report.used + report.held_out + report.dropped.get("has a text that is held out", 0)
    assert any(report.dropped for report in data.reports)  # as the other task holds it out


def test_pairs_and_documents(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"query": f"question {n}", "answer": f"first {n}. Then {n}."} for n in range(40)]
    write_rows(tmp_path / "pairs.jsonl", [*rows, rows[0]])
    changes = ["tasks.search_document.datasets=[pairs.jsonl]", "validation.share=0.1"]
    data = load(tmp_path, tokenizer, *changes, recipe="cot-mae")
    used, held_out = data.texts["search_document"], data.held_out["search_document"]
    assert {*used, *held_out} == {(row["answer"], row["query"]) for row in rows}
    assert not {text for pair in held_out for text in pair} & {text for pair in used for text in pair}
    assert 0 < len(held_out) < 20
    changes = [*changes, "spans.length=5", "spans.short=0"]
    cuts = load(tmp_path, tokenizer, *changes, recipe="cot-mae-spans").texts["search_document"]
    assert {len(found.spans) for found in cuts} == {2}
    with pytest.raises(ValueError, match=r"nothing is left to train on(.|\n)*too short for two spans of 99 tokens"):
        load(tmp_path, tokenizer, *changes, "spans.length=99", recipe="cot-mae-spans")


def test_no_pair_with_a_held_out_text_is_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"query": "what", "answer": f"{n}."} for n in range(5)] + [{"query": "one question", "answer": "it."}]
    write_rows(tmp_path / "pairs.jsonl", rows)
    changes = ["tasks.search_document.datasets=[pairs.jsonl]", "validation={share: 0.01, limit: 2}"]
    data = load(tmp_path, tokenizer, *changes, recipe="cot-mae")
    # "what" is in the share.
    assert [pair[1] for pair in data.held_out["search_document"]] == ["what", "what"]
    assert data.texts["search_document"] == [("it.", "one question")]
    assert data.reports[0].dropped == {"has a text that is held out": 3}


@pytest.fixture(scope="module")
def document(tokenizer: Any) -> SplitDocument:
    """Twelve sentences of six tokens each, in spans of two."""
    text = " ".join(f'A "b{letter}".' for letter in "cdefghijklmn")
    found = split_into_spans(text, tokenizer, SpanSettings(length=12, short=0), 1)
    assert found is not None
    return found


def test_a_text_is_cut_into_spans_of_whole_sentences(document: SplitDocument, tokenizer: Any) -> None:
    assert [document.text_of((number, number + 1)).strip() for number in (0, 11)] == ['A "bc".', 'A "bn".']
    assert document.lengths == (6,) * 12
    assert document.spans == tuple((first, first + 2) for first in range(0, 12, 2))
    assert "".join(document.text_of(span) for span in document.spans) == str(document)
    assert split_into_spans("One sentence. And another.", tokenizer, SpanSettings(short=0), 1) is None
    assert split_into_spans("no end", tokenizer, SpanSettings(), 1) is None
    short = [split_into_spans(f"{document} {n}.", tokenizer, SpanSettings(length=12, short=0.5), 1) for n in range(30)]
    lengths = {end - first for found in short if found for first, end in found.spans}
    assert lengths == {1, 2}


@pytest.mark.parametrize("kind", ["nearby", "random", "overlap", "mixed"])
def test_contexts(kind: str, document: SplitDocument) -> None:
    parts = {document.text_of(span): number for number, span in enumerate(document.spans)}
    distances, overlapping = set(), 0
    for seed in range(200):
        text, context = document.draw(kind, random.Random(seed))
        assert text in parts
        if context in parts:
            distances.add(abs(parts[text] - parts[context]))
            continue
        overlapping += 1
        start, end = str(document).index(text), str(document).index(context)
        last = parts[text] == len(parts) - 1
        assert end < start < end + len(context) if last else start < end < start + len(text)
        assert len(context.split()) == len(text.split())  # two sentences each
    assert distances == {"nearby": {1}, "overlap": set()}.get(kind, {1, 2, 3, 4, 5})
    assert overlapping == {"nearby": 0, "random": 0, "overlap": 200}.get(kind, pytest.approx(67, abs=25))


def assert_masked(ids: Any, labels: Any, plain: Any, rate: float, tokenizer: Any, of_masked: Any) -> torch.Tensor:
    """Check the rate of predicted tokens and the share of mask tokens among them; return where tokens are predicted."""
    hidden = labels != -100
    assert labels[hidden].equal(plain[hidden])
    assert ids[~hidden].equal(plain[~hidden])
    special = torch.isin(plain, torch.tensor(tokenizer.all_special_ids))
    assert not (hidden & special).any()
    assert hidden[~special].float().mean().item() == pytest.approx(rate, abs=0.04)
    assert (ids[hidden] == tokenizer.mask_token_id).float().mean().item() == of_masked
    return hidden


@pytest.mark.parametrize(
    ("packed", "rows"),
    [
        (False, ["ab cd efg", "hijk lm nop", "qrs tuv wx", "y", "zz", "abcdefghij", "klmnop q", "r st"]),
        (True, ["ab cd efg", "hijk lm nop", "qrs tuv wx[SEP]y", "zz", "abcdefghij", "klmnop q[SEP]r", "st"]),
    ],
)
def test_rows_of_ten_tokens(packed: bool, rows: list[str], tokenizer: Any) -> None:
    texts = ["ab cd efg", "hijk lm nop qrs tuv wx", "y", "zz abcdefghijklmnop q", "r st"]
    assert [*rows_of(texts, tokenizer, 10, packed)] == rows


def test_rows_of_a_recipe(tmp_path: Path, tokenizer: Any) -> None:
    """Rows leave room for the instruction; the separator is not masked, and held-out texts stay whole."""
    (tmp_path / "texts.txt").write_text("\n".join(f"{'abc ' * (1 + number % 9)}{number}" for number in range(60)))
    tasks = "tasks={clustering: {datasets: [texts.txt], rows: packed}}"
    more = ("model.max_length=16", "model.instructions=true", "validation.share=0.2", "masking.rate=0.9")
    recipe = pretraining_recipe("mlm", f"data.folder={tmp_path}", tasks, *more)
    config = MoTEConfig(tasks={"clustering": "clustering"}, experts=["clustering"], instructions={"clustering": "in: "})
    data = load_texts(recipe, tokenizer)
    held_out = [*data.held_out["clustering"]]
    data.fill_rows(recipe, config, tokenizer)
    assert data.held_out["clustering"] == held_out
    rows = TextRows(data.texts, recipe, config, tokenizer)
    lengths = [len(tokenizer(f"in: {text}")["input_ids"]) for text in data.texts["clustering"]]
    assert max(lengths) <= 16
    assert sum(lengths) / len(lengths) > 13
    batch = MaskedBatches(tokenizer, recipe)([rows[number] for number in range(len(rows))])
    assert (batch["input_ids"] == tokenizer.sep_token_id).sum() > len(rows)
    assert not (batch["labels"] == tokenizer.sep_token_id).any()
    short = recipe.updated(model=recipe.model.updated(max_length=5))  # only the instruction fits
    data.fill_rows(short, config, tokenizer)
    assert max(len(tokenizer.tokenize(text)) for text in data.texts["clustering"]) == 1


@pytest.mark.parametrize(("temperature", "seen"), [(1.0, (150, 10)), (0.0, (80, 80)), (0.5, (127, 33))])
def test_small_datasets_are_seen_more_often(
    temperature: float, seen: tuple[int, int], tmp_path: Path, tokenizer: Any
) -> None:
    for name, count in {"en": 150, "sw": 10}.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(count)))
    tasks = f"tasks={{clustering: {{datasets: ['*.txt'], temperature: {temperature}}}}}"
    texts = load(tmp_path, tokenizer, tasks, "validation.share=0").texts["clustering"]
    assert tuple(sum(text.startswith(name) for text in texts) for name in ("en", "sw")) == seen
    assert len({*texts}) >= min(seen)
    tasks = "tasks={clustering: {datasets: [en.txt, {path: sw.txt, weight: 2.5}]}}"
    data = load(tmp_path, tokenizer, tasks, "validation.share=0")
    assert len(data.texts["clustering"]) == 150 + 25
    assert "sw: each text is seen 2.5 times per epoch" in str(data)


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks(whole_words: bool, tokenizer: Any) -> None:
    texts = {"a": ["abc def ghi jkl mno"] * 300, "b": ["xy z"] * 100}
    masking = f"masking={{rate: 0.3, whole_words: {str(whole_words).lower()}}}"
    tasks = ("tasks={a: {datasets: [x]}, b: {datasets: [x]}}", "model.instructions=true")
    chosen = pretraining_recipe("mlm", "training.seed=5", masking, *tasks)
    config = MoTEConfig(experts=["c", "b", "a"], instructions={"b": "pre: "})
    rows = TextRows(texts, chosen, config, tokenizer)
    collator = MaskedBatches(tokenizer, chosen)
    found = collator([rows[i] for i in range(400)])
    assert found["task_ids"].tolist() == [2] * 300 + [1] * 100
    plain = tokenizer([*texts["a"], *["pre: xy z"] * 100], padding=True, return_tensors="pt")["input_ids"]
    share = 1.0 if whole_words else pytest.approx(0.8, abs=0.03)
    hidden = assert_masked(found["input_ids"], found["labels"], plain, 0.3, tokenizer, share)
    words = hidden[:300, 1:16].view(300, 5, 3)  # of three letters, a token each
    assert (words.all(-1) == words.any(-1)).all() == whole_words
    again = collator([rows[i] for i in range(400)])
    assert all(value.equal(found[name]) for name, value in again.items())
    rows.epoch = 1
    assert not collator([rows[i] for i in range(400)])["labels"].equal(found["labels"])


@pytest.mark.parametrize("kind", ["bidirectional", "autoregressive"])
def test_texts_and_contexts(kind: str, tokenizer: Any) -> None:
    """Texts of six words, of which one and a half are cut off, and contexts of three."""
    pairs = [("abc def ghi jkl mno pqr stu vwx yz", "yz abc uvw")] * 150
    chosen = pretraining_recipe("cot-mae", f"decoder.kind={kind}")
    config = MoTEConfig(experts=["search_query", "search_document"])
    rows = TextRows({"search_document": pairs}, chosen, config, tokenizer)
    batch = MaskedBatches(tokenizer, chosen)([rows[number] for number in range(150)])
    assert batch["task_ids"].tolist() == [1, 0] * 150
    sides = ([*pairs[0]] * 150, [*reversed(pairs[0])] * 150)
    plain, swapped = (tokenizer(texts, padding=True, truncation=True, return_tensors="pt") for texts in sides)
    assert plain["input_ids"].shape[1] == 24
    assert batch["attention_mask"].equal(plain["attention_mask"])
    assert batch["decoder_attention_mask"].equal(swapped["attention_mask"])
    masked = [("", plain, 0.3), ("decoder_", swapped, chosen.decoder.masking_rate)]
    for prefix, clean, rate in masked[: 2 if kind == "bidirectional" else 1]:
        ids, labels = batch[f"{prefix}input_ids"], batch[f"{prefix}labels"]
        hidden = assert_masked(ids, labels, clean["input_ids"], rate, tokenizer, 1.0)
        for first, words in ((0, [1, 4, 7, 10, 13, 16, 19, 22]), (1, [1, 3, 6])):  # of three letters, or cut to one
            row = first if prefix == "" else 1 - first
            for start, end in pairwise(words):
                assert (hidden[row::2, start:end].all(-1) == hidden[row::2, start:end].any(-1)).all()
    if kind == "autoregressive":
        assert batch["decoder_input_ids"].equal(swapped["input_ids"])
        assert batch["decoder_labels"].equal(swapped["input_ids"].masked_fill(swapped["attention_mask"] == 0, -100))
    else:  # masked once more, other than for the encoder
        texts, contexts = batch["labels"][::2, :8] != -100, batch["decoder_labels"][1::2, :8] != -100
        assert not texts.equal(contexts)
    one_side = pretraining_recipe("cot-mae", "decoder.both_sides=false")
    half = MaskedBatches(tokenizer, one_side)([rows[number] for number in range(3)])
    assert half["task_ids"].tolist() == [1] * 3
    assert half["decoder_input_ids"].equal(tokenizer(["yz abc uvw"] * 3, return_tensors="pt")["input_ids"])


def test_whole_words_need_a_tokenizer_that_shows_them() -> None:
    letters = models.WordLevel({"[UNK]": 0, "[MASK]": 1}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), mask_token="[MASK]", unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"masking\.whole_words needs a tokenizer whose offsets"):
        Masking(tokenizer, MaskingSettings(whole_words=True))
