"""Encoding with MoTE compared with one LoRA adapter per task on the same dense model, as in jina-embeddings-v3."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options
from benchmarks.performance.models import TASKS, load_dense, make_mote, milliseconds, real_texts, seconds, waiting
from mote.remote.modeling_mote import pool

ROWS = 64


def measure(options: Options) -> Benchmark:
    """Compare on real texts of four tasks, in one batch and task by task."""
    dense = load_dense(options)
    mote = make_mote(dense)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    texts = real_texts(options, ROWS // len(TASKS))
    mixed = [
        (task, text) for group in zip(*texts.values(), strict=True) for task, text in zip(TASKS, group, strict=True)
    ]

    def tokens(batch: list[str]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(batch, padding=True, truncation=True, max_length=128, return_tensors="pt")
        return dict(encoded.to(options.device))

    def with_mote(tasks: str | list[str], batch: list[str]) -> torch.Tensor:
        return mote(**tokens(batch), task=tasks).pooler_output

    rows = []
    for rank in (8,) if options.quick else (4, 8):
        lora = with_adapters(load_dense(options), rank)

        def with_lora(tasks: list[str], batch: list[str], lora: PeftModel = lora) -> torch.Tensor:
            inputs = tokens(batch)
            return pool(lora(**inputs, adapter_names=tasks).last_hidden_state, inputs["attention_mask"], "mean")

        def with_active(task: str, batch: list[str], lora: PeftModel = lora) -> torch.Tensor:
            lora.set_adapter(task)
            inputs = tokens(batch)
            return pool(lora(**inputs).last_hidden_state, inputs["attention_mask"], "mean")

        tasks, batch = map(list, zip(*mixed, strict=True))
        pairs = {
            "one batch of four tasks": (lambda: with_mote(tasks, batch), lambda: with_lora(tasks, batch)),  # noqa: B023
            "a batch for each task": (
                lambda: [with_mote(task, of_task) for task, of_task in texts.items()],
                lambda: [with_active(task, of_task) for task, of_task in texts.items()],
            ),
        }
        for name, (of_mote, of_lora) in pairs.items():
            with torch.inference_mode():
                found = compare(of_mote, of_lora, seconds=seconds(options), synchronize=waiting(options))
            times = [milliseconds(found.candidate), milliseconds(found.baseline)]
            rows.append([f"rank {rank}", name, *times, f"{found.ratio:.3f}"])
    columns = ["adapters", "64 real texts in", "task LoRA, ms", "MoTE, ms", "task LoRA / MoTE"]
    notes = [
        "Times include tokenization, the forward pass and mean pooling. The adapters have random weights and are on "
        "all linear layers. For a mixed batch, peft is given the adapter of each row (`adapter_names`); for a batch of "
        "one task, the task's adapter is activated.",
        "In a mixed batch, MoTE also computes less padding, because it trims each group of rows to its longest row.",
    ]
    return Benchmark("task_lora", "Encoding compared with one LoRA adapter per task", columns, rows, [], notes)


def with_adapters(dense: PreTrainedModel, rank: int) -> PeftModel:
    """Put one adapter per task on all linear layers of a dense model."""
    dense.register_module("pooler", None)
    settings = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    lora = get_peft_model(dense, settings, adapter_name=TASKS[0])
    for task in TASKS[1:]:
        lora.add_adapter(task, settings)
    return lora.eval()
