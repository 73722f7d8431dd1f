"""`hub_server.HubServer` against the real huggingface_hub client, each client in a process and a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from helpers.checkpoints import contents
from hub.hub_server import HubServer

pytest.importorskip("huggingface_hub")

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


class Client(Protocol):
    """Runs code in a fresh process and returns its `result`."""

    def __call__(self, code: str, token: str | None = None, home: str = "home") -> Any: ...


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
def client(server: HubServer, folder: Path, tmp_path: Path) -> Client:
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


def test_push_and_download_in_another_process(server: HubServer, client: Client, folder: Path) -> None:
    first = client(PUSH, token="hf_write", home="pusher")
    old = server.files("user/name")
    assert without_attributes(old) == contents(folder)
    assert [commit.title for commit in server.commits("user/name")] == ["push", "initial commit"]
    assert endpoints(server).count("upload") == 1
    found = client('result = snapshot_download("user/name")', home="reader")
    assert without_attributes(contents(found)) == contents(folder)
    assert Path(found).name == server.commits("user/name")[0].id == first

    (folder / "config.json").write_text('{"hidden_size": 16}')
    (folder / "modeling_naïve.py").unlink()
    second, found = client(PUSH + 'result = [result, snapshot_download("user/name")]', token="hf_write")
    assert without_attributes(contents(found)) == contents(folder)
    assert without_attributes(server.files("user/name", second)) == contents(folder)
    assert server.files("user/name", first) == old
    assert endpoints(server).count("upload") == 1  # only what has changed is sent
    assert client(PUSH, token="hf_write") == second  # nothing has changed: no commit
    assert len(server.commits("user/name")) == 3


def test_who_may_do_what(server: HubServer, client: Client, folder: Path) -> None:
    server.add_repo("user/open", folder)
    server.add_repo("user/hidden", folder, private=True)
    code = """
create = call(api.create_repo, "user/new")
upload = call(api.upload_file, repo_id="user/open", path_or_fileobj=b"x", path_in_repo="x")
hidden = call(api.model_info, "user/hidden")
missing = call(hf_hub_download, "user/missing", "config.json")
whoami = call(api.whoami)
result = [r["status"] if isinstance(r, dict) and "status" in r else "fine" for r in (create, upload, hidden, missing)]
result += [whoami.get("name", whoami.get("status"))]
"""
    assert client(code) == [401, 401, 404, 404, None]
    assert client(code, token="hf_wrong") == [401, 401, 401, 401, 401]
    assert client(code, token="hf_other") == [403, 403, 404, 404, "other"]
    assert client(code, token="hf_read") == [403, 403, "fine", 404, "user"]
    assert client(code, token="hf_write") == ["fine", "fine", "fine", 404, "user"]


def test_errors_of_downloads_and_listings(server: HubServer, client: Client, folder: Path) -> None:
    server.add_repo("user/name", folder)
    code = """
result = {
    "entry": call(hf_hub_download, "user/name", "none.json")["error"],
    "revision": call(hf_hub_download, "user/name", "config.json", revision="none")["error"],
    "repository": call(hf_hub_download, "user/none", "config.json")["error"],
    "by hash": Path(hf_hub_download("user/name", "config.json", revision=api.model_info("user/name").sha)).read_text(),
    "subfolder": Path(hf_hub_download("user/name", "config.json", subfolder="1_Pooling")).read_text(),
    "top": [entry.path for entry in api.list_repo_tree("user/name")],
    "inside": [entry.path for entry in api.list_repo_tree("user/name", "1_Pooling")],
    "none": call(lambda: list(api.list_repo_tree("user/name", "additional_chat_templates")))["error"],
    "all": api.list_repo_files("user/name"),
}
"""
    result = client(code)
    assert result["entry"] == result["none"] == "RemoteEntryNotFoundError"
    assert result["revision"] == "RevisionNotFoundError"
    assert result["repository"] == "RepositoryNotFoundError"
    assert (result["by hash"], result["subfolder"]) == ('{"hidden_size": 8}', "{}")
    assert sorted(result["top"]) == sorted([".gitattributes", *(path.name for path in folder.iterdir())])
    assert result["inside"] == ["1_Pooling/config.json"]
    assert sorted(result["all"]) == sorted(server.files("user/name"))


def test_environment_carries_no_other_hub_setting(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "https_proxy", "TRANSFORMERS_CACHE"):
        monkeypatch.setenv(name, "1")
    settings = {name: value for name, value in server.environment(tmp_path).items() if os.environ.get(name) != value}
    assert all(name.startswith("HF_") or name == "NO_PROXY" for name in settings)
    assert settings["HF_ENDPOINT"] == server.endpoint
    assert settings.keys().isdisjoint({"HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "https_proxy"})
    assert server.environment(tmp_path, "hf_read")["HF_TOKEN"] == "hf_read"
