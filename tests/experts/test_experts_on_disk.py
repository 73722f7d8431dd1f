"""MoTEs on disk with an expert added, removed or renamed."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import contents, edit_json, files_in, read_json, tensors_of
from helpers.kills import stop_everywhere
from helpers.on_disk import add, base_hash, hidden, last_hidden, merge

import mote
from mote import WriteOptions, upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts import extract, list_experts, open_expert
from mote.remote.modeling_mote import MoTEModel


@pytest.mark.long
def test_merging(tiny_mote: Path, with_legal: Path, legal: Path, tmp_path: Path) -> None:
    out = merge(tiny_mote, {"search_query": 1, str(legal): 3}, "both", tmp_path / "out", tasks=["x", "y"])
    weights, whole = (tensors_of(folder) for folder in (out, with_legal))
    for key, weight in weights.items():
        if ".experts.both." in key:
            query, other = (whole[key.replace("both", name)].double() for name in ("search_query", "legal"))
            assert weight.equal((0.25 * query + 0.75 * other).float())
    model = MoTEModel.from_pretrained(out)
    assert model.config.tasks["y"] == "both"
    mote.experts.remove(model, "both", tasks={"x": None, "y": None})
    mote.experts.merge(model, dict.fromkeys(model.config.experts, 0.7), "middle")
    assert last_hidden(model, task="middle").equal(last_hidden(mote.experts.average(mote.load(tiny_mote))))
    alone = merge(tiny_mote, {str(legal): 0.1}, "alone", tmp_path / "alone")
    assert hidden(alone, "alone").equal(hidden(with_legal, "legal"))


def test_removed_and_renamed_in_place(with_legal: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(with_legal, tmp_path / "mote")
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    (folder / "my-model.safetensors").write_text("mine as well")
    before = hidden(folder, "legal")
    assert main(["experts", "rename", str(folder), "legal", "law", "--overwrite"]) == 0
    remove = ["experts", "remove", str(folder), "classification", "--overwrite"]
    assert main([*remove, "--task", "sts=law", "--task", "pair_classification=", "--task", "summarization="]) == 0
    assert hidden(folder, "law").equal(hidden(folder, "sts"))
    assert hidden(folder, "law").equal(before)
    assert (folder / "notes" / "mine.txt").read_text() == "mine"
    names = {name.replace("legal", "law") for name in files_in(with_legal)} - {
        "model-expert-classification.safetensors"
    }
    assert files_in(folder) == {*names, "notes/mine.txt", "my-model.safetensors"}
    same = [file.name for file in folder.glob("model-*") if (with_legal / file.name).exists()]
    assert len(same) == 4  # the base, and the experts that were not touched
    assert [path.name for path in tmp_path.iterdir()] == ["mote"]
    prompts = read_json(folder / "config_sentence_transformers.json")["prompts"]
    assert not {"classification", "Classification", "legal", "summarization"} & prompts.keys()
    assert prompts["STS"] == prompts["law"] == "legal: "
    *_, renamed, removed = read_steps(folder)
    assert removed["command"].startswith("mote experts remove mote classification --task sts=law ")
    assert renamed["command"] == "mote experts rename mote legal law --overwrite"


def test_shards_of_a_model_changed_in_place(with_legal: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mote"
    options = WriteOptions(max_shard_size="20KB")
    mote.transform(with_legal, folder, mote.experts.rename, "legal", "law", options=options)
    assert len(list(folder.glob("model-base-*"))) > 1
    mote.transform(folder, None, mote.experts.rename, "law", "legal", options=WriteOptions(overwrite=True))
    assert {path.name for path in folder.glob("model*")} == {path.name for path in with_legal.glob("model*")}
    assert hidden(folder, "legal").equal(hidden(with_legal, "legal"))


def test_the_list(with_legal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "list", str(with_legal)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].replace("|", " ").split() == ["expert", "parameters", "instruction", "tasks"]
    _, name, _, instruction, tasks, _ = map(str.strip, printed[-3].split("|"))
    assert (name, instruction, tasks) == ("legal", "'legal: '", "legal, contracts")
    assert printed[-1] == f"base `{base_hash(with_legal)}`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "{}", "nobody/nothing:x", "--name", "x"], "nobody/nothing is neither a folder nor available on the"),
        (["add", "{0}", "{0}:x", "--name", "x"], "Unknown expert with a file of its own in "),
        (["add", "{0}", "{0}/none.safetensors", "--name", "x"], "not the file of an expert: name one of a model as"),
        (["merge", "{}", "clustering=0", "--name", "x"], "'clustering' is 0.0: expected a number above 0"),
        (["remove", "{}", "search_query"], "`--task query=EXPERT`, or none (`--task query=`) to remove the task"),
    ],
)
def test_invalid_command_lines(words: list[str], message: str, tiny_mote: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["experts", *(word.format(tiny_mote) for word in words), "--out", str(tmp_path / "out")]
    assert main(command) in (1, 2)
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_files_that_are_in_the_way(tiny_mote: Path, with_legal: Path, legal: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_mote, tmp_path / "mote")
    inside = shutil.copy(legal, folder / "mine.safetensors")
    with pytest.raises(FileExistsError, match="choose another file, or replace it with `--overwrite`"):
        extract(str(with_legal), "clustering", inside)
    with pytest.raises(ValueError, match="is, holds or lies in the source"):
        add(with_legal, inside, folder, name="x", instruction="x: ", overwrite=True)
    add(folder, inside, None, name="x", instruction="x: ", overwrite=True)  # in place, other files stay
    assert open_expert(inside).name == "legal"
    assert open_expert(extract(str(with_legal), "clustering", inside, overwrite=True)).name == "clustering"


@pytest.mark.long
def test_token_routers_and_compressed_experts(dense: Path, tiny_mote: Path, tmp_path: Path) -> None:
    routed = upcycle(str(dense), tmp_path / "routed", routing="token")
    with pytest.raises(ValueError, match="token-routed"):
        list_experts(str(routed))
    with pytest.raises(ValueError, match=r"Unknown expert with a file of its own in .*Available: none"):
        extract(str(routed), "clustering", tmp_path / "out")
    assert main(["compress", str(tiny_mote), "--rank", "2", "--out", str(tmp_path / "small")]) == 0
    small = str(tmp_path / "small")
    with pytest.raises(ValueError, match="has another base than"):
        add(tiny_mote, f"{small}:clustering", tmp_path / "out", name="x", instruction="x: ")
    expected = hidden(tmp_path / "small", "clustering")
    renamed = mote.transform(small, tmp_path / "out", mote.experts.rename, "clustering", "x")
    assert hidden(renamed, "x").equal(expected)
    mote.transform(small, tmp_path / "less", mote.experts.remove, "clustering")
    assert hidden(tmp_path / "less", "query").equal(hidden(tmp_path / "small", "query"))


@pytest.mark.long
def test_an_expert_that_is_token_routed(trained_hierarchical: Path, hierarchical: Path, tmp_path: Path) -> None:
    assert list_experts(str(trained_hierarchical)).base_hash == list_experts(str(hierarchical)).base_hash
    artefact = extract(str(trained_hierarchical), "clustering", tmp_path / "expert.safetensors")
    out = add(hierarchical, artefact, tmp_path / "more", name="topics", instruction="Topic: ")
    assert hidden(out, "topics").equal(hidden(trained_hierarchical, "clustering"))
    assert hidden(out, "clustering").equal(hidden(hierarchical, "clustering"))
    less = mote.transform(out, tmp_path / "less", mote.experts.remove, "clustering")
    renamed = mote.transform(less, tmp_path / "renamed", mote.experts.rename, "topics", "clustering")
    assert hidden(renamed, "clustering").equal(hidden(trained_hierarchical, "clustering"))
    others = shutil.copytree(hierarchical, tmp_path / "others")
    config = read_json(others / "config.json")
    edit_json(others / "config.json", backbone_config={**config["backbone_config"], "norm_topk_prob": False})
    with pytest.raises(ValueError, match="has another base than"):
        add(others, artefact, tmp_path / "wrong", name="topics", instruction="Topic: ")


@pytest.mark.slow
@pytest.mark.processes
def test_killed_while_a_mote_is_written(tiny_mote: Path, legal: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    before = contents(tiny_mote)
    killed = stop_everywhere(out, "experts", "add", tiny_mote, legal, "--name", "legal", "--out", out)
    assert len(killed) > 15
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} <= {"absent", "new"}
    assert contents(tiny_mote) == before


@pytest.mark.slow
@pytest.mark.processes
def test_killed_while_a_mote_is_changed_in_place(with_legal: Path, tmp_path: Path) -> None:
    old = shutil.copytree(with_legal, tmp_path / "old")
    (old / "notes.txt").write_text("mine")
    out = tmp_path / "place" / "mote"
    command = ["experts", "rename", out, "legal", "law", "--overwrite"]
    killed = stop_everywhere(out, *command, old=old)
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} == {"old", "absent", "new"}
    assert [result.replaced for result in killed if result.out == "absent"] == [["old"]]
