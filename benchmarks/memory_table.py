"""The tables of docs/scale.md: memory per GPU of a training step, by model size and number of GPUs.

    python -m benchmarks.memory_table

Takes seconds and needs no GPU: only shapes are computed.
"""

from collections.abc import Iterator

from transformers import BertConfig, NomicBertConfig

from mote import MemoryEstimate, estimate_memory
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import table as markdown_table
from mote.training.memory import Sharding

GIB = 2**30
BATCH_SIZE = 6144  # as in the paper

# all-MiniLM-L6-v2 and nomic-bert-2048 (137 M parameters, no dropout), each with the paper's four experts
MODELS = {
    "all-MiniLM-L6-v2": (BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536), 256),
    "nomic-bert-2048": (NomicBertConfig(), 512),
}

# GPUs → mini-batch size, sharding, gradient checkpointing
SETTINGS: dict[int, list[tuple[int, Sharding, bool]]] = {
    1: [(64, "ddp", False), (256, "ddp", True)],
    8: [(64, "ddp", False), (256, "ddp", True), (64, "fsdp2", False)],
    128: [(48, "ddp", False), (48, "fsdp2", False)],
}

SIZES = ("persistent", "activations", "loss", "total")  # columns of `_sizes`


def rows() -> Iterator[tuple[str, ...]]:
    """Estimate each combination."""
    for name, (backbone, length) in MODELS.items():
        for processes, settings in SETTINGS.items():
            for mini_batch_size, sharding, checkpointing in settings:
                estimate = estimate_memory(
                    MoTEConfig(backbone_config=backbone),
                    batch_size=BATCH_SIZE,
                    mini_batch_size=mini_batch_size,
                    length=length,
                    processes=processes,
                    sharding=sharding,
                    precision="bf16",
                    gradient_checkpointing=checkpointing,
                )
                how = f"{sharding}, checkpointing" if checkpointing else sharding
                how = how if processes > 1 else how.replace("ddp", "one process")
                yield (name, str(length), str(processes), how, str(mini_batch_size), *_sizes(estimate))


def _sizes(estimate: MemoryEstimate) -> Iterator[str]:
    persistent = estimate.weights + estimate.gradients + estimate.optimizer + estimate.communication
    for size in (persistent, estimate.activations, estimate.loss, estimate.to_dict()["total"]):
        yield f"{size / GIB:.2f}"


if __name__ == "__main__":
    heads = ["model", "tokens", "GPUs", "how", "mini-batch", *SIZES]
    print(markdown_table(heads, rows(), align="lrrlrrrrr"))
