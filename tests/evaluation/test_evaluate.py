"""`mote evaluate`: scores of real mteb runs, what is cached of them, and what is made of them."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import edit_json
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.rows import read_rows, write_rows

pytest.importorskip("mteb")

from safetensors.numpy import load_file, save_file

import mote
from mote import Evaluation, evaluate, experts
from mote.cli import main
from mote.evaluation import evaluate as evaluating
from mote.evaluation.models import EvaluatedModel
from mote.evaluation.options import EvaluateOptions


@pytest.fixture
def changed_encoder(tmp_path: Path) -> Path:
    """The small encoder with other weights, under the same name."""
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "other" / "small-encoder")
    change_weights(folder)
    return folder


def change_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "word_embeddings" in name)
    noise = np.random.default_rng(0).normal(0, weights[name].std(), weights[name].shape)
    weights[name] = (weights[name] + noise).astype(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def results(folder: Path) -> list[Path]:
    return [path for path in (folder / "results").rglob("*.json") if path.name != "model_meta.json"]


@pytest.mark.long
def test_scores_are_cached_and_the_second_run_computes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mote")
    loaded, load = [], EvaluatedModel.load
    with monkeypatch.context() as patch:
        patch.setattr(EvaluatedModel, "load", lambda model, device: loaded.append(device) or load(model, device))
        first = evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path)
    assert loaded == ["meta", None]  # checked, and loaded once for all datasets
    assert len(results(tmp_path)) == len(first.datasets) == 4
    assert len([line for line in caplog.messages if " s" in line and "/4 " in line]) == 4

    monkeypatch.delattr(EvaluatedModel, "load")
    assert evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path) == first
    assert len([line for line in caplog.messages if line.endswith("(cached)")]) == 4


@pytest.mark.long
def test_what_a_score_depends_on_is_not_mixed_up(data: Path, changed_encoder: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "out", shutil.copytree(data, tmp_path / "data")
    paths = [str(SMALL_ENCODER), str(changed_encoder)]
    both = evaluate({"first": paths[0], "second": paths[1]}, data=own, tasks=["part0", "trivia"], out=out)
    first, second = (both.scores[label] for label in both.models)
    assert all(first[name] != second[name] for name in both.datasets)
    assert len(results(out)) == 4

    where = {"data": own, "out": out}
    cut = evaluate([paths[0]], tasks=["part0"], limit=20, **where)
    bf16 = evaluate([paths[0]], tasks=["trivia"], dtype="bfloat16", **where)
    assert not cut.failures
    assert not bf16.failures
    assert len(results(out)) == 6
    assert cut.scores["small-encoder"]["sts-part0"] != first["sts-part0"]
    assert bf16.scores["small-encoder"]["clustering-trivia"] != first["clustering-trivia"]
    assert (cut.settings["limit"], bf16.settings["dtype"]) == (20, "bfloat16")

    # the second model alone scores as it does after another: tasks start from the same random numbers
    alone = evaluate([paths[1]], data=own, tasks=["part0", "trivia"], out=tmp_path / "alone")
    assert alone.scores["small-encoder"] == pytest.approx(second)

    path = own / "sts" / "part0" / "test.jsonl.gz"
    write_rows(path, read_rows(path)[:20])  # other data: scored again, though there is a complete result
    again = evaluate([paths[0]], tasks=["part0", "trivia"], **where)
    assert [again.scores["small-encoder"][name] == first[name] for name in again.datasets] == [True, False]

    change_weights(changed_encoder)
    changed = evaluate([paths[1]], tasks=["trivia"], **where).scores["small-encoder"]
    assert changed["clustering-trivia"] != second["clustering-trivia"]


@pytest.mark.long
def test_with_and_without_the_code_of_a_model_scores_are_not_mixed_up(data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "rounding-encoder")
    edit_json(folder / "config.json", auto_map={"AutoModel": "rounding.RoundingModel"})
    (folder / "rounding.py").write_text(ROUNDING)
    where: dict[str, Any] = {"data": data, "tasks": ["part0"], "out": tmp_path / "out"}
    without, trusted = evaluate(folder, **where), evaluate(folder, trust_remote_code=True, **where)
    assert without.scores != trusted.scores
    assert (without.settings["trust_remote_code"], trusted.settings["trust_remote_code"]) == (False, True)
    assert evaluate(folder, **where).scores == without.scores


ROUNDING = """
from transformers import BertModel


class RoundingModel(BertModel):
    def forward(self, *inputs, **kwargs):
        output = super().forward(*inputs, **kwargs)
        output.last_hidden_state = output.last_hidden_state.round()
        return output
"""


def test_without_space_for_all_files_the_old_ones_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Evaluation({"a": {"s": 1.0}}, {"s": "STS"}).save(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert {file.name for file in before} == {"scores.md", "scores.json"}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_text = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda path, *text, **how: (full if "json" in path.name else write_text)(path, *text, **how)
    )
    with pytest.raises(OSError, match=r"No space left on device: '.*'"):
        Evaluation({"a": {"s": 3.0}}, {"s": "STS"}).save(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.long
def test_failures_do_not_stop_the_others(
    data: Path, fresh_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(data, tmp_path / "data")
    (own / "sts" / "part1" / "test.jsonl.gz").write_bytes(b"no gzip")
    model = mote.transform(fresh_folder, tmp_path / "without-a-task", experts.remove, "clustering")
    out = tmp_path / "out"
    status = main(
        ["evaluate", str(SMALL_ENCODER), str(model), "--data", str(own), "--out", str(out), "--trust-remote-code"]
    )
    printed = capsys.readouterr()
    assert status == 1
    assert "error: 3 failed: small-encoder on sts-part1: " in printed.err
    assert "without-a-task on clustering-trivia: " in printed.err
    evaluation = Evaluation.from_json((out / "scores.json").read_text())
    assert evaluation.common == ["sts-part0", "sts-part2"]
    assert set(evaluation.failures["without-a-task"]) == {"sts-part1", "clustering-trivia"}
    assert "clustering-trivia" in evaluation.scores["small-encoder"]
    assert "Means are over the 2 of 4 datasets" in printed.out
    assert len(re.findall(r"\bfailed\b", (out / "scores.md").read_text())) == 3


def test_prompts_that_mteb_does_not_use_are_named(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "prompted")
    settings = folder / "config_sentence_transformers.json"
    where: dict[str, Any] = {"data": data, "tasks": ["part0"], "out": tmp_path / "out"}
    edit_json(settings, prompts={"search_query": "find: ", "STS": "compare: ", "sts": "compare: ", "clustering": ""})
    assert not evaluate(folder, **where).failures
    (warning,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("prompted: MTEB does not use the prompts 'search_query', whose names it does not know.")
    caplog.clear()
    edit_json(settings, default_prompt_name="search_query")  # which Sentence-Transformers uses where mteb has none
    assert not evaluate(folder, **where).failures
    assert not caplog.records


def test_a_model_that_does_not_load_is_not_loaded_for_each_dataset(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def load(model: EvaluatedModel, device: str | None) -> Any:
        if device != "meta":  # all checks pass
            tried.append(model.label)
            raise RuntimeError(f"out of memory: {model.label}")

    monkeypatch.setattr(EvaluatedModel, "load", load)
    models = {"first": str(SMALL_ENCODER), "second": str(SMALL_ENCODER)}
    evaluation = evaluate(models, data=data, tasks=["sts/*"], out=tmp_path)
    assert tried == ["first", "second"]
    for label in models:
        assert [*evaluation.failures[label].values()] == [f"RuntimeError: out of memory: {label}"] * 3


def test_a_model_that_embeds_as_nan_has_no_score(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "without-numbers")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    data = ROOT / "examples" / "data"  # retrieval would be scored 0
    evaluation = evaluate([str(folder)], data=data, tasks=["beir/arxiv", "sts17_en"], limit=3, out=tmp_path / "out")
    assert set(evaluation.failures["without-numbers"]) == {"beir-arxiv", "STS17", "pair-sts17_en"}
    assert all(
        "embeddings that are not finite" in message for message in evaluation.failures["without-numbers"].values()
    )
    assert not results(tmp_path / "out")


def test_equal_similarities_are_an_error_that_says_so(data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "constant")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: np.ones_like(weight) if name.endswith("bias") else 0 * weight for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    evaluation = evaluate([str(folder)], data=data, tasks=["part0"], out=tmp_path / "out")
    message = "ValueError: the score is nan, as where all that the model gives are equal"
    assert evaluation.failures["constant"] == {"sts-part0": message}


@pytest.mark.processes
def test_the_command_writes_tables_and_scores(fresh_folder: Path, tmp_path: Path) -> None:
    models, data = [str(SMALL_ENCODER), str(fresh_folder)], str(ROOT / "examples" / "data")
    models[0] = f"dense={models[0]}"
    command = [
        sys.executable,
        "-m",
        "mote",
        "evaluate",
        *models,
        "--data",
        data,
        "--task",
        "sts/*",
        "--task",
        "summarization/*",
    ]
    options = ["--reference", "dense", "--out", str(tmp_path), "--limit", "30", "--trust-remote-code"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # libraries are silent
    assert "--limit 30" in done.stdout
    evaluation = Evaluation.from_json((tmp_path / "scores.json").read_text())
    assert evaluation.reference == "dense"
    assert str(evaluation) in done.stdout
    assert str(evaluation) in (tmp_path / "scores.md").read_text()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.processes
def test_a_killed_run_resumes(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "mote", "evaluate", str(SMALL_ENCODER), "--data", str(data), "--out", str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "/4 " in line:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert 1 <= len(results(killed)) < 4
    with caplog.at_level(logging.INFO, "mote"):
        resumed = evaluate([str(SMALL_ENCODER)], data=data, out=killed)
    assert any(line.endswith("(cached)") for line in caplog.messages)
    assert resumed.scores["small-encoder"] == pytest.approx(
        evaluate([str(SMALL_ENCODER)], data=data, out=whole).scores["small-encoder"]
    )


@contextmanager
def interrupted_at(progress: str) -> Iterator[None]:
    """Interrupts a run when it logs this."""

    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if progress in record.getMessage():
                raise KeyboardInterrupt

    logger, handler = logging.getLogger("mote.evaluation"), Interrupt()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def test_an_interrupted_run_says_how_to_resume(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "mote"),
        interrupted_at("2/4"),
        pytest.raises(KeyboardInterrupt, match=r"2 of 4 scores are cached in .*; the same command resumes"),
    ):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path)
    assert len(results(tmp_path)) == 2


# Invalid arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--data FOLDER, --benchmark NAME, or only --task"),
        (["--data", "DATA", "--benchmark", "MTEB(eng, v1)"], "Choose what to evaluate on: --data"),
        (["--task", "NFCorpuss"], "'NFCorpuss' not found. Did you mean: 'NFCorpus'"),
        (["--benchmark", "MTEB(eng, v1)", "--task", "Bank?"], "No dataset matches 'Bank?'"),
        (["--task", "STS12", "--limit", "5"], "--limit only cuts datasets of --data"),
        (["--data", "DATA", "--task", "sts/part9"], "sts/part9"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "DATA", "--reference", "gpt"], "Unknown model 'gpt'. Available: 'small-encoder'"),
        (["--data", "DATA", "--dtype", "int3"], 'Invalid value "int3" for --dtype. Choose from: "float32"'),
        (["--data", "DATA", "--limit", "0"], "greater than or equal to 1"),
    ],
)
def test_invalid_arguments(words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(data) if word == "DATA" else word for word in words]
    assert main(["evaluate", str(SMALL_ENCODER), *words]) == (2 if said.startswith(("Invalid", "greater")) else 1)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [{"retrieval": "lexical"}, {"tasks": ["part9"]}, {"definitions": {"part9": "x"}}, {"template": "{definition}"}],
)
def test_arguments_are_checked_before_weights_are_hashed(
    setting: dict[str, Any], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(evaluating, "commit_of")
    with pytest.raises(ValueError, match=r"lexical|part9|template"):
        evaluate(SMALL_ENCODER, data=data, **setting)


def test_options_are_one_object_or_keywords(data: Path, tmp_path: Path) -> None:
    options = EvaluateOptions(data=data, tasks=["sts/part0"], limit=20)
    assert evaluate(SMALL_ENCODER, tmp_path, options, limit=10).settings["limit"] == 10


def test_invalid_models(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(SMALL_ENCODER, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    deeper = shutil.copytree(SMALL_ENCODER, tmp_path / "deeper")
    settings = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 4}))
    adapter, adapted = tmp_path / "adapter", shutil.copytree(SMALL_ENCODER, tmp_path / "adapted")
    for folder in (adapter, adapted / "0_Transformer"):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(SMALL_ENCODER)}))
    for path, said in {
        str(tmp_path / "empty"): "empty does not load in Sentence-Transformers",
        str(broken): f"{broken} does not load in Sentence-Transformers",
        str(deeper): f"{deeper} lacks weights that its config requires, and random ones would replace them: encoder",
        str(adapter): f"{adapter} is a PEFT adapter: merge it into its base model first",
        str(adapted): f"{adapted} is a PEFT adapter",
        "nobody/nothing": "nobody/nothing is neither a folder nor available on the Hub: Cannot find",
        "no such/folder/here": "is neither a folder nor available on the Hub",
    }.items():
        out = tmp_path / "out"
        assert main(["evaluate", str(SMALL_ENCODER), path, "--data", str(data), "--out", str(out)]) == 1
        printed = capsys.readouterr()
        assert said in printed.err
        assert "Model 1" not in printed.out  # known before the work begins


@pytest.mark.long
def test_code_of_a_folder_runs_only_if_it_is_trusted(
    data: Path, fresh_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A name that no other test's folder has: transformers keeps the classes that it has loaded, by name and config.
    model, ran = shutil.copytree(fresh_folder, tmp_path / "not-trusted"), tmp_path / "ran"
    with (model / "modeling_mote.py").open("a") as code:
        code.write(f"\n\nopen({str(ran)!r}, 'w').close()\n")
    command = ["evaluate", str(model), "--data", str(data), "--task", "part0", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert f"{model} has code of its own, which runs only with --trust-remote-code" in capsys.readouterr().err
    assert not ran.exists()
    assert main([*command, "--trust-remote-code"]) == 0
    assert ran.exists()
