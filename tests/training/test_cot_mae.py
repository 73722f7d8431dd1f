"""CoT-MAE: spans, masked batches of texts and contexts, the decoder, and runs."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, files_in
from helpers.families import dense_model
from helpers.paths import EXAMPLE_DATA
from helpers.random_kills import kill_at_random
from helpers.runs import pretraining_recipe, read_log, stop_after, weights
from torch import nn
from transformers import AutoModelForMaskedLM

from mote.checkpoints.provenance import read_steps
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.training.masking import MaskedBatches, TextRows
from mote.training.objectives import Decoder, Pretraining
from mote.training.pretraining import PretrainingRun, plan_pretraining, pretrain
from mote.training.pretraining_recipe import DecoderSettings, SpanSettings
from mote.training.spans import SplitDocument, split_into_spans
from mote.training.texts import load_texts


def settings(source: Path, out: Path, *more: str) -> list[str]:
    """Six steps, in two epochs."""
    return [
        f"model.source={source}",
        "model.max_length=16",
        f"data.folder={EXAMPLE_DATA}",
        f"output={out}",
        "data.limit=12",
        "training.batch_size=8",
        "training.num_train_epochs=2",
        "training.learning_rate=1e-2",
        "training.save_steps=4",
        "training.eval_steps=3",
        "validation.limit=8",
        *more,
    ]


# Spans ---------------------------------------------------------------------------------------------------------------


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
    assert "".join(document.text_of(span) for span in document.spans) == document.text
    assert split_into_spans("One sentence. And another.", tokenizer, SpanSettings(short=0), 1) is None
    assert split_into_spans("no end", tokenizer, SpanSettings(), 1) is None
    short = [
        split_into_spans(document.text + f" {n}.", tokenizer, SpanSettings(length=12, short=0.5), 1) for n in range(30)
    ]
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
        start, end = document.text.index(text), document.text.index(context)
        last = parts[text] == len(parts) - 1
        assert end < start < end + len(context) if last else start < end < start + len(text)
        assert len(context.split()) == len(text.split())  # two sentences each
    assert distances == {"nearby": {1}, "overlap": set()}.get(kind, {1, 2, 3, 4, 5})
    assert overlapping == {"nearby": 0, "random": 0, "overlap": 200}.get(kind, pytest.approx(67, abs=25))


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bidirectional", "autoregressive"])
def test_a_batch(kind: str, tokenizer: Any) -> None:
    """Texts of six words, of which one and a half are cut off, and contexts of three."""
    pairs = [("abc def ghi jkl mno pqr stu vwx yz", "yz abc uvw")] * 150
    chosen = pretraining_recipe("cot-mae", f"decoder.kind={kind}")
    config = MoTEConfig(experts=["search_query", "search_document"])
    rows = TextRows({"search_document": pairs}, chosen, config, tokenizer)
    batch = MaskedBatches(tokenizer, chosen)([rows[number] for number in range(150)])
    assert batch["task_ids"].tolist() == [1, 0] * 150
    plain = tokenizer([text for pair in pairs for text in pair], padding=True, truncation=True, return_tensors="pt")
    swapped = tokenizer(
        [text for pair in pairs for text in reversed(pair)], padding=True, truncation=True, return_tensors="pt"
    )
    assert plain["input_ids"].shape[1] == 24
    assert batch["attention_mask"].equal(plain["attention_mask"])
    assert batch["decoder_attention_mask"].equal(swapped["attention_mask"])
    sides = [("", plain, 0.3), ("decoder_", swapped, chosen.decoder.masking_rate)]
    for prefix, clean, rate in sides[: 2 if kind == "bidirectional" else 1]:
        ids, labels = batch[f"{prefix}input_ids"], batch[f"{prefix}labels"]
        hidden = labels != -100
        assert labels[hidden].equal(clean["input_ids"][hidden])
        assert ids[~hidden].equal(clean["input_ids"][~hidden])
        special = torch.isin(clean["input_ids"], torch.tensor(tokenizer.all_special_ids))
        assert not (hidden & special).any()
        assert (ids[hidden] == tokenizer.mask_token_id).all()
        assert hidden[~special].float().mean().item() == pytest.approx(rate, abs=0.04)
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


def test_pairs_and_documents(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"query": f"question {n}", "answer": f"first {n}. Then {n}."} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    changes = [f"data.folder={tmp_path}", "tasks.search_document.datasets=[pairs.jsonl]", "validation.share=0.1"]
    data = load_texts(pretraining_recipe("cot-mae", *changes), tokenizer)
    used, held_out = data.texts["search_document"], data.held_out["search_document"]
    assert {*used, *held_out} == {(row["answer"], row["query"]) for row in rows}
    assert not {text for pair in held_out for text in pair} & {text for pair in used for text in pair}
    assert 0 < len(held_out) < 20
    changes = [*changes, "spans.length=5", "spans.short=0"]
    cuts = load_texts(pretraining_recipe("cot-mae-spans", *changes), tokenizer).texts["search_document"]
    assert {len(found.spans) for found in cuts} == {2}
    with pytest.raises(ValueError, match=r"no text is left to train on(.|\n)*too short for two spans of 99 tokens"):
        load_texts(pretraining_recipe("cot-mae-spans", *changes, "spans.length=99"), tokenizer)


def test_no_pair_with_a_held_out_text_is_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"query": "what", "answer": f"{n}."} for n in range(5)] + [{"query": "one question", "answer": "it."}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f"data.folder={tmp_path}", "tasks.search_document.datasets=[pairs.jsonl]", "validation.share=0.01"]
    data = load_texts(pretraining_recipe("cot-mae", *changes, "validation.limit=2"), tokenizer)
    # "what" is in the share.
    assert [pair[1] for pair in data.held_out["search_document"]] == ["what", "what"]
    assert data.texts["search_document"] == [("it.", "one question")]
    assert data.reports[0].dropped == {"has a text that is held out": 3}


# The decoder ---------------------------------------------------------------------------------------------------------


def test_an_autoregressive_decoder_sees_the_vector_and_a_window() -> None:
    backbone = dense_model("bert").config
    decoder = Decoder(backbone, DecoderSettings(kind="autoregressive", layers=1, attention_window=3)).eval()
    hidden = torch.randn(1, 8, backbone.hidden_size, requires_grad=True)
    decoded = decoder(hidden, torch.ones(1, 8, dtype=torch.long))
    for position in range(8):
        (gradient,) = torch.autograd.grad(decoded[0, position, 0], hidden, retain_graph=True)
        seen = (gradient[0].abs().sum(-1) > 1e-9).nonzero().flatten().tolist()
        assert seen == sorted({0, *range(max(0, position - 2), position + 1)})


@pytest.mark.parametrize("vector", ["dense", "sparse"])
def test_the_decoder_trains_the_encoder_through_the_vector(vector: Any, source: Path) -> None:
    torch.manual_seed(0)
    native = AutoModelForMaskedLM.from_config(dense_model("bert").config)
    config = MoTEConfig(backbone_config=native.config, experts=["a", "b"], pooling="cls")
    model = Pretraining(MoTEForMaskedLM(config, native), DecoderSettings(vector=vector, layers=1))
    ids = torch.randint(5, 50, (4, 6))
    unlabelled = torch.full_like(ids, -100)
    labels = unlabelled.clone()
    labels[:, 2] = ids[:, 2]
    out = model(ids, torch.ones_like(ids), labels, None, torch.tensor([1, 1, 1, 1]), ids, torch.ones_like(ids), labels)
    out.decoder_loss.backward()
    trained = {name for name, weight in model.model.named_parameters() if weight.grad is not None and weight.grad.any()}
    blocks = {name for name, _ in model.model.named_parameters() if ".layer." in name}
    key_bias = {name for name in blocks if name.endswith("key.bias")}  # changes nothing
    assert {name for name in blocks if ".experts.a." not in name} - key_bias <= trained
    assert not {name for name in trained if ".experts.a." in name}
    assert out.loss.item() == pytest.approx(out.encoder_loss.item() + out.decoder_loss.item())


def test_a_batch_without_masked_tokens() -> None:
    """As the last batch of an epoch, of a single short text, may be: its loss is 0, not the mean over nothing."""
    native = AutoModelForMaskedLM.from_config(dense_model("bert").config)
    model = Pretraining(MoTEForMaskedLM(MoTEConfig(backbone_config=native.config, experts=["a", "b"]), native))
    ids = torch.randint(5, 50, (2, 4))
    output = model(ids, torch.ones_like(ids), torch.full_like(ids, -100), None, torch.tensor([0, 1]))
    output.loss.backward()
    assert output.loss.item() == 0
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def test_the_same_passes_give_the_same_losses_and_gradients() -> None:
    """Through every expert, also `b`, which has no text here, and whose weights get a gradient of zeros."""
    torch.manual_seed(0)
    bert = dense_model("bert").config
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
    native = AutoModelForMaskedLM.from_config(bert)
    config = MoTEConfig(backbone_config=native.config, experts=["a", "b", "c"], tasks={"d": "a"}, pooling="cls")
    model = MoTEForMaskedLM(config, native)
    ids, mask = torch.randint(5, 50, (5, 6)), torch.ones(5, 6, dtype=torch.long)
    labels = torch.where(torch.rand(5, 6) < 0.4, ids, -100)
    tasks = torch.tensor([list(config.tasks).index(task) for task in "cadca"])
    gradients = []
    for same_passes in (False, True):
        trained = Pretraining(model, DecoderSettings(layers=1), same_passes=same_passes)
        torch.manual_seed(1)
        for weight in trained.decoder.parameters() if trained.decoder else ():
            torch.nn.init.normal_(weight, std=0.1)
        model.zero_grad()
        loss = trained(ids, mask, labels, None, tasks, ids, mask, labels).loss
        loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()} | {"loss": loss.detach()})
    one, two = gradients
    assert {name for name in one if ".experts.b." in name} == {name for name in one if one[name] is None}
    for name, gradient in two.items():
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if one[name] is None else one[name])


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("run") / "run"
    pretrain("cot-mae", settings(source, out))
    return out


@pytest.mark.long
def test_a_run(run: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(run / "model", trust_remote_code=True)
    assert model.config.pooling == "cls"
    assert not [name for name in weights(run / "model") if "decoder" in name]
    assert {"masked_lm_mote.py", "curves.png"} <= files_in(run / "model")
    assert "pre-trained by contextual masked auto-encoding (CoT-MAE)" in (run / "model" / "README.md").read_text()
    step = read_steps(run / "model")[-1]
    assert {task: seen["texts"] for task, seen in step["tasks"].items()} == {"search_query": 48, "search_document": 48}
    assert step["objective"] == "cot-mae"
    assert step["loss"]["after"]["search_document"] < step["loss"]["before"]["search_document"]
    experts = {name: weight for name, weight in weights(run / "model").items() if ".experts.search_query." in name}
    assert not any(
        weight.equal(weights(run / "model")[name.replace("search_query", "search_document")])
        for name, weight in experts.items()
        if name.endswith("dense.weight")
    )
    log = read_log(run)
    assert [line["step"] for line in log] == [1, 2, 3, 3, 4, 5, 6, 6]
    for line in log:
        if "eval_search_document_loss" not in line:
            assert line["loss"] == pytest.approx(line["encoder_loss"] + line["decoder_loss"])


def test_without_dropout_the_decoder_has_none_either(source: Path, tmp_path: Path) -> None:
    ready = PretrainingRun("cot-mae", settings(source, tmp_path / "run", "model.dropout=0")).prepare()
    probabilities = {name: each.p for name, each in ready.trainer.model.named_modules() if isinstance(each, nn.Dropout)}
    assert any(name.startswith("decoder.") for name in probabilities)
    assert set(probabilities.values()) == {0}


@pytest.mark.long
def test_a_stopped_run_ends_as_if_it_had_not_been(
    run: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(KeyboardInterrupt, match="checkpoint-4"):
            pretrain("cot-mae", settings(source, tmp_path / "run"))
    found, expected = weights(pretrain("cot-mae", settings(source, tmp_path / "run"))), weights(run / "model")
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert [line.get("loss") for line in read_log(tmp_path / "run")] == [line.get("loss") for line in read_log(run)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlm", "cot-mae", "cot-mae-spans"])
def test_ten_kills_at_random_moments(name: str, source: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["training.num_train_epochs=4", "training.save_steps=1", "spans.length=12"]
    command = ["pretrain", name, *settings(source, Path("OUT"), *more)]
    assert len(kill_at_random(whole, killed, 10, *command)) == 10
    found, expected = weights(killed / "model"), weights(whole / "model")
    assert found.keys() == expected.keys()
    assert all(found[key].equal(weight) for key, weight in expected.items())
    assert [line.get("loss") for line in read_log(killed)] == [line.get("loss") for line in read_log(whole)]


@pytest.mark.long
def test_a_sparse_context_of_distilbert(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny", "distilbert", head="mlm")
    pretrain("cot-mae", settings(source, tmp_path / "run", "training.max_steps=1", "decoder.vector=sparse"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cot-mae", ["model.shared_modules=[]"]),
        ("cot-mae", ["decoder.vector=sparse", "decoder.both_sides=false"]),
        ("cot-mae", ["model.kind=token_routed"]),
        ("cot-mae-switched", ["model.max_length=64"]),
        ("cot-mae-spans", ["spans.length=12", "model.instructions=true"]),
    ],
)
def test_variants(name: str, more: list[str], source: Path, tmp_path: Path) -> None:
    model = pretrain(name, settings(source, tmp_path / "run", "training.max_steps=2", *more))
    tasks = {task: seen["tokens"] for task, seen in read_steps(model)[-1]["tasks"].items() if seen["texts"]}
    loaded = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=name != "cot-mae-spans")
    if "model.shared_modules=[]" in more:
        assert all(
            ".experts." in key for key in weights(model) if ".layer." in key
        )  # attention, too: only embeddings and head are shared
    if name == "cot-mae-switched":
        assert tasks["search_query"] > tasks["search_document"]
    if name == "cot-mae-spans":
        assert type(loaded).__name__ == "BertForMaskedLM"
        assert set(tasks) == {"search_document"}
    if "decoder.both_sides=false" in more:
        assert set(tasks) == {"search_document"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["tasks.search_document.texts=all"], "context: pair needs `texts: anchors`"),
        (["tasks.search_document.context_task=search"], "Unknown task 'search'"),
        (["tasks.search_document.datasets=[clustering/*]"], "has single texts, not pairs"),
    ],
)
def test_settings_that_are_refused(more: list[str], message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pretraining("cot-mae", settings(source, tmp_path / "run", *more))


@pytest.mark.long
def test_a_family_without_absolute_positions_is_refused(tmp_path: Path) -> None:
    rotary = dense_checkpoint(tmp_path / "tiny", "modernbert", head="mlm")
    with pytest.raises(ValueError, match=r"cot-mae needs embeddings with absolute positions.*'modernbert' does not"):
        plan_pretraining("cot-mae", settings(rotary, tmp_path / "run"))
