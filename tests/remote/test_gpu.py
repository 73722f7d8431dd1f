"""What only a GPU can show. Skipped without one."""

from pathlib import Path

import pytest
import torch
from helpers.families import EAGER_ONLY, EXPERTS, all_families, assert_threads_agree, batch, trained_mote

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
