"""Single experts on a loopback Hub: what clients fetch from an empty cache, and what they push."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, read_json
from helpers.families import make_different
from helpers.processes import run_python
from hub.hub_server import HubServer
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

from mote import upcycle
from mote.remote.modeling_mote import MoTEModel

pytestmark = pytest.mark.processes

Results = dict[str, Any]
EXPERTS = [f"e{number:02}" for number in range(16)]
INDEX = "model.safetensors.index.json"

# Evaluates expressions, each with a repository, and prints what they return or raise.
CLIENT = """
import contextlib, io, json, sys, tempfile, torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel
import mote
from mote.cli import main
def auto(repo, **settings):
    return AutoModel.from_pretrained(repo, trust_remote_code=True, **settings)
def encoder(repo, **settings):
    return SentenceTransformer(repo, trust_remote_code=True, model_kwargs=settings)
def cli(*words):
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = main([*words])
    return printed.getvalue() if status else 0
def vector(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 6, 7]]), task="e03").pooler_output[0].tolist()
def change(model):
    with torch.no_grad():
        [weight.mul_(2) for block in model.blocks for weight in block.experts["e03"].parameters()]
def push(repo, model, **settings):
    change(model[0].model if isinstance(model, SentenceTransformer) else model)
    model.push_to_hub(repo, **settings)

results = []
for repo, code in json.loads(sys.argv[1]):
    out = tempfile.mkdtemp(dir=".")
    to = ["--out", out, "--push", "--repo-id", repo]
    options = mote.WriteOptions(push=True, repo_id=repo)
    try:
        results.append(eval(code))
    except Exception as error:
        results.append(f"{type(error).__name__}: {error}")
print("RESULTS", json.dumps(results, default=str))
"""


PAIRS = """
tasks: {t: {batches: homogeneous, anchor: e03, positive: e03, datasets: [pairs.jsonl]}}
training: {batch_size: 2, max_steps: 1}
validation: {share: 0}
"""


class World(NamedTuple):
    """Two states of a model of sixteen experts, between which `e03` was trained, and a Hub."""

    old: Path
    new: Path
    home: Path  # of the clients
    server: HubServer

    def evaluate(self, codes: Mapping[str, str], token: str | None = None, **settings: str) -> Results:
        """Evaluate expressions, by repository and anything behind a blank, in a process of its own."""
        environment = {**self.server.environment(self.home, token), "OMP_NUM_THREADS": "1", **settings}
        rows = [(f"user/{name.split()[0]}", code) for name, code in codes.items()]
        done = run_python(CLIENT, json.dumps(rows), cwd=self.home, environment=environment)
        return dict(zip(codes, json.loads(done.stdout.rpartition("RESULTS ")[2]), strict=True))

    def add(self, name: str, private: bool) -> list[str]:
        """Create a repository with both states; return their commits."""
        self.server.create_repo(f"user/{name}", private)
        return [self.server.add_repo(f"user/{name}", folder) for folder in (self.old, self.new)]

    def moved(self, name: str, method: str = "GET") -> dict[str, int]:
        """Count the bytes that clients got of each file, or put into the storage."""
        commits = self.server.repos[f"user/{name}"].commits
        files = {blob.sha256: file for commit in commits for file, blob in commit.files.items()}
        sizes: Counter[str] = Counter()
        for request in self.server.requests:
            path = re.fullmatch(f"/storage/user/{name}/(.+)|/user/{name}/resolve/[^/]+/(.+)", request.path)
            if path and request.method == method and request.status < 300:
                sizes[path[2] or files.get(path[1], path[1])] += request.sent + request.received
        return dict(sizes)


def weights(files: Iterable[str]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def sizes(folder: Path, experts: list[str], shared: bool = True) -> dict[str, int]:
    """Return the sizes of the files of experts."""
    index = read_json(folder / INDEX)["metadata"]["mote"]
    files = [*index["shared"] * shared, *(index["experts"][name] for name in experts)]
    return {name: (folder / name).stat().st_size for name in files}


@cache
def vector(folder: Path) -> Any:
    with torch.no_grad():
        output = MoTEModel.from_pretrained(folder)(input_ids=torch.tensor([[5, 6, 7]]), task="e03").pooler_output
    return pytest.approx(output[0].tolist(), abs=1e-6)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    dense_checkpoint(folder / "tiny", sentence_transformers={"normalize": True})
    old = upcycle(str(folder / "tiny"), folder / "old", experts=EXPERTS)
    make_different(MoTEModel.from_pretrained(old)).save_pretrained(old)
    new = shutil.copytree(old, folder / "new")
    make_different(MoTEModel.from_pretrained(new, experts=["e03"])).save_pretrained(new)
    (folder / "home").mkdir()
    (folder / "home/texts.jsonl").write_text('{"text": "a whale"}\n')
    (folder / "home/pairs.jsonl").write_text('["a whale", "it swims"]\n["a crow", "it flies"]\n' * 2)
    (folder / "home/pairs.yaml").write_text(PAIRS)
    with HubServer() as server:
        yield World(old, new, folder / "home", server)


WAYS = {
    "AutoModel": 'vector(auto(repo, experts=["e03"]))',
    "SentenceTransformer": 'vector(encoder(repo, experts=["e03"])[0].model)',
    "load": 'vector(mote.load(repo, experts="e03"))',
    "embed": 'cli("embed", repo, "texts.jsonl", "--task", "e03", "--trust-remote-code", "--out", out)',
    "export": 'cli("export", repo, "--expert", "e03", "--out", out)',
    "extract": 'cli("experts", "extract", repo, "e03", "--out", out + "/one.safetensors")',
    "add": 'cli("experts", "add", LOCAL, repo + ":e03", "--name", "one", "--out", out)',
    "pinned": 'vector(auto(repo, experts=["e03"], revision=OLD))',
    "pinned-export": 'cli("export", repo, "--expert", "e03", "--revision", OLD, "--out", out)',
    "token": 'vector(auto(repo, experts=["e03"], token="hf_read"))',
    "all": "(auto(repo).save_pretrained(out), vector(encoder(out)[0].model))[1]",
}
OFFLINE = ["AutoModel", "SentenceTransformer", "load", "embed", "export", "extract"]
REFUSED = ["AutoModel", "SentenceTransformer", "load", "export", "add"]  # without a token


@pytest.fixture(scope="module")
def fetched(world: World) -> Results:
    """What ways to an expert returned, each from a repository of its own, of which the cache has nothing."""
    codes = WAYS | {f"private-{way}": WAYS[way] for way in REFUSED} | {"broken": WAYS["load"]}
    for name, code in codes.items():
        old, _ = world.add(name, private=name.startswith(("private", "token")))
        codes[name] = code.replace("OLD", repr(old)).replace("LOCAL", repr(str(world.new)))
    world.server.faults[broken_path(world)] = 403, "not today"
    return world.evaluate(codes)


def broken_path(world: World) -> str:
    files = world.server.repos["user/broken"].at("main").files
    return f"/storage/user/broken/{files[next(iter(sizes(world.new, ['e03'], shared=False)))].sha256}"


@pytest.mark.parametrize("way", WAYS)
def test_only_the_files_of_an_expert_are_fetched(way: str, world: World, fetched: Results) -> None:
    folder, shared = world.old if "OLD" in WAYS[way] else world.new, way not in ("extract", "add")
    assert fetched[way] in (0, vector(folder))
    expected, found = sizes(folder, EXPERTS if way == "all" else ["e03"], shared), world.moved(way)
    assert {file: found[file] for file in weights(found)} == expected
    assert shared or found.keys() == {*expected, INDEX, "config.json"}


def test_training_starts_from_a_model_on_the_hub(world: World) -> None:
    """With the installed code, and with that of the repository."""
    codes = {}
    for name, trusting in (("installed", 0), ("own", 1)):
        world.add(name, private=False)
        more = f'"model.source=" + repo, "output=" + out, "model.trust_remote_code={trusting}"'
        codes[name] = f'cli("train", "pairs.yaml", {more})'
    assert world.evaluate(codes) == {"installed": 0, "own": 0}


def test_an_adapter_on_the_hub_becomes_an_expert(world: World, tmp_path: Path) -> None:
    settings = LoraConfig(target_modules=r".*\d\.(intermediate|output)\.dense", init_lora_weights=False)
    adapted = get_peft_model(AutoModel.from_pretrained(world.home.parent / "tiny"), settings)
    adapted.peft_config["default"].base_model_name_or_path = "user/tiny"
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    for name, folder in (("tiny", world.home.parent / "tiny"), ("lora", tmp_path)):
        world.server.create_repo(f"user/{name}", private=False)
        world.server.add_repo(f"user/{name}", folder)
    made = 'str(mote.upcycle("user/tiny", out + "/mote"))'
    add = f'cli("experts", "add", {made}, repo, "--name=one", "--out", out + "/new")'
    found = world.evaluate({"lora": f'({add}, mote.load(out + "/new").config.available_experts[-1])'})
    assert found == {"lora": [0, "one"]}
    assert world.moved("lora").keys() == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("way", REFUSED)
def test_a_private_model_without_a_token(way: str, world: World, fetched: Results) -> None:
    assert "a private " in fetched[f"private-{way}"]
    assert world.moved(f"private-{way}") == {}


def test_a_download_that_broke_off(world: World, fetched: Results) -> None:
    """huggingface_hub starts again with the one file that was not complete."""
    assert "lacks the files of the experts 'e03'" in fetched["broken"]
    assert weights(world.moved("broken")) == [*sizes(world.new, [])]
    del world.server.faults[broken_path(world)]
    world.server.cuts[broken_path(world)] = 5000
    assert world.evaluate({"broken": WAYS["load"]}) == {"broken": vector(world.new)}
    found, (shared, expert) = world.moved("broken"), sizes(world.new, ["e03"]).items()
    assert [(file, found[file]) for file in weights(found)] == [shared, (expert[0], expert[1] + 5000)]


@pytest.fixture(scope="module")
def offline(world: World, fetched: Results) -> Results:
    """What ways to an expert return without a connection, for the one in the cache, for another, and for all."""
    codes = {f"{way} {name}": WAYS[way].replace("e03", name) for way in OFFLINE for name in ("e03", "e04")}
    before = len(world.server.requests)
    results = world.evaluate({**codes, "AutoModel all": WAYS["all"]}, HF_HUB_OFFLINE="1")
    assert len(world.server.requests) == before
    return results


@pytest.mark.parametrize("way", OFFLINE)
def test_offline_only_what_is_missing_fails(way: str, world: World, offline: Results) -> None:
    assert offline[f"{way} e03"] in (0, vector(world.new))
    assert "'e04'" in offline[f"{way} e04"]
    assert {*re.findall(r"'(e\d\d)'", offline["AutoModel all"])} == {*EXPERTS} - {"e03"}


# Change → what makes it, and the experts whose files are new, and gone.
CHANGES = {
    "add": ('cli("experts", "add", repo, "e03", "--name", "more", *to)', ["more"], []),
    "replace": ("mote.transform(repo, out, change, options=options)", ["e03"], ["e03"]),
    "rename": ('cli("experts", "rename", repo, "e03", "more", *to)', ["more"], ["e03"]),
    "remove": ('cli("experts", "remove", repo, "e03", *to)', [], ["e03"]),
    "set": ('cli("set", repo, "--instruction", "e03=Three: ", *to)', ["e03"], ["e03"]),
    # transformers only adds files: the old one is still there, but not in the index
    "AutoModel": ('push(repo, auto(repo, experts=["e03"]))', ["e03"], []),
    "load": ('push(repo, mote.load(repo, experts="e03"))', ["e03"], []),
    "SentenceTransformer": ('push(repo, encoder(repo, experts=["e03"]), exist_ok=True)', ["e03"], []),
}
# The first of two changes, and both.
TWO = {
    "command": ("add", '({}, cli("experts", "remove", repo, "e04", "--revision", NEW, "--out", out + "2", *to[2:]))'),
    "model": ("add", '(m := mote.load(repo, experts="e03"), {}, push(repo, m))'),
    "whole": ("add", "(m := mote.load(repo), {}, push(repo, m))"),
    "setting": ("set", '(m := mote.load(repo, experts="e03"), {}, push(repo, m))'),
}
SAVED = """(
    m := encoder(repo, experts=["e03"]), push(repo, m, exist_ok=True), m.save(out),
    mote.load(out).config.available_experts,
)"""


@pytest.fixture(scope="module")
def pushed(world: World) -> Results:
    """What changes returned, each in a private repository."""
    codes = {f"{name}-changed": code for name, (code, *_) in CHANGES.items()}
    codes |= {f"two-{name}": code.format(CHANGES[first][0]) for name, (first, code) in TWO.items()} | {"saved": SAVED}
    for name, code in codes.items():
        codes[name] = code.replace("NEW", repr(world.add(name, private=True)[1]))
    return world.evaluate(codes, token="hf_write")


def experts_at(world: World, name: str, folder: Path) -> list[str]:
    """Load the model in a repository, and return its experts."""
    for file, content in world.server.files(f"user/{name}").items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    return sorted(MoTEModel.from_pretrained(folder).config.available_experts)


@pytest.mark.parametrize("name", CHANGES)
def test_only_the_file_of_a_changed_expert_is_pushed(name: str, world: World, pushed: Results, tmp_path: Path) -> None:
    _, new, gone = CHANGES[name]
    before, after = contents(world.new), world.server.files(f"user/{name}-changed")
    assert experts_at(world, f"{name}-changed", tmp_path) == sorted({*EXPERTS} - {*gone} | {*new})
    put, changed = sizes(tmp_path, new, shared=False), [file for file in after if before.get(file) != after[file]]
    assert world.moved(f"{name}-changed", "PUT") == put, pushed[f"{name}-changed"]
    assert weights(changed) == sorted(put)
    assert weights(before.keys() - after.keys()) == [*sizes(world.new, gone, shared=False)]
    assert not any(file.endswith(".py") for file in changed)


@pytest.mark.parametrize("way", TWO)
def test_the_second_of_two_changes_is_refused(way: str, world: World, pushed: Results) -> None:
    first, _ = TWO[way]
    assert weights(world.server.files(f"user/two-{way}")) == weights(world.server.files(f"user/{first}-changed"))
    if way == "command":
        assert re.search("A commit has happened since.* change its newest state", pushed["two-command"][1])


def test_a_model_that_was_pushed_is_saved_with_its_own_experts(pushed: Results) -> None:
    assert pushed["saved"][3:] == [["e03"]]
