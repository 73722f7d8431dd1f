"""Atomic files and locks; atomic folders are tested in checkpoints/test_staging.py, kills in test_interruptions.py."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mote import UpcyclingOptions, files
from mote.cli import main


def test_the_home_folder_in_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["{}/x", "--out={}/x y", "data.folder={}/x"]
    assert [files.expanded(word.format("~")) for word in words] == [word.format(tmp_path) for word in words]
    assert UpcyclingOptions(tokenizer="~/x").tokenizer == f"{tmp_path}/x"
    assert main(["upcycle", "--src=~/absent"]) == 1
    assert f"error: {tmp_path}/absent is neither a folder" in capsys.readouterr().err


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    files.write_json(path, {"a": "ä"})
    with files.replaced(path) as temporary:
        temporary.write_text("{}")
        assert temporary.suffix == ".json"
        assert files.read_json(path) == {"a": "ä"}
    assert files.read_json(path) == {}
    assert names(path.parent) == ["file.json"]


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left on device"), files.replaced(path) as new:  # noqa: PT012
        new.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("of others")
    (tmp_path / "link.json").symlink_to("blob")
    files.write_json(tmp_path / "link.json", [1])
    assert (tmp_path / "blob").read_text() == "of others"
    assert files.read_json(tmp_path / "link.json", list) == [1]


def test_leftovers(tmp_path: Path) -> None:
    with files.replaced(tmp_path / "sub" / "file") as temporary:
        temporary.write_text("x")
        left = temporary.read_bytes()
    temporary.write_bytes(left)
    files.remove_leftovers(tmp_path)
    assert names(tmp_path / "sub") == ["file"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_damaged_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.json is not valid JSON"):
        files.read_json(tmp_path / "file.json")


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "lock"
    with files.lock(path):
        with pytest.raises(BlockingIOError, match=f"folder is in use by process {os.getpid()} on "), files.lock(path):
            pass
        assert path.is_file()
    assert names(tmp_path) == []


@pytest.mark.parametrize("system", ["fcntl", "none"])
def test_a_lock_leaves_other_files(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "none":
        monkeypatch.setattr(files, "fcntl", None)  # as on Windows
    with files.lock(tmp_path / "folder" / "lock"):
        (tmp_path / "folder" / "file").touch()
    assert names(tmp_path / "folder") == ["file"]
    with files.lock(tmp_path / "folder" / "lock"):
        pass


WITH_A_CHILD = """
import os, sys, time
from pathlib import Path
from mote.files import lock

with lock(Path(sys.argv[1])):
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(60)
"""


def test_a_killed_process_frees_its_lock_although_its_child_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_A_CHILD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        with pytest.raises(BlockingIOError, match="is in use by process"), files.lock(tmp_path / "lock"):
            pass
        process.kill()
        process.wait()
        try:
            with files.lock(tmp_path / "lock"):
                os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
