"""The card and the record of a model that other programs train, save and push."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import read_json, trusted
from helpers.families import make_different
from helpers.processes import STRANGER, run_python
from helpers.steps import train
from hub.hub_server import HubServer
from huggingface_hub import ModelCard, metadata_load
from sentence_transformers import SentenceTransformerModelCardData
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import AutoModel

from mote import upcycle, write_card
from mote.checkpoints.provenance import read_steps

HEAD = "base_model: you/base\nlicense: apache-2.0\n"


@pytest.fixture
def source(upcycled: Path, tmp_path: Path) -> Path:
    """A fresh MoTE whose card names a base model and a licence."""
    folder = shutil.copytree(upcycled, tmp_path / "tiny-mote")
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("---\n", f"---\n{HEAD}", 1))
    return folder


def snippet_of(card: str, name: Path) -> dict:
    """Run the card's first snippet, with the model's folder in place of Sentence-Transformers' placeholder."""
    code = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)[0]
    values: dict = {"texts": ["a"], "queries": ["a"], "documents": ["b"]}
    exec(re.sub(r'SentenceTransformer\("[^"]+"', f'SentenceTransformer("{name}"', code), values)
    return values


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("roles", [True, False])
def test_the_card_of_sentence_transformers_trainer(
    roles: bool, source: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not roles:  # no prompts for queries and documents: the snippet is another one
        source = upcycle(str(dense), tmp_path / "named", experts=["find", "sort"], instructions={"find": "find | : "})
        (source / "README.md").write_text(f"---\n{HEAD}---\n")
    one, other = ("search_query: ", "search_document: ") if roles else ("find | : ", "find | : ")
    model = trusted(source)
    prompts = {"anchor": one, "positive": other}
    arguments: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "prompts": prompts}
    texts = ["whales", "bread", "ships", "tea"]
    train(model, MultipleNegativesRankingLoss(model), tmp_path / "run", texts, **arguments)
    model.save_pretrained(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "run" / "checkpoint-1"):
        card = (folder / "README.md").read_text()
        data_of_card = metadata_load(folder / "README.md")
        assert {"mote", "custom_code", "generated_from_trainer"} <= set(data_of_card["tags"])
        assert (data_of_card["base_model"], data_of_card["license"]) == ("you/base", "apache-2.0")
        assert "Not trained yet" not in card
        assert "| `search_query` | `search_query` |" in card if roles else "| `find` | `find` |" in card
        assert "MultipleNegativesRankingLoss" in card
        snippet_of(card, folder)
        assert read_steps(folder) == read_steps(source) != []
    written = write_card(tmp_path / "final")
    assert "#### All Hyperparameters" in written
    assert write_card(tmp_path / "final") == written
    snippet_of(written, tmp_path / "final")


def test_a_loop_of_ones_own(source: Path, tmp_path: Path) -> None:
    model = trusted(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    features = model.preprocess(["a whale"], prompt="clustering: ")
    model(features)["sentence_embedding"].pow(2).sum().backward()
    optimizer.step()
    for name in ("once", "twice"):
        model.save_pretrained(str(tmp_path / name))
        card = (tmp_path / name / "README.md").read_text()
        assert "Not trained yet" not in card
        assert "identical copies" not in card
        before = (source / "README.md").read_text()
        note = re.compile(r"> \*\*Not trained yet.*?\n\n", re.DOTALL)
        assert card == note.sub("", before) != before  # nothing else is lost
        assert read_steps(tmp_path / name) == read_steps(source)
        model = trusted(tmp_path / name)
    assert "Not trained yet" not in write_card(tmp_path / "once")
    trusted(source).save_pretrained(str(tmp_path / "same"))
    assert "Not trained yet" in write_card(tmp_path / "same")  # where it is true


def test_the_record_of_an_auto_model(source: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(source, trust_remote_code=True)
    make_different(model).save_pretrained(tmp_path / "saved")
    assert read_steps(tmp_path / "saved") == read_steps(source)
    model.save_pretrained(source)  # onto itself
    assert read_steps(source) == read_steps(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["absent", "a new model", "state_dict"])
def test_without_a_record(kind: str, source: Path, tmp_path: Path) -> None:
    (source / "mote.json").unlink()
    model = AutoModel.from_pretrained(source, trust_remote_code=True)
    if kind == "a new model":
        model = type(model)(model.config)
    elif kind == "state_dict":
        model = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "mote.json").exists()


def test_a_card_of_ones_own_class_is_left_alone(source: Path) -> None:
    mine = type("Mine", (SentenceTransformerModelCardData,), {})(license="mit")
    model = trusted(source, model_card_data=mine)
    assert (type(model.model_card_data), mine.license, "mote" in mine.tags) == (type(mine), "mit", True)
    assert type(trusted(source).model_card_data).__name__ == "MoTECardData"


PUSH = f"""
{STRANGER}
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

for load, target in ((SentenceTransformer, "user/st"), (AutoModel.from_pretrained, "user/auto")):
    model = load("you/tiny-mote", trust_remote_code=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.push_to_hub(target)
"""

CARD = """
from huggingface_hub import HfApi, snapshot_download
from mote.cli import main
assert main(["card", "user/auto"]) == 1
folder = snapshot_download("user/auto", local_dir="auto")
assert main(["card", folder, "--repo-id", "user/auto", "--base-model", "you/base"]) == 0
HfApi().upload_file(path_or_fileobj="auto/README.md", path_in_repo="README.md", repo_id="user/auto")
"""


@pytest.mark.processes
def test_pushes_by_the_libraries_alone(source: Path, tmp_path: Path) -> None:
    with HubServer() as server:
        server.add_repo("you/tiny-mote", source)
        environment = server.environment(tmp_path / "home", token="hf_write")
        outputs = []
        for code in (PUSH, CARD):
            stderr = run_python(code, cwd=tmp_path, environment=environment).stderr
            outputs.append({name: server.files(f"user/{name}") for name in ("st", "auto")})
    pushed, after = outputs
    record = read_json(source / "mote.json")
    for name in ("st", "auto"):
        assert json.loads(pushed[name]["mote.json"]) == record
        assert {"mote", "custom_code"} <= set(ModelCard(pushed[name]["README.md"].decode()).data.tags)
    card = pushed["st"]["README.md"].decode()
    assert "trust_remote_code=True" in card
    assert "| `clustering` | `clustering` | `clustering: ` |" in card
    assert "base_model: you/base" in card
    assert "Not trained yet" not in card
    card = after["auto"]["README.md"].decode()
    assert 'SentenceTransformer("user/auto", trust_remote_code=True)' in card
    assert "base_model: you/base" in card
    assert "Not trained yet" not in card
    assert "[More Information Needed]" not in card
    assert after["auto"].keys() == pushed["auto"].keys()
    assert "user/auto is not a folder: download a model from the Hub first" in stderr
