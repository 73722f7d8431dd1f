"""Push to a loopback server that speaks the Hub's protocol, and load from it, in real processes of their own."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, published_nomic, tiny_tokenizer
from helpers.processes import STRANGER
from hub.hub_server import HubServer
from sentence_transformers import SentenceTransformer

from mote.remote.modeling_mote import MoTEModel

ROOT = Path(__file__).parents[1]

LOAD = (
    STRANGER
    + """
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

name, inputs = sys.argv[1:]
batch = torch.load(inputs)
model = AutoModel.from_pretrained(name, trust_remote_code=True)
with torch.no_grad():
    outputs = {task: model(**batch, task=task).pooler_output for task in model.config.experts}
encoder = SentenceTransformer(name, trust_remote_code=True)
outputs["encoded"] = torch.from_numpy(encoder.encode(["a whale", "bread"], prompt_name="search_query"))
torch.save(outputs, inputs + ".outputs")
"""
)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(dense_checkpoint(tmp_path / "tiny"))


def run(server: HubServer, home: Path, *command: str, token: str | None = "hf_write", status: int = 0) -> str:
    """Run Python with a cache and a login of its own; return what it printed."""
    home.mkdir(exist_ok=True)
    environment = {**server.environment(home, token=token), "OMP_NUM_THREADS": "1"}
    settings: dict[str, Any] = {"env": environment, "cwd": home, "stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == status, done.stderr
    return str(done.stdout + done.stderr)


def upcycle(server: HubServer, tmp_path: Path, *arguments: str, token: str | None = "hf_write", status: int = 0) -> str:
    printed = run(server, tmp_path / "home", str(ROOT / "upcycle.py"), *arguments, token=token, status=status)
    assert "Traceback" not in printed
    return printed


def test_from_the_hub_to_the_hub_to_a_stranger(server: HubServer, tmp_path: Path) -> None:
    published_nomic(tmp_path / "nomic", prefix=True, tokenizer=False)
    commit = server.add_repo("nomic-ai/nomic-bert-2048", tmp_path / "nomic")
    server.add_repo("google-bert/bert-base-uncased", tiny_tokenizer(tmp_path / "tokenizer"))
    printed = upcycle(server, tmp_path, "--src", "nomic-ai/nomic-bert-2048", "--push")
    assert 'SentenceTransformer("user/nomic-bert-2048-mote"' in printed

    local = tmp_path / "home" / "nomic-bert-2048-mote"
    pushed = server.files("user/nomic-bert-2048-mote")
    assert contents(local) == {name: content for name, content in pushed.items() if name != ".gitattributes"}
    card, record = pushed["README.md"].decode(), pushed["mote.json"].decode()
    assert f'"revision": "{commit}"' in record
    assert "base_model: nomic-ai/nomic-bert-2048" in card
    assert str(tmp_path) not in card + record

    batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    torch.save(batch, tmp_path / "batch")
    words = ["user/nomic-bert-2048-mote", str(tmp_path / "batch")]
    run(server, tmp_path / "fresh", "-c", LOAD, *words, token=None)
    outputs = torch.load(tmp_path / "batch.outputs")
    model = MoTEModel.from_pretrained(local)
    with torch.no_grad():
        for task in model.config.experts:
            assert torch.equal(outputs[task], model(**batch, task=task).pooler_output)
    encoder = SentenceTransformer(str(local), trust_remote_code=True)
    encoded = torch.from_numpy(encoder.encode(["a whale", "bread"], prompt_name="query"))
    assert (outputs["encoded"] - encoded).abs().max() <= 1e-6


def test_an_exported_expert_is_loaded_by_the_line_on_its_card(server: HubServer, source: str, tmp_path: Path) -> None:
    upcycle(server, tmp_path, "--src", source, "--out", str(tmp_path / "mote"))
    words = ["export", str(tmp_path / "mote"), "--expert", "clustering", "--out", str(tmp_path / "out"), "--push"]
    run(server, tmp_path / "home", "-m", "mote", *words, "--repo-id", "user/exported")
    code = """
import sys
import mote
from sentence_transformers import SentenceTransformer
model = mote.load_exported("user/exported", backend="torch")
assert (model.encode("a whale") == SentenceTransformer(sys.argv[1]).encode("a whale")).all()
"""
    run(server, tmp_path / "fresh", "-c", code, str(tmp_path / "out"))


def test_mteb_loads_it_by_name(server: HubServer, source: str, tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    upcycle(server, tmp_path, "--src", source, "--push", "--repo-id", "user/tiny")
    code = """
import mteb
model = mteb.get_model("user/tiny", trust_remote_code=True)
names = {(t, r): model.get_prompt_name(mteb.get_task(t).metadata, r and mteb.types.PromptType(r)) for t, r in [
    ("Banking77Classification", None), ("STSBenchmark", None), ("NFCorpus", "query"), ("NFCorpus", "document")]}
print(sorted(model.model_prompts[name] for name in names.values()))
"""
    prompts = ["classification: ", "classification: ", "search_document: ", "search_query: "]
    assert str(prompts) in run(server, tmp_path / "fresh", "-c", code)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "nothing was started: Token is required"),
        ("hf_unheard_of", "nothing was started: Invalid user token"),
        ("hf_read", "is read-only"),
    ],
)
def test_a_push_that_cannot_succeed_is_not_begun(
    server: HubServer, source: str, tmp_path: Path, token: str | None, message: str
) -> None:
    words = ["--src", source, "--push", "--out", str(tmp_path / "out" / "mote")]
    assert message in upcycle(server, tmp_path, *words, token=token, status=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("endpoint", ["create_repo", "commit"])
def test_a_push_that_is_refused_keeps_the_result(server: HubServer, source: str, tmp_path: Path, endpoint: str) -> None:
    server.faults[endpoint] = 403, "no rights in this namespace"
    words = ["--src", source, "--push", "--repo-id", "user/tiny", "--out", "out"]
    printed = upcycle(server, tmp_path, *words, status=1)
    assert "user/tiny was not pushed: " in printed
    server.faults.clear()
    [remedy] = re.findall("`(mote push .*)`", printed)
    run(server, tmp_path / "home", "-m", *remedy.split())
    folder, uploads = tmp_path / "home" / "out", [each for each in server.requests if each.method == "PUT"]
    assert contents(folder) == {name: server.files("user/tiny")[name] for name in contents(folder)}
    assert 'SentenceTransformer("user/tiny"' in (folder / "README.md").read_text()
    with torch.no_grad():  # as another program trains an expert, which does not know the record's list of files
        model = MoTEModel.from_pretrained(folder)
        next(model.blocks[0].experts["clustering"].parameters()).add_(1)
    model.save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    run(server, tmp_path / "home", "-m", *remedy.split())
    assert len([each for each in server.requests if each.method == "PUT"]) == len(uploads) + 1
    index = json.loads(server.files("user/tiny")["model.safetensors.index.json"])
    weights = {name for name in server.files("user/tiny") if name.endswith(".safetensors")}
    assert weights == {*index["weight_map"].values()}
    assert "notes.txt" not in server.files("user/tiny")


def test_a_hub_that_cannot_be_reached(server: HubServer, source: str, tmp_path: Path) -> None:
    server.endpoint = "http://127.0.0.1:9"
    printed = upcycle(server, tmp_path, "--src", source, "--push", "--out", str(tmp_path / "out"), status=1)
    assert "error: The push would fail, nothing was started: [Errno 111] Connection refused" in printed
    assert not (tmp_path / "out").exists()
