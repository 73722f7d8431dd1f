"""Estimate the memory of a training step, without the memory or a GPU.

What depends on the number of parameters is computed. Activations, of any architecture, are measured: a mini-batch runs
on fake tensors, which have shapes but no data, while every allocation is recorded.
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # where PyTorch's documentation imports it from
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from mote.checkpoints.plain import learned_positions
from mote.checkpoints.reading import is_mote, mote_class, open_checkpoint
from mote.checkpoints.tensors import token_routing
from mote.reporting import Report, table

# Dropout of attention probabilities, which GPUs do not keep, in configs.
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attention_probs_dropout")


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Report):
    """Memory of a training step, in bytes.

    Attributes:
        weights: Weights of all experts.
        gradients: Gradients of all weights; those of experts that a step does not use are absent in that step.
        optimizer: AdamW's two moments and its step counters.
        activations: Peak of one mini-batch's forward and backward pass, on top of the above.
        loss: Embeddings of the batch, their gradients, and one chunk of logits.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    def __str__(self) -> str:
        """A table in GiB."""
        return table(["", "GiB"], [(name, f"{size / 2**30:.2f}") for name, size in self.to_dict().items()])

    def to_dict(self) -> dict[str, int]:
        """Return the bytes of each part, and their sum as `total`."""
        parts = asdict(self)
        return {**parts, "total": sum(parts.values())}


def estimate_memory(
    model: str | PreTrainedModel | PreTrainedConfig,
    *,
    batch_size: int,
    length: int,
    mini_batch_size: int | None = None,
    columns: int = 2,
    gradient_checkpointing: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> MemoryEstimate:
    """Estimate the memory of a step of contrastive training with AdamW on one GPU. Weights are in float32.

    Not included are the CUDA context (about half a GiB) and fragmentation. Dropout masks count as activations do.

    Args:
        model: A MoTE or dense model: a folder, an id on the Hub, a model in memory, or its config.
        batch_size: Rows per step.
        length: Tokens per text.
        mini_batch_size: Rows per forward pass, with gradient caching. Default: no caching.
        columns: Texts per row: 2 for pairs, 3 with a hard negative.
        gradient_checkpointing: Whether activations within a block are recomputed.
        precision: Precision; `"bf16"` is autocast.

    Raises:
        FileNotFoundError: If the model does not exist.
        ValueError: If experts are token-routed, or the architecture is not supported.
    """
    config: Any = open_checkpoint(model).config if isinstance(model, str) else getattr(model, "config", model)
    if token_routing(config) is not None:
        raise ValueError("The memory of a token-routed model depends on where the tokens go, and cannot be estimated")
    chunk = min(mini_batch_size or batch_size, batch_size)
    empty = empty_model(config, gradient_checkpointing)
    if (positions := learned_positions(empty)) is not None and length > positions:
        raise ValueError(f"A text of {length:,} tokens is too long for the model, which has {positions:,} positions")
    parameters = [*empty.parameters()]
    if not all(parameter.is_floating_point() for parameter in parameters):
        raise ValueError("8-bit experts cannot be trained: their weights are integers")
    weights = sum(parameter.nbytes for parameter in parameters)
    documents, embedding = batch_size * (columns - 1), 4 * empty.config.hidden_size
    return MemoryEstimate(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights + 4 * len(parameters),
        activations=measure_activations(empty, chunk, length, columns if mini_batch_size is None else 1, precision),
        # Logits with probabilities and gradient; documents normalized and joined, and all embeddings, with gradients.
        loss=12 * chunk * documents + 8 * documents * embedding + 2 * batch_size * columns * embedding,
    )


def empty_model(config: Any, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, as it is in training."""
    build: Any = AutoModel.from_config
    if is_mote(config):  # in the installed classes, not the checkpoint's
        build, own = (mote_class(config.model_type, part) for part in ("model", "config"))
        config = own.from_dict(config.to_dict())
    config = copy.deepcopy(config)
    for name in ATTENTION_DROPOUT:
        backbone = getattr(config, "backbone_config", config)
        if hasattr(backbone, name):
            setattr(backbone, name, 0.0)
    with torch.device("meta"):
        model = build(config)
    model.pooler = None  # which embeddings do not pass through
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.float().train()


def measure_activations(
    model: PreTrainedModel, rows: int, length: int, passes: int = 1, precision: str = "fp32"
) -> int:
    """Measure what some forward passes and a backward pass of an empty model need beyond weights and gradients."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in model.buffers()}
        for parameter in model.parameters():  # those that modules share stay shared
            tensors[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            tensors[id(parameter)].grad = torch.empty_like(parameter, device="cpu")
        fake = copy.deepcopy(model, tensors)
        tokens = torch.ones(rows, length, dtype=torch.long)
        task = {"task": fake.config.available_experts[0]} if is_mote(fake.config) else {}
        embeddings = []
        tracker = MemTracker()
        tracker.track_external(fake)
        with tracker:
            for _ in range(passes):
                tracker.reset_mod_stats()  # else it refuses a second pass
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    output = fake(input_ids=tokens, attention_mask=torch.ones_like(tokens), **task)
                    embeddings.append(output.last_hidden_state.float().mean(dim=1))
            torch.stack(embeddings).sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # of one device
    return peak["Total"] - sum(tensor.nbytes for tensor in (*model.parameters(), *model.parameters(), *model.buffers()))
