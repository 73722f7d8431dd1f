"""One expert in a file of its own."""

import shutil
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
from helpers.on_disk import add, base_hash, hidden
from transformers import AutoModel

import mote
from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.experts import extract, list_experts, open_expert
from mote.experts.artefact import base_of, open_word
from mote.remote.modeling_mote import MoTEModel
from mote.remote.weights_mote import read_header


@all_families
def test_extract_and_add_are_exact(name: str, tmp_path: Path) -> None:
    mote_layers = "every_other" if name in ("bert", "gemma2") else "every"
    model = trained_mote(name, mote_layers=mote_layers, instructions={"beta": "b: "}, tasks={"more": "beta"})
    tiny_tokenizer(tmp_path / "whole")
    model.save_pretrained(tmp_path / "whole", max_shard_size="10KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    file = extract(str(tmp_path / "whole"), "beta", tmp_path / "beta.safetensors")
    assert_same(open_expert(file).weights_for(model), mote.experts.weights(model, "beta"))
    mote.transform(tmp_path / "whole", tmp_path / "without", mote.experts.remove, "beta", tasks={"more": None})
    add(tmp_path / "without", file, tmp_path / "again")
    assert len({base_hash(tmp_path / folder) for folder in ("whole", "without", "again")}) == 1
    again = MoTEModel.from_pretrained(tmp_path / "again")
    assert (again.config.tasks, again.config.instructions) == (model.config.tasks, model.config.instructions)
    for task in ("alpha", "beta", "more"):
        assert hidden(tmp_path / "again", task).equal(hidden(tmp_path / "whole", task))
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").glob("model-expert-beta-*")}
    assert list(again.values()) == [file.read_bytes()]


def test_an_expert_s_file(with_legal: Path, legal: Path, tiny_mote: Path) -> None:
    named = {"name": "legal", "tasks": ["legal", "contracts"], "instructions": {"legal": "legal: "}}
    (file,) = with_legal.glob("model-expert-legal-*")
    header = read_header(legal)
    assert header == {**named, "base": base_hash(tiny_mote), "id": file.stem.rpartition("-")[2]}
    assert legal.read_bytes() == file.read_bytes()
    assert open_expert(with_legal, "legal").provenance()["weights"].keys() == {file.name}
    with pytest.raises(ValueError, match="is not the file of an expert"):
        open_expert(next(with_legal.glob("model-base-*")))


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
    assert [source["name"] for source in step["sources"]] == ["mote", "legal.safetensors"]


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
    expert = f"{tmp_path / 'whole'}:search_document"
    assert open_word(expert).instructions == {"search_document": ""}
    config = MoTEModel.from_pretrained(add(tmp_path / "part", expert, tmp_path / "out")).config
    assert config.instruction_of("search_document") == config.instruction_of("document") == ""


def test_tasks_that_another_expert_has_stay_there(tiny_mote: Path, tmp_path: Path) -> None:
    expert = f"{tiny_mote}:classification"
    out = add(tiny_mote, expert, tmp_path / "out", name="second", instruction="2: ", tasks=["sts"])
    tasks = MoTEModel.from_pretrained(out).config.tasks
    assert (tasks["sts"], tasks["summarization"]) == ("second", "classification")
    with pytest.raises(ValueError, match=r"instruction '2: ' .* already stands for"):
        add(out, expert, tmp_path / "twice", name="third", instruction="2: ")
    assert not (tmp_path / "twice").exists()


def test_a_folder_with_some_of_its_experts(with_legal: Path, legal: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    trusted(with_legal, model_kwargs={"experts": ["clustering"]}).save_pretrained(str(partial))
    edit_json(partial / "config_sentence_transformers.json", prompts={"clustering": "reworded: "})
    listed = str(list_experts(str(partial)))
    assert "not here" in listed
    assert "reworded: " in listed
    assert base_hash(partial) == base_hash(with_legal)
    with pytest.raises(ValueError, match=r"Unknown expert .* 'legal'"):
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
        assert base_of(model.config, state) != first
        state[key].view(-1).view(torch.int32)[-1] ^= 1
    assert base_of(model.config, state) == first
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


def test_a_wrong_base_is_refused(
    tiny_mote: Path, legal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_mote, tmp_path / "other")
    key = "backbone.encoder.layer.0.shared.attention.self.query.bias"
    edit_weights(folder, **{key: tensors_of(folder)[key] + 1e-6})
    for verb in (["add", str(folder), str(legal)], ["merge", str(folder), "clustering", str(legal)]):
        assert main(["experts", *verb, "--name", "x", "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert f"error: The expert 'legal' of {legal} has another base than {folder}" in error
        assert f"{base_hash(tiny_mote)} and {base_hash(folder)}. What works: the MoTE that it was" in error
    assert not (tmp_path / "out").exists()
