"""`mote evaluate`: scores of real mteb runs, what is cached of them, and what is made of them."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import edit_json, edit_weights, tensors_of
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.rows import read_rows, write_rows

pytest.importorskip("mteb")

from mteb import get_task
from mteb.results import TaskResult

import mote
from mote import Evaluation, evaluate, experts
from mote.cli import main
from mote.evaluation import evaluate as evaluating
from mote.evaluation.cache import Cache
from mote.evaluation.models import EvaluatedModel
from mote.evaluation.options import EvaluateOptions
from mote.evaluation.tasks import load_tasks

EXAMPLES = ROOT / "examples" / "data"
META = EvaluatedModel("small", str(SMALL_ENCODER), None, EvaluateOptions()).meta()


def changed_encoder(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    shutil.copytree(SMALL_ENCODER, folder, dirs_exist_ok=True)
    weights = tensors_of(SMALL_ENCODER)
    edit_weights(folder, **{name: change(name, weight).contiguous() for name, weight in weights.items()})
    return folder


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
def test_what_a_score_depends_on_is_not_mixed_up(data: Path, tmp_path: Path) -> None:
    out, own, other = tmp_path / "out", shutil.copytree(data, tmp_path / "data"), tmp_path / "other" / "small-encoder"
    paths = [str(SMALL_ENCODER), str(changed_encoder(other, lambda _, weight: weight.roll(1, -1)))]
    both = evaluate({"first": paths[0], "second": paths[1]}, data=own, tasks=["part0", "trivia"], out=out)
    first, second = (both.scores[label] for label in both.models)
    assert all(first[name] != second[name] for name in both.datasets)
    assert len(results(out)) == 4

    where = {"data": own, "out": out}
    cut = evaluate([paths[0]], tasks=["part0"], limit=20, **where)
    bf16 = evaluate([paths[0]], tasks=["trivia"], dtype="bfloat16", **where)
    evaluate([paths[0]], tasks=["part0"], limit=20, trust_remote_code=True, **where)  # code of its own may differ
    assert len(results(out)) == 7
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

    changed_encoder(other, lambda _, weight: weight.roll(2, -1))
    changed = evaluate([paths[1]], tasks=["trivia"], **where).scores["small-encoder"]
    assert changed["clustering-trivia"] != second["clustering-trivia"]


@pytest.mark.long
def test_failures_do_not_stop_the_others(
    data: Path, fresh_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(data, tmp_path / "data")
    (own / "sts" / "part1" / "test.jsonl.gz").write_bytes(b"no gzip")
    model = mote.transform(fresh_folder, tmp_path / "without-a-task", experts.remove, "clustering")
    mote.configure(model, default_task="none")
    out = tmp_path / "out"
    words = ["evaluate", str(SMALL_ENCODER), str(model), "--data", str(own), "--out", str(out)]
    assert main([*words, "--trust-remote-code"]) == 1
    printed = capsys.readouterr()
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


@pytest.mark.parametrize(
    ("change", "tasks", "said"),
    [
        (
            lambda name, weight: weight * (float("nan") if name == "embeddings.LayerNorm.bias" else 1),
            ["beir/arxiv", "sts17_en"],  # retrieval would be scored 0
            "embeddings that are not finite",
        ),
        (
            lambda name, weight: torch.ones_like(weight) if name.endswith("bias") else 0 * weight,
            ["sts/sts17_en"],
            "ValueError: the score is nan: are all embeddings of the model equal?",
        ),
    ],
)
def test_a_damaged_model_has_no_scores(change: Any, tasks: list[str], said: str, tmp_path: Path) -> None:
    folder = changed_encoder(tmp_path / "damaged", change)
    evaluation = evaluate(folder, data=EXAMPLES, tasks=tasks, limit=3, out=tmp_path / "out")
    assert evaluation.scores == {"damaged": {}}
    assert all(said in evaluation.failures["damaged"][name] for name in evaluation.datasets)


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
    caplog.set_level(logging.INFO, "mote")
    resumed, undisturbed = (evaluate(SMALL_ENCODER, data=data, out=out) for out in (killed, whole))
    assert any(line.endswith("(cached)") for line in caplog.messages)
    assert resumed.scores["small-encoder"] == pytest.approx(undisturbed.scores["small-encoder"])


def test_an_interrupted_run_says_how_to_resume(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = evaluating._Scorer._compute

    def interrupted(*arguments: Any) -> Any:
        if len(results(tmp_path)) == 2:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(evaluating._Scorer, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"2 of 4 scores are cached in .*; the same command resumes"):
        evaluate(SMALL_ENCODER, data=data, out=tmp_path)


def test_invalid_arguments(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[str], str]] = [
        ([], "--data FOLDER, --benchmark NAME, or only --task"),
        (["--data", "DATA", "--benchmark", "MTEB(eng, v1)"], "Choose what to evaluate on: --data"),
        (["--task", "NFCorpuss"], "error: MTEB has no such task: 'NFCorpuss' not found. Did you mean: 'NFCorpus'"),
        (["--benchmark", "MTEB(eng, v1)", "--task", "Bank?"], "No dataset matches 'Bank?'"),
        (["--task", "STS12", "--limit", "5"], "--limit only cuts datasets of --data"),
        (["--data", "DATA", "--task", "sts/part9"], "sts/part9"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "DATA", "--dimensions", "64,257"], "small-encoder 257: dimensions and precisions are for dense"),
        (["--data", "DATA", "--reference", "gpt"], "Unknown model 'gpt'. Available: 'small-encoder'"),
    ]
    for words, said in cases:
        assert main(["evaluate", str(SMALL_ENCODER), *(str(data) if word == "DATA" else word for word in words)]) == 1
        assert said in capsys.readouterr().err


def test_invalid_models(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(SMALL_ENCODER, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    adapter, adapted = tmp_path / "adapter", shutil.copytree(SMALL_ENCODER, tmp_path / "adapted")
    for folder in (adapter, adapted / "0_Transformer"):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
    for path, said in {
        str(tmp_path / "empty"): "empty does not load in Sentence-Transformers",
        str(broken): f"{broken} does not load in Sentence-Transformers",
        str(adapter): f"{adapter} is a PEFT adapter: merge it into its base model first",
        str(adapted): f"{adapted} is a PEFT adapter",
        "nobody/nothing": "nobody/nothing is neither a folder nor available on the Hub: Cannot find",
        "no such/folder/here": "is neither a folder nor available on the Hub",
    }.items():
        assert main(["evaluate", str(SMALL_ENCODER), path, "--data", str(data), "--out", str(tmp_path / "out")]) == 1
        printed = capsys.readouterr()
        assert said in printed.err
        assert "Model 1" not in printed.out  # known before the work begins


@pytest.mark.long
def test_a_damaged_result_is_computed_again(data: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"data": data, "tasks": ["part0"], "out": tmp_path}
    first = evaluate([str(SMALL_ENCODER)], **arguments)
    (path,) = results(tmp_path)
    (task,) = load_tasks(data, ["part0"])
    cache = Cache(tmp_path, [task])
    assert cache.find(task, META) is not None
    for damaged in (path.read_text()[:100], "", "[]", "null", "{}", '{"task_name": "part0"}'):
        path.write_text(damaged)
        assert cache.find(task, META) is None
    assert evaluate([str(SMALL_ENCODER)], **arguments).scores == first.scores


def test_where_results_cannot_be_written_the_run_ends(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path / "file")
    (tmp_path / "results").write_text("")
    with pytest.raises(OSError, match="The result of clustering-trivia cannot be written to"):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path)


def test_without_an_output_folder_results_go_to_the_users_assets(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "cached_assets_path", tmp_path.joinpath)
    evaluation = evaluate([str(SMALL_ENCODER)], data=data, tasks=["part0"])
    assert not evaluation.failures
    assert [path.name for path in results(tmp_path / "mote" / "evaluation")] == ["sts-part0.json"]


def test_an_aggregate_counts_only_with_all_of_its_subtasks(tmp_path: Path) -> None:
    task = get_task("CQADupstackRetrieval")
    cache = Cache(tmp_path, [task])
    for part in (*task.metadata.tasks, task):
        splits: Any = {"test": {"default": {"main_score": 0.5, "ndcg_at_10": 0.5}}}
        cache.save_to_cache(TaskResult.from_task_results(part, splits, evaluation_time=1), META)
    assert cache.find(task, META) is not None
    path = cache.get_task_result_path(task.metadata.tasks[3].metadata.name, META)
    path.write_text(path.read_text().replace(task.metadata.tasks[3].metadata.revision, "another revision"))
    assert cache.find(task, META) is None
    assert cache.find(task.metadata.tasks[2], META) is not None
