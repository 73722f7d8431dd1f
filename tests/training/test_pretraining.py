"""Pre-training: texts and masks, runs, resuming, and what is refused."""

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, files_in, read_json
from helpers.families import batch
from helpers.paths import EXAMPLE_DATA, ROOT
from helpers.runs import environment, pretraining_recipe, read_log, stop_after, weights
from transformers import AutoModelForMaskedLM

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import HOW_TO_RESUME
from mote.training.masking import MaskedBatches, Masking, TextRows
from mote.training.pretraining import plan_pretraining, pretrain
from mote.training.pretraining_recipe import MaskingSettings, PretrainingRecipe
from mote.training.progress import NonFiniteError
from mote.training.recipe_files import load_recipe
from mote.training.texts import load_texts

TASKS = {"search_query", "search_document", "classification", "clustering"}


def settings(source: Path, out: Path, *more: str) -> list[str]:
    """Two epochs of 6 steps."""
    return [
        f"model.source={source}",
        "model.max_length=24",
        f"data.folder={EXAMPLE_DATA}",
        f"output={out}",
        "data.limit=12",
        "training.batch_size=16",
        "training.num_train_epochs=2",
        "training.learning_rate=1e-3",
        "training.save_steps=4",
        "training.eval_steps=null",
        "validation.limit=8",
        *more,
    ]


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("run") / "run"
    pretrain("mlm", settings(source, out))
    return out


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run(run: Path, source: Path) -> None:
    assert {path.name for path in run.iterdir()} == {"model", "log.jsonl", "mote-run.json", "recipe.yaml"}
    assert {"masked_lm_mote.py", "recipe.yaml", "curves.png", "README.md"} <= files_in(run / "model")
    step = read_steps(run / "model")[-1]
    assert (step["step"], step["steps"], step["command"]) == ("pretrain", 12, "mote pretrain recipe.yaml")
    assert {task: seen["texts"] for task, seen in step["tasks"].items()} == dict.fromkeys(TASKS, 48)
    assert step["loss"]["after"].keys() == TASKS
    assert all(step["loss"]["after"][task] < loss for task, loss in step["loss"]["before"].items())
    log = read_log(run)
    assert [line["step"] for line in log] == [*range(1, 13)]
    assert "pre-trained by masked language modelling (recipe `mlm`) from" in (run / "model" / "README.md").read_text()
    model = AutoModelForMaskedLM.from_pretrained(run / "model", trust_remote_code=True)
    logits = {task: model(**batch(), task=task).logits for task in TASKS}
    assert len({logit.sum().item() for logit in logits.values()}) == 4
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.long
def test_a_stopped_run_ends_as_if_it_had_not_been(
    run: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the second epoch, whose order and masks are other than the first's."""
    with monkeypatch.context() as patch:
        stop_after(9, patch)
        with pytest.raises(KeyboardInterrupt, match=re.escape(f"checkpoint-8; {HOW_TO_RESUME} from it.")):
            pretrain("mlm", settings(source, tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(ValueError, match=r"The settings differ .*: masking.rate \(0.3 there, 0.2 here"):
        pretrain("mlm", settings(source, tmp_path / "run", "masking.rate=0.2"))
    file = tmp_path / "run" / "mote-run.json"
    identity = read_json(file)
    for part, changed in (("data", "clustering"), ("models", f"source {source}")):
        edit_json(file, **{part: {**identity[part], changed: "other"}})
        with pytest.raises(ValueError, match=f"The {part} differ from those of the run in .*: {changed} "):
            pretrain("mlm", settings(source, tmp_path / "run"))
        edit_json(file, **identity)
    model = pretrain("mlm", settings(source, tmp_path / "run"))
    found, expected = weights(model), weights(run / "model")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert [line["loss"] for line in read_log(tmp_path / "run")] == [line["loss"] for line in read_log(run)]
    step = read_steps(model)[-1]
    assert step["resumed_from_step"] == 8
    assert step["tasks"] == read_steps(run / "model")[-1]["tasks"]
    with pytest.raises(FileExistsError, match="holds a finished run"):
        pretrain("mlm", settings(source, tmp_path / "run"))


def test_a_killed_run(run: Path, source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mote", "pretrain", "mlm", *settings(source, tmp_path / "run")]
    process = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    begun = time.monotonic()
    while not list((tmp_path / "run").glob("checkpoints/*/checkpoint.json")) and process.poll() is None:
        assert time.monotonic() - begun < 120
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True)
    found = weights(tmp_path / "run" / "model")
    assert all(found[name].equal(weight) for name, weight in weights(run / "model").items())


def test_two_processes(source: Path, tmp_path: Path) -> None:
    """DDP: all see other texts, and the counts are those of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        f"--master_port={port}",
        "-m",
        "mote",
    ]
    arguments = settings(source, tmp_path / "run", "training.max_steps=4")
    env = environment(tmp_path)
    done = subprocess.run(
        [*command, "pretrain", "mlm", *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    step = read_steps(tmp_path / "run" / "model")[-1]
    assert (step["processes"], step["steps"]) == (2, 4)
    assert sum(seen["texts"] for seen in step["tasks"].values()) == 64


@pytest.mark.families
def test_a_token_routed_model_with_a_new_head(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny")
    more = ["model.kind=token_routed", "model.new_head=true", "training.max_steps=1", "validation.share=0"]
    model = AutoModelForMaskedLM.from_pretrained(
        pretrain("mlm", settings(source, tmp_path / "run", *more)), trust_remote_code=True
    )
    assert type(model).__name__ == "TokenRoutedForMaskedLM"
    assert read_steps(tmp_path / "run" / "model")[-1]["loss"] == {"before": {}, "after": {}}


@pytest.mark.long
def test_a_dense_model(source: Path, tmp_path: Path) -> None:
    """Without experts in it or code beside it, and the start of a MoTE with a head."""
    changes = ["training.max_steps=4", "training.eval_steps=2", "masking.whole_words=true"]
    model = pretrain("mlm-dense", settings(source, tmp_path / "dense", *changes))
    assert not [name for name in files_in(model) if name.endswith(".py")]
    loaded, info = AutoModelForMaskedLM.from_pretrained(model, output_loading_info=True)
    assert type(loaded).__name__ == "BertForMaskedLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    step = read_steps(model)[-1]
    assert [step["step"] for step in read_steps(model)] == ["pretrain"]
    assert step["loss"]["after"]["text"] < step["loss"]["before"]["text"]
    logged = [line for line in read_log(tmp_path / "dense") if "eval_text_loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    assert round(logged[-1]["eval_text_loss"], 4) == step["loss"]["after"]["text"]
    further = settings(model, tmp_path / "mote", "training.max_steps=1", "validation.share=0")
    assert [step["step"] for step in read_steps(pretrain("mlm", further))] == ["pretrain", "upcycle", "pretrain"]


@pytest.mark.families
def test_a_mote_is_pretrained_further(run: Path, tmp_path: Path) -> None:
    model = pretrain(
        "mlm", settings(run / "model", tmp_path / "run", "training.max_steps=2", "masking.whole_words=true")
    )
    assert [step["step"] for step in read_steps(model)][-2:] == ["pretrain", "pretrain"]


def test_a_dry_run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "mlm", *settings(source, tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "12 steps, 2 of them warmup; checkpoints: every 4 steps" in printed
    assert not (tmp_path / "run").exists()


# Texts and masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absolute", [False, True])
def test_patterns_of_text_files(absolute: bool, tmp_path: Path, tokenizer: Any) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n")
    pattern = f"{tmp_path}/*.txt" if absolute else "*.txt"
    others = [f"tasks.{task}=null" for task in ("search_query", "search_document", "classification")]
    tasks = f"tasks.clustering={{datasets: [{{path: '{pattern}', exclude: [b]}}]}}"
    data = load_texts(
        pretraining_recipe("mlm", f"data.folder={tmp_path}", tasks, *others),
        tokenizer,
    )
    assert [report.name for report in data.reports] == ["a", "c"]


def test_texts(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [{"query": f"question {i}", "answer": f"answer {i}", "negative": f"no {i}"} for i in range(50)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*pairs, pairs[0]]))
    with gzip.open(tmp_path / "plain.txt.gz", "wt") as file:
        file.write("one\n\n two \none\n")
    both = "{datasets: [pairs.jsonl, plain.txt.gz]}"
    data = load_texts(
        pretraining_recipe(
            "mlm",
            f"data.folder={tmp_path}",
            "tasks.search_query={datasets: [pairs.jsonl], texts: anchors}",
            "tasks.search_document={datasets: [pairs.jsonl], texts: positives}",
            f"tasks.clustering={both}",
            "tasks.classification=null",
            "validation.share=0.2",
        ),
        tokenizer,
    )
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
    others = [f"tasks.{task}=null" for task in ("search_document", "classification")]
    tasks = ["tasks.search_query={datasets: [some.txt], texts: all}", "tasks.clustering.datasets=[all.txt]"]
    data = load_texts(
        pretraining_recipe("mlm", f"data.folder={tmp_path}", *tasks, *others, "validation={share: 0.5, limit: 3}"),
        tokenizer,
    )
    assert {task: len(texts) for task, texts in data.held_out.items()} == {"search_query": 3, "clustering": 3}
    held_out = {text for texts in data.held_out.values() for text in texts}
    for report in data.reports:
        everything = {f"text {number}" for number in range(report.read)}
        assert set(data.texts[report.task]) == everything - held_out
        assert report.read == report.used + report.held_out + report.dropped.get("has a text that is held out", 0)
    assert any(report.dropped for report in data.reports)  # as the other task holds it out


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
    hidden = found["labels"] != -100
    assert found["labels"][hidden].equal(plain[hidden])
    assert found["input_ids"][~hidden].equal(plain[~hidden])
    special = torch.isin(plain, torch.tensor(tokenizer.all_special_ids))
    assert not (hidden & special).any()
    assert hidden[~special].float().mean().item() == pytest.approx(0.3, abs=0.03)
    masked = (found["input_ids"][hidden] == tokenizer.mask_token_id).float().mean().item()
    assert masked == (1.0 if whole_words else pytest.approx(0.8, abs=0.03))
    words = hidden[:300, 1:16].view(300, 5, 3)  # of three letters, a token each
    assert (words.all(-1) == words.any(-1)).all() == whole_words
    again = collator([rows[i] for i in range(400)])
    assert all(value.equal(found[name]) for name, value in again.items())
    rows.epoch = 1
    assert not collator([rows[i] for i in range(400)])["labels"].equal(found["labels"])


def test_whole_words_need_a_tokenizer_that_shows_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = models.WordLevel({"[UNK]": 0, "[MASK]": 1}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), mask_token="[MASK]", unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"masking\.whole_words needs a tokenizer whose offsets"):
        Masking(tokenizer, MaskingSettings(whole_words=True))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["masking.rate=1.5"], "masking.rate: Input should be less than 1"),
        (["training.learning_rat=1"], "'learning_rat'. Did you mean 'learning_rate'.*arguments of TrainingArguments"),
        (["training.gradient_accumulation_steps=2"], "set training.batch_size"),
        (["training.dataloader_persistent_workers=true"], "cannot be set here: workers draw new masks"),
        (["tasks.search={datasets: [retrieval/arxiv]}"], "Unknown task 'search'"),
        (["tasks.clustering.texts=anchors"], "has single texts, not pairs: leave out `texts: anchors`"),
        (["model.kind=token_routed", "training.fp16=true"], "training.bf16=true instead"),
        (["model.max_length=513"], "model.max_length is 513, and .* positions for 512 tokens: .*`mote lengthen`"),
        (["model.end_token=eos", "model.pooling_heads=2"], r"(?s)pooling_heads: Input should be None.*end_token: "),
    ],
)
def test_settings_that_are_refused(more: list[str], message: str, source: Path, tmp_path: Path) -> None:
    for start in (pretrain, plan_pretraining):
        with pytest.raises(ValueError, match=message):
            start("mlm", settings(source, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


def test_an_unknown_recipe() -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no recipe 'mlms'. Did you mean 'mlm'\? Available: .*'mlm'"):
        pretrain("mlms")


def test_sources_without_a_head(source: Path, tmp_path: Path) -> None:
    for start in (pretrain, plan_pretraining):
        with pytest.raises(ValueError, match="has no head for masked language modelling"):
            start("mlm", settings(dense_checkpoint(tmp_path / "tiny"), tmp_path / "run"))
        headless = upcycle(str(source), tmp_path / "mote", overwrite=True)
        with pytest.raises(ValueError, match=r"is a MoTE and has no head: a new head has to be added"):
            start("mlm", settings(headless, tmp_path / "run"))


def test_data_that_are_refused(source: Path, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": ""}, {"text": 3}, {"text": "b"}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    only = ["tasks.search_query=null", "tasks.search_document=null", "tasks.classification=null"]
    more = [*only, f"data.folder={tmp_path}", "tasks.clustering.datasets=[bad.jsonl]"]
    with pytest.raises(ValueError, match=r"(?s)2 of 4 rows are invalid.*bad.jsonl:2: 'text': String"):
        pretrain("mlm", settings(source, tmp_path / "run", *more))
    with pytest.raises(FileNotFoundError, match=r"There is no dataset .*no\.txt"):
        pretrain("mlm", settings(source, tmp_path / "run", *more, "tasks.clustering.datasets=[no.txt]"))


def test_a_loss_that_is_not_finite(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"(loss|gradient) is (nan|inf).*Try a lower training.learning_rate"):
        pretrain("mlm", settings(source, tmp_path / "run", "training.learning_rate=1e30", "training.warmup_steps=0"))
    assert not (tmp_path / "run" / "model").exists()


def test_the_documented_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")
    (tmp_path / "my.yaml").write_text(page.split("```yaml\n", 1)[1].split("```", 1)[0])
    found = load_recipe(tmp_path / "my.yaml", kind=PretrainingRecipe)
    assert list(found.tasks) == ["query", "passage"]
    assert found.masking.whole_words
    assert found.training.trainer_arguments()["bf16"] is True
