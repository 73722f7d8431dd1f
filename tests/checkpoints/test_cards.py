"""Model cards."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import (
    dense_checkpoint,
)
from huggingface_hub import ModelCard

from mote import upcycle, write_card
from mote.checkpoints import cards
from mote.checkpoints.reading import open_dense, open_mote
from mote.remote.configuration_mote import MoTEConfig

TEXTS = ["whales breathe air", "a recipe for bread", "bread"]
LONG = "a long text " * 50


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


def test_the_model_card(upcycled: Path) -> None:
    card = ModelCard.load(upcycled / "README.md")
    assert card.data.base_model is None  # a folder is not an id on the Hub
    assert "base_model" not in (upcycled / "README.md").read_text()
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
    assert encoded.equal(torch.tensor(eval(caplog.messages[-1].splitlines()[1], names)))
    exec(of_transformers, names)
    assert names["embeddings"].equal(eval(caplog.messages[-1].splitlines()[0], names))
    assert "normalise it for cosine similarity" in card
    normalised = torch.nn.functional.normalize(names["embeddings"])
    assert (normalised - encoded).abs().max() <= 1e-6
    compile(of_mteb, "card", "exec")
    row = next(line for line in card.splitlines() if line.startswith(f"| `{task}`"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4  # of a table with three columns


@pytest.mark.parametrize(
    "content",
    [b"---\nlicense: [mit\nx: : y\n---\n", b"---\nlicense: mit\n---\n\xff\xfe", b"---\n- a list\n---\n", b"no head"],
)
def test_a_source_whose_own_card_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source")
    (source / "README.md").write_bytes(content)
    card = ModelCard.load(upcycle(str(source), tmp_path / "out") / "README.md")
    assert card.data.license is None


def test_licence_and_language_of_the_source(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [de, en]\ntags: [x]\n---\n# Source\n")
    card = ModelCard.load(upcycle(str(source), tmp_path / "out") / "README.md")
    assert (card.data.license, card.data.language) == ("apache-2.0", ["de", "en"])
    assert "x" not in card.data.tags


@pytest.mark.parametrize(
    ("settings", "expected", "kind"),
    [
        ({}, "Each block has one attention for all tasks and one feed-forward expert per task; a", "one attention and"),
        (
            {"layers": "every_other"},
            "Each block has one attention for all tasks, and 1 of the 2 blocks has one feed-forward expert per task; a",
            "an expert per task in 1 of the 2 blocks,",
        ),
        (
            {"shared_modules": []},
            "Each task has an expert in each block, with an attention of its own. A",
            "an expert per task in each block,",
        ),
        (
            {"shared_modules": ["attention.self"], "layers": [1]},
            "Each task has an expert in 1 of the 2 blocks; the experts of a block share `attention.self`. A",
            "an expert per task in 1 of the 2 blocks,",
        ),
    ],
)
def test_which_blocks_have_experts_and_what_these_share(
    settings: dict[str, Any], expected: str, kind: str, dense: Path, tmp_path: Path
) -> None:
    folder = upcycle(str(dense), tmp_path / "out", **settings)
    card = (folder / "README.md").read_text()
    assert f" {expected} whole sequence goes through the expert of its task. So a text" in " ".join(card.split())
    assert write_card(folder) == card
    source = open_mote(str(folder))
    recipe = {"name": "r", "description": "", "batch_size": 8, "learning_rate": 1e-4, "weight_decay": 0.0, "seed": 0}
    run = {"steps": 7, "device": "cpu", "processes": 1, "seconds": 1.0, "resumed_from_step": None}
    values: dict[str, Any] = {"recipe": recipe, "run": run, "data": [], "seen": {}, "scores": []}
    cards.write_trained_card(folder, "run", source.config, source, kind="mote", **values)
    assert f"A **MoTE** (Mixture of Task Experts): {kind}" in (folder / "README.md").read_text()
    assert "**MoTE** (Mixture of Task Experts):" not in write_card(folder)


def test_a_card_says_what_is_possible_and_what_is_needed(upcycled: Path, dense: Path, tmp_path: Path) -> None:
    card = (upcycled / "README.md").read_text()
    assert "`mote export` makes dense models" in card
    assert "`mote` is the command, and the module, of the Python package `mote-embeddings`." in card
    folder = upcycle(str(dense), tmp_path / "out", pooling="self_attention")
    assert "mote export" not in (folder / "README.md").read_text()


def assert_rendered(folder: Path) -> str:
    card = ModelCard.load(folder / "README.md")
    assert not re.search(r"[{}]{2}|[{]%", card.text)  # nothing of the template
    assert card.data.base_model is None
    return card.text


def test_cards_of_plain_values(dense: Path, tmp_path: Path) -> None:
    source, config = open_dense(str(dense)), MoTEConfig(experts=["a", "b"], instructions={"a": 'say "a" | b: '})
    counts = {"texts": 2000, "tokens": 30_000}
    values: dict[str, Any] = {
        "recipe": {
            "name": "smoke",
            "description": "",
            "batch_size": 8,
            "learning_rate": 1e-4,
            "weight_decay": 0.0,
            "seed": 0,
        },
        "run": {"steps": 7, "device": "2 CPU threads", "processes": 2, "seconds": 1234.1, "resumed_from_step": 3},
        "data": [("pairs", "homogeneous", "InfoNCE", 0.05, "nli (1,000)")],
        "seen": {"a": counts},
        "scores": [("mean", "50.00", "60.00")],
    }
    openings = {
        "token_routed": "A mixture of experts routed token by token, ",
        "dense": "A dense text-embedding model, ",
    }
    for kind, opening in openings.items():
        cards.write_trained_card(tmp_path, "run", config, source, kind=kind, **values)
        text = assert_rendered(tmp_path)
        assert opening in text
        assert "(2 processes), 1,234 s (resumed at step 3)." in " ".join(text.split())
        assert "| pairs | homogeneous | InfoNCE | 0.05 | nli (1,000) |" in text
        assert "| `a` | 2,000 | 30,000 |" in text
        assert ("trust_remote_code=True" in text) == (kind != "dense")
        assert ("This requires Transformers 5.17 and Sentence-Transformers 6.0" in text) == (kind != "dense")


def test_the_base_model_of_a_local_source_is_the_one_that_its_own_card_names(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source")
    for named, expected in (("you/base", "you/base"), ("[you/base, a-folder]", ["you/base"]), ("a-folder", None)):
        (source / "README.md").write_text(f"---\nbase_model: {named}\n---\n# Source\n")
        data = cards.card_data(open_dense(str(source)), "finetune")
        assert (data.base_model, data.base_model_relation) == (expected, "finetune" if expected else None)
