"""The folder of a run: its lock, its checkpoints, and what a new run may replace."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.checkpoints import contents
from helpers.runs import break_off, overrides, train_step

from mote.training.recipe_files import load_recipe
from mote.training.run_folder import (
    LOCK_FILE,
    PROBE,
    RECIPE_FILE,
    START_FOLDER,
    RunFolder,
    as_yaml,
    differences,
    fixed_settings,
)
from mote.training.train import plan, prepare, train

DIVERGING = ("training.optim=sgd", "training.learning_rate=1e+30", "training.weight_decay=1e+30")


HOLDER = """
import os, sys, time
from pathlib import Path
from mote.training.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])).lock():
    if len(sys.argv) > 2:
        worker = os.fork()
        if not worker:  # outlives its parent
            time.sleep(60)
            os._exit(0)
        print(worker, flush=True)
    print("locked", flush=True)
    time.sleep(60)
"""


def hold(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "locked\n":
            return process
        process.worker = int(line)  # type: ignore[attr-defined]
    raise AssertionError(process.wait())


def test_a_kill_while_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    for step in (4, 8):
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checkpoint.json").write_text("{}")
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-8"
    monkeypatch.setattr("mote.training.run_folder.shutil.rmtree", lambda *_, **__: None)  # killed before
    run.remove_checkpoints()
    assert run.last_checkpoint() is None


def test_only_checkpoints_of_the_run_count(tmp_path: Path) -> None:
    run, recipe = RunFolder(tmp_path), load_recipe("smoke")
    run.begin(recipe, None)
    for name in ("checkpoint-5", "checkpoint-8", "checkpoint-5-copy", "checkpoint-best", "old-checkpoint-9"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "checkpoint.json").write_text("{}")
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-8"
    run.begin(recipe, run.checkpoints / "checkpoint-5")
    left = ["checkpoint-5-copy", "checkpoint-best", "old-checkpoint-9"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-5", *left]
    run.remove_checkpoints()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == left


@pytest.mark.parametrize(
    ("content", "message"), [("", "is not valid JSON"), ("[]", "must hold a dict"), ("{}", "does not name a recipe")]
)
def test_a_damaged_checkpoint_is_named(content: str, message: str, tmp_path: Path) -> None:
    """It may be left by a power cut."""
    run, recipe = RunFolder(tmp_path), load_recipe("smoke")
    run.begin(recipe, None)
    checkpoint = run.checkpoints / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{checkpoint}/checkpoint.json {message}.*: remove {checkpoint} to resume"):
        run.open(recipe, overwrite=False)
    assert run.open(recipe, overwrite=True) is None


def test_a_source_may_be_named_by_its_commit_on_resuming(tmp_path: Path) -> None:
    """Its commit is compared later, whatever it is named by."""
    run, source = RunFolder(tmp_path), "model.source=user/model"
    begun, named = load_recipe("smoke", [source]), load_recipe("smoke", [source, f"model.revision={'a' * 40}"])
    run.begin(begun, None)
    seal = run.checkpoints / "checkpoint-5" / "checkpoint.json"
    seal.parent.mkdir(parents=True)
    seal.write_text(json.dumps({"recipe": fixed_settings(begun), "models": {}}))
    assert run.open(named, overwrite=False) == seal.parent
    seal.write_text(json.dumps({"recipe": fixed_settings(begun)}))  # older, without the commit
    with pytest.raises(ValueError, match=r"differs in model\.revision"):
        run.open(named, overwrite=False)


def test_a_teacher_may_be_named_by_its_commit_on_resuming(tmp_path: Path) -> None:
    taught = "loss: MSELoss, teacher: {source: user/teacher, revision: REVISION}"
    for where in ("anchor: clustering, datasets: [a], TAUGHT", "anchor: clustering, datasets: [{path: a, TAUGHT}]"):
        task = f"tasks={{t: {{batches: homogeneous, {where.replace('TAUGHT', taught)}}}}}"
        begun, named = (load_recipe("mote", [task.replace("REVISION", revision)]) for revision in ("null", "a" * 40))
        run = RunFolder(tmp_path / str(len(where)))
        run.begin(begun, None)
        seal = run.checkpoints / "checkpoint-5" / "checkpoint.json"
        seal.parent.mkdir(parents=True)
        seal.write_text(json.dumps({"recipe": fixed_settings(begun), "models": {}}))
        assert run.open(named, overwrite=False) == seal.parent
        other = load_recipe("mote", [task.replace("REVISION", "null").replace("user/teacher", "user/other")])
        with pytest.raises(ValueError, match=r"differs in tasks\.t\.(teacher\.source|datasets)"):
            run.open(other, overwrite=False)


@pytest.mark.processes
def test_a_second_run_is_refused_until_the_first_one_dies(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = hold(folder.path, "with a worker")
    try:
        with pytest.raises(BlockingIOError, match=rf"process {first.pid} on {os.uname().nodename}"), folder.lock():
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (folder.path / LOCK_FILE).exists()
        with folder.lock():  # though the worker is alive
            assert "process" in (folder.path / LOCK_FILE).read_text()
    finally:
        os.kill(first.worker, signal.SIGKILL)  # type: ignore[attr-defined]
        first.kill()
        first.communicate()
    assert not folder.path.exists() or list(folder.path.iterdir()) == []


def test_a_lock_is_also_one_for_the_same_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    with folder.lock(), pytest.raises(BlockingIOError, match=f"process {os.getpid()}"), folder.lock():
        pass
    assert not (tmp_path / "new").exists()  # a run that could not start leaves nothing
    with folder.lock():
        pass


@pytest.fixture
def settings(tiny: Path, data: Path, tmp_path: Path) -> list[str]:
    return overrides(tiny, data, tmp_path / "run", "data.limit=16", "training.max_steps=1")


def test_train_refuses_a_folder_in_use(settings: list[str], tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").lock():
        time.sleep(0)
        for overwrite in (False, True):
            with pytest.raises(BlockingIOError, match="A run is using"):
                train("ic", settings, overwrite=overwrite)


@pytest.mark.long
def test_overwrite_keeps_the_model_until_the_new_one_is_complete(settings: list[str], tmp_path: Path) -> None:
    model = train("ic", settings)
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    for broken, message in (
        ("data.folder=/nowhere", "nowhere"),
        ("model.source=/nowhere", "nowhere"),
        (f"model.source={model}", "is inside .* the folder of this run"),
        ("model.max_length=3", "model.max_length"),
        ("training.optim=nonsense", "nonsense"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train("ic", [*settings, broken], overwrite=True)
        assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
        assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    with pytest.raises(ValueError, match="weights are non-finite at step 1"):  # after training has begun
        train("ic", [*settings, *DIVERGING], overwrite=True)
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
    assert train("ic", [*settings, "training.seed=7"], overwrite=True) == model
    assert (model / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert train_step(model)["steps"] == 1


@pytest.mark.long
def test_an_interrupted_overwrite_is_resumed(settings: list[str], tmp_path: Path) -> None:
    """A checkpoint next to a finished model belongs to a run that was to replace it."""
    model = train("ic", settings)
    recipe = load_recipe("ic", settings)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FileExistsError, match="holds a finished run"):
        folder.open(recipe, overwrite=False)
    checkpoint = folder.checkpoints / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"recipe": fixed_settings(recipe)}))
    assert folder.open(recipe, overwrite=False) == checkpoint
    assert folder.open(recipe, overwrite=True) is None
    assert checkpoint.exists()  # opening changes nothing
    assert model.exists()


@pytest.mark.long
def test_a_model_is_not_the_folder_of_a_run(settings: list[str]) -> None:
    """Though it holds a recipe."""
    model = train("ic", settings)
    with pytest.raises(FileExistsError, match="something other than a run"):
        train("ic", [*settings, f"output={model}"], overwrite=True)


@pytest.mark.parametrize("output", ["/proc/run", "/dev/null/run"])
def test_an_output_that_cannot_be_written(output: str, settings: list[str]) -> None:
    for run in (plan, train):
        with pytest.raises(OSError, match=rf"Nothing can be written to {output}: .* another `output`"):
            run("ic", [*settings, f"output={output}"])


def test_differences_name_short_values() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": "x" * 200}) == ["b (2 there, 3 here)", "c"]
    recipe = load_recipe("mote", ["training.save_steps=7", "output=x"])
    assert not {"output", "training.save_steps"} & fixed_settings(recipe).keys()
    given = fixed_settings(load_recipe("mote", ["training.seed=7"]), given_only=True)
    assert given["training.seed"] == 7  # named, unlike the optimizer
    assert "training.optim" in fixed_settings(recipe).keys() - given.keys()
    assert "save_steps: 7" in as_yaml(recipe)


@pytest.mark.long
def test_a_checkpoint_that_was_cut_short_is_not_used(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=4")
    break_off(settings, monkeypatch, at=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "checkpoint-3" / "checkpoint.json").unlink()
    (checkpoints / "checkpoint-3" / "model.safetensors").write_bytes(b"cut")
    record = train_step(train("mote", settings))
    assert record["resumed_from_step"] == 2


@pytest.mark.long
def test_a_checkpoint_of_another_recipe_is_refused(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=4")
    break_off(settings, monkeypatch, at=3)
    with pytest.raises(
        ValueError,
        match=r"belongs to another recipe, which differs in .*training.learning_rate \(0.001 there, 0.1 here\)",
    ):
        train("mote", [*settings, "training.learning_rate=0.1"])
    with pytest.raises(ValueError, match=r"belongs to another recipe.*name.*model.kind"):
        train("ic", settings)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").exists()  # nothing was lost
    train("mote", [*settings, "training.logging_steps=2", "training.save_total_limit=3"])  # these may change
    with pytest.raises(FileExistsError, match="holds a finished run"):
        train("mote", settings)
    train("mote", [*settings, "training.learning_rate=0.1"], overwrite=True)


def test_a_start_model_left_by_a_kill_is_not_used(tiny: Path, data: Path, fresh_folder: Path, tmp_path: Path) -> None:
    """Killed between upcycling and loading, then started again with another source."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    shutil.copytree(fresh_folder, folder.path / START_FOLDER)
    model = prepare(load_recipe("mote", overrides(tiny, data, folder.path)), folder).model
    assert model.get_embedding_dimension() == 16
    assert not (folder.path / START_FOLDER).exists()


def test_overwrite_after_a_kill_while_upcycling(tiny: Path, data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    recipe = load_recipe("mote", overrides(tiny, data, folder.path))
    (folder.path / f".{START_FOLDER}.writing-999999999").mkdir(parents=True)
    assert folder.open(recipe, overwrite=True) is None


def test_a_foreign_folder_is_left_alone(tiny: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="something other than a run"):
        train("mote", overrides(tiny, data, tmp_path / "run"), overwrite=True)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"


COMPLETE = as_yaml(load_recipe("smoke"))


@pytest.mark.parametrize(
    "own", ["# mine\nextends: smoke\n", "extends: smoke\n", f"# mine\n{COMPLETE}", "- 1\n", "a: [", "\0"]
)
def test_the_users_own_recipe_is_left_alone(own: str, tmp_path: Path) -> None:
    """And what is next to it: another trainer's checkpoint, for example."""
    run, recipe = RunFolder(tmp_path / "run"), load_recipe("smoke", [f"output={tmp_path / 'run'}"])
    for name, content in ((RECIPE_FILE, own), ("start/data.jsonl", "{}"), ("checkpoints/checkpoint-500/state", "")):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(content)
    before = contents(run.path)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=f"{run.path / RECIPE_FILE} was not written by .* another `output`"):
            run.open(recipe, overwrite)
    with pytest.raises(FileExistsError, match=f"{run.path / RECIPE_FILE} was not written"):
        run.begin(recipe, None)
    run.clean()
    assert contents(run.path) == before


def test_folders_of_earlier_versions_are_runs(tmp_path: Path) -> None:
    settings = load_recipe("smoke").model_dump(mode="json")
    del settings["retrieval"]  # a later addition
    (tmp_path / RECIPE_FILE).write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    (tmp_path / "start").mkdir()
    RunFolder(tmp_path).check(load_recipe("smoke"))


@pytest.mark.parametrize(
    "name", ["start", "restart", f"my{PROBE}x", f"{PROBE}x.txt", f"x{START_FOLDER}", ".start.writing-notes"]
)
def test_names_like_those_of_leftovers_are_in_the_way(name: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.path / name).mkdir(parents=True)
    (run.path / name / "data.jsonl").write_text("{}")
    with pytest.raises(FileExistsError, match=re.escape(f"{run.path / name} is in the way. Choose another `output`")):
        run.check(load_recipe("smoke"))
    run.clean()
    assert (run.path / name / "data.jsonl").exists()


def test_a_recipe_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cut short would not be known as a run's."""
    run, recipe = RunFolder(tmp_path), load_recipe("smoke")

    def cut(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text.encode()[:50])
        raise KeyboardInterrupt

    for before in ([], [RECIPE_FILE]):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", cut)
            with pytest.raises(KeyboardInterrupt):
                run.begin(recipe, None)
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == before
        run.check(recipe)
        run.begin(recipe, None)
        assert (tmp_path / RECIPE_FILE).read_text() == as_yaml(recipe)


def test_processes_may_check_a_new_folder_at_once(tmp_path: Path) -> None:
    recipe = load_recipe("smoke")
    RunFolder(tmp_path / "run").path.mkdir()
    (tmp_path / "run" / f"{PROBE}x").mkdir()  # of another process, which is checking, too
    (tmp_path / "run" / "checkpoints").mkdir()  # and if a run is killed when its trainer has just been made
    RunFolder(tmp_path / "run").check(recipe)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something other than a run"):
        RunFolder(tmp_path / "run").check(recipe)
