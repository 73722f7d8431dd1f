"""Runs of pre-training: masked language modelling and CoT-MAE, resumed and refused."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint, files_in, tensors_of
from helpers.families import batch
from helpers.kills import kill_at_random
from helpers.paths import EXAMPLE_DATA, ROOT
from helpers.runs import assert_same_weights, break_off, environment, kill_after, launcher, read_log
from torch import nn
from transformers import AutoModelForMaskedLM

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.training.pretraining import PretrainingRun, pretrain
from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.progress import NonFiniteError
from mote.training.recipe import load_recipe

TASKS = {"search_query", "search_document", "classification", "clustering"}
COT_MAE = ("training.batch_size=8", "training.learning_rate=1e-2", "training.eval_steps=3")
"""Six steps."""


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
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:

    @cache
    def run(recipe: str, *more: str) -> Path:
        out = tmp_path_factory.mktemp("run") / "run"
        pretrain(recipe, settings(source, out, *more))
        return out

    return run


def test_masked_language_modelling(whole: Callable[..., Path]) -> None:
    run = whole("mlm")
    assert {path.name for path in run.iterdir()} == {"model", "trainer_state.json", "mote-run.json", "recipe.yaml"}
    assert {"masked_lm_mote.py", "recipe.yaml", "README.md"} <= files_in(run / "model")
    step = read_steps(run / "model")[-1]
    assert (step["step"], step["steps"], step["command"]) == ("pretrain", 12, "mote pretrain recipe.yaml")
    assert step["training_sets"] == {"mlm": {"steps": 12, "rows": 192}}
    assert step["validation"]["after"].keys() == TASKS
    assert all(step["validation"]["after"][task] < loss for task, loss in step["validation"]["before"].items())
    assert [line["step"] for line in read_log(run)] == [*range(1, 13)]
    assert "pre-trained by `mlm` (recipe `mlm`) from" in (run / "model" / "README.md").read_text()
    model = AutoModelForMaskedLM.from_pretrained(run / "model", trust_remote_code=True)
    logits = {task: model(**batch(), task=task).logits for task in TASKS}
    assert len({logit.sum().item() for logit in logits.values()}) == 4
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.long
def test_contextual_auto_encoding(whole: Callable[..., Path]) -> None:
    run = whole("cot-mae", *COT_MAE)
    model = AutoModelForMaskedLM.from_pretrained(run / "model", trust_remote_code=True)
    assert model.config.pooling == "cls"
    trained = tensors_of(run / "model")
    assert not [name for name in trained if "decoder" in name]
    step = read_steps(run / "model")[-1]
    assert step["training_sets"] == {"cot-mae": {"steps": 6, "rows": 96}}
    assert step["validation"]["after"]["search_document"] < step["validation"]["before"]["search_document"]
    experts = {
        name: weight for name, weight in trained.items() if re.search(r"\.experts\.search_query\..*dense\.weight", name)
    }
    assert not any(
        weight.equal(trained[name.replace("search_query", "search_document")]) for name, weight in experts.items()
    )
    log = read_log(run)
    assert [line["step"] for line in log] == [1, 2, 3, 3, 4, 5, 6, 6]
    for line in log:
        if "eval_search_document_loss" not in line:
            assert line["loss"] == pytest.approx(line["encoder_loss"] + line["decoder_loss"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "more", "step"),
    [
        ("mlm", (), 9),
        ("mlm", ("training.mini_batch_size=4", "tasks.search_document.rows=segmented"), 9),
        ("cot-mae", COT_MAE, 5),
    ],
)
def test_a_stopped_run_ends_as_if_it_had_not_been(
    recipe: str,
    more: tuple[str, ...],
    step: int,
    whole: Callable[..., Path],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the second epoch, whose order and masks are other than the first's."""
    own = settings(source, tmp_path / "run", *more)
    break_off(own, monkeypatch, step + 1, recipe, pretrain)
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(ValueError, match=r"The settings differ .*: masking.rate \(0.3 there, 0.2 here"):
        pretrain(recipe, [*own, "masking.rate=0.2"])
    model = pretrain(recipe, own)
    expected = whole(recipe, *more)
    assert_same_weights(model, expected / "model")
    logs = [[line.get("loss") for line in read_log(run)] for run in (tmp_path / "run", expected)]
    assert logs[0] == logs[1]
    record = read_steps(model)[-1]
    assert record["resumed_from_step"] == step - step % 4
    assert record["training_sets"] == read_steps(expected / "model")[-1]["training_sets"]
    with pytest.raises(FileExistsError, match="holds a finished run"):
        pretrain(recipe, own)


def test_a_killed_run(whole: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mote", "pretrain", "mlm", *settings(source, tmp_path / "run")]
    kill_after(tmp_path / "run" / "checkpoints" / "checkpoint-4" / "checkpoint.json", command, tmp_path)
    assert not (tmp_path / "run" / "model").exists()
    subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True)
    assert_same_weights(tmp_path / "run" / "model", whole("mlm") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlm", "cot-mae", "cot-mae-spans"])
def test_ten_kills_at_random_moments(name: str, source: Path, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "whole", tmp_path / "killed"
    more = [*COT_MAE, "training.num_train_epochs=4", "training.save_steps=1", "spans.length=12"]
    command = ["pretrain", name, *settings(source, Path("OUT"), *more)]
    assert len(kill_at_random(undisturbed, killed, 10, *command)) == 10
    assert_same_weights(killed / "model", undisturbed / "model")
    logs = [[line.get("loss") for line in read_log(run)] for run in (killed, undisturbed)]
    assert logs[0] == logs[1]


def test_two_processes(source: Path, tmp_path: Path) -> None:
    """DDP: all see other texts, and the counts are those of all."""
    command = [*launcher(2), "-m", "mote", "pretrain", "mlm"]
    command += settings(source, tmp_path / "run", "training.max_steps=4")
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    step = read_steps(tmp_path / "run" / "model")[-1]
    assert (step["processes"], step["training_sets"]) == (2, {"mlm": {"steps": 4, "rows": 64}})


@pytest.mark.families
def test_a_token_routed_model_with_a_new_head(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny")
    more = ["model.kind=token_routed", "model.new_head=true", "training.max_steps=1", "validation.share=0"]
    model = AutoModelForMaskedLM.from_pretrained(
        pretrain("mlm", settings(source, tmp_path / "run", *more)), trust_remote_code=True
    )
    assert type(model).__name__ == "TokenRoutedForMaskedLM"
    assert read_steps(tmp_path / "run" / "model")[-1]["validation"] == {"before": {}, "after": {}}


@pytest.mark.long
def test_a_dense_model(source: Path, tmp_path: Path) -> None:
    """Without experts in it or code beside it, and the start of a MoTE with a head, which is trained further."""
    changes = ["training.max_steps=4", "training.eval_steps=2", "masking.whole_words=true"]
    model = pretrain("mlm-dense", settings(source, tmp_path / "dense", *changes))
    assert not [name for name in files_in(model) if name.endswith(".py")]
    loaded, info = AutoModelForMaskedLM.from_pretrained(model, output_loading_info=True)
    assert type(loaded).__name__ == "BertForMaskedLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    step = read_steps(model)[-1]
    assert [step["step"] for step in read_steps(model)] == ["pretrain"]
    assert step["validation"]["after"]["text"] < step["validation"]["before"]["text"]
    logged = [line for line in read_log(tmp_path / "dense") if "eval_text_loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    assert round(logged[-1]["eval_text_loss"], 4) == step["validation"]["after"]["text"]
    for name in ("mote", "further"):
        model = pretrain("mlm", settings(model, tmp_path / name, "training.max_steps=1", "validation.share=0"))
    assert [step["step"] for step in read_steps(model)] == ["pretrain", "upcycle", "pretrain", "pretrain"]


def test_without_dropout_the_decoder_has_none_either(source: Path, tmp_path: Path) -> None:
    ready = PretrainingRun("cot-mae", settings(source, tmp_path / "run", "model.dropout=0")).prepare()
    probabilities = {name: each.p for name, each in ready.trainer.model.named_modules() if isinstance(each, nn.Dropout)}
    assert any(name.startswith("decoder.") for name in probabilities)
    assert set(probabilities.values()) == {0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more", "rows"),
    [
        ("cot-mae", ["model.shared_modules=[]"], 32),
        ("cot-mae", ["decoder.both_sides=false"], 16),
        ("cot-mae", ["model.kind=token_routed"], 32),
        ("cot-mae-switched", ["model.max_length=64"], 32),
        ("cot-mae-spans", ["spans.length=12", "model.instructions=true"], 32),
    ],
)
def test_variants(name: str, more: list[str], rows: int, source: Path, tmp_path: Path) -> None:
    """Of pairs, both sides are encoded, or one."""
    model = pretrain(name, settings(source, tmp_path / "run", *COT_MAE, "training.max_steps=2", *more))
    assert read_steps(model)[-1]["training_sets"]["cot-mae"]["rows"] == rows
    loaded = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=name != "cot-mae-spans")
    if "model.shared_modules=[]" in more:  # attention, too: only embeddings and head are shared
        assert all(".experts." in key for key in tensors_of(model) if ".layer." in key)
    if name == "cot-mae-spans":
        assert type(loaded).__name__ == "BertForMaskedLM"


def test_a_dry_run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "mlm", *settings(source, tmp_path / "run"), "--dry-run"]) == 0
    assert "12 steps, 2 of them warmup" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("mlm", ["masking.rate=1.5"], "masking.rate: Input should be less than 1"),
        ("mlm", ["training.learning_rat=1"], "'learning_rat'. Did you mean 'learning_rate'.*TrainingArguments"),
        ("mlm", ["training.gradient_accumulation_steps=2"], "set training.mini_batch_size"),
        ("mlm", ["training.mini_batch_size=5"], "16 cannot be divided evenly among 1, in mini-batches of 5"),
        ("mlm", ["model.max_length=null", "tasks.clustering.rows=packed"], "packed needs .* `model.max_length`"),
        ("cot-mae", ["tasks.search_document.rows=packed"], "packed needs `objective: mlm`"),
        ("mlm", ["training.dataloader_persistent_workers=true"], "cannot be set here: workers draw new masks"),
        ("mlm", ["tasks.search={datasets: [retrieval/arxiv]}"], "Unknown task 'search'"),
        ("mlm", ["tasks.clustering.texts=positives"], "dropped 800: not a pair"),
        ("mlm", ["model.kind=token_routed", "training.fp16=true"], "training.bf16=true instead"),
        ("mlm", ["model.max_length=513"], "max_length is 513, and .* positions for 512 tokens: .*`mote lengthen`"),
        ("mlm", ["model.end_token=eos"], "model.end_token: Input should be None, got 'eos'"),
        ("cot-mae", ["tasks.search_document.texts=all"], "context: pair needs `texts: anchors`"),
        ("cot-mae", ["tasks.search_document.context_task=search"], "Unknown task 'search'"),
    ],
)
def test_settings_that_are_refused(recipe: str, more: list[str], message: str, source: Path, tmp_path: Path) -> None:
    for start in ("plan", "run"):
        with pytest.raises(ValueError, match=message):
            getattr(PretrainingRun(recipe, settings(source, tmp_path / "run", *more)), start)()
    assert not (tmp_path / "run").exists()


def test_fsdp_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="start it without DeepSpeed and FSDP"):
        PretrainingRun("mlm", settings(source, tmp_path / "run")).plan()


def test_sources_that_are_refused(source: Path, tmp_path: Path) -> None:
    headless = upcycle(str(source), tmp_path / "mote")
    rotary = dense_checkpoint(tmp_path / "rotary", "modernbert", head="mlm")
    for recipe, refused, message in (
        ("mlm", dense_checkpoint(tmp_path / "tiny"), "tiny lack .* model.new_head=true"),
        ("mlm", headless, "is a MoTE: only its dense source can get a new head"),
        ("cot-mae", rotary, "cot-mae needs embeddings with absolute positions"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrain(recipe, settings(refused, tmp_path / "run"))


def test_a_loss_that_is_not_finite(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"non-finite|loss is (nan|inf).*try a lower training.learning_rate"):
        pretrain("mlm", settings(source, tmp_path / "run", "training.learning_rate=1e30", "training.warmup_steps=0"))
    assert not (tmp_path / "run" / "model").exists()


def test_the_documented_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")
    (tmp_path / "my.yaml").write_text(page.split("```yaml\n", 1)[1].split("```", 1)[0])
    found: Any = load_recipe(tmp_path / "my.yaml", kind=PretrainingRecipe)
    assert list(found.tasks) == ["query", "passage"]
    assert found.masking.whole_words
    assert found.training.trainer_arguments()["bf16"] is True
