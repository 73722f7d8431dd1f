"""The router of texts of unknown task."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import read_json, trusted
from helpers.rows import write_rows

import mote
from mote import serving
from mote.cli import main
from mote.corpora.embed import read_embeddings

TRUST = {"trust_remote_code": True}
WORDS = {
    "classification": ["card", "bank", "money", "transfer", "account"],
    "clustering": ["whale", "ocean", "fish", "river", "water"],
    "search_query": ["why", "how", "where", "what", "who"],
    "search_document": ["theorem", "proof", "number", "group", "field"],
}


def texts_of(task: str, seed: int, count: int = 60) -> list[str]:
    chosen = np.random.default_rng(seed)
    return [" ".join([*chosen.choice(WORDS[task], 4), str(number)]) for number in range(count)]


@pytest.fixture
def routed(trained_folder: Path, tmp_path: Path) -> Path:
    """A MoTE with a router, trained on labelled texts, single ones, and pairs, of which each role gets its own."""
    folder = shutil.copytree(trained_folder, tmp_path / "mote")
    (folder / "mote.json").write_text(json.dumps({"format": 1, "steps": [], "files": ["config.json"]}))
    pairs = zip(texts_of("search_query", 3), texts_of("search_document", 4), strict=True)
    files = {
        "classification": [{"text": text, "label": "a"} for text in texts_of("classification", 1)],
        "clustering": [{"text": text} for text in texts_of("clustering", 2)],
        "pairs": [{"query": query, "positive": document} for query, document in pairs],
    }
    places = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()}
    words = [f"{task}={places.get(task, places['pairs'])}" for task in WORDS]
    assert main(["route", str(folder), *words, "--trust-remote-code"]) == 0
    return folder


def test_each_text_gets_the_task_of_its_like(routed: Path, tmp_path: Path) -> None:
    assert read_json(routed / "mote.json")["files"] == ["config.json", "router.safetensors"]
    encoder = trusted(routed)
    router = mote.open_router(encoder, routed)
    new = {task: texts_of(task, 9, 10) for task in WORDS}
    for task, texts in new.items():
        assert router.tasks_of(texts) == [task] * 10
    assert router.tasks_of([""])[0] in WORDS
    rows = [{"text": text, "task": task} for task, texts in new.items() for text in texts]
    corpus = write_rows(tmp_path / "corpus.jsonl", rows)
    ways = {"routed": {"task": "auto"}, "told": {"task_column": "task"}}
    found, told = (
        np.concatenate([*read_embeddings(mote.embed_corpus(routed, corpus, tmp_path / way, **choice, **TRUST))[1]])
        for way, choice in ways.items()
    )
    assert np.array_equal(found, told)
    embedder = serving.Embedder(encoder, router)
    for task, texts in new.items():
        assert embedder.item(texts[0], "auto") == embedder.item(texts[0], task)


def test_two_tasks_and_none(routed: Path, tmp_path: Path) -> None:
    words = [f"{task}={tmp_path / task}.jsonl" for task in ("classification", "clustering")]
    assert mote.train_router(routed, words, **TRUST) == {"classification": 1, "clustering": 1}
    router = mote.open_router(encoder := trusted(routed), routed)
    assert router.tasks_of([WORDS["clustering"][0], WORDS["classification"][0]]) == ["clustering", "classification"]
    with pytest.raises(ValueError, match="Unknown task 'clusterin'"):
        mote.train_router(routed, ["clusterin=x"], **TRUST)
    (routed / "router.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no router for unknown tasks: .* See `mote route --help`"):
        mote.open_router(encoder, routed)
    with pytest.raises(ValueError, match="Unknown task 'auto'"):
        serving.Embedder(encoder).item("a text", "auto")


def test_a_model_that_is_loaded_with_its_router(routed: Path) -> None:
    model, plain, tokenizer = mote.load(routed, route="auto"), mote.load(routed), trusted(routed).tokenizer
    batch = tokenizer([texts_of(task, 9)[0] for task in WORDS], padding=True, return_tensors="pt")
    assert model(**batch).pooler_output.equal(plain(**batch, task=[*WORDS]).pooler_output)
    assert model(**batch, task="clustering")[1].equal(plain(**batch, task="clustering")[1])
    with pytest.raises(ValueError, match="needs `input_ids`; with other inputs, pass `task`"):
        model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]))


def test_a_router_is_not_used_after_a_change_of_tasks_or_shared_weights(routed: Path) -> None:
    model = mote.load(routed, route="auto")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(routed)
    with pytest.raises(
        ValueError, match=r"before the model changed \(other token embeddings\): run `mote route` again"
    ):
        mote.load(routed, route="auto")
    mote.experts.remove(model, "clustering")
    model.save_pretrained(routed)
    with pytest.raises(ValueError, match=r"before the model changed \(unknown tasks \['clustering'\]\)"):
        mote.open_router(trusted(routed), routed)
