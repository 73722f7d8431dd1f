"""The folder of a run: its lock, its checkpoints, and what a new run may replace."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import contents
from helpers.runs import break_off, overrides, train_step

from mote.files import lock
from mote.training.recipe import load_recipe
from mote.training.run_folder import CHECKPOINT_FILE, LOCK_FILE, RunFolder, as_yaml, fixed_settings
from mote.training.train import TrainingRun, train

DIVERGING = ("training.optim=sgd", "training.learning_rate=1e+30", "training.weight_decay=1e+30")


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
    run.begin(recipe, {}, None)
    for name in ("checkpoint-5", "checkpoint-8", "checkpoint-5-copy", "checkpoint-best", "old-checkpoint-9"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "checkpoint.json").write_text("{}")
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-8"
    run.begin(recipe, {}, run.checkpoints / "checkpoint-5")
    left = ["checkpoint-5-copy", "checkpoint-best", "old-checkpoint-9"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-5", *left]
    run.remove_checkpoints()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == left


@pytest.fixture
def settings(tiny: Path, data: Path, tmp_path: Path) -> list[str]:
    return overrides(tiny, data, tmp_path / "run", "data.limit=16", "training.max_steps=1")


def test_train_refuses_a_folder_in_use(settings: list[str], tmp_path: Path) -> None:
    with lock(tmp_path / "run" / LOCK_FILE):
        for overwrite in (False, True):
            with pytest.raises(BlockingIOError, match=f"run is in use by process {os.getpid()}"):
                train("ic", settings, overwrite=overwrite)


@pytest.mark.long
def test_overwrite_keeps_the_model_until_the_new_one_is_complete(settings: list[str], tmp_path: Path) -> None:
    model = train("ic", settings)
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    log = (tmp_path / "run" / "trainer_state.json").read_bytes()
    for broken, message in (
        ("data.folder=/nowhere", "nowhere"),
        (f"model.source={model}", "is inside .* the folder of this run"),
        ("training.optim=nonsense", "nonsense"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train("ic", [*settings, broken], overwrite=True)
        assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
        assert (tmp_path / "run" / "trainer_state.json").read_bytes() == log
    with pytest.raises(ValueError, match="weights are non-finite at step 1"):  # after training has begun
        train("ic", [*settings, *DIVERGING], overwrite=True)
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
    assert train("ic", [*settings, "training.seed=7"], overwrite=True) == model
    assert (model / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert train_step(model)["steps"] == 1


def begun(folder: RunFolder, *settings: str, identity: dict[str, Any] | None = None) -> Path:
    """Make a folder look as if its run had been stopped after step 5; return the checkpoint."""
    recipe = load_recipe("smoke", [f"output={folder.path}", *settings])
    folder.begin(recipe, {"settings": fixed_settings(recipe), **(identity or {})}, None)
    checkpoint = folder.checkpoints / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / CHECKPOINT_FILE).write_text("{}")
    return checkpoint


def test_an_interrupted_overwrite_is_resumed(tmp_path: Path) -> None:
    """A checkpoint next to a finished model belongs to a run that was to replace it; also before the first one."""
    folder, recipe = RunFolder(tmp_path), load_recipe("smoke", [f"output={tmp_path}"])
    folder.begin(recipe, {}, None)
    folder.model.mkdir()
    folder.remove_checkpoints()
    with pytest.raises(FileExistsError, match="holds a finished run"):
        folder.open(recipe, overwrite=False)
    shutil.rmtree(begun(folder))
    assert folder.open(recipe, overwrite=False) is None
    with pytest.raises(ValueError, match="The settings differ"):
        folder.open(load_recipe("ic"), overwrite=False)
    checkpoint = begun(folder)
    assert folder.open(recipe, overwrite=False) == checkpoint
    assert folder.open(recipe, overwrite=True) is None
    assert checkpoint.exists()  # opening changes nothing
    assert folder.model.exists()


def test_source_and_teacher_may_be_named_by_their_commits_on_resuming(tmp_path: Path) -> None:
    task = (
        "tasks={t: {batches: homogeneous, anchor: clustering, datasets: [a], loss: MSELoss, "
        "teacher: {source: user/teacher, revision: REVISION}}}"
    )
    folder = RunFolder(tmp_path)
    checkpoint = begun(folder, task.replace("REVISION", "null"))
    settings = ["model.revision=" + "a" * 40, task.replace("REVISION", "b" * 40)]
    assert folder.open(load_recipe("smoke", settings), overwrite=False) == checkpoint
    other = load_recipe("smoke", [task.replace("user/teacher", "user/other")])
    with pytest.raises(ValueError, match=r"tasks\.t\.teacher\.source \('user/teacher' there, 'user/other'"):
        folder.open(other, overwrite=False)


def test_a_run_resumes_with_what_it_was_begun_with(tmp_path: Path) -> None:
    """But how it is saved and logged may change."""
    folder = RunFolder(tmp_path)
    identity: dict[str, Any] = {"models": {"source user/model": "a" * 40}, "processes": {"number": 2}}
    checkpoint = begun(folder, identity=identity)
    folder.require_same(**identity)
    with pytest.raises(ValueError, match=r"The models differ .*source user/model \('a{40}' there, 'b{40}' here\)"):
        folder.require_same(models={"source user/model": "b" * 40})
    with pytest.raises(ValueError, match=r"The processes differ .*: number \(2 there, 1 here\)"):
        folder.require_same(processes={"number": 1})
    free = ["training.save_steps=7", "training.logging_steps=2", "training.save_total_limit=3", "output=x"]
    assert folder.open(load_recipe("smoke", free), overwrite=False) == checkpoint
    for other, message in (
        (load_recipe("smoke", ["training.learning_rate=0.1"]), r"training\.learning_rate \(\S+ there, 0.1 here\)"),
        (load_recipe("ic"), r"The settings differ .*name.*model\.kind"),
    ):
        with pytest.raises(ValueError, match=message):
            folder.open(other, overwrite=False)
    assert checkpoint.exists()  # nothing was lost


@pytest.mark.parametrize("output", ["/proc/run", "/dev/null/run"])
def test_an_output_that_cannot_be_written(output: str, settings: list[str]) -> None:
    """It is found before anything is read."""
    with pytest.raises(OSError, match=output.rpartition("/")[0]):
        train("ic", [*settings, f"output={output}", "model.source=/nowhere"])


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.long
def test_a_checkpoint_that_was_cut_short_is_not_used(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=4")
    break_off(settings, monkeypatch, at=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    optimizer = checkpoints / "checkpoint-3" / "optimizer.pt"
    for name, damage in (("scheduler.pt", Path.unlink), (optimizer.name, flip_last_byte)):
        damage(optimizer.with_name(name))
        with pytest.raises(ValueError, match=f"checkpoint-3/{name} is missing or damaged: remove its folder to "):
            train("mote", settings)
    (checkpoints / "checkpoint-3" / "checkpoint.json").unlink()
    (checkpoints / "checkpoint-3" / "model.safetensors").write_bytes(b"cut")
    record = train_step(train("mote", settings))
    assert record["resumed_from_step"] == 2


def test_a_start_model_left_by_a_kill_is_not_used(tiny: Path, data: Path, fresh_folder: Path, tmp_path: Path) -> None:
    """Killed between upcycling and loading, then started again with another source."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    shutil.copytree(fresh_folder, folder.start)
    model = TrainingRun("mote", overrides(tiny, data, folder.path)).prepare().model
    assert model.get_embedding_dimension() == 16
    assert not folder.start.exists()


@pytest.mark.parametrize("name", ["recipe.yaml", "thesis.txt", "checkpoints/checkpoint-500/state", "model/x"])
def test_files_like_those_of_a_run_are_left_alone(name: str, tmp_path: Path) -> None:
    """Without the file that marks the folder of a run: another trainer's checkpoint, for example."""
    run, recipe = RunFolder(tmp_path / "run"), load_recipe("smoke", [f"output={tmp_path / 'run'}"])
    (run.path / name).parent.mkdir(parents=True)
    (run.path / name).write_text(as_yaml(recipe))
    before = contents(run.path)
    for overwrite in (False, True):
        message = f"{run.path / Path(name).parts[0]} is in the way. Choose another `output`"
        with pytest.raises(FileExistsError, match=re.escape(message)):
            run.open(recipe, overwrite)
    assert contents(run.path) == before
    run.begin(recipe, {}, None)
    assert run.open(recipe, overwrite=True) is None  # it is a run's now
