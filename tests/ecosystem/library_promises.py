"""Libraries that embed, search, evaluate and train with a model of Sentence-Transformers or Transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from ecosystem.promises import Reference, normalized, promises
from helpers.paths import EXAMPLE_DATA
from helpers.rows import read_rows
from scipy.stats import spearmanr
from sentence_transformers import MultiVectorEncoder


def changed_experts(model: Any, reference: Reference) -> set[str]:
    """The experts whose weights are other than those of the reference; "shared" for weights that all share."""
    before = reference.model.state_dict()
    names = [name for name, weight in model[0].model.state_dict().items() if not weight.equal(before[name])]
    return {name.split(".experts.")[1].split(".")[0] if ".experts." in name else "shared" for name in names}


@promises("SetFit", "setfit", tier="slow")
def setfit(names: dict[str, Any], reference: Reference) -> None:
    assert changed_experts(names["body"], reference) == {"classification", "shared"}
    assert names["classes"].tolist() == [1, 0]


@promises("model2vec", "model2vec", "sklearn")
def model2vec(names: dict[str, Any], reference: Reference) -> None:
    assert names["vectors"].shape == (2, 64)
    texts = ["whales", "prices"]
    batches = [reference.tokenizer(text, return_tensors="pt") for text in texts]
    vectors = [names["expert"](**batch).last_hidden_state[0].mean(0).detach().numpy() for batch in batches]
    reference.is_by(vectors, texts, "clustering", instruction=False)


@promises("fastembed", "fastembed", "onnxscript")
def fastembed(names: dict[str, Any], reference: Reference) -> None:
    reference.is_by(names["vectors"], names["texts"], "clustering")


@promises("transformers.js", "onnxscript", tier="slow")
def transformers_js(names: dict[str, Any], reference: Reference) -> None:
    reference.is_by(names["vectors"], ["Whales breathe air.", "Prices rise."], "clustering")


def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mteb find the datasets of the examples."""
    import mteb

    from mote.evaluation.tasks import load_tasks

    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: load_tasks(EXAMPLE_DATA, tasks))


@promises("mteb", "mteb", prepare=without_the_hub)
def mteb(names: dict[str, Any], reference: Reference) -> None:
    (task,) = names["tasks"]
    pairs = read_rows(EXAMPLE_DATA / "sts" / "sts17_en" / "test.jsonl.gz")
    one, other = (reference.embed([row[side] for row in pairs], "sts") for side in ("sentence1", "sentence2"))
    expected = spearmanr((one * other).sum(-1), [row["score"] for row in pairs]).statistic
    assert task.metadata.name == "STS17"
    assert names["results"].task_results[0].get_score() == pytest.approx(expected, abs=1e-3)


@promises("Late interaction")
def late_interaction(names: dict[str, Any], reference: Reference) -> None:
    vectors = {}
    for side, task in (("quer", "search_query"), ("document", "search_document")):
        texts = names["queries" if side == "quer" else "documents"]
        vectors[side] = [normalized(tokens_of(reference, text, task)) for text in texts]
        found = names["query_vectors" if side == "quer" else "document_vectors"]
        for one, other in zip(found, vectors[side], strict=True):
            np.testing.assert_allclose(one.numpy(), other, atol=1e-4)  # [tokens, H], by the expert of its side
    for row, query in enumerate(vectors["quer"]):
        for column, document in enumerate(vectors["document"]):
            expected = (query @ document.T).max(axis=1).sum()
            assert names["scores"][row, column].item() == pytest.approx(expected, abs=1e-3)
    reloaded = MultiVectorEncoder("late", trust_remote_code=True)
    for one, other in zip(reloaded.encode_query(names["queries"]), names["query_vectors"], strict=True):
        assert torch.equal(one, other)


def tokens_of(reference: Reference, text: str, task: str) -> np.ndarray:
    """The vectors of a text's tokens by the expert of a task, [L, H]."""
    batch = reference.tokenizer([reference.model.config.instruction_of(task) + text], return_tensors="pt")
    with torch.no_grad():
        return reference.model(**batch, task=task).last_hidden_state[0].numpy()


@promises("Several processes", tier="processes")
def several_processes(names: dict[str, Any], reference: Reference) -> None:
    reference.is_by(names["groups"], names["documents"], "clustering")
    reference.is_by(names["vectors"], names["documents"], "search_document")


@promises("The trainer", "datasets")
def trainer(names: dict[str, Any], reference: Reference) -> None:
    assert changed_experts(names["model"], reference) == {"search_query", "search_document", "shared"}


@promises("PEFT", "peft")
def peft(names: dict[str, Any], reference: Reference) -> None:
    assert names["trained"]
    assert all(".experts.search_query." in name and ".lora_" in name for name in names["trained"])
