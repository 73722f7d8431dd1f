"""Settings of a Sentence-Transformers source carry over: modules, pooling, prompts."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, e5_checkpoint, edit_json, read_json, trusted
from sentence_transformers import SentenceTransformer

from mote import plan_upcycling, upcycle
from mote.checkpoints.sentence_transformers import POOLING_NAMES
from mote.checkpoints.st_settings import Retrieval, first_module, write_retrieval
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel

TEXTS = ["whales breathe air", "a recipe for bread", "bread"]
LONG = "a long text " * 50


@pytest.fixture(scope="module")
def e5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return e5_checkpoint(tmp_path_factory.mktemp("e5") / "e5")


def test_settings_and_prompts_of_the_source_carry_over(e5: Path, tmp_path: Path) -> None:
    out = upcycle(str(e5), tmp_path / "out")
    modules = ["MoTETransformer", "Pooling", "Normalize"]
    assert [module["type"].rsplit(".", 1)[-1] for module in read_json(out / "modules.json")] == modules
    source, mote = SentenceTransformer(str(e5)), trusted(out)
    assert (mote.max_seq_length, mote[0].model.config.pooling) == (11, "cls")
    texts = [*TEXTS, LONG]
    for task in ("classification", "search_query"):
        assert np.array_equal(mote.encode(texts, task=task), source.encode(texts))
        assert np.allclose(np.linalg.norm(mote.encode(texts, task=task), axis=1), 1)
    config = mote[0].model.config
    instructions = {task: config.instruction_of(task) for task in config.tasks}
    assert instructions["query"] == instructions["search_query"] == "query: "
    assert instructions["document"] == instructions["search_document"] == ""  # so the source's own encode_document
    prompts = read_json(out / "config_sentence_transformers.json")["prompts"]
    assert (prompts["query"], prompts["Retrieval-query"], prompts["passage"]) == ("query: ", "query: ", "passage: ")
    expected = source.encode(TEXTS, prompt_name="query")
    assert np.array_equal(mote.encode(TEXTS, prompt_name="query"), expected)
    assert np.array_equal(mote.encode_query(TEXTS), expected)
    assert np.array_equal(mote.encode_document(TEXTS), source.encode_document(TEXTS))
    assert np.array_equal(mote.encode([f"query: {text}" for text in TEXTS]), expected)
    assert np.array_equal(mote.encode(TEXTS, prompt_name="passage"), source.encode(TEXTS, prompt_name="passage"))


@pytest.mark.parametrize(
    ("prompts", "default", "experts"),
    [
        ({}, None, None),
        ({"query": "Q: ", "passage": "P: "}, "passage", None),
        ({"query": "Q: ", "document": "D: "}, None, ["general", "search"]),
        ({"query": "Q: ", "topic": "T: "}, "topic", ["search"]),
    ],
)
def test_a_fresh_model_embeds_as_its_source(
    prompts: dict[str, str], default: str | None, experts: list[str] | None, tmp_path: Path
) -> None:
    """No instructions that the source has not seen, in whatever way it is called."""
    dense_checkpoint(tmp_path / "tiny", sentence_transformers={})
    edit_json(tmp_path / "tiny" / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=default)
    tasks = {} if experts is None else {"query": "search", "document": "search"}
    mote = trusted(upcycle(str(tmp_path / "tiny"), tmp_path / "out", experts=experts, tasks=tasks))
    source = SentenceTransformer(str(tmp_path / "tiny"))
    for way in ({}, {"prompt": "search_query: "}, {"prompt": "mine: "}, *({"prompt_name": name} for name in prompts)):
        assert np.array_equal(mote.encode(TEXTS, **way), source.encode(TEXTS, **way)), way
    assert np.array_equal(mote.encode_query(TEXTS), source.encode_query(TEXTS))
    assert np.array_equal(mote.encode_document(TEXTS), source.encode_document(TEXTS))
    texts = [f"search_query: {text}" for text in TEXTS]
    assert np.array_equal(mote.encode(texts), source.encode(texts))
    if experts is None:
        assert np.array_equal(mote.encode(TEXTS, prompt_name="search_query"), source.encode_query(TEXTS))


def test_prompts_that_only_a_card_prescribes(tmp_path: Path) -> None:
    for name, query, document in (
        ("multilingual-e5-small", "query: ", "passage: "),
        ("nomic-embed-text-v1.5", "search_query: ", "search_document: "),
        ("e5-mistral-7b-instruct", "", ""),
    ):
        config = plan_upcycling(str(dense_checkpoint(tmp_path / name, sentence_transformers={}))).config
        assert (config.instruction_of("query"), config.instruction_of("document")) == (query, document)


def test_a_prompt_of_the_source_can_be_routed(e5: Path, tmp_path: Path) -> None:
    options = ["--task", "passage=search_document", "--instruction", "clustering=topic: "]
    assert main(["upcycle", "--src", str(e5), "--out", str(tmp_path / "out"), *options]) == 0
    mote = trusted(tmp_path / "out")
    config = mote[0].model.config
    assert {config.instruction_of(task) for task in ("passage", "search_document", "document")} == {"passage: "}
    assert config.instruction_of("clustering") == "topic: "
    expected = SentenceTransformer(str(e5)).encode(TEXTS, prompt_name="passage")
    assert np.array_equal(mote.encode(TEXTS, prompt_name="passage"), expected)
    assert np.array_equal(mote.encode_document(TEXTS), expected)
    assert np.array_equal(mote.encode([f"passage: {text}" for text in TEXTS]), expected)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("mean", None), ("cls", None), ("lasttoken", None), ("mean", "cls"), ("max", "cls")]
)
def test_pooling_carries_over_or_is_the_same_for_both_libraries(theirs: str, ours: str | None, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", sentence_transformers={"pooling": theirs})
    out = upcycle(str(source), tmp_path / "out", pooling=ours)
    mote = trusted(out)
    if ours is None:
        assert mote[0].model.config.pooling == POOLING_NAMES[theirs]
        assert np.array_equal(mote.encode(TEXTS, task="clustering"), SentenceTransformer(str(source)).encode(TEXTS))
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
        for change in (partial(upcycle, str(source), tmp_path / "out"), partial(write_retrieval, source, Retrieval())):
            with pytest.raises(ValueError, match=r"is outside the modules of .*source"):
                change()
    assert (tmp_path / "secret").is_dir()
    assert first_module("evil.InstructedTransformer", included=True) == "evil.InstructedTransformer"  # not ours


def test_a_network_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path / "source", sentence_transformers={"max_seq_length": 7, "normalize": True})
    (folder / "0_Transformer").mkdir()
    for path in [path for pattern in ("model.*", "tok*", "*bert*", "config.json") for path in folder.glob(pattern)]:
        path.rename(folder / "0_Transformer" / path.name)
    first, *others = read_json(folder / "modules.json")
    (folder / "modules.json").write_text(json.dumps([{**first, "path": "0_Transformer"}, *others]))
    mote = trusted(upcycle(str(folder), tmp_path / "out"))
    assert mote.max_seq_length == 7
    assert np.array_equal(mote.encode([LONG], task="clustering"), SentenceTransformer(str(folder)).encode([LONG]))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_texts_longer_than_the_positions_are_cut(family: str, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", family, max_position_embeddings=20, pad_token_id=0)
    edit_json(source / "tokenizer_config.json", model_max_length=100)
    mote = trusted(upcycle(str(source), tmp_path / "out"))
    assert mote.max_seq_length == (19 if family == "roberta" else 20)  # which leaves out the padding's position
    assert np.isfinite(mote.encode([LONG], task="clustering")).all()


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A source as the Hub's cache stores it: links to files in `blobs`."""
    source = e5_checkpoint(tmp_path / "models--me--e5" / "snapshots" / "abc")
    blobs = tmp_path / "models--me--e5" / "blobs"
    blobs.mkdir()
    (source / "1_Pooling" / "config.json").rename(blobs / "123")
    (source / "1_Pooling" / "config.json").symlink_to(Path("../../../blobs/123"))
    (source / "2_Normalize" / "note").symlink_to(source / "README.md")
    return source


def test_links_within_the_source_and_those_of_the_hubs_cache_are_followed(cached: Path, tmp_path: Path) -> None:
    out = upcycle(str(cached), tmp_path / "out")
    assert (out / "1_Pooling" / "config.json").read_bytes() == (cached / "1_Pooling" / "config.json").read_bytes()
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize("target", ["{tmp}/secret/key", "../../../../secret/key", "../../../blobs/456", None])
def test_links_out_of_the_source_are_not_followed(target: str | None, cached: Path, tmp_path: Path) -> None:
    shutil.copytree(cached / "1_Pooling", tmp_path / "secret")
    (tmp_path / "secret" / "key").write_text("private")
    (cached.parents[1] / "blobs" / "456").symlink_to(tmp_path / "secret" / "key")
    if target is None:
        shutil.rmtree(cached / "1_Pooling")
        (cached / "1_Pooling").symlink_to(tmp_path / "secret")
    else:
        (cached / "1_Pooling" / "leak").symlink_to(target.format(tmp=tmp_path))
    with pytest.raises(ValueError, match=r"(leak|1_Pooling) is outside the modules of .*abc"):
        upcycle(str(cached), tmp_path / "out")
    assert not (tmp_path / "out").exists()
