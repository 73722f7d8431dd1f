"""Estimate the memory of a training step without running it.

What depends on the number of parameters is computed. Activations are measured: one mini-batch runs forward and
backward on fake tensors, which have shapes but no data, while every allocation is recorded. So the estimates hold
for any architecture, with gradient checkpointing and mixed precision, and need neither memory nor a GPU.
"""

import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # where PyTorch's documentation imports it from
from torch.utils._python_dispatch import TorchDispatchMode  # likewise
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mote.checkpoints.reading import is_mote, mote_class, open_checkpoint
from mote.checkpoints.tensors import token_routing
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import Report, table
from mote.training.adapters import adapt, share_weights

if TYPE_CHECKING:  # recipes need the extra `train`, estimates do not
    from mote.training.trainer_settings import PeftSettings

Sharding = Literal["ddp", "fsdp2", "deepspeed-stage-1", "deepspeed-stage-2"]

# Kind of sharding → what is divided among the processes.
SHARDED: dict[Sharding, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": ("weights", "gradients", "optimizer"),
    "deepspeed-stage-1": ("optimizer",),
    "deepspeed-stage-2": ("gradients", "optimizer"),
}
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attention_probs_dropout")


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Report):
    """Memory of a training step on one device, in bytes.

    Attributes:
        weights: Weights of all experts, frozen ones included.
        gradients: Gradients of all trained weights. An expert that a step does not use has none in that step.
        optimizer: AdamW's two moments and its step counters; under DeepSpeed with bf16 also the weights in float32.
        communication: DDP's buckets; under FSDP, what is gathered at a time.
        activations: Peak of the forward and backward pass of one mini-batch (without gradient caching, of the device's
            whole batch), on top of all of the above.
        embeddings: Embeddings of the device's batch and their gradients, with gradient caching.
        loss: Peak of the loss beyond the embeddings: gathered embeddings, one chunk of logits.
        at_once: Whether activations and loss are in memory at the same time; with gradient caching they are not.
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    embeddings: int
    loss: int
    at_once: bool

    @property
    def total(self) -> int:
        """Peak of a step."""
        persistent = self.weights + self.gradients + self.optimizer + self.communication + self.embeddings
        temporary = (self.activations, self.loss)
        return persistent + (sum(temporary) if self.at_once else max(temporary))

    def __str__(self) -> str:
        """A table in GiB."""
        return table(["", "GiB"], [(name, f"{size / 2**30:.2f}") for name, size in self.to_dict().items()])

    def to_dict(self) -> dict[str, int]:
        """Return the bytes of each part, and of the peak as `total`."""
        parts = {name: size for name, size in asdict(self).items() if name != "at_once"}
        return {**parts, "total": self.total}


def estimate_memory(  # noqa: PLR0913
    model: PreTrainedModel | PreTrainedConfig,
    *,
    batch_size: int,
    length: int,
    mini_batch_size: int | None = None,
    columns: int = 2,
    gradient_checkpointing: bool = False,
    precision: Literal["fp32", "bf16"] = "fp32",
    processes: int = 1,
    sharding: Sharding = "ddp",
    device: Literal["gpu", "cpu"] = "gpu",
    peft: "PeftSettings | Mapping[str, Any] | None" = None,
) -> MemoryEstimate:
    """Estimate the memory of a step of contrastive training with AdamW, on each device.

    The memory of kernels and allocators is not included: on a GPU, add the CUDA context (about half a GiB) and room for
    fragmentation. The measurement uses CPU kernels. GPUs store dropout masks with one byte per element, whereas here
    they have the type of the activations; and GPUs keep no attention probabilities even with dropout, so for `"gpu"`
    dropout within attention is disabled.

    Args:
        model: A MoTE or a dense model, or its config.
        batch_size: Rows per step, over all processes.
        length: Tokens per text.
        mini_batch_size: Rows per forward pass, with gradient caching. Default: no caching.
        columns: Texts per row: 2 for pairs, 3 with a hard negative.
        gradient_checkpointing: Whether activations within a block are recomputed.
        precision: Precision; `"bf16"` is autocast.
        processes: Number of devices. Embeddings are gathered across them.
        sharding: `"ddp"` (every device has everything), `"fsdp2"` (weights, gradients and optimizer sharded),
            `"deepspeed-stage-1"` (optimizer sharded), or `"deepspeed-stage-2"` (gradients, too; not for cached losses).
        device: `"gpu"` or `"cpu"`: on a CPU, attention with dropout keeps its probabilities.
        peft: Adapters to train, as `training.peft` in a recipe. The experts of a MoTE then share their frozen weights,
            as they do in a run that starts from a dense model.

    Raises:
        ValueError: If the processes cannot share the batch evenly, or experts are token-routed.
    """
    if token_routing(model.config if isinstance(model, PreTrainedModel) else model) is not None:
        raise ValueError("The memory of a token-routed model depends on where the tokens go, and cannot be estimated")
    if batch_size % processes:
        raise ValueError(f"batch_size {batch_size} cannot be divided evenly among {processes} processes")
    rows, cached = batch_size // processes, mini_batch_size is not None
    chunk = min(mini_batch_size or rows, rows)
    empty = empty_model(model, device, peft)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_model(empty, gradient_checkpointing)
        activations = measure_activations(fake, chunk, length, 1 if cached else columns, precision).peak
    embedding = 4 * fake.config.hidden_size
    documents = batch_size * (columns - 1)
    # Logits with probabilities and gradient; copies of the documents: normalized, joined, with their gradients.
    loss = 3 * 4 * chunk * documents + 8 * documents * embedding
    return MemoryEstimate(
        **_persistent(empty, precision, processes, sharding),
        activations=activations,
        embeddings=2 * rows * columns * embedding if cached else 0,
        loss=loss + 2 * (batch_size - rows) * columns * embedding,
        at_once=not cached,
    )


def config_of(src: str, revision: str | None = None, experts: list[str] | None = None) -> PreTrainedConfig:
    """Read the config of a model, to estimate its memory.

    Args:
        src: A folder, or an id on the Hub.
        revision: Branch, tag or commit of a source on the Hub.
        experts: Experts of the MoTE that a dense source is upcycled to. Default: no upcycling.

    Raises:
        FileNotFoundError: If the source does not exist.
        ValueError: If its architecture is not supported, or it already is a MoTE and `experts` are given.
    """
    config = open_checkpoint(src, revision).config
    if experts is None:
        return config
    if is_mote(config):
        raise ValueError(f"{src} is already a MoTE: remove `--expert`")
    return MoTEConfig(backbone_config=config, experts=experts, dtype=config.dtype)


def _persistent(model: PreTrainedModel, precision: str, processes: int, sharding: Sharding) -> dict[str, int]:
    """Count what stays in memory throughout a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = _bytes_of(trained)
    sizes = {
        "weights": _bytes_of(model.parameters()),
        "gradients": gradients,
        "optimizer": 2 * gradients + 4 * len(trained),  # two moments, and a step counter in float32
    }
    if sharding.startswith("deepspeed") and precision == "bf16":  # the model in bf16, a copy in float32 to optimize
        count = sum(parameter.numel() for parameter in trained)
        sizes = {"weights": 2 * model.num_parameters(), "gradients": 2 * count, "optimizer": 12 * count}
    communication = 0
    if processes > 1 and sharding == "ddp":
        communication = gradients
    elif processes > 1 and sharding == "fsdp2":
        communication = _gathered(model, widest=2 if precision == "bf16" else 8)
    shares = {name: processes if name in SHARDED[sharding] else 1 for name in sizes}
    return {name: -(-size // shares[name]) for name, size in sizes.items()} | {"communication": communication}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _gathered(model: PreTrainedModel, widest: int) -> int:
    """Count what FSDP gathers at a time, in at most `widest` bytes a number: two blocks, and all outside of them."""

    def size(module: nn.Module) -> int:
        return sum(weight.numel() * min(weight.element_size(), widest) for weight in module.parameters())

    blocks = getattr(model, "blocks", None) or [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sizes = [size(block) for block in blocks]
    return size(model) - sum(sizes) + 2 * max(sizes, default=0)


class LiveMemory(TorchDispatchMode):
    """Records how many bytes are allocated while it is active.

    Attributes:
        live: Bytes allocated and still in use.
        peak: Maximum of `live`.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {id(tensor.untyped_storage()) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and record what it returns."""
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


def empty_model(
    model: PreTrainedModel | PreTrainedConfig,
    device: str = "gpu",
    peft: "PeftSettings | Mapping[str, Any] | None" = None,
) -> PreTrainedModel:
    """Build a model without weights, on the meta device; experts under adapters share their weights.

    The arguments are those of `estimate_memory`.
    """
    config = _config_of(model, device)
    with_experts = is_mote(config)
    if with_experts and peft is not None:
        config.load_only(config.available_experts[:1])
    with torch.device("meta"):
        empty: Any = mote_class(config.model_type, "model")(config) if with_experts else AutoModel.from_config(config)
        empty.pooler = None  # which embeddings do not pass through
        if peft is None and isinstance(config.dtype, torch.dtype):
            empty.to(dtype=config.dtype)
        if peft is not None:
            from mote.training.trainer_settings import PeftSettings

            if with_experts:
                share_weights(empty)
            adapt(empty, PeftSettings(**peft) if isinstance(peft, Mapping) else peft)
    originals = dict(model.named_parameters()) if isinstance(model, PreTrainedModel) else {}
    for name, parameter in empty.named_parameters():
        if name in originals:
            parameter.data = parameter.data.to(originals[name].dtype)
            parameter.requires_grad_(originals[name].requires_grad)
    return empty


def _config_of(model: PreTrainedModel | PreTrainedConfig, device: str) -> Any:
    """Copy a config; for `"gpu"`, without what only CPUs keep."""
    config: Any = copy.deepcopy(model.config if isinstance(model, PreTrainedModel) else model)
    if is_mote(config):
        config = mote_class(config.model_type, "config").from_dict(config.to_dict())
    backbone = getattr(config, "backbone_config", config)
    for name in {"gpu": ATTENTION_DROPOUT, "cpu": ()}[device]:
        if getattr(backbone, name, None):
            setattr(backbone, name, 0.0)
    return config


def fake_model(empty: PreTrainedModel, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Copy a model to fake tensors, in training mode, with gradients, as it is after the first mini-batch.

    Args:
        empty: Model from `empty_model`.
        gradient_checkpointing: Whether activations within a block are recomputed.
    """
    tensors: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in empty.buffers()}
    for parameter in empty.parameters():  # those that modules share stay shared
        tensor = torch.empty_like(parameter, device="cpu")
        tensors[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    fake = copy.deepcopy(empty, tensors)
    for parameter in fake.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    if gradient_checkpointing:
        fake.gradient_checkpointing_enable({"use_reentrant": False})
    return fake.train()


class Activations(NamedTuple):
    """What a forward and backward pass needs beyond weights and gradients, in bytes."""

    kept: int  # between the two passes
    peak: int  # the maximum during both


def measure_activations(
    model: PreTrainedModel, rows: int, length: int, columns: int = 1, precision: str = "fp32"
) -> Activations:
    """Run a forward and backward pass, and record what it allocates.

    Args:
        model: In training mode, with gradients. Within `FakeTensorMode` nothing is computed or really allocated.
        rows: Texts at a time.
        length: Tokens per text.
        columns: Forward passes before the backward pass.
        precision: `"fp32"`, or `"bf16"` for autocast.
    """
    parameters = [*model.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tokens = torch.ones(rows, length, dtype=torch.long)
    task = {"task": model.config.available_experts[0]} if is_mote(model.config) else {}
    with LiveMemory(*parameters, *gradients, *model.buffers()) as memory:
        embeddings = []
        for _ in range(columns):
            with torch.autocast("cpu", torch.bfloat16, enabled={"fp32": False, "bf16": True}[precision]):
                embeddings.append(_embed(model, tokens, task))
        kept = memory.live
        torch.stack(embeddings).sum().backward()
    return Activations(kept, memory.peak)


def _embed(model: PreTrainedModel, tokens: torch.Tensor, task: dict[str, str]) -> torch.Tensor:
    """Run a model with mean pooling: [B, L] → [B, H]."""
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **task)
    return output.last_hidden_state.float().mean(dim=1)
