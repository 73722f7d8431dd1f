"""What the integrations share: tasks of queries and documents, settings, errors at construction."""

import copy
import importlib
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ecosystem.promises import Reference
from helpers.paths import SMALL_ENCODER
from sentence_transformers import SentenceTransformer

import mote
from mote.integrations.encoder import TaskEncoder

TEXTS = ["Whales breathe air through a blowhole.", "Prices rise.", "clustering: how to undo a commit"]


def test_queries_and_documents(trained_folder: Path, reference: Reference) -> None:
    encoder = TaskEncoder(trained_folder, trust_remote_code=True)
    reference.is_by(encoder.encode_queries(TEXTS), TEXTS, "search_query")  # also a text that begins as another task's
    reference.is_by(encoder.encode_documents(TEXTS), TEXTS, "search_document")


@pytest.mark.parametrize(("query_task", "document_task"), [("clustering", "sts"), ("document", "query")])
def test_other_tasks(model: SentenceTransformer, reference: Reference, query_task: str, document_task: str) -> None:
    encoder = TaskEncoder(model, query_task=query_task, document_task=document_task)
    reference.is_by(encoder.encode_queries(TEXTS), TEXTS, query_task)
    reference.is_by(encoder.encode_documents(TEXTS), TEXTS, document_task)


def test_a_default_prompt_is_not_used(trained_folder: Path, reference: Reference) -> None:
    model = SentenceTransformer(str(trained_folder), trust_remote_code=True, default_prompt_name="clustering")
    reference.is_by(TaskEncoder(model).encode_queries(TEXTS), TEXTS, "search_query")


def test_tasks_without_instructions(tmp_path: Path) -> None:
    folder = mote.upcycle(str(SMALL_ENCODER), tmp_path / "mote", experts=["one", "other"])
    encoder = TaskEncoder(folder, query_task="one", document_task="other", trust_remote_code=True)
    assert encoder.encode_queries(TEXTS) == pytest.approx(encoder.model.encode(TEXTS, task="one"))
    assert TaskEncoder(folder, trust_remote_code=True).encode_queries(TEXTS).shape == (3, 256)  # the default task
    mote.configure(folder, default_task="none")
    for side, tasks in (("query", {}), ("document", {"query_task": "one"})):
        with pytest.raises(ValueError, match=rf"no task '{side}': pass `{side}_task=`. Available: 'one', 'other'"):
            TaskEncoder(folder, trust_remote_code=True, **tasks)


def test_dense_models() -> None:
    prompts = {"query": "question: ", "document": "passage: ", "topic": "topic: "}
    model = SentenceTransformer(str(SMALL_ENCODER), prompts=prompts, device="cpu")
    encoder = TaskEncoder(model, document_task="topic")
    plain = SentenceTransformer(str(SMALL_ENCODER), device="cpu")
    assert encoder.encode_queries(TEXTS) == pytest.approx(plain.encode(["question: " + text for text in TEXTS]))
    assert encoder.encode_documents(TEXTS) == pytest.approx(plain.encode(["topic: " + text for text in TEXTS]))
    assert TaskEncoder(plain).encode_queries(TEXTS) == pytest.approx(plain.encode(TEXTS))
    with pytest.raises(ValueError, match=r"Unknown task 'topics'. Did you mean 'topic'\?"):
        TaskEncoder(model, query_task="topics")


def test_tasks_that_are_refused(model: SentenceTransformer) -> None:
    for side in ("query_task", "document_task"):
        with pytest.raises(ValueError, match=r"Unknown task 'clusterin'. Did you mean 'clustering'\?"):
            TaskEncoder(model, **{side: "clusterin"})
    for name in ("prompt", "prompt_name", "task"):  # of both sides
        with pytest.raises(ValueError, match=f"'{name}' for both sides: pass `query_task=` and `document_task=`"):
            TaskEncoder(model, encode_kwargs={name: "search_document"})


def test_settings(model: SentenceTransformer, trained_folder: Path) -> None:
    encoder = TaskEncoder(model, encode_kwargs={"truncate_dim": 8, "normalize_embeddings": True})
    for vectors in (encoder.encode_queries(TEXTS), encoder.encode_documents(TEXTS)):
        assert vectors.shape == (3, 8)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert TaskEncoder(model).encode_documents([]).tolist() == []
    with pytest.raises(ValueError, match="keyword arguments that this model does not use: \\['batchsize'\\]"):
        TaskEncoder(model, encode_kwargs={"batchsize": 8})
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        TaskEncoder(trained_folder)
    with pytest.raises(ValueError, match="/nonexistent does not load in Sentence-Transformers"):
        TaskEncoder("/nonexistent")


def test_a_model_is_loaded_as_the_settings_say(monkeypatch: pytest.MonkeyPatch, model: SentenceTransformer) -> None:
    asked: list[Any] = []

    def load(path: str, **settings: Any) -> SentenceTransformer:
        asked.append((path, settings))
        return model

    monkeypatch.setattr("mote.integrations.encoder.load_encoder", load)
    TaskEncoder("you/model-mote", revision="v1", device="cpu", trust_remote_code=True)
    assert asked == [("you/model-mote", {"revision": "v1", "device": "cpu", "trust_remote_code": True})]


def test_pickling_and_copies(trained_folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder.parent)
    encoder = TaskEncoder(trained_folder.name, trust_remote_code=True, query_task="clustering")
    stored = pickle.dumps(encoder)
    assert len(stored) < 2_000  # the settings, not the weights
    monkeypatch.chdir("/")
    for other in (pickle.loads(stored), copy.deepcopy(encoder)):
        reference.is_by(other.encode_queries(TEXTS), TEXTS, "clustering")
    of_loaded = pickle.loads(pickle.dumps(TaskEncoder(encoder.model)))
    reference.is_by(of_loaded.encode_queries(TEXTS), TEXTS, "search_query")


def test_threads(model: SentenceTransformer, reference: Reference) -> None:
    encoder = TaskEncoder(model)
    with ThreadPoolExecutor(4) as pool:
        queries = [pool.submit(encoder.encode_queries, TEXTS) for _ in range(4)]
        documents = [pool.submit(encoder.encode_documents, TEXTS) for _ in range(4)]
        for query, document in zip(queries, documents, strict=True):
            reference.is_by(query.result(), TEXTS, "search_query")
            reference.is_by(document.result(), TEXTS, "search_document")


@pytest.mark.parametrize(
    ("module", "library"), [("langchain", "langchain_core"), ("llamaindex", "llama_index"), ("chroma", "chromadb")]
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, module: str, library: str) -> None:
    ours = f"mote.integrations.{module}"
    for name in [name for name in sys.modules if name == ours or name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "mote-embeddings\[{module}\]"'):
        importlib.import_module(ours)
