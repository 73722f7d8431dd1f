"""Estimate the memory of a training step without running it.

What depends on the number of parameters is computed. Activations are measured: one mini-batch runs forward and
backward on fake tensors, which have shapes but no data, while every allocation is recorded. So the estimates hold
for any architecture, with gradient checkpointing and mixed precision, and need neither memory nor a GPU.
"""

import copy
import weakref
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # where PyTorch's documentation imports it from
from torch.utils._python_dispatch import TorchDispatchMode  # likewise
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from mote.checkpoints.reading import is_mote, mote_class, open_checkpoint
from mote.checkpoints.tensors import token_routing
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import Report, table

# Dropout of attention probabilities, which GPUs do not keep, in configs.
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attention_probs_dropout")


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Report):
    """Memory of a training step, in bytes.

    Attributes:
        weights: Weights of all experts.
        gradients: Gradients of all weights. An expert that a step does not use has none in that step.
        optimizer: AdamW's two moments and its step counters.
        activations: Peak of the forward and backward pass of one mini-batch, on top of all of the above.
        loss: Embeddings of the batch and their gradients, and one chunk of logits.
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
    experts: list[str] | None = None,
    batch_size: int,
    length: int,
    mini_batch_size: int | None = None,
    columns: int = 2,
    gradient_checkpointing: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> MemoryEstimate:
    """Estimate the memory of a step of contrastive training with AdamW on one GPU. Weights are in float32.

    The memory of kernels and allocators is not included: add the CUDA context (about half a GiB) and room for
    fragmentation. Dropout masks are counted in the type of the activations, though GPUs store one byte per element.

    Args:
        model: A MoTE or a dense model: a folder, an id on the Hub, a model in memory, or its config.
        experts: Experts of the MoTE that a dense model on disk is upcycled to.
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
    config: Any = model.config if isinstance(model, PreTrainedModel) else model
    if isinstance(model, str):
        config = config_of(model, experts)
    if token_routing(config) is not None:
        raise ValueError("The memory of a token-routed model depends on where the tokens go, and cannot be estimated")
    chunk = min(mini_batch_size or batch_size, batch_size)
    empty = empty_model(config, gradient_checkpointing)
    parameters = [*empty.parameters()]
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


def config_of(src: str, experts: list[str] | None = None) -> PreTrainedConfig:
    """Read the config of a source, or of the MoTE with `experts` that a dense source is upcycled to."""
    config = open_checkpoint(src).config
    if experts is None:
        return config
    if is_mote(config):
        raise ValueError(f"{src} is already a MoTE: remove `--expert`")
    return MoTEConfig(backbone_config=config, experts=experts)


def empty_model(config: Any, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, as it is in training."""
    config = copy.deepcopy(config)
    with_experts = is_mote(config)
    if with_experts:  # in the installed class, not the checkpoint's
        config = mote_class(config.model_type, "config").from_dict(config.to_dict())
    backbone = config.backbone_config if with_experts else config
    for name in ATTENTION_DROPOUT:
        if hasattr(backbone, name):
            setattr(backbone, name, 0.0)
    with torch.device("meta"):
        model: Any = mote_class(config.model_type, "model")(config) if with_experts else AutoModel.from_config(config)
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
        gradients = [parameter.grad for parameter in fake.parameters()]
        with _LiveMemory(*fake.parameters(), *gradients, *fake.buffers()) as memory:
            embeddings = []
            for _ in range(passes):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    output = fake(input_ids=tokens, attention_mask=torch.ones_like(tokens), **task)
                    embeddings.append(output.last_hidden_state.float().mean(dim=1))
            torch.stack(embeddings).sum().backward()
    return memory.peak


class _LiveMemory(TorchDispatchMode):
    """Records the bytes that are allocated while it is active: those in use, and their peak."""

    def __init__(self, *known: Any) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {id(tensor.untyped_storage()) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size
