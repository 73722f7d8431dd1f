"""What a model repository carries: settings of a Sentence-Transformers source, the record and the model card."""

import hashlib
import json
import logging
import re
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import (
    dense_checkpoint,
    e5_checkpoint,
    edit_json,
    edit_weights,
    files_in,
    read_json,
    to_bin,
    trusted,
)
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer

from modeling_mote import MoTEModel
from mote import plan_upcycling, upcycle
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.sentence_transformers import prompts_of
from mote.cli import main

TEXTS = ["whales breathe air", "a recipe for bread", "bread"]
LONG = "a long text " * 50


@pytest.fixture(scope="module")
def e5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return e5_checkpoint(tmp_path_factory.mktemp("e5") / "e5")


# What a Sentence-Transformers source brings --------------------------------------------------------------------------


def test_settings_of_the_source_carry_over(e5: Path, tmp_path: Path) -> None:
    out = upcycle(str(e5), tmp_path / "out")
    modules = ["MoTETransformer", "Pooling", "Normalize"]
    assert [module["type"].rsplit(".", 1)[-1] for module in read_json(out / "modules.json")] == modules
    assert MoTEModel.from_pretrained(out).config.pooling == "cls"
    source, mote = SentenceTransformer(str(e5)), trusted(out)
    assert mote.max_seq_length == 11
    texts = [*TEXTS, LONG]
    for task in ("classification", "search_query"):
        assert np.array_equal(mote.encode(texts, task=task), source.encode(texts))
        assert np.allclose(np.linalg.norm(mote.encode(texts, task=task), axis=1), 1)


def test_prompts_of_the_source_become_instructions(e5: Path, tmp_path: Path) -> None:
    out = upcycle(str(e5), tmp_path / "out")
    config = MoTEModel.from_pretrained(out).config
    instructions = {task: config.instruction_of(task) for task in config.tasks}
    assert instructions["query"] == instructions["search_query"] == "query: "
    assert instructions["document"] == instructions["search_document"] == ""  # so the source's own encode_document
    prompts = read_json(out / "config_sentence_transformers.json")["prompts"]
    assert (prompts["query"], prompts["Retrieval-query"], prompts["passage"]) == ("query: ", "query: ", "passage: ")
    source, mote = SentenceTransformer(str(e5)), trusted(out)
    expected = source.encode(TEXTS, prompt_name="query")
    assert np.array_equal(mote.encode(TEXTS, prompt_name="query"), expected)
    assert np.array_equal(mote.encode_query(TEXTS), expected)
    assert np.array_equal(mote.encode_document(TEXTS), source.encode_document(TEXTS))
    assert np.array_equal(mote.encode([f"query: {text}" for text in TEXTS]), expected)
    with pytest.raises(ValueError, match="No task for the text 'passage: whales"):
        mote.encode(TEXTS, prompt_name="passage")


def test_a_prompt_of_the_source_can_be_routed(e5: Path, tmp_path: Path) -> None:
    options = ["--task", "passage=search_document", "--instruction", "clustering=topic: "]
    assert main(["upcycle", "--src", str(e5), "--out", str(tmp_path / "out"), *options]) == 0
    mote = trusted(tmp_path / "out")
    config = mote[0].model.config
    instructions = {
        task: config.instruction_of(task) for task in ("passage", "search_document", "document", "clustering")
    }
    assert instructions == dict.fromkeys(("passage", "search_document", "document"), "passage: ") | {
        "clustering": "topic: "
    }
    expected = SentenceTransformer(str(e5)).encode(TEXTS, prompt_name="passage")
    assert np.array_equal(mote.encode(TEXTS, prompt_name="passage"), expected)
    assert np.array_equal(mote.encode_document(TEXTS), expected)
    assert np.array_equal(mote.encode([f"passage: {text}" for text in TEXTS]), expected)


@pytest.mark.parametrize(("theirs", "ours"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last_token")])
def test_pooling_carries_over(theirs: str, ours: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={"pooling": theirs})
    out = upcycle(str(source), tmp_path / "out")
    mote = trusted(out)
    assert mote[0].model.config.pooling == ours
    assert np.array_equal(mote.encode(TEXTS, task="clustering"), SentenceTransformer(str(source)).encode(TEXTS))


@pytest.mark.parametrize("theirs", ["mean", "max"])
def test_another_pooling_is_the_same_for_both_libraries(theirs: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={"pooling": theirs})
    out = upcycle(str(source), tmp_path / "out", pooling="cls")
    mote = trusted(out)
    tokens = mote.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        pooled = MoTEModel.from_pretrained(out)(**tokens, task="clustering").pooler_output.numpy()
    assert np.abs(mote.encode(TEXTS, task="clustering") - pooled).max() <= 1e-6


def test_a_module_outside_of_the_source_is_not_copied(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={})
    (tmp_path / "secret").mkdir()
    modules = read_json(source / "modules.json")
    for path in ("../secret", "1_Pooling/../../secret", str(tmp_path / "secret"), "", "."):
        modules[1]["path"] = path
        (source / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ValueError, match="source has a module that is not in a folder of its own"):
            upcycle(str(source), tmp_path / "out")


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_texts_longer_than_the_positions_are_cut(family: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", family, max_position_embeddings=20, pad_token_id=0)
    edit_json(source / "tokenizer_config.json", model_max_length=100)
    mote = trusted(upcycle(str(source), tmp_path / "out"))
    assert mote.max_seq_length == (19 if family == "roberta" else 20)  # which leaves out the padding's position
    assert np.isfinite(mote.encode([LONG], task="clustering")).all()


# Record and model card -----------------------------------------------------------------------------------------------


def test_the_record(dense: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"experts": ["a", "b"], "layers": [1], "instructions": {"a": "it's a: "}}
    out = upcycle(str(dense), tmp_path / "out", **options)
    record = read_json(out / "mote.json")
    assert record["format"] == 1
    assert set(record["files"]) == files_in(out)
    (step,) = record["steps"]
    digest = hashlib.sha256((dense / "model.safetensors").read_bytes()).hexdigest()
    source = {"name": "tiny", "revision": None, "weights": {"model.safetensors": digest}}
    assert (step["step"], step["sources"], step["settings"]) == ("upcycle", [source], options)
    command = """mote upcycle --src tiny --out out --expert a --expert b --layers 1 --instruction 'a=it'"'"'s a: '"""
    assert step["command"] == command
    assert set(step["versions"]) == {"python", "mote-embeddings", "torch", "transformers", "sentence-transformers"}
    assert datetime.fromisoformat(step["date"]).tzinfo is not None


def test_the_recorded_command_makes_the_same_model(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "experts": ["search_query", "b-2"],
        "tasks": {"c d": "b-2", "e": "search_query"},
        "instructions": {"c d": 'Say "so":\n\t', "e": ""},
        "layers": "every_other",
        "default_task": "c d",
        "pooling": "cls",
        "dtype": "bfloat16",
        "max_shard_size": "10KB",
    }
    out = upcycle(str(dense), tmp_path / "out", **options)
    command = shlex.split(read_steps(out)[-1]["command"])
    out.rename(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(dense)
    assert command[0] == "mote"
    assert main(command[1:]) == 0
    assert files_in(tmp_path / "first") == files_in(out)
    for name in files_in(out) - {"mote.json"}:
        assert (tmp_path / "first" / name).read_bytes() == (out / name).read_bytes(), name


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


def test_the_model_card(upcycled: Path) -> None:
    card = ModelCard.load(upcycled / "README.md")
    assert card.data.base_model == "tiny"
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


def test_prompts_under_the_names_of_mteb_become_instructions(tmp_path: Path) -> None:
    prompts = {
        "query": "task: search result | query: ",
        "document": "title: none | text: ",
        "Clustering": "task: clustering | query: ",
        "STS": "task: sentence similarity | query: ",
    }
    source = dense_checkpoint(tmp_path / "gemma", sentence_transformers={"prompts": prompts})
    config = plan_upcycling(str(source)).config
    instructions = {
        name: config.instruction_of(name) for name in ("search_query", "search_document", "clustering", "sts")
    }
    assert list(instructions.values()) == list(prompts.values())
    saved = prompts_of(config, prompts)
    assert {name: saved[name] for name in prompts} == prompts


# What a source may hold ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_weights_that_are_not_finite_are_named(
    value: float, file_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = dense_checkpoint(tmp_path / "source", dtype=torch.float16)
    edit_weights(source, embeddings__LayerNorm__bias=torch.tensor([value] * 16, dtype=torch.float16))
    if file_format == "bin":
        to_bin(source)
    upcycle(str(source), tmp_path / "out")
    expected = f"Weights of {source} hold NaN or infinite values: embeddings.LayerNorm.bias"
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [expected]


def test_links_out_of_the_source_are_not_followed(tmp_path: Path) -> None:
    source = e5_checkpoint(tmp_path / "source")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    link = source / "1_Pooling" / "leak"
    for target in (tmp_path / "secret" / "key", Path("../../secret/key")):
        link.symlink_to(target)
        with pytest.raises(ValueError, match=r"leak is a link to a file outside of .*source.*which is not copied"):
            upcycle(str(source), tmp_path / "out")
        link.unlink()
    shutil.copytree(source / "1_Pooling", tmp_path / "secret", dirs_exist_ok=True)
    shutil.rmtree(source / "1_Pooling")
    (source / "1_Pooling").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link to a file outside of"):
        upcycle(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_within_the_source_and_those_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    source = e5_checkpoint(tmp_path / "models--me--e5" / "snapshots" / "abc")
    blobs = tmp_path / "models--me--e5" / "blobs"
    blobs.mkdir()
    settings = source / "1_Pooling" / "config.json"
    settings.rename(blobs / "123")
    settings.symlink_to(Path("../../../blobs/123"))
    (source / "2_Normalize" / "note").symlink_to(source / "README.md")
    out = upcycle(str(source), tmp_path / "out")
    assert (out / "1_Pooling" / "config.json").read_bytes() == (blobs / "123").read_bytes()
    assert not any(path.is_symlink() for path in out.rglob("*"))
    (blobs / "456").symlink_to("/etc/passwd")
    (source / "1_Pooling" / "more").symlink_to(blobs / "456")
    with pytest.raises(ValueError, match="is a link to a file outside of"):
        upcycle(str(source), tmp_path / "other")
