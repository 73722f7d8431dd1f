"""Atomic folders: several writers, leftovers of killed ones, files of others."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier

import pytest
from helpers.checkpoints import contents, edit_json, files_in, read_json

from mote import files
from mote.checkpoints.provenance import new_step, read_steps, write_steps
from mote.checkpoints.staging import ModelStaging, refuse_occupied, refuse_source

FULL = OSError(errno.ENOSPC, "No space left on device")


def write(folder: Path, text: str, *names: str) -> None:
    for name in ("model.safetensors", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_steps([new_step("upcycle")], folder)


@pytest.mark.parametrize(("writers", "overwrite"), [(2, True), (5, False)])
def test_threads_that_write_to_one_place(writers: int, overwrite: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for round_ in range(10):
        if round_ and not overwrite:
            shutil.rmtree(out)
        started, written = Barrier(writers), Barrier(writers)

        def work(number: int, started: Barrier = started, written: Barrier = written) -> None:
            started.wait()
            with ModelStaging(out, overwrite) as folder:
                write(folder, str(number), *(f"file{i}" for i in range(20)))
                written.wait(timeout=60)  # an error before here would leave the others waiting

        with ThreadPoolExecutor(writers) as pool:
            futures = [pool.submit(work, number) for number in range(writers)]
            wait(futures)
        errors = [future.exception() for future in futures]
        texts = {path.read_text() for path in out.iterdir() if path.name != "mote.json"}
        assert len(texts) == 1
        assert len(files_in(out)) == 22
        assert errors[int(texts.pop())] is None  # the result is that of a writer which reported success
        assert sum(error is None for error in errors) == (writers if overwrite else 1)
        assert all(error is None or "in use" in str(error) for error in errors)
        assert list(tmp_path.iterdir()) == [out]


def test_a_leftover_that_goes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".out.writing-0").mkdir()
    listed = Path.iterdir

    def removed_by_another(folder: Path) -> Iterator[Path]:
        if folder.name == ".out.writing-0":
            folder.rmdir()
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", removed_by_another)
    with ModelStaging(tmp_path / "out") as folder:
        write(folder, "text", "file")
    assert files_in(tmp_path / "out") >= {"file"}


@pytest.mark.parametrize("damage", ["removed", "replaced", "without a file"])
def test_a_result_that_is_lost_is_not_reported_as_a_success(damage: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OSError, match="out was not written: another process removed"), ModelStaging(out) as folder:  # noqa: PT012
        write(folder, "x")
        if damage == "removed":
            shutil.rmtree(folder)
        elif damage == "replaced":
            shutil.copytree(folder.rename(folder.with_name("lock-of-mine")), folder)
        else:
            (folder / "model.safetensors").unlink()
    assert not out.exists()


def test_leftovers_are_removed_unless_their_writer_is_running(tmp_path: Path) -> None:
    for name in ("killed", "killed-early", "replacing", "killed/new", "replacing/new", "replacing/replaced"):
        (tmp_path / f".out.writing-{name}").mkdir()
    not_ours = [".out2.writing-x", ".out.writing-mine", "out.writing-x"]
    for name in not_ours:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    with pytest.raises(FileExistsError, match="in use"), ModelStaging(tmp_path / "out") as running:  # noqa: PT012
        write(running, "first")
        with ModelStaging(tmp_path / "out") as folder:
            write(folder, "second")
        assert (running / "model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {*not_ours, "out"}


def test_a_replaced_model_stays_until_its_successor_is_there(tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / ".out.writing-killed" / "replaced"
    old.mkdir(parents=True)
    write(old, "old")
    with pytest.raises(OSError, match="No space"), ModelStaging(out):
        raise FULL
    assert (old / "model.safetensors").is_file()
    with ModelStaging(out) as folder:
        write(folder, "new")
        assert old.is_dir()
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "usual").mkdir()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_model_stays_where_its_successor_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    write(out, "old")
    before = contents(out)

    def no_second_rename(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise FULL
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", no_second_rename)
    with pytest.raises(OSError, match="No space"), ModelStaging(out, overwrite=True) as folder:
        write(folder, "new")
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("system", ["no locks", "no fcntl"])
def test_systems_without_locks(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if system == "no locks":
        monkeypatch.setattr(files.fcntl, "flock", refuse)
    else:
        monkeypatch.setattr(files, "fcntl", None)  # as on Windows
    (tmp_path / ".out.writing-whose" / "new").mkdir(parents=True)
    with ModelStaging(tmp_path / "out") as folder:
        write(folder, "x")
    may_be_running = [".out.writing-whose"] if system == "no locks" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*may_be_running, "out"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository on the Hub, in which someone has made notes."""
    out = tmp_path / "out"
    out.mkdir()
    old = ("2_Dense/config.json", "model-00001-of-00002.safetensors", "recipe.yaml", "vocab.txt", "old_mote.py")
    write(out, "old", *old)
    (out / "onnx").mkdir()
    (out / "onnx" / "model.onnx").write_text("converted by hand")
    for name in (".git/HEAD", ".git/objects/12/34", "diary.txt", "plots/a.png"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / ".git" / "refs").mkdir()
    (out / "link").symlink_to("diary.txt")
    return out


@pytest.mark.parametrize("in_place", [False, True])
def test_files_of_others_are_kept(in_place: bool, clone: Path) -> None:
    """Also those named like a model's; a change in place keeps all but weights and code."""
    (clone / ".writing-config.json").touch()  # by a `save_pretrained` that was killed
    edit_json(clone / "mote.json", files=[*read_json(clone / "mote.json")["files"], ".git/HEAD"])
    names = {"model_before_training.safetensors", "my_mote.py", "2024_results/scores.csv", "onnx/notes.txt"}
    for name in names:
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("mine")
    with ModelStaging(clone, overwrite=True, steps=read_steps(clone) if in_place else None) as folder:
        write(folder, "new", "README.md", "vocab.txt")
    kept = {".git/HEAD", ".git/objects/12/34", "diary.txt", "plots/a.png", "link", *names}
    of_model = {"2_Dense/config.json", "recipe.yaml", "onnx/model.onnx"} if in_place else set()
    assert files_in(clone) == {"model.safetensors", "README.md", "vocab.txt", "mote.json", *kept, *of_model}
    assert (clone / ".git" / "refs").is_dir()
    assert (clone / "link").is_symlink()
    assert {(clone / name).read_text() for name in ("model.safetensors", "vocab.txt")} == {"new"}
    assert {(clone / name).read_text() for name in kept} == {"mine"}


def test_of_two_changes_in_place_the_second_is_refused(clone: Path) -> None:
    steps = read_steps(clone)
    second = ModelStaging(clone, overwrite=True, steps=steps)
    write(second.__enter__(), "second")
    with ModelStaging(clone, overwrite=True, steps=steps) as first:
        write(first, "first")
        write_steps([*steps, new_step("add")], first)
    with pytest.raises(ValueError, match="was changed by another process in the meantime"):
        second.__exit__(None, None, None)
    assert (clone / "model.safetensors").read_text() == "first"
    assert {path.name for path in clone.parent.iterdir()} == {"out"}


def test_a_kill_loses_no_file_of_others(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(clone)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), ModelStaging(clone, overwrite=True) as folder:
        write(folder, "new")
    assert contents(clone) == before


@pytest.mark.parametrize("content", ['{"format": 1, "steps": []}', '{"format": 2, "steps": [{"step": "x"}]}'])
def test_a_folder_is_ours_by_what_its_record_holds(content: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "mote.json").write_text(content)
    with pytest.raises(FileExistsError, match="holds something other than a MoTE"):
        refuse_occupied(tmp_path, overwrite=True)


def test_a_result_in_around_or_at_its_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "a", tmp_path / "link", source / "out", tmp_path / "link" / "x" / "y"):
        with pytest.raises(ValueError, match="choose another folder for the result"):
            refuse_source(out, source)
    refuse_source(tmp_path / "a" / "source2", source)
