"""Own tasks are tested by files beside those that train them, each score with the expert that made it."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint, edit_json
from sentence_transformers import SentenceTransformer

import mote
from mote import evaluate, upcycle
from mote.evaluation.tasks import load_tasks

EXPERTS = ["general", "faq", "tickets", "spam", "alike"]
TASKS = {"query": "faq", "document": "faq", "classification": "tickets", "sts": "alike", "pair_classification": "alike"}
WORDS = ("card", "rent", "train", "apple", "cloud", "green", "river", "table")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sets of labels, of search, of graded and of binary pairs."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("tickets", "spam"):
        for split in ("", ".test"):
            rows = [(f"{word} {other} {split}", word) for word in WORDS[:3] for other in WORDS]
            write_csv(folder / f"{name}{split}.csv", ("text", "label"), rows)
    for split, words in (("", WORDS[:4]), (".test", WORDS[4:])):
        write_csv(
            folder / f"faq{split}.csv", ("query", "document"), [(f"where is {one}", f"{one} is here") for one in words]
        )
    write_csv(
        folder / "alike.test.csv",
        ("sentence1", "sentence2", "score"),
        [*zip(WORDS, WORDS[1:], (1, 2.5, 0, 4, 5, 3, 1), strict=False)],
    )
    write_csv(
        folder / "same.test.csv",
        ("sentence1", "sentence2", "label"),
        [*zip(WORDS, WORDS[1:], (1, 0, 0, 1, 0, 1, 1), strict=False)],
    )
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A MoTE whose experts differ."""
    dense = dense_checkpoint(tmp_path / "tiny", sentence_transformers={"normalize": True, "max_seq_length": 24})
    out = upcycle(str(dense), tmp_path / "mote", experts=EXPERTS, tasks=TASKS)

    def move(model: mote.MoTEModel) -> None:
        for number, name in enumerate(EXPERTS):
            for weight in mote.experts.weights(model, name).values():
                weight.add_(0.05 * number)

    return mote.transform(out, tmp_path / "moved", move)


def test_each_file_is_scored_by_its_expert(model: Path, folder: Path, tmp_path: Path) -> None:
    tasks = {task.metadata.name: (task.metadata.type, task.metadata.main_score) for task in load_tasks(folder)}
    assert tasks == {
        "spam": ("Classification", "accuracy"),
        "tickets": ("Classification", "accuracy"),
        "same": ("PairClassification", "max_ap"),
        "faq": ("Retrieval", "ndcg_at_10"),
        "alike": ("STS", "cosine_spearman"),
    }
    settings = {"data": folder, "trust_remote_code": True}
    found = evaluate(str(model), tmp_path / "out", **settings)
    assert not found.failures
    assert found.experts == {
        "moved": {"spam": "spam", "tickets": "tickets", "same": "alike", "faq": "faq", "alike": "alike"}
    }
    assert " spam |" in found.per_dataset()
    again = evaluate(str(model), tmp_path / "out", **settings)  # from the cache
    assert again.experts == found.experts
    other = evaluate(
        str(model), tmp_path / "out", **settings, experts={"spam": "tickets", "faq": "general"}, tasks=["spam", "faq"]
    )
    assert other.experts == {"moved": {"spam": "tickets", "faq": "general"}}
    for name, expert in (("spam", "tickets"), ("faq", "general"), ("faq", "faq")):
        used = other if found.experts["moved"][name] != expert else found
        (task,) = load_tasks(folder, [name])
        assert used.scores["moved"][name] == pytest.approx(score_of(model, expert, task, tmp_path / f"{name}-{expert}"))
    with pytest.raises(ValueError, match=r"Unknown task for the dataset 'spam': 'tikets'\. Did you mean 'tickets'"):
        evaluate(str(model), tmp_path / "out", **settings, experts={"spam": "tikets"}, tasks=["spam"])


def score_of(model: Path, expert: str, task: Any, out: Path) -> float:
    """The score of one expert, exported as a dense model."""
    dense = mote.transform(model, out, mote.experts.export, expert)
    return evaluate(str(dense), data=task.source.folder, tasks=[task.metadata.name]).scores[out.name][
        task.metadata.name
    ]


def test_documents_of_the_index_that_is_there(model: Path, folder: Path, tmp_path: Path) -> None:
    edit_json(
        model / "config.json",
        tasks={**dict.fromkeys(EXPERTS), **{one: one for one in EXPERTS}, **TASKS, "document": "general"},
    )
    found = evaluate(str(model), tmp_path / "out", data=folder, tasks=["faq"], trust_remote_code=True)
    assert found.experts == {"moved": {"faq": "faq and general"}}
    used: dict[str, int] = {}
    encoder = SentenceTransformer(str(model), trust_remote_code=True, device="cpu")
    for expert, layer in encoder[0].model.backbone.encoder.layer[0].experts.items():
        layer.register_forward_hook(lambda *_, expert=expert: used.update({expert: 1}))
    encoder.encode_query(["where"])
    encoder.encode_document(["here"])
    assert [*used] == ["faq", "general"]
