"""`mote generate`: queries of tiny random models of both kinds, resumed, and read by what comes next."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, read_json, tiny_tokenizer
from helpers.rows import read_rows, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration, set_seed

import mote
from mote.cli import main
from mote.corpora import generating

TEXTS = [f"{animal} of the {place}" for animal in ("whale", "otter", "heron") for place in ("river", "sea", "hill")]
CHAT = "{% for message in messages %}[CLS] user: {{ message['content'] }} [SEP] writer: {% endfor %}"


@pytest.fixture(scope="module", params=["t5", "causal", "chat"])
def writer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer") / request.param
    if request.param == "t5":
        set_seed(0)
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(T5Config(vocab_size=60, eos_token_id=3, **sizes))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))  # else it repeats the start token
        model.save_pretrained(folder)
        return tiny_tokenizer(folder)
    dense_checkpoint(folder, "llama", head="causal")
    if request.param == "chat":
        (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def generate(folder: Path, writer: Path, name: str = "out", **options: Any) -> Path:
    corpus = write_rows(folder / "corpus.jsonl", [{"text": text} for text in TEXTS])
    options = {"max_new_tokens": 8, "batch_size": 2, "queries": 3, **options}
    return mote.generate_queries([str(corpus)], folder / name, writer, **options)


def test_the_likeliest_queries_are_those_of_each_document_alone(writer: Path, tmp_path: Path) -> None:
    rows = read_rows(generate(tmp_path, writer, top_k=1, prompt="a {document}:", max_length=8) / "train.jsonl.gz")
    assert 0 < len(rows) == len({row["document"] for row in rows})  # equal queries count once
    tokenizer, encoder_decoder = AutoTokenizer.from_pretrained(writer), writer.name == "t5"
    model = (T5ForConditionalGeneration if encoder_decoder else AutoModelForCausalLM).from_pretrained(writer)
    for row in rows:
        assert row["document"] in TEXTS  # uncut
        cut = tokenizer.decode(tokenizer(row["document"], add_special_tokens=False)["input_ids"][:8])
        prompt = f"[CLS] user: a {cut}: [SEP] writer: " if writer.name == "chat" else f"[CLS] a {cut}: [SEP]"
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        tokens = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)[0]
        new = tokens[0 if encoder_decoder else ids.shape[1] :]
        assert row["query"] == tokenizer.decode(new, skip_special_tokens=True).strip()


def test_an_interrupted_run_draws_the_same_queries(
    writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "BLOCK", 4)
    whole, write, calls = generate(tmp_path, writer, "whole"), generating._write, []

    def interrupted(*args: Any) -> dict[str, np.ndarray]:
        calls.append(args[-1].tolist())
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(generating, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt, match="kept in"):
        generate(tmp_path, writer)
    out = generate(tmp_path, writer)
    assert contents(out) == contents(whole)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8]]
    generate(tmp_path, writer, device="cpu")
    assert len(calls) == 4  # all is finished
    with pytest.raises(ValueError, match=r"differs in seed \(42, now 1\)"):
        generate(tmp_path, writer, seed=1)
    rows, counts = read_rows(out / "train.jsonl.gz"), read_json(out / "record.json")["files"]["train.jsonl.gz"]
    assert (counts["documents"], counts["queries"]) == (9, len(rows))
    assert len(TEXTS) < len(rows) == len({tuple(row.values()) for row in rows})
    assert rows != read_rows(generate(tmp_path, writer, "other", seed=1) / "train.jsonl.gz")


def test_from_texts_to_an_expert(
    writer: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{text}\n{text} again\n")
    words = ["--max-new-tokens", "8", "--queries", "9", "--device", "cpu"]
    assert main(["generate", "texts/*.txt", "--model", str(writer), "--out", "DATA/retrieval/mine", *words]) == 0
    assert main(["filter", "retrieval/mine", "--data", "DATA", "--model", str(model), "--out", "CLEAN"]) == 0
    rows = [read_rows(tmp_path / folder / "retrieval/mine/train.jsonl.gz") for folder in ("DATA", "CLEAN")]
    assert len({row["document"] for row in rows[0]}) == 18
    assert 0 < len(rows[1]) < len(rows[0])
    capsys.readouterr()
    train = ["train", "my-tasks", f"model.source={model}", "data.folder=CLEAN", "tasks.mine=retrieval/mine"]
    assert main([*train, "--dry-run"]) == 0
    assert "pairs (anchor, positive)" in capsys.readouterr().out
