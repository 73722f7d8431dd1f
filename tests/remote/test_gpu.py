"""What only a GPU can show. Skipped without one."""

import importlib.util
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


def test_device_map_puts_it_on_the_gpu(tmp_path: Path) -> None:
    model, inputs = trained_mote("bert"), batch()
    model.save_pretrained(tmp_path)
    expected = model(**inputs, task="alpha").pooler_output
    for device_map in ("cuda", "auto"):
        loaded = MoTEModel.from_pretrained(tmp_path, device_map=device_map)
        assert loaded.device.type == "cuda"
        assert (loaded(**on_gpu(inputs), task="alpha").pooler_output.cpu() - expected).abs().max() <= 2e-5


def test_threads_on_one_gpu() -> None:
    model = trained_mote("bert").cuda()
    batches = [on_gpu(batch(seed=seed)) for seed in range(8)]
    with torch.no_grad():
        assert_threads_agree(
            lambda thread, turn: [model(**batches[thread], task=EXPERTS[turn % 2]).pooler_output], turns=50
        )


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed")
def test_flash_attention(tmp_path: Path) -> None:
    model, inputs = trained_mote("bert", "sdpa"), batch()
    model.save_pretrained(tmp_path)
    arguments = {"dtype": torch.bfloat16, "device_map": "cuda"}
    flash = MoTEModel.from_pretrained(tmp_path, attn_implementation="flash_attention_2", **arguments)
    sdpa = MoTEModel.from_pretrained(tmp_path, attn_implementation="sdpa", **arguments)
    with torch.no_grad():
        one, other = (m(**on_gpu(inputs), task="beta").pooler_output.float() for m in (flash, sdpa))
    assert torch.nn.functional.cosine_similarity(one, other).min() > 0.999
