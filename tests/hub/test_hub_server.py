"""`hub_server.HubServer` against the real huggingface_hub client, each client in a process and a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import contents
from hub.hub_server import HubServer

WEIGHTS = "model.safetensors"

# What each client process runs first, and last: `result`, or the class of the error, goes back to the test.
PROLOGUE = """
import json, sys
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
folder = sys.argv[1]
def call(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return {"error": type(error).__name__, "status": status, "text": str(error)}
api = HfApi()
"""
EPILOGUE = "\nprint(json.dumps(result, default=vars))\n"


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(os.urandom(10_500_000))
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "modeling_naïve.py").write_text("answer = 42\n")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def client(server: HubServer, folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs code in a fresh process and returns its `result`."""

    def run(code: str, token: str | None = None, home: str = "home") -> Any:
        command = [sys.executable, "-c", PROLOGUE + code + EPILOGUE, str(folder)]
        environment = server.environment(tmp_path / home, token)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def endpoints(server: HubServer) -> list[str]:
    return [request.endpoint for request in server.requests]


def without_attributes(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path != ".gitattributes"}


PUSH = """
api.create_repo("user/name", exist_ok=True)
result = api.upload_folder(repo_id="user/name", folder_path=folder, commit_message="push", delete_patterns="*").oid
"""


def test_push_and_download_in_another_process(server: HubServer, client: Callable[..., Any], folder: Path) -> None:
    first = client(PUSH, token="hf_write", home="pusher")
    old = server.files("user/name")
    assert without_attributes(old) == contents(folder)
    assert endpoints(server).count("upload") == 1
    found = client('result = snapshot_download("user/name")', home="reader")
    assert without_attributes(contents(found)) == contents(folder)
    assert Path(found).name == first

    (folder / "config.json").write_text('{"hidden_size": 16}')
    (folder / "modeling_naïve.py").unlink()
    second, found = client(PUSH + 'result = [result, snapshot_download("user/name")]', token="hf_write")
    assert without_attributes(contents(found)) == contents(folder)
    assert without_attributes(server.files("user/name", second)) == contents(folder)
    assert server.files("user/name", first) == old
    assert endpoints(server).count("upload") == 1  # only what has changed is sent
    assert client(PUSH, token="hf_write") == second  # nothing has changed: no commit
