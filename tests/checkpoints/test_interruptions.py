"""Whatever goes wrong: a message, and an output folder that is whole or not there."""

import errno
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import contents
from helpers.kills import stop_everywhere

from mote import upcycle
from mote.checkpoints import writing as repository
from mote.cli import main
from mote.remote import weights_mote


@pytest.fixture(scope="module")
def other(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another MoTE of the same name."""
    return upcycle(str(dense), tmp_path_factory.mktemp("other") / "tiny-mote", experts=["x", "y"])


def run(source: Path, out: Path, *options: Any) -> int:
    return main(["upcycle", "--src", str(source), "--out", str(out), *map(str, options)])


@pytest.mark.parametrize("place", ["out", "out/mine.txt"])
def test_other_content_is_never_replaced(
    place: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    before = contents(tmp_path)
    assert run(dense, out) == 1
    printed = capsys.readouterr()
    assert f"error: {out} is in use: choose another folder, or replace" in printed.err
    assert printed.out == ""  # refused before any work
    assert run(dense, out, "--overwrite") == 1
    assert f"error: {out} holds something other than a MoTE" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_mote_that_holds_the_source_is_not_replaced(dense: Path, upcycled: Path, tmp_path: Path) -> None:
    out = shutil.copytree(upcycled, tmp_path / "out")
    shutil.copytree(dense, out / "start")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"out is, holds or lies in the source .*: choose another folder"):
        upcycle(str(out / "start"), out, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.long
def test_places_that_are_free(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("empty", "link", "dangling", "a/b/c", "with space", "[*?]", "-dash", "Ümlaut 🐋"):
        assert run(dense, tmp_path / name) == 0
        assert (tmp_path / name / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new" / "config.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(dense, Path()) == 0
    assert (tmp_path / "here" / "config.json").is_file()
    assert not any(path.name.startswith(".") for path in tmp_path.rglob("*"))


def fail(error: BaseException) -> Callable[..., None]:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise error

    return failing


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (weights_mote, "save_file"),
        (repository, "write_sentence_transformer"),
        (repository, "new_card"),
        (repository, "write_steps"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk(
    module: Any,
    name: str,
    overwrite: bool,
    dense: Path,
    other: Path,
    upcycled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "tiny-mote"
    if overwrite:
        shutil.copytree(other, out)
    before = contents(tmp_path)
    monkeypatch.setattr(module, name, fail(FULL))
    assert run(dense, out, *["--overwrite"] * overwrite) == 1
    message = f"error: {out} could not be written, nothing was left behind: [Errno 28] No space left on device"
    assert message in capsys.readouterr().err
    assert contents(tmp_path) == before
    monkeypatch.undo()
    assert run(dense, out, *["--overwrite"] * overwrite) == 0
    assert (out / "config.json").read_bytes() == (upcycled / "config.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-mote"]


@pytest.mark.parametrize("name", ["write_sentence_transformer", "write_steps"])
def test_ctrl_c(
    name: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repository, name, fail(KeyboardInterrupt()))
    assert run(dense, tmp_path / "out") == 130
    assert "interrupted: no partial result was left behind" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def stopped(dense: Path, tmp_path: Path, *options: str, **how: Any) -> list[Any]:
    """Results of upcycling that is stopped at each of its moments."""
    out = tmp_path / "place" / "tiny-mote"
    return stop_everywhere(out, "upcycle", "--src", str(dense), "--out", str(out), *options, **how)


def test_killed_at_any_moment(dense: Path, tmp_path: Path) -> None:
    killed = stopped(dense, tmp_path)
    assert len(killed) > 15
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} <= {"absent", "new"}
    assert any(result.left for result in killed)


def test_files_that_cannot_grow(dense: Path, tmp_path: Path) -> None:
    limited = stopped(dense, tmp_path, how="file size")
    assert len(limited) == 5
    for result in limited:
        assert (result.status, result.out, result.left) == (1, "absent", [])
        assert re.search("tiny-mote could not be written, nothing was left behind: ", result.printed)
    assert any("File too large" in result.printed for result in limited)


@pytest.mark.slow
def test_killed_at_any_moment_of_replacing_a_model(dense: Path, other: Path, tmp_path: Path) -> None:
    killed = stopped(dense, tmp_path, "--overwrite", old=other)
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} == {"old", "absent", "new"}
    between_two_renames = [result.replaced for result in killed if result.out == "absent"]
    assert between_two_renames == [["old"]]


@pytest.mark.slow
def test_interrupted_at_any_moment(dense: Path, tmp_path: Path) -> None:
    interrupted = stopped(dense, tmp_path, how="SIGINT")
    assert len(interrupted) > 15
    for result in interrupted:
        assert (result.status, result.left) == (130, [])
        assert result.printed.endswith("interrupted: no partial result was left behind\n")
    states = [result.out for result in interrupted]
    assert states == sorted(states)  # nothing, and once the folder has its place, all of it
    assert set(states) <= {"absent", "new"}
