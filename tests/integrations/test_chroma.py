"""Chroma's `EmbeddingFunction` over a MoTE."""

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from ecosystem.promises import Reference

pytest.importorskip("chromadb", reason="the extra `chroma` is not installed")

import chromadb
from chromadb.config import Settings

from mote.integrations.chroma import MoTEEmbeddingFunction

TEXTS = ["Whales breathe air through a blowhole.", "Prices rise and money buys less.", "git reset undoes a commit."]
SETTINGS = Settings(anonymized_telemetry=False)


@pytest.fixture
def client(tmp_path: Path) -> Any:
    return chromadb.PersistentClient(str(tmp_path / "chroma"), SETTINGS)


def filled(client: Any, function: Any) -> Any:
    collection = client.create_collection(f"texts-{uuid.uuid4()}", embedding_function=function)
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    return collection


def test_collections_know_their_function(client: Any, trained_folder: Path, reference: Reference) -> None:
    settings: dict[str, Any] = {"trust_remote_code": True, "device": "cpu", "encode_kwargs": {"batch_size": 2}}
    function = MoTEEmbeddingFunction(trained_folder, query_task="sts", **settings)
    collection = client.get_collection(filled(client, function).name)  # without a function
    assert collection.configuration["embedding_function"] is function  # loaded once
    found = collection.query(query_texts=[TEXTS[1]], n_results=3)
    distances = 1 - reference.embed(TEXTS, "search_document") @ reference.embed(TEXTS[1:2], "sts")[0]
    assert found["distances"][0] == pytest.approx(sorted(distances), abs=1e-4)
    assert found["documents"][0][0] == TEXTS[distances.argmin()]
    assert collection.configuration_json["embedding_function"] == {
        "name": "mote",
        "type": "known",
        "config": {
            **settings,
            "model": str(trained_folder),
            "query_task": "sts",
            "document_task": None,
            "revision": None,
        },
    }


REOPEN = """
import sys
import chromadb
{imports}
collection = chromadb.PersistentClient(sys.argv[1]).get_collection(sys.argv[2])
try:
    found = collection.query(query_texts=[sys.argv[3]], n_results=3)
    again = collection.query(query_texts=[sys.argv[3]], n_results=3)
    assert found["distances"] == again["distances"]
    print(*found["distances"][0])
    configuration = collection.configuration
    assert configuration["embedding_function"] is collection.configuration["embedding_function"], "loaded twice"
except ValueError as error:
    print(error)
"""


def reopened(tmp_path: Path, name: str, imports: str) -> str:
    command = [sys.executable, "-c", REOPEN.format(imports=imports), str(tmp_path / "chroma"), name, TEXTS[1]]
    environment = {**os.environ, "ANONYMIZED_TELEMETRY": "False"}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", env=environment).stdout


@pytest.mark.processes
def test_reopened_in_another_process(
    client: Any, trained_folder: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_folder.parent)
    function = MoTEEmbeddingFunction(trained_folder.name, trust_remote_code=True, query_task="clustering", device="cpu")
    name = filled(client, function).name
    distances = [float(each) for each in reopened(tmp_path, name, "import mote.integrations.chroma").split()]
    expected = 1 - reference.embed(TEXTS, "search_document") @ reference.embed(TEXTS[1:2], "clustering")[0]
    assert distances == pytest.approx(sorted(expected), abs=1e-4)
    assert "Embedding function mote not found" in reopened(tmp_path, name, "")


def test_a_loaded_model_has_no_name_to_store(model: Any) -> None:
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object"):
        MoTEEmbeddingFunction(model)
