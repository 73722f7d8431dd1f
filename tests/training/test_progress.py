"""Progress: counts, log, non-finite values, and complete checkpoints."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs import overrides, train_step

from mote.reporting import HOW_TO_RESUME
from mote.training import losses, progress
from mote.training import train as run
from mote.training.progress import NonFiniteError, RunCallback, TrackedLoss
from mote.training.recipe import load_recipe
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
    loss = TrackedLoss(torch.nn.Identity(), Constant(), tracker, "set", "task", [{"anchor": "a", "positive": "b"}])
    assert loss(features, None).item() == 1
    assert tracker.tasks == {"a": {"texts": 2, "tokens": 9}, "b": {"texts": 2, "tokens": 9}}
    assert losses.LoadBalancedLoss(Constant())(features, None).item() == 1
    assert features[0]["balance_share"] == 1 / 4
    assert losses._sorted_by_length(features, None) == (features, None)


class Constant(torch.nn.Module):
    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        return torch.ones(())


@pytest.mark.long
def test_a_non_finite_loss_stops_the_run(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=4")
    calculate = run.build_loss

    def broken(*args: Any, **kwargs: Any) -> torch.nn.Module:
        loss = calculate(*args, **kwargs)
        forward, calls = loss.forward, []

        def forward_once_more(*inputs: Any) -> torch.Tensor:
            calls.append(1)
            return forward(*inputs) * (float("nan") if ready.tracker.step == 2 else 1)

        monkeypatch.setattr(loss, "forward", forward_once_more)
        return loss

    monkeypatch.setattr(run, "build_loss", broken)
    ready = TrainingRun("mote", settings).prepare()
    with pytest.raises(NonFiniteError, match=r"loss is nan at step 3, in a batch of \d+ rows of "):
        ready.train()
    assert re.search(rf"checkpoint-2; {re.escape(HOW_TO_RESUME)}", caplog.text)
    monkeypatch.setattr(run, "build_loss", calculate)
    assert train_step(train("mote", settings))["resumed_from_step"] == 2


@pytest.mark.long
def test_non_finite_weights_are_not_saved(tiny: Path, data: Path, tmp_path: Path) -> None:
    recipe = load_recipe("mote", overrides(tiny, data, tmp_path / "run", "training.max_steps=4"))
    ready = TrainingRun(recipe).prepare()
    parameter = ready.model[0].model.get_input_embeddings().weight
    parameter.register_hook(lambda gradient: gradient * float("nan") if ready.tracker.step == 2 else gradient)
    with pytest.raises(NonFiniteError, match=r"weights are non-finite at step 3"):
        ready.train()
    assert ready.folder.last_checkpoint() == ready.folder.checkpoints / "checkpoint-2"


def test_the_chart_leaves_the_callers_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")
    log: list[dict[str, Any]] = [{"step": step, "task": "a", "loss": 1.0} for step in (1, 2)]
    log += [{"step": 2, "eval_a_loss": 1.5}]
    progress.draw_curves(log, tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams["backend"] == "svg"
