"""Progress: counts, log, non-finite values, and complete checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs import overrides, train_step

from mote.reporting import HOW_TO_RESUME
from mote.training import losses, progress
from mote.training.progress import NonFiniteError, RunCallback, TrackedLoss
from mote.training.train import TrainingRun, train


def test_a_checkpoint_is_completed_when_all_processes_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = tmp_path / "checkpoint-1" / "checkpoint.json"
    seal.parent.mkdir()
    sealed_while_waiting = []
    waiting = SimpleNamespace(
        device="cpu", num_processes=1, wait_for_everyone=lambda: sealed_while_waiting.append(seal.exists())
    )
    monkeypatch.setattr(progress, "processes", lambda: waiting)
    callback = RunCallback(progress.Tracker(), {})
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    callback.on_save(SimpleNamespace(output_dir=tmp_path), state, None, model=torch.nn.Identity())
    assert sealed_while_waiting == [False]
    assert seal.exists()


def test_concatenated_texts_are_counted() -> None:
    """As flash attention has them: no mask, and where each text begins."""
    features = [
        {"input_ids": torch.zeros(1, 9), "cu_seq_lens_q": torch.tensor(ends)} for ends in ([0, 4, 9], [0, 1, 9])
    ]
    tracker = progress.Tracker()
    loss = TrackedLoss(torch.nn.Identity(), Constant(), tracker, "set", "task")
    assert loss(features, None).item() == 1
    assert tracker.training_sets == {"set": {"steps": 1, "rows": 2}}
    assert losses.LoadBalancedLoss(Constant())(features, None).item() == 1
    assert features[0]["balance_share"] == 1 / 4
    assert losses._sorted_by_length(features, None) == (features, None)


class Constant(torch.nn.Module):
    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        return torch.ones(())


@pytest.mark.long
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_values_stop_the_run(
    where: str, tiny: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss at its step; a gradient when the weights are checked, before the checkpoint is completed."""
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=4")
    ready = TrainingRun("mote", settings).prepare()
    weight = ready.model[0].model.get_input_embeddings().weight

    def spoil(*_: Any) -> None:
        weight.data *= float("nan") if ready.tracker.step == 2 else 1

    if where == "loss":
        ready.model.register_forward_pre_hook(spoil)
    else:
        weight.register_hook(lambda gradient: gradient * float("nan") if ready.tracker.step == 2 else gradient)
    messages = {"loss": r"loss is nan at step 3, in a batch of \d+ rows of ", "gradient": "non-finite at step 3"}
    with pytest.raises(NonFiniteError, match=messages[where]):
        ready.train()
    assert f"checkpoint-2; {HOW_TO_RESUME}" in caplog.text
    assert where == "gradient" or train_step(train("mote", settings))["resumed_from_step"] == 2
