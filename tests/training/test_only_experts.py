"""One expert is trained, all else stays as it is: one line of a recipe."""

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, tensors_of
from helpers.paths import EXAMPLE_DATA
from helpers.runs import overrides, plan

import mote
from mote import upcycle
from mote.training.train import train

LEGAL = "legal: {anchor: legal, batches: homogeneous, datasets: [retrieval/tldr_pages]}"
BOTH_SIDES = "legal: {anchor: legal, positive: search_document, batches: homogeneous, datasets: [retrieval/tldr_pages]}"
OTHER = "topics: {anchor: clustering, batches: homogeneous, datasets: [retrieval/tldr_pages]}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    dense = dense_checkpoint(folder / "tiny", sentence_transformers={"normalize": True, "max_seq_length": 24})
    upcycled = upcycle(str(dense), folder / "mote")
    return mote.transform(upcycled, folder / "legal", mote.experts.add, "legal", instruction="legal: ")


def settings(source: Path, out: Path, *more: str, tasks: str = LEGAL) -> list[str]:
    own = ("training.only_experts=[legal]", "training.learning_rate=1e-2", "training.weight_decay=0.5")
    return overrides(source, EXAMPLE_DATA, out, f"tasks={{{tasks}}}", *own, *more)


@pytest.mark.parametrize(
    ("tasks", "how"),
    [
        (LEGAL, "training.gradient_checkpointing=true"),
        pytest.param(BOTH_SIDES, "training.mini_batch_size=8", marks=pytest.mark.long),
    ],
)
def test_only_the_new_expert_moves(tasks: str, how: str, source: Path, tmp_path: Path) -> None:
    model = train("mote", settings(source, tmp_path / "run", how, tasks=tasks))
    before, after = (tensors_of(folder) for folder in (source, model))
    assert before.keys() == after.keys()
    moved = {key for key, weight in after.items() if not torch.equal(weight, before[key])}
    of_legal = {key for key in after if ".experts.legal." in key}
    assert moved <= of_legal
    assert {key for key in of_legal if key.endswith("weight")} <= moved
    assert mote.experts.list_experts(str(model)).base_hash == mote.experts.list_experts(str(source)).base_hash


def test_lines_that_do_not_hold(source: Path, tmp_path: Path) -> None:
    for override, message in (
        ("training.only_experts=[legl]", r"Unknown expert to train: 'legl'. Did you mean 'legal'\?"),
        ("training.only_experts=[clustering]", r"tasks.legal trains legal, none of .*only_experts \(clustering\)"),
        (f"tasks={{{LEGAL}, {OTHER}}}", "tasks.topics trains clustering, none of"),
    ):
        with pytest.raises(ValueError, match=message):
            plan("mote", settings(source, tmp_path / "run", override))
