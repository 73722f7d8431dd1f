"""The table of docs/scale.md: memory of a training step on one GPU, by model size.

    python -m benchmarks.memory_table

Takes seconds and needs no GPU: only shapes are computed.
"""

from collections.abc import Iterator

from transformers import BertConfig, NomicBertConfig

from mote import estimate_memory
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import table as markdown_table

GIB = 2**30
BATCH_SIZE = 6144  # as in the paper

# all-MiniLM-L6-v2 and nomic-bert-2048 (137 M parameters, no dropout), each with the paper's four experts
MODELS = {
    "all-MiniLM-L6-v2": (BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536), 256),
    "nomic-bert-2048": (NomicBertConfig(), 512),
}


def rows() -> Iterator[tuple[str, ...]]:
    """Estimate each combination."""
    for name, (backbone, length) in MODELS.items():
        for mini_batch_size, checkpointing in ((64, False), (256, True)):
            estimate = estimate_memory(
                MoTEConfig(backbone_config=backbone),
                batch_size=BATCH_SIZE,
                mini_batch_size=mini_batch_size,
                length=length,
                precision="bf16",
                gradient_checkpointing=checkpointing,
            )
            sizes = (f"{size / GIB:.2f}" for size in estimate.to_dict().values())
            yield (name, str(length), str(mini_batch_size), "yes" if checkpointing else "no", *sizes)


if __name__ == "__main__":
    heads = ["model", "tokens", "mini-batch", "checkpointing"]
    heads += ["weights", "gradients", "optimizer", "activations", "loss", "total"]
    print(markdown_table(heads, rows(), align="lrrlrrrrrr"))
