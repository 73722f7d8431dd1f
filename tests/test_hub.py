"""Push to a loopback server that speaks the Hub's protocol, and load from it, in real processes of their own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.checkpoints import dense_checkpoint, published_nomic, tiny_tokenizer
from helpers.processes import STRANGER
from hub.hub_server import HubServer

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
one = AutoModel.from_pretrained(name, trust_remote_code=True, experts=["search_query"])
with torch.no_grad():
    assert torch.equal(one(**batch, task="query").pooler_output, outputs["search_query"])
encoder = SentenceTransformer(name, trust_remote_code=True)
outputs["encoded"] = torch.from_numpy(encoder.encode(["a whale", "bread"], prompt_name="search_query"))
torch.save(outputs, inputs + ".outputs")
"""
)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


def run(
    server: HubServer, home: Path, *command: str, token: str | None = "hf_write", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with a cache and a login of its own."""
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *command],
        env={**server.environment(home, token=token), "OMP_NUM_THREADS": "1"},
        cwd=cwd or home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def upcycle(server: HubServer, tmp_path: Path, *arguments: str, token: str | None = "hf_write"):  # noqa: ANN201
    return run(server, tmp_path / "home", str(ROOT / "upcycle.py"), *arguments, token=token)


def test_from_the_hub_to_the_hub_to_a_stranger(server: HubServer, tmp_path: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    from mote.remote.modeling_mote import MoTEModel

    published_nomic(tmp_path / "nomic", prefix=True, tokenizer=False)
    commit = server.add_repo("nomic-ai/nomic-bert-2048", tmp_path / "nomic")
    server.add_repo("google-bert/bert-base-uncased", tiny_tokenizer(tmp_path / "tokenizer"))
    done = upcycle(server, tmp_path, "--src", "nomic-ai/nomic-bert-2048", "--push")
    assert done.returncode == 0, done.stderr
    assert 'AutoModel.from_pretrained("user/nomic-bert-2048-mote"' in done.stdout

    local = tmp_path / "home" / "nomic-bert-2048-mote"
    pushed = server.files("user/nomic-bert-2048-mote")
    assert {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()} == set(pushed) - {
        ".gitattributes"
    }
    assert all((local / name).read_bytes() == content for name, content in pushed.items() if name != ".gitattributes")
    assert f'"revision": "{commit}"' in pushed["mote.json"].decode()
    assert "base_model: nomic-ai/nomic-bert-2048" in pushed["README.md"].decode()
    assert str(tmp_path) not in pushed["README.md"].decode() + pushed["mote.json"].decode()

    batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    torch.save(batch, tmp_path / "batch")
    loaded = run(
        server, tmp_path / "fresh", "-c", LOAD, "user/nomic-bert-2048-mote", str(tmp_path / "batch"), token=None
    )
    assert loaded.returncode == 0, loaded.stderr
    outputs = torch.load(tmp_path / "batch.outputs")
    model = MoTEModel.from_pretrained(local)
    with torch.no_grad():
        for task in model.config.experts:
            assert torch.equal(outputs[task], model(**batch, task=task).pooler_output)
    encoder = SentenceTransformer(str(local), trust_remote_code=True)
    encoded = torch.from_numpy(encoder.encode(["a whale", "bread"], prompt_name="query"))
    assert (outputs["encoded"] - encoded).abs().max() <= 1e-6


def test_an_expert_halfway_to_a_dense_model_on_the_hub(server: HubServer, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny")
    commit = server.add_repo("user/tiny", source)
    assert upcycle(server, tmp_path, "--src", str(source), "--out", str(tmp_path / "mote")).returncode == 0
    words = ["experts", "merge", str(tmp_path / "mote"), "clustering=0.5", "user/tiny=0.5", "--name", "near_start"]
    done = run(server, tmp_path / "home", "-m", "mote", *words, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    record = (tmp_path / "out" / "mote.json").read_text(encoding="utf-8")
    assert f'"revision": "{commit}"' in record
    assert "mote experts merge mote clustering=0.5 user/tiny=0.5 --name near_start" in record


def test_an_exported_expert_is_loaded_by_the_line_on_its_card(server: HubServer, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny")
    assert upcycle(server, tmp_path, "--src", str(source), "--out", str(tmp_path / "mote")).returncode == 0
    words = ["export", str(tmp_path / "mote"), "--expert", "clustering", "--out", str(tmp_path / "out"), "--push"]
    done = run(server, tmp_path / "home", "-m", "mote", *words, "--repo-id", "user/exported")
    assert done.returncode == 0, done.stderr
    code = """
import sys
import mote
from sentence_transformers import SentenceTransformer
model = mote.load_exported("user/exported", backend="torch")
assert (model.encode("a whale") == SentenceTransformer(sys.argv[1]).encode("a whale")).all()
"""
    done = run(server, tmp_path / "fresh", "-c", code, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr


def test_mteb_loads_it_by_name(server: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    source = dense_checkpoint(tmp_path / "tiny")
    assert upcycle(server, tmp_path, "--src", str(source), "--push", "--repo-id", "user/tiny").returncode == 0
    code = """
import mteb
model = mteb.get_model("user/tiny", trust_remote_code=True)
names = {(t, r): model.get_prompt_name(mteb.get_task(t).metadata, r and mteb.types.PromptType(r)) for t, r in [
    ("Banking77Classification", None), ("STSBenchmark", None), ("NFCorpus", "query"), ("NFCorpus", "document")]}
print(sorted(model.model_prompts[name] for name in names.values()))
"""
    done = run(server, tmp_path / "fresh", "-c", code)
    assert done.returncode == 0, done.stderr
    prompts = ["classification: ", "classification: ", "search_document: ", "search_query: "]
    assert str(prompts) in done.stdout


def test_pushing_again_updates_the_repository(server: HubServer, tmp_path: Path) -> None:
    source = str(dense_checkpoint(tmp_path / "tiny"))
    push = ["--src", source, "--push", "--repo-id", "user/tiny", "--out", "out", "--private"]
    assert upcycle(server, tmp_path, *push, "--max-shard-size", "20KB").returncode == 0
    assert len([name for name in server.files("user/tiny") if name.endswith(".safetensors")]) > 1
    done = upcycle(server, tmp_path, *push, "--overwrite")
    assert done.returncode == 0, done.stderr
    files = server.files("user/tiny")
    assert [name for name in files if "safetensors" in name] == ["model.safetensors"]
    anonymous = run(server, tmp_path / "fresh", "-c", LOAD, "user/tiny", str(tmp_path / "none"), token=None)
    assert anonymous.returncode != 0  # private


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "log in with `hf auth login`"),
        ("hf_unheard_of", "nothing was started: Invalid user token"),
        ("hf_read", "may only read"),
    ],
)
def test_a_push_that_cannot_succeed_is_not_begun(
    server: HubServer, tmp_path: Path, token: str | None, message: str
) -> None:
    source = str(dense_checkpoint(tmp_path / "tiny"))
    done = upcycle(server, tmp_path, "--src", source, "--push", "--out", str(tmp_path / "out" / "mote"), token=token)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("endpoint", ["create_repo", "commit"])
def test_a_push_that_is_refused_keeps_the_result(server: HubServer, tmp_path: Path, endpoint: str) -> None:
    source = str(dense_checkpoint(tmp_path / "tiny"))
    server.fail(endpoint, 403, "no rights in this namespace")
    done = upcycle(server, tmp_path, "--src", source, "--push", "--repo-id", "user/tiny", "--out", "out")
    assert done.returncode == 1
    assert "user/tiny was not pushed: " in done.stderr
    assert "hf upload user/tiny" in done.stderr
    assert "Traceback" not in done.stderr
    server.heal()
    hf = [str(Path(sys.executable).parent / "hf"), "upload", "user/tiny", str(tmp_path / "home" / "out")]
    environment = server.environment(tmp_path / "home", token="hf_write")
    if endpoint == "commit":  # the remedy that the message names
        subprocess.run(hf, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        assert "model.safetensors" in server.files("user/tiny")


def test_a_hub_that_cannot_be_reached(server: HubServer, tmp_path: Path) -> None:
    source = str(dense_checkpoint(tmp_path / "tiny"))
    environment = {**server.environment(tmp_path / "home", token="hf_write"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, str(ROOT / "upcycle.py"), "--src", source, "--push", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "error: The push would fail, nothing was started: [Errno 111] Connection refused" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_push_that_breaks_off_keeps_the_result(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    from mote.hub import push

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: HfApi(endpoint="http://127.0.0.1:9").whoami(token="x"))
    with pytest.raises(ConnectionError, match=r"(?s)user/tiny was not pushed: .*hf upload user/tiny"):
        push(tmp_path, "user/tiny", ["config.json"])


def test_a_source_that_the_hub_does_not_have(server: HubServer, tmp_path: Path) -> None:
    for source, message in (
        ("nobody/nothing", "neither a folder nor available on the Hub"),
        ("not a name", "neither a folder nor an id on the Hub"),
    ):
        done = upcycle(server, tmp_path, "--src", source)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert list((tmp_path / "home").glob("*mote*")) == []
