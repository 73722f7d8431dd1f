"""Experts that are not in use leave the device, while several threads call the model."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import assert_threads_agree, batch, in_threads
from helpers.offloading import FOUR, assert_same, offloaded, outputs, saved

import mote
from mote.remote.modeling_mote import MoTEModel


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "keep"),
    [("cpu", 1), ("cpu", 2), ("disk", 1), ("disk", 2)],
)
def test_eight_threads(to: str, keep: int, tmp_path: Path) -> None:
    expected_of, model = saved(tmp_path), offloaded(tmp_path, to, keep)
    tasks: list[Any] = [*FOUR, ["a", "b", "c", "d"], ["d", "d", "a", "b"]]
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        shared = mote.experts.parameter_counts(model)["shared"]
        one = max(mote.experts.parameter_counts(expected_of)["experts"].values())
        while not done.wait(0.001):
            most = max(most, -(-(sum(p.numel() for p in model.parameters()) - shared) // one))

    def embed(thread: int, turn: int) -> list[torch.Tensor]:
        return outputs(model, [random.Random(100 * thread + turn).choice(tasks)])

    assert_same(outputs(model, tasks), outputs(expected_of, tasks))
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert_threads_agree(embed, turns=12)
    done.set()
    watcher.join()
    assert 1 <= most <= keep
    assert not any(slot.users for slot in model.offloading.slots)


def test_an_expert_in_use_stays_and_others_wait(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), ["b"])
    model = offloaded(tmp_path)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(outputs(model, ["b"])))
    with model.offloading.expert("a"):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert model.offloading.on_device == ["a"]
    thread.join()
    assert_same(found, expected)


def test_none_starves_while_another_expert_is_in_use_without_pause(tmp_path: Path) -> None:
    saved(tmp_path)
    model, done = offloaded(tmp_path), threading.Event()

    def serve_a() -> None:
        while not done.wait(0.001):
            outputs(model, ["a"])

    threads = [threading.Thread(target=serve_a) for _ in range(4)]
    for thread in threads:
        thread.start()
    other = threading.Thread(target=lambda: outputs(model, ["b"] * 3))
    other.start()
    other.join(30)
    starved = other.is_alive()
    done.set()
    for thread in [*threads, other]:
        thread.join()
    assert not starved


@pytest.mark.long
def test_calls_go_on_while_experts_are_restored(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), FOUR)
    wrong: list[Any] = []

    def serve(model: MoTEModel, thread: int) -> None:
        try:
            for _ in range(10):
                if not torch.equal(outputs(model, [FOUR[thread]])[0], expected[thread]):
                    wrong.append(thread)
        except Exception as error:
            wrong.append(error)

    for _ in range(5):
        model = offloaded(tmp_path)
        threads = [threading.Thread(target=serve, args=[model, thread]) for thread in range(4)]
        for thread in threads:
            thread.start()
        mote.restore(model)
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_call_that_saw_experts_offloaded_runs_after_they_are_restored(tmp_path: Path) -> None:
    """As where another thread restores them just after it has looked."""
    expected = outputs(saved(tmp_path), ["b"])
    model = offloaded(tmp_path)
    waited = model.offloading
    mote.restore(model)
    with waited.expert("b"):
        assert_same(outputs(model, ["b"]), expected)
    with torch.no_grad():
        found = waited.run(model.backbone, **batch(), expert="b").last_hidden_state
        assert torch.equal(found, model(**batch(), task="b").last_hidden_state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("keep", [1, 2])
def test_on_a_gpu_equal_under_threads(to: str, keep: int, tmp_path: Path) -> None:
    expected_of = saved(tmp_path).cuda()
    model = mote.load(tmp_path, offload=to, keep=keep).cuda()
    inputs = {name: value.cuda() for name, value in batch().items()}
    with torch.no_grad():
        expected = {task: expected_of(**inputs, task=task).pooler_output for task in FOUR}
    wrong: list[Any] = []

    def serve(thread: int) -> None:
        order = random.Random(thread)
        stream = torch.cuda.Stream() if thread % 2 else torch.cuda.default_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(50):
                task = order.choice(FOUR)
                found = model(**inputs, task=task).pooler_output
                stream.synchronize()
                if not torch.equal(found, expected[task]):
                    wrong.append((thread, task))

    torch.cuda.synchronize()
    in_threads(8, serve)
    assert wrong == []
    mote.restore(model)
    with torch.no_grad():
        for task in FOUR:
            assert torch.equal(model(**inputs, task=task).pooler_output, expected[task])
