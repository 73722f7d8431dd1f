"""Cards that other programs have written or kept, rewritten."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.families import make_different
from huggingface_hub import ModelCard, metadata_load

import mote
from mote import experts, transform, upcycle, write_card
from mote.checkpoints.reading import open_mote
from mote.checkpoints.tensors import experts_are_copies
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel

# What Sentence-Transformers' trainer writes, in short.
TRAINED = """---
# a comment
language:
- en
license: apache-2.0
tags:
- sentence-transformers
- generated_from_trainer
- loss:MultipleNegativesRankingLoss
base_model: you/tiny-mote
widget:
- source_sentence: a
  sentences: [b, c]
datasets:
- you/pairs
pipeline_tag: sentence-similarity
library_name: sentence-transformers
metrics:
- cosine_accuracy
model-index:
- name: x
  results:
  - task: {type: triplet, name: Triplet}
    dataset: {name: dev, type: dev}
    metrics:
    - {type: cosine_accuracy, value: 0.5, name: Cosine Accuracy}
---

# SentenceTransformer based on you/tiny-mote

This is a [sentence-transformers](https://www.SBERT.net) model finetuned from x.

A paragraph of the author.

## Model Details

- **Maximum Sequence Length:** 32 tokens

```
## no heading: SentenceTransformer(…)
```

## Usage

```python
model = SentenceTransformer("sentence_transformers_model_id")
```
<!--
## Out-of-Scope

*in a comment*
-->

## Evaluation

| metric | value |

## Training Details

#### pairs
* Loss: <code>MultipleNegativesRankingLoss</code>

<!--
## Glossary
-->

## Citation

```bibtex
## @article
```
"""


def are_copies(folder: Path) -> bool:
    return experts_are_copies([*folder.glob("*.safetensors")], open_mote(str(folder)).config)


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "my-mote")


def test_a_card_of_ours_is_written_the_same(upcycled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(upcycled, tmp_path / "tiny-mote")
    before = (folder / "README.md").read_text()
    assert write_card(folder) == before == (folder / "README.md").read_text()


def test_text_outside_of_our_regions_stays_where_it_is(upcycled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(upcycled, tmp_path / "tiny-mote")
    readme = folder / "README.md"
    card = readme.read_text()
    edited = card.replace("<!-- mote:about", "First.\n\n<!-- mote:about", 1)
    edited = edited.replace("<!-- mote:usage", "## Mine\n\n```\n## Use\n```\n\n<!-- mote:usage", 1) + "\nLast.\n"
    readme.write_text(edited.replace("## Tasks\n", "## Tasks\n\nReplaced.\n", 1))
    assert write_card(folder) == edited
    readme.write_text(edited.replace("<!-- /mote:usage -->", "Deleted the line that was here.", 1))
    found = write_card(folder)
    assert all(text in found for text in ("First.", "## Mine", "Deleted the line", "Last."))
    assert write_card(folder) == found


def test_what_the_trainer_wrote_is_kept(folder: Path) -> None:
    (folder / "README.md").write_text(TRAINED)
    card = write_card(folder)
    assert write_card(folder) == card
    before, after = yaml.safe_load(TRAINED.split("---")[1]), metadata_load(folder / "README.md")
    assert {"mote", "custom_code", "generated_from_trainer", "loss:MultipleNegativesRankingLoss"} <= set(after["tags"])
    for name in ("language", "license", "base_model", "widget", "datasets", "metrics", "model-index"):
        assert after[name] == before[name]
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        *("## Tasks", "## Use"),
        *("## Model Details", "## no heading: SentenceTransformer(…)", "## Evaluation", "## Training Details"),
        *("## Glossary", "## Citation", "## @article", "## How it was made"),
    ]
    assert "sentence_transformers_model_id" not in card
    assert "Out-of-Scope" not in card
    assert 'SentenceTransformer("my-mote", trust_remote_code=True)' in card
    assert "| `clustering` | `clustering` | `clustering: ` |" in card
    assert "# my-mote\n" in card
    assert "A paragraph of the author.\n\n<!-- mote:usage, rewritten by `mote card`" in card
    assert "This is a [sentence-transformers]" not in card
    ModelCard(card, ignore_metadata_errors=False)


def test_not_trained_yet_goes_once_the_experts_differ(upcycled: Path, folder: Path) -> None:
    assert "Not trained yet" in (folder / "README.md").read_text()
    card = write_card(folder)
    assert "Not trained yet" not in card
    assert "identical copies" not in card
    assert are_copies(upcycled)
    assert not are_copies(folder)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_one_weight_of_one_expert_is_enough(layer: int, size: str, upcycled: Path, tmp_path: Path) -> None:
    model = MoTEModel.from_pretrained(upcycled)
    model.save_pretrained(tmp_path / "equal", max_shard_size=size)
    assert are_copies(tmp_path / "equal")
    with torch.no_grad():
        next(reversed(list(model.blocks[layer].experts["search_document"].parameters()))).add_(1e-3)
    model.save_pretrained(tmp_path / "different", max_shard_size=size)
    assert not are_copies(tmp_path / "different")


def test_a_token_routed_model(dense: Path, tmp_path: Path) -> None:
    folder = upcycle(str(dense), tmp_path / "routed", routing="token")
    assert write_card(folder) == (folder / "README.md").read_text()
    assert "its router is random" in " ".join(write_card(folder).split())
    model = mote.load(folder)
    with torch.no_grad():
        model.blocks[0].feed_forward.experts.down_proj[1].add_(1)  # type: ignore[union-attr]
    model.save_pretrained(folder)
    card = write_card(folder)
    assert "Not trained yet" not in card
    assert "token router" in card
    assert "custom_code" in card


def test_a_compressed_model(folder: Path, tmp_path: Path) -> None:
    out = transform(folder, tmp_path / "small", experts.compress, bits=8)
    before = (out / "README.md").read_text()
    card = write_card(out)
    assert "The experts are compressed" in card
    assert "Not trained yet" not in card
    assert before.split("## How it was made")[0] == card.split("## How it was made")[0]


@pytest.mark.parametrize("average", [False, True])
def test_a_dense_model(average: bool, folder: Path, tmp_path: Path) -> None:
    function: Any = experts.average if average else experts.export
    out = transform(folder, tmp_path / "dense", function, *([] if average else ["clustering"]))
    before = (out / "README.md").read_text()
    card = write_card(out)
    assert before.split("## How it was made")[0] == card.split("## How it was made")[0]
    assert write_card(out) == card
    assert "mote" not in metadata_load(out / "README.md")["tags"]
    assert ("send them `clustering: ` followed by the text." in card) is not average
    assert "trust_remote_code" not in card
    assert "mote upcycle" in card
    assert ("mote average" if average else "mote export") in card
    assert "`mote` is the command of the Python package `mote-embeddings`:" in " ".join(card.split())


def test_a_base_model_is_an_id_on_the_hub(folder: Path) -> None:
    with pytest.raises(ValueError, match="The base model 'tiny' must be an id on the Hub"):
        write_card(folder, base_model="tiny")
    assert "base_model" not in write_card(folder)
    assert metadata_load(folder / "README.md").get("base_model") is None
    write_card(folder, base_model="you/base")
    write_card(folder)
    assert metadata_load(folder / "README.md")["base_model"] == "you/base"
    assert metadata_load(folder / "README.md")["base_model_relation"] == "finetune"


def test_the_base_model_is_the_nearest_one_on_the_hub(folder: Path) -> None:
    record = json.loads((folder / "mote.json").read_text())
    local, on_hub = record["steps"][0]["sources"][0], {"name": "you/base", "revision": "1" * 40}
    record["steps"] = [
        {"step": "upcycle", "sources": [{"name": "you/first", "revision": "1" * 40}]},
        {"step": "add", "sources": [on_hub]},
        {"step": "rename", "sources": [local]},
    ]
    (folder / "mote.json").write_text(json.dumps(record))
    write_card(folder)
    assert metadata_load(folder / "README.md")["base_model"] == "you/base"


def test_without_a_card_and_without_a_record(folder: Path, dense: Path, tmp_path: Path) -> None:
    for name in ("README.md", "mote.json"):
        (folder / name).unlink()
    card = write_card(folder)
    assert card == write_card(folder)
    assert "a **MoTE** (Mixture of Task Experts).\n" in card
    assert "mote upcycle" not in card
    plain = shutil.copytree(dense, tmp_path / "plain")
    with pytest.raises(ValueError, match="is not a MoTE, and has no mote"):
        write_card(plain)
    assert not (plain / "README.md").exists()


def test_the_form_of_transformers_is_replaced(folder: Path) -> None:
    card = ModelCard.from_template(
        ModelCard("---\ntags: [x]\n---\n").data,
        model_description="This is the model card of a model. This model card has been automatically generated.",
    )
    card.save(folder / "README.md")
    assert "[More Information Needed]" in (folder / "README.md").read_text()
    text = write_card(folder)
    assert "[More Information Needed]" not in text
    assert {"x", "mote"} <= set(metadata_load(folder / "README.md")["tags"])


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text(TRAINED)
    assert main(["card", str(folder), "--base-model", "you/base", "--repo-id", "you/mine"]) == 0
    card = (folder / "README.md").read_text()
    assert "base_model: you/base" in card
    assert 'SentenceTransformer("you/mine", trust_remote_code=True)' in card
    assert main(["card", str(folder.parent / "none")]) == 1
    assert "is neither a folder" in capsys.readouterr().err


def test_a_folder_with_some_of_the_experts(upcycled: Path, tmp_path: Path) -> None:
    MoTEModel.from_pretrained(upcycled, experts=["clustering"], default_task="sts").save_pretrained(tmp_path / "one")
    shutil.copy(upcycled / "tokenizer.json", tmp_path / "one")
    card = write_card(tmp_path / "one")
    assert "1 task expert in one text-embedding model" in card
    assert re.findall(r"^\| `(\w+)` \| `(\w+)`", card, re.MULTILINE) == [("clustering", "clustering")]
    assert "Texts without a task: an error" in card
    assert "search_query" not in card.split("## How it was made")[0]


def test_different_experts_after_saving_by_transformers(upcycled: Path, tmp_path: Path) -> None:
    model = make_different(MoTEModel.from_pretrained(upcycled))
    model.save_pretrained(tmp_path / "saved")
    assert "Not trained yet" not in write_card(tmp_path / "saved")


@pytest.mark.parametrize("damaged", [b"---\nlicense: [\n---\n# x\n", b"---\n- a list\n---\n", b"\xff\xfe\x00"])
def test_metadata_that_cannot_be_read_are_not_lost(damaged: bytes, folder: Path) -> None:
    (folder / "README.md").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"The metadata of the card .*README\.md cannot be read"):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == damaged
    with pytest.raises(ValueError, match="cannot be read"):
        mote.configure(folder, default_task="clustering")
    assert (folder / "README.md").read_bytes() == damaged
    assert open_mote(str(folder)).config.default_task is None


def test_the_recipe_that_trained_it_is_named(folder: Path) -> None:
    record = json.loads((folder / "mote.json").read_text())
    source = {"name": "you/base", "revision": "1" * 40}
    record["steps"].append({"step": "train", "sources": [source], "made": "trained from", "recipe": "short"})
    (folder / "mote.json").write_text(json.dumps(record))
    for _ in range(2):
        lead = " ".join(write_card(folder).split())
        assert "trained by the recipe `short` from [you/base](https://huggingface.co/you/base)." in lead


def test_one_expert_and_a_task_whose_name_would_end_a_cell(dense: Path, tmp_path: Path) -> None:
    folder = upcycle(str(dense), tmp_path / "one", experts=["größe"], tasks={"a | b": "größe"})
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert r"| `a \| b` | `größe` | none |" in card
    assert "1 task expert in one text-embedding model" in card
    assert write_card(folder) == write_card(folder)
    assert write_card(folder).count("in one text-embedding model") == 1
