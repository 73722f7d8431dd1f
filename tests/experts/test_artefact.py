"""One expert in files of its own."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import (
    assert_same,
    edit_json,
    edit_weights,
    files_in,
    read_json,
    tensors_of,
    tiny_tokenizer,
    trusted,
)
from helpers.families import all_families, batch, make_different, trained_mote
from helpers.kills import stop_everywhere
from helpers.on_disk import add, base_hash, hidden
from helpers.processes import run_python
from hub.hub_server import HubServer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel

import mote
from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts import extract, list_experts, open_expert
from mote.experts.artefact import base_hash as hash_of
from mote.remote.modeling_mote import MoTEModel


@all_families
def test_extract_and_add_are_exact(name: str, tmp_path: Path) -> None:
    mote_layers = "every_other" if name in ("bert", "gemma2") else "every"
    model = trained_mote(name, mote_layers=mote_layers, instructions={"beta": "b: "}, tasks={"more": "beta"})
    tiny_tokenizer(tmp_path / "whole")
    model.save_pretrained(tmp_path / "whole", max_shard_size="10KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    files = extract(str(tmp_path / "whole"), "beta", tmp_path / "beta")
    assert_same(load_file(files / "expert.safetensors"), mote.experts.weights(model, "beta"))
    mote.transform(tmp_path / "whole", tmp_path / "without", mote.experts.remove, "beta", tasks={"more": None})
    add(tmp_path / "without", files, tmp_path / "again")
    assert len({base_hash(tmp_path / folder) for folder in ("whole", "without", "again")}) == 1
    again = MoTEModel.from_pretrained(tmp_path / "again")
    assert (again.config.tasks, again.config.instructions) == (model.config.tasks, model.config.instructions)
    for task in ("alpha", "beta", "more"):
        assert hidden(tmp_path / "again", task).equal(hidden(tmp_path / "whole", task))
    extract(str(tmp_path / "again"), "beta", tmp_path / "twice")
    one, other = ((tmp_path / folder / "expert.safetensors").read_bytes() for folder in ("beta", "twice"))
    assert one == other


def description(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "expert.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["mote"])


def test_files_of_an_artefact(with_legal: Path, legal: Path, tiny_mote: Path) -> None:
    assert files_in(legal) == {"expert.safetensors", "mote.json"}
    named = {"name": "legal", "tasks": ["legal", "contracts"], "instructions": {"legal": "legal: "}}
    assert description(legal) == {**named, "base": base_hash(tiny_mote)}
    steps = read_steps(legal)
    assert [step["step"] for step in steps] == ["upcycle", "add", "extract"]
    assert steps[-1]["command"] == "mote experts extract legal-mote legal --out legal"
    assert not any(str(with_legal.parent).encode() in (legal / name).read_bytes() for name in files_in(legal))


@pytest.mark.long
def test_a_mote_to_which_an_expert_was_added(tiny_mote: Path, with_legal: Path, legal: Path, tmp_path: Path) -> None:
    out = add(tiny_mote, legal, tmp_path / "out")
    assert files_in(out) == {*files_in(with_legal)}
    for task in ("legal", "contracts", "search_query", "clustering"):
        assert hidden(out, task).equal(hidden(with_legal, task))
    model = trusted(out)
    assert model.prompts["legal"] == model.prompts["contracts"] == "legal: "
    assert model.prompts["mine"] == "My: "
    card = (out / "README.md").read_text()
    assert "| `contracts` | `legal` | `legal: ` |" in card
    assert "made by adding the expert `legal` to" in card
    assert "Not trained yet" not in card
    step = read_steps(out)[-1]
    assert step["experts"]["legal"] == ["legal", "contracts"]
    assert [source["name"] for source in step["sources"]] == ["mote", "legal"]


@pytest.mark.parametrize("remote", [False, True])
def test_an_artefact_in_memory(remote: bool, tiny_mote: Path, with_legal: Path, legal: Path) -> None:
    model: Any = AutoModel.from_pretrained(tiny_mote, trust_remote_code=True) if remote else mote.load(tiny_mote)
    assert (type(model) is not MoTEModel) == remote
    model.eval()
    mote.experts.add(model, "law", open_expert(legal), instruction={"law": "law: ", "contracts": "contract: "})
    assert model.config.instruction_of("contracts") == "contract: "
    mote.experts.merge(model, {"search_query": 1, open_expert(legal): 1}, "both")
    with torch.no_grad():
        assert model(**batch(), task="contracts").last_hidden_state.equal(hidden(with_legal, "legal"))
        next(iter(model.blocks[0].shared.parameters())).add_(1e-3)
    with pytest.raises(ValueError, match="has another base than"):
        mote.experts.add(model, "other", open_expert(legal))
    assert "other" not in model.config.tasks


def test_an_expert_without_an_instruction_stays_without_one(dense: Path, tmp_path: Path) -> None:
    """Not even with the paper's, which a new expert of such a name gets."""
    find = {"search_query": "Find passages"}
    upcycle(str(dense), tmp_path / "whole", definitions=find)
    upcycle(str(dense), tmp_path / "part", experts=["search_query", "clustering"], definitions=find)
    files = extract(str(tmp_path / "whole"), "search_document", tmp_path / "files")
    assert description(files)["instructions"] == {"search_document": ""}
    config = MoTEModel.from_pretrained(add(tmp_path / "part", files, tmp_path / "out")).config
    assert config.instruction_of("search_document") == config.instruction_of("document") == ""


def test_tasks_that_another_expert_has_stay_there(tiny_mote: Path, tmp_path: Path) -> None:
    files = extract(str(tiny_mote), "classification", tmp_path / "files")
    out = add(tiny_mote, files, tmp_path / "out", name="second", instruction="2: ", tasks=["sts"])
    tasks = MoTEModel.from_pretrained(out).config.tasks
    assert (tasks["sts"], tasks["summarization"]) == ("second", "classification")
    with pytest.raises(ValueError, match=r"instruction 'classification: ' .* already stands for"):
        add(tiny_mote, files, tmp_path / "twice", name="third")
    assert not (tmp_path / "twice").exists()


def test_a_folder_with_some_of_its_experts(with_legal: Path, legal: Path, tmp_path: Path) -> None:
    partial = shutil.copytree(with_legal, tmp_path / "partial")
    (partial / "model.safetensors").unlink()
    MoTEModel.from_pretrained(with_legal, experts=["clustering"]).save_pretrained(partial)
    assert "not here" in str(list_experts(str(partial)))
    assert base_hash(partial) == base_hash(with_legal)
    with pytest.raises(ValueError, match="Unknown expert 'legal'"):
        extract(str(partial), "legal", tmp_path / "out")
    out = add(partial, legal, tmp_path / "more", name="law", instruction="law: ")
    config = MoTEModel.from_pretrained(out).config
    assert config.available_experts == ["clustering", "law"]
    assert [task for task, expert in config.tasks.items() if expert == "law"] == ["law"]
    assert hidden(out, "law").equal(hidden(with_legal, "legal"))


@pytest.mark.long
def test_the_base_hash_tells_bases_apart(tiny_mote: Path, dense: Path, tmp_path: Path) -> None:
    model = MoTEModel.from_pretrained(tiny_mote)
    first, state = base_hash(tiny_mote), model.state_dict()
    shared = [key for key in state if ".experts." not in key]
    assert len(shared) > 20
    for key in shared:
        state[key].view(-1).view(torch.int32)[-1] ^= 1  # the last bit of the last number
        assert hash_of(model.config, state, state.__getitem__) != first
        state[key].view(-1).view(torch.int32)[-1] ^= 1
    assert hash_of(model.config, state, state.__getitem__) == first
    others: list[dict[str, Any]] = [{}, {"pooling": "cls"}, {"layers": "every_other"}, {"dtype": "bfloat16"}]
    made = [upcycle(str(dense), tmp_path / str(number), **other) for number, other in enumerate(others)]
    assert len({base_hash(folder) for folder in made}) == 4
    config = read_json(tiny_mote / "config.json")
    for number, changed in enumerate(({"layer_norm_eps": 1e-3}, {"hidden_act": "relu"})):
        folder = shutil.copytree(tiny_mote, tmp_path / f"config{number}")
        edit_json(folder / "config.json", backbone_config={**config["backbone_config"], **changed})
        assert base_hash(folder) != first


def test_the_base_hash_knows_the_base_again(upcycled: Path, dense: Path, tmp_path: Path) -> None:
    upcycle(str(dense), tmp_path / "others", experts=["a", "b"])
    model = MoTEModel.from_pretrained(upcycled)
    model.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    make_different(model)
    model.config.backbone_config.hidden_dropout_prob = 0.5
    model.config.backbone_config._name_or_path = "elsewhere"
    model.save_pretrained(tmp_path / "trained")
    assert {base_hash(tmp_path / name) for name in ("others", "saved", "trained")} == {base_hash(upcycled)}


def changed_attention(folder: Path) -> None:
    key = "backbone.encoder.layer.0.shared.attention.self.query.bias"
    edit_weights(folder, **{key: tensors_of(folder)[key] + 1e-6})


def other_type(folder: Path) -> None:
    MoTEModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize("change", [changed_attention, other_type])
def test_a_wrong_base_is_refused(
    change: Callable[[Path], None], tiny_mote: Path, legal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_mote, tmp_path / "other")
    change(folder)
    for verb in (["add", str(folder), str(legal)], ["merge", str(folder), "clustering", str(legal)]):
        assert main(["experts", *verb, "--name", "x", "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert f"error: The expert 'legal' of {legal} has another base than {folder}" in error
        assert f"{base_hash(tiny_mote)} and {base_hash(folder)}. What works: the MoTE that it was" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_killed_while_an_expert_is_extracted(tiny_mote: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "clustering"
    command = ["experts", "extract", tiny_mote, "clustering", "--out", out]
    killed = stop_everywhere(out, *command)
    assert len(killed) >= 4
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} <= {"absent", "new"}


COMMANDS = """
import json, sys
from mote.cli import main
print("statuses", [main(["experts", *command]) for command in json.loads(sys.argv[1])])
"""


def run_mote(server: HubServer, home: Path, *commands: list[Any], token: str | None = None) -> tuple[str, str]:
    """Run commands in one process with a cache and a login of its own."""
    home.mkdir(exist_ok=True)
    words = json.dumps([[str(word) for word in command] for command in commands])
    environment = {**server.environment(home, token=token), "OMP_NUM_THREADS": "1"}
    done = run_python(COMMANDS, words, cwd=home, environment=environment)
    return done.stdout, done.stderr


@pytest.mark.processes
def test_to_the_hub_and_back(tiny_mote: Path, with_legal: Path, tmp_path: Path) -> None:
    push = ["extract", "user/legal-mote", "legal", "--out", "legal", "--push"]
    with HubServer() as server:
        server.add_repo("user/legal-mote", with_legal)
        onto_a_model = [*push, "--repo-id", "user/legal-mote"]
        out, error = run_mote(server, tmp_path / "home", onto_a_model, push, token="hf_write")
        assert "statuses [1, 0]" in out, error
        assert "user/legal-mote holds a whole model" in error
        assert "mote experts add MODEL user/legal --name legal --out DIR" in out
        assert {*server.files("user/legal")} - {".gitattributes"} == {"expert.safetensors", "mote.json"}

        add = ["add", tiny_mote, "user/legal", "--name", "legal", "--out", "new"]
        a_model = ["add", tiny_mote, "user/legal-mote", "--name", "x", "--out", "x"]
        in_place = ["rename", "user/legal-mote", "legal", "law", "--overwrite"]
        listed = ["list", "user/legal-mote"]
        out, error = run_mote(server, tmp_path / "fresh", add, a_model, in_place, push, listed)
        assert "statuses [0, 1, 1, 1, 0]" in out, error
        assert hidden(tmp_path / "fresh" / "new", "legal").equal(hidden(with_legal, "legal"))
        for message in ("expert.safetensors", "Name the folder to write with `--out`\n", "`hf auth login`"):
            assert message in error
        assert base_hash(with_legal) in out
        assert not {"x", "legal"} & {path.name for path in (tmp_path / "fresh").iterdir()}
