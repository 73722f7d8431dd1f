"""The card and the record of a model that other programs train, save and push."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import trusted
from helpers.families import make_different
from helpers.steps import train
from huggingface_hub import metadata_load
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


def run_snippet(card: str, name: Path) -> None:
    """Run the card's first snippet, with the model's folder in place of Sentence-Transformers' placeholder."""
    code = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)[0]
    values: dict = {"texts": ["a"], "queries": ["a"], "documents": ["b"]}
    exec(re.sub(r'SentenceTransformer\("[^"]+"', f'SentenceTransformer("{name}"', code), values)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("roles", [True, False])
def test_the_card_of_sentence_transformers_trainer(roles: bool, source: Path, dense: Path, tmp_path: Path) -> None:
    if not roles:  # no prompts for queries and documents: the snippet is another one
        source = upcycle(str(dense), tmp_path / "named", experts=["find", "sort"], instructions={"find": "find | : "})
        (source / "README.md").write_text(f"---\n{HEAD}---\n")
    model, texts = trusted(source), ["whales", "bread", "ships", "tea"]
    prompts = dict.fromkeys(("anchor", "positive"), "search_query: " if roles else "find | : ")
    arguments: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "prompts": prompts}
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
        run_snippet(card, folder)
        assert read_steps(folder) == read_steps(source) != []
    written = write_card(tmp_path / "final")
    assert "#### All Hyperparameters" in written
    assert write_card(tmp_path / "final") == written
    run_snippet(written, tmp_path / "final")


def test_a_loop_of_ones_own(source: Path, tmp_path: Path) -> None:
    model = trusted(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    features = model.preprocess(["a whale"], prompt="clustering: ")
    model(features)["sentence_embedding"].pow(2).sum().backward()
    optimizer.step()
    before = (source / "README.md").read_text()
    without_note = re.sub(r"(?s)> \*\*Not trained yet.*?\n\n", "", before)
    for name in ("once", "twice"):
        model.save_pretrained(str(tmp_path / name))
        assert (tmp_path / name / "README.md").read_text() == without_note != before  # nothing else is lost
        assert read_steps(tmp_path / name) == read_steps(source)
        model = trusted(tmp_path / name)
    assert "Not trained yet" not in write_card(tmp_path / "once")
    trusted(source).save_pretrained(str(tmp_path / "same"))
    assert "Not trained yet" in write_card(tmp_path / "same")  # where it is true


def test_the_record_of_an_auto_model(source: Path, tmp_path: Path) -> None:
    loaded = AutoModel.from_pretrained(source, trust_remote_code=True)
    make_different(loaded).save_pretrained(tmp_path / "saved")
    assert read_steps(tmp_path / "saved") == read_steps(source)
    loaded.save_pretrained(source)  # onto itself
    assert read_steps(source) == read_steps(tmp_path / "saved")
    cls, config = type(loaded), loaded.config
    for model in (cls(config), cls.from_pretrained(None, config=config, state_dict=loaded.state_dict())):
        model.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new" / "mote.json").exists()


def test_a_card_of_ones_own_class_is_left_alone(source: Path) -> None:
    mine = type("Mine", (SentenceTransformerModelCardData,), {})(license="mit")
    model = trusted(source, model_card_data=mine)
    assert (type(model.model_card_data), mine.license, "mote" in mine.tags) == (type(mine), "mit", True)
    assert type(trusted(source).model_card_data).__name__ == "MoTECardData"
