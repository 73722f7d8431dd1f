"""What only a GPU can show. Skipped without one."""

from pathlib import Path

import pytest
import torch
from helpers.families import EAGER_ONLY, EXPERTS, all_families, assert_threads_agree, batch, trained_mote

import mote
from mote.remote.modeling_mote import MoTEModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in inputs.items()}


@all_families
def test_gpu_equals_cpu(name: str) -> None:
    model, inputs = trained_mote(name), batch()
    tasks = ["alpha", "beta", "beta", "alpha"]
    with torch.no_grad():
        expected = [model(**inputs, task=task).pooler_output for task in ("beta", tasks)]
        model.cuda()
        found = [model(**on_gpu(inputs), task=task).pooler_output.cpu() for task in ("beta", tasks)]
        ids = torch.tensor([list(model.config.tasks).index(task) for task in tasks]).cuda()
        found_by_ids = model(**on_gpu(inputs), task_ids=ids).pooler_output.cpu()
    for one, other in zip([*expected, expected[1]], [*found, found_by_ids], strict=True):
        assert (one - other).abs().max() <= 2e-5


@all_families
def test_bfloat16_with_checkpointing_trains(name: str) -> None:
    model = trained_mote(name).cuda().to(torch.bfloat16).train()
    if name not in EAGER_ONLY - {"gemma2"}:
        model.gradient_checkpointing_enable()
    model(**on_gpu(batch()), task="beta").pooler_output.float().square().sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".experts.alpha." in key), key
        assert parameter.grad is None or parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("device_map", ["cuda", "auto"])
def test_threads_on_one_gpu(device_map: str, tmp_path: Path) -> None:
    on_cpu, batches = trained_mote("bert"), [batch(seed=seed) for seed in range(8)]
    on_cpu.save_pretrained(tmp_path)
    model = MoTEModel.from_pretrained(tmp_path, device_map=device_map)
    assert model.device.type == "cuda"

    def embed(thread: int, turn: int) -> list[torch.Tensor]:
        return [model(**on_gpu(batches[thread]), task=EXPERTS[turn % 2]).pooler_output]

    with torch.no_grad():
        expected = on_cpu(**batches[0], task=EXPERTS[0]).pooler_output
        assert (embed(0, 0)[0].cpu() - expected).abs().max() <= 2e-5
        assert_threads_agree(embed, turns=50)


@all_families
@torch.no_grad()
def test_one_pass_and_graphs_equal_eager(name: str) -> None:
    model = trained_mote(name).cuda()
    inputs = [on_gpu(batch(rows=rows, length=length)) for rows, length in ((1, 5), (3, 17), (40, 30))]
    tasks = [["alpha", "beta", "beta", "alpha"] * 10, "beta"]
    calls = [
        (given, task if isinstance(task, str) else task[: len(given["input_ids"])])
        for given in inputs
        for task in tasks
    ]
    expected = [model(**given, task=task).pooler_output for given, task in calls]
    for way in ({"one_pass": True}, {"cuda_graphs": True}, {"one_pass": True, "cuda_graphs": True}):
        mote.speed_up(model, **way)
        for _ in range(2):  # captured, then replayed
            for (given, task), of_eager in zip(calls, expected, strict=True):
                assert (model(**given, task=task).pooler_output - of_eager).abs().max() <= 2e-5, (way, task)


@torch.no_grad()
def test_graphs_in_threads_on_several_streams() -> None:
    model, batches = trained_mote("bert").cuda(), [on_gpu(batch(rows=1 + seed % 4, seed=seed)) for seed in range(8)]
    mote.speed_up(model, cuda_graphs=True)
    streams = [torch.cuda.Stream() for _ in range(8)]

    def embed(thread: int, turn: int) -> list[torch.Tensor]:
        with torch.cuda.stream(streams[thread]):
            out = model(**batches[(thread + turn) % 8], task=EXPERTS[turn % 2]).pooler_output
        streams[thread].synchronize()
        return [out]

    assert_threads_agree(embed, turns=125)
