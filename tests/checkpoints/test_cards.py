"""Model cards: new ones, and cards that other programs have written or kept."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.checkpoints import dense_checkpoint
from huggingface_hub import ModelCard, metadata_load

import mote
from mote import experts, transform, upcycle, write_card
from mote.checkpoints import cards
from mote.checkpoints.reading import open_checkpoint, open_dense, open_mote
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel

TEXTS = ["whales breathe air", "a recipe for bread", "bread"]

# What a training run says about itself.
RUN: dict[str, Any] = {
    "recipe": {
        "name": "smoke",
        "description": "",
        "training": {"batch_size": 8, "learning_rate": 1e-4, "weight_decay": 0.0, "seed": 0},
    },
    "run": {
        "steps": 7,
        "device": "2 CPU threads",
        "processes": 2,
        "seconds": 1234.1,
        "resumed_from_step": 3,
        "data": [{"task": "pairs", "name": "nli", "used": 1000}],
    },
    "scores": [("mean", "50.00", "60.00")],
}


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


def test_the_model_card(upcycled: Path) -> None:
    card = ModelCard.load(upcycled / "README.md")
    assert "base_model" not in (upcycled / "README.md").read_text()  # a folder is not an id on the Hub
    assert card.data.library_name == "sentence-transformers"
    assert card.data.pipeline_tag == "sentence-similarity"
    assert {"sentence-transformers", "feature-extraction", "mote", "custom_code"} <= set(card.data.tags)
    assert "# tiny-mote\n" in card.text
    assert "identical copies of the dense model's blocks" in " ".join(card.text.split())
    assert "Not trained yet" in card.text
    for task, expert in (("clustering", "clustering"), ("sts", "classification"), ("query", "search_query")):
        assert f"\n| `{task}` | `{expert}` | `{expert}: ` |\n" in card.text
    assert card.text.count("\n| `") == 9
    assert len(python_blocks(card.text)) == 3
    assert "mote upcycle --src tiny --out tiny-mote" in card.text
    assert not re.search(r"[{}]{2}|[{]%", card.text)  # nothing of the template


@pytest.mark.parametrize("experts", [None, ["find", "sort"]])
@pytest.mark.parametrize("instruction", ["find: ", 'Say "it" | `so` \\ now:\nQuery: ', ""])
def test_what_the_card_and_the_command_say_runs(
    instruction: str,
    experts: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = dense_checkpoint(tmp_path / "dense", sentence_transformers={"pooling": "cls", "normalize": True})
    caplog.set_level(logging.INFO, "mote")
    task = "search_query" if experts is None else "find"
    instructions = dict.fromkeys(["find"] if experts else ["search_query", "query"], instruction)
    monkeypatch.chdir(tmp_path)
    upcycle(str(source), "my-mote", experts=experts, instructions=instructions)
    names: dict[str, Any] = {"texts": TEXTS, "queries": TEXTS, "documents": TEXTS}
    card = (tmp_path / "my-mote" / "README.md").read_text()
    of_sentence_transformers, of_transformers, of_mteb = python_blocks(card)
    exec(of_sentence_transformers, names)
    assert ("scores" in names) == (experts is None)
    encoded = torch.tensor(names["embeddings"])
    assert encoded.equal(torch.tensor(eval(caplog.messages[-1], names)))
    exec(of_transformers, names)
    assert "normalise it for cosine similarity" in card
    normalised = torch.nn.functional.normalize(names["embeddings"])
    assert (normalised - encoded).abs().max() <= 1e-6
    compile(of_mteb, "card", "exec")
    row = next(line for line in card.splitlines() if line.startswith(f"| `{task}`"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4  # of a table with three columns


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling": "self_attention"}, "Each block has one attention for all tasks and one feed-forward expert per"),
        ({"layers": "every_other"}, "1 of the 2 blocks has one feed-forward expert per task;"),
        ({"shared_modules": []}, "Each task has an expert in each block, with an attention of its own."),
        ({"shared_modules": ["attention.self"], "layers": [1]}, "the experts of a block share `attention.self`."),
    ],
)
def test_which_blocks_have_experts_and_what_these_share(
    settings: dict[str, Any], expected: str, dense: Path, tmp_path: Path
) -> None:
    folder = upcycle(str(dense), tmp_path / "out", **settings)
    card = (folder / "README.md").read_text()
    assert f" {expected} " in " ".join(card.split())
    assert ("mote export" in card) == ("pooling" not in settings)
    assert write_card(folder) == card


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"---\nbase_model: you/base\n---\n# Source\n", ("you/base", None, None)),
        (b"---\nbase_model: [you/base, a-folder]\n---\n# Source\n", (["you/base"], None, None)),
        (b"---\nbase_model: a-folder\n---\n# Source\n", (None, None, None)),
        (b"---\nlicense: mit\nlanguage: [de, no]\ntags: [x]\n---\n", (None, "mit", ["de", "no"])),  # in YAML, false
        (b"---\nlicense: [mit\nx: : y\n---\n", (None, None, None)),
        (b"---\nlicense: mit\n---\n\xff\xfe", (None, None, None)),
        (b"no head", (None, None, None)),
    ],
)
def test_metadata_of_a_source(content: bytes, expected: tuple[Any, ...], tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", tokenizer=False)
    (source / "README.md").write_bytes(content)
    data = cards.card_data(open_dense(str(source)), "finetune")
    assert (data.base_model, data.license, data.language) == expected
    assert data.base_model_relation == ("finetune" if expected[0] else None)
    assert "x" not in data.tags


@pytest.mark.parametrize(
    ("kind", "opening"),
    [("trained", "4 task experts in"), ("token_routed", "4 experts in"), ("dense", "A dense text-embedding model:")],
)
def test_trained_models(kind: str, opening: str, dense: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = open_checkpoint(str(request.getfixturevalue(kind)))
    steps = [{"step": "train", "recipe": "smoke", "made": "trained from", "sources": [{"name": "tiny"}]}]
    card = ModelCard(cards.new_card(model, steps, "run", open_dense(str(dense)), RUN))
    text = " ".join(card.text.split())
    assert f"# run {opening} " in text
    assert " trained by the recipe `smoke` from [tiny](#how-it-was-made)." in text
    assert "(2 processes), 1,234 s (resumed at step 3)." in text
    assert "| pairs | nli | 1,000 |" in text
    assert ("trust_remote_code=True" in text) == (kind != "dense")


# What Sentence-Transformers' trainer writes, in short.
TRAINED = """---
language: [en]
license: apache-2.0
tags: [generated_from_trainer]
base_model: you/tiny-mote
datasets: [you/pairs]
---

# SentenceTransformer based on you/tiny-mote

This is a [sentence-transformers](https://www.SBERT.net) model finetuned from x.

A paragraph of the author.

## Model Details

## Usage

```python
model = SentenceTransformer("sentence_transformers_model_id")
```
<!--
## Out-of-Scope

*in a comment*
-->

## Training Details
"""


def without_record(card: str) -> str:
    return card.split("## How it was made")[0]


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "my-mote")


def test_text_outside_of_our_regions_stays_where_it_is(upcycled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(upcycled, tmp_path / "tiny-mote")
    readme = folder / "README.md"
    card = readme.read_text()
    assert write_card(folder) == card == readme.read_text()
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
    assert {"mote", "custom_code", "generated_from_trainer"} <= set(after["tags"])
    for name in ("language", "license", "base_model", "datasets"):
        assert after[name] == before[name]
    headings = [line for line in card.splitlines() if line.startswith("## ")]
    assert headings == ["## Tasks", "## Use", "## Model Details", "## Training Details", "## How it was made"]
    assert "sentence_transformers_model_id" not in card
    assert "Out-of-Scope" not in card
    assert 'SentenceTransformer("my-mote", trust_remote_code=True)' in card
    assert "A paragraph of the author.\n\n<!-- mote:usage, rewritten by `mote card`" in card
    assert "This is a [sentence-transformers]" not in card
    ModelCard(card, ignore_metadata_errors=False)


@pytest.mark.parametrize(("layer", "size"), [(0, "5GB"), (1, "20KB")])
def test_not_trained_yet_until_one_weight_of_one_expert_differs(
    layer: int, size: str, upcycled: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(upcycled, tmp_path / "tiny-mote", ignore=shutil.ignore_patterns("model*"))
    model = MoTEModel.from_pretrained(upcycled)
    model.save_pretrained(folder, max_shard_size=size)
    assert "Not trained yet" in write_card(folder)
    with torch.no_grad():
        next(reversed(list(model.blocks[layer].experts["search_document"].parameters()))).add_(1e-3)
    model.save_pretrained(folder, max_shard_size=size)
    assert "Not trained yet" not in write_card(folder)
    assert "identical copies" not in write_card(folder)


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


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (experts.compress, {"bits": 8}, "The experts are compressed"),
        (experts.export, {"name": "clustering"}, "send them `clustering: ` followed by the text."),
        (experts.average, {}, "mote average"),
    ],
)
def test_results_of_verbs(function: Any, arguments: dict[str, Any], text: str, folder: Path, tmp_path: Path) -> None:
    out = transform(folder, tmp_path / "out", function, **arguments)
    before = (out / "README.md").read_text()
    card = write_card(out)
    assert without_record(before) == without_record(card)
    assert write_card(out) == card
    assert text in card
    assert "mote upcycle" in card
    assert "Not trained yet" not in card
    is_mote = function is experts.compress
    assert ("mote" in metadata_load(out / "README.md")["tags"]) is is_mote
    assert ("trust_remote_code" in card) is is_mote


def test_the_base_model_is_the_nearest_one_on_the_hub(folder: Path) -> None:
    assert "base_model" not in write_card(folder)
    record = json.loads((folder / "mote.json").read_text())
    local, on_hub = record["steps"][0]["sources"][0], {"name": "you/base", "revision": "1" * 40}
    record["steps"] = [
        {"step": "upcycle", "sources": [{"name": "you/first", "revision": "1" * 40}]},
        {"step": "train", "sources": [on_hub], "made": "trained from", "recipe": "short"},
        {"step": "rename", "sources": [local]},
    ]
    (folder / "mote.json").write_text(json.dumps(record))
    for given, expected in ((None, "you/base"), ("you/other", "you/other"), (None, "you/other")):
        lead = " ".join(write_card(folder, base_model=given).split())
        data = metadata_load(folder / "README.md")
        assert (data["base_model"], data["base_model_relation"]) == (expected, "finetune")
        assert "trained by the recipe `short` from [you/base](https://huggingface.co/you/base)." in lead


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


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text(TRAINED)
    assert main(["card", str(folder), "--base-model", "you/base", "--repo-id", "you/mine"]) == 0
    card = (folder / "README.md").read_text()
    assert "base_model: you/base" in card
    assert 'SentenceTransformer("you/mine", trust_remote_code=True)' in card
    assert main(["card", str(folder.parent / "none")]) == 1
    assert "none is not a folder: download a model" in capsys.readouterr().err


def test_a_folder_with_some_of_the_experts(upcycled: Path, tmp_path: Path) -> None:
    MoTEModel.from_pretrained(upcycled, experts=["clustering"], default_task="sts").save_pretrained(tmp_path / "one")
    shutil.copy(upcycled / "tokenizer.json", tmp_path / "one")
    card = write_card(tmp_path / "one")
    assert "1 task expert in one text-embedding model" in card
    assert re.findall(r"^\| `(\w+)` \| `(\w+)`", card, re.MULTILINE) == [("clustering", "clustering")]
    assert "Texts without a task: an error" in card
    assert "search_query" not in without_record(card)


@pytest.mark.parametrize("damaged", [b"---\nlicense: [\n---\n# x\n", b"---\n- a list\n---\n", b"\xff\xfe\x00"])
def test_metadata_that_cannot_be_read_are_not_lost(damaged: bytes, folder: Path) -> None:
    (folder / "README.md").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"The metadata of the card .*README\.md cannot be read"):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == damaged
    with pytest.raises(ValueError, match="cannot be read"):
        mote.configure(folder, default_task="clustering")
    assert (folder / "README.md").read_bytes() == damaged
    assert open_mote(str(folder)).config.default_task == "search_document"
