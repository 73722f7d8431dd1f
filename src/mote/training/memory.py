"""Estimate the memory of a training step without running it.

What depends on the number of parameters is computed. Activations are measured: one mini-batch runs forward and
backward on fake tensors, which have shapes but no data, while every allocation is recorded. So the estimates hold
for any architecture, with gradient checkpointing and mixed precision, and need neither memory nor a GPU.
"""

import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from mote.checkpoints.reading import is_mote, mote_class, open_checkpoint
from mote.checkpoints.tensors import token_routing
from mote.remote.configuration_mote import MoTEConfig, alternatives
from mote.remote.modeling_mote import MoTEModel
from mote.reporting import Report, table
from mote.training.adapters import adapt, share_weights

if TYPE_CHECKING:  # recipes need the extra `train`, estimates do not
    from mote.training.trainer_settings import PeftSettings

PRECISIONS = ("fp32", "bf16")
SHARDINGS = ("ddp", "fsdp2", "deepspeed-stage-1", "deepspeed-stage-2")
DEVICES = ("gpu", "cpu")

MAX_COLUMNS = 100
MAX_SIZE = 2**24  # beyond this, sizes in bytes overflow 64 bits
MAX_ATTENTION = 2**48

EAGER_ONLY = ("mpnet",)  # in transformers itself


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
        lasting = self.weights + self.gradients + self.optimizer + self.communication + self.embeddings
        passing = (self.activations, self.loss)
        return lasting + (sum(passing) if self.at_once else max(passing))

    def __str__(self) -> str:
        """A table in GiB."""
        return table(["", "GiB"], self._rows())

    def to_dict(self) -> dict[str, int]:
        """Return the bytes of each part, and of the peak as `total`."""
        parts = {name: size for name, size in asdict(self).items() if name != "at_once"}
        return {**parts, "total": self.total}

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, f"{size / 2**30:.2f}") for name, size in self.to_dict().items()]


def estimate_memory(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    batch_size: int,
    length: int,
    mini_batch_size: int | None = None,
    columns: int = 2,
    gradient_checkpointing: bool = False,
    precision: str = "fp32",
    processes: int = 1,
    sharding: str = "ddp",
    device: str = "gpu",
    peft: "PeftSettings | Mapping[str, Any] | None" = None,
) -> MemoryEstimate:
    """Estimate the memory of a step of contrastive training with AdamW, on each device.

    The memory of kernels and allocators is not included: on a GPU, add the CUDA context (about half a GiB) and room for
    fragmentation. The measurement uses CPU kernels. GPUs store dropout masks with one byte per element, whereas here
    they have the type of the activations; and GPUs keep no attention probabilities even with dropout, so for `"gpu"`
    dropout within sdpa is disabled.

    Args:
        model: A MoTE or a dense model, or its config.
        batch_size: Rows per step, over all processes.
        length: Tokens per text.
        mini_batch_size: Rows per forward pass, with gradient caching. Default: no caching.
        columns: Texts per row: 2 for pairs, 3 with a hard negative.
        gradient_checkpointing: Whether activations within a block are recomputed.
        precision: `"fp32"`, or `"bf16"` for autocast.
        processes: Number of devices. Embeddings are gathered across them.
        sharding: `"ddp"` (every device has everything), `"fsdp2"` (weights, gradients and optimizer sharded),
            `"deepspeed-stage-1"` (optimizer sharded), or `"deepspeed-stage-2"` (gradients, too; not for cached losses).
        device: `"gpu"` or `"cpu"`: on a CPU, sdpa with dropout keeps attention probabilities.
        peft: Adapters to train, as `training.peft` in a recipe. The experts of a MoTE then share their frozen weights,
            as they do in a run that starts from a dense model.

    Raises:
        ValueError: If a name is unknown, a number is out of range, the model's forward depends on its inputs' values,
            or the model or its task experts are token-routed.
    """
    names = {"precision": (precision, PRECISIONS), "sharding": (sharding, SHARDINGS), "device": (device, DEVICES)}
    for name, (value, known) in names.items():
        if value not in known:
            raise ValueError(f"Unknown {name} {value!r}." + alternatives(value, known))
    if token_routing(model.config if isinstance(model, PreTrainedModel) else model) is not None:
        raise ValueError("The memory of a token-routed model depends on where the tokens go, and cannot be estimated")
    rows = _rows(batch_size, processes, mini_batch_size, length, columns)
    cached = mini_batch_size is not None
    adapters: Any = peft
    if isinstance(peft, Mapping):
        from mote.training.trainer_settings import PeftSettings

        adapters = PeftSettings(**peft)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_model(model, gradient_checkpointing, device, adapters)
        try:
            at_once = (min(mini_batch_size, rows), 1) if mini_batch_size is not None else (rows, columns)
            activations = measure_activations(fake, at_once[0], length, at_once[1], precision).peak
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"The forward of {type(fake).__name__} depends on the values of its inputs, so its memory cannot be "
                f"estimated from their shapes ({error})"
            ) from error
        width = fake.config.hidden_size
        loss = _loss(rows, batch_size, mini_batch_size or rows, columns, width)
    return MemoryEstimate(
        **_lasting(fake, precision, processes, sharding),
        activations=activations,
        embeddings=2 * rows * columns * width * 4 if cached else 0,
        loss=loss,
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


def _rows(batch_size: int, processes: int, mini_batch_size: int | None, length: int, columns: int) -> int:
    """Count the rows of each process."""
    numbers = {"batch_size": batch_size, "processes": processes, "length": length, "columns": columns}
    if mini_batch_size is not None:
        numbers["mini_batch_size"] = mini_batch_size
    for name, number in numbers.items():
        most = MAX_COLUMNS if name == "columns" else MAX_SIZE  # each column is a forward pass
        if not 1 <= number <= most:
            raise ValueError(f"{name} must be from 1 to {most:,}, got {number}")
    if batch_size % processes:
        raise ValueError(f"batch_size {batch_size} cannot be divided evenly among {processes} processes")
    rows = batch_size // processes
    if min(mini_batch_size or rows, rows) * columns * length**2 > MAX_ATTENTION:
        raise ValueError(f"{rows:,} rows of {length:,} tokens are too many to estimate: set a mini_batch_size")
    return rows


# Counted -------------------------------------------------------------------------------------------------------------


def _lasting(model: PreTrainedModel, precision: str, processes: int, sharding: str) -> dict[str, int]:
    """Count what stays in memory throughout a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights, gradients = _size(model.parameters()), _size(trained)
    optimizer = 2 * gradients + 4 * len(trained)  # two moments, and a step counter in float32
    if sharding == "ddp":
        buckets = gradients if processes > 1 else 0
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "communication": buckets}
    if sharding == "fsdp2":
        return {
            "weights": _size(model.parameters(), processes),
            "gradients": _size(trained, processes),
            "optimizer": 2 * _size(trained, processes) + 4 * len(trained),
            "communication": _gathered(model, precision) if processes > 1 else 0,
        }
    count = sum(parameter.numel() for parameter in trained)
    if precision == "bf16":  # DeepSpeed keeps the model in bf16, and shards a float32 copy with the optimizer
        weights = sum(2 * parameter.numel() for parameter in model.parameters())
        gradients, optimizer = 2 * count, 12 * count
    return {
        "weights": weights,
        "gradients": -(-gradients // processes) if sharding == "deepspeed-stage-2" else gradients,
        "optimizer": -(-optimizer // processes),
        "communication": 0,
    }


def _size(tensors: Iterable[torch.Tensor], processes: int = 1) -> int:
    """Count bytes; if sharded along the first dimension, the bytes of the largest shard."""
    return sum(
        -(-len(tensor) // processes) * tensor[0].numel() * tensor.element_size() if tensor.dim() else 8
        for tensor in tensors
    )


def _gathered(model: PreTrainedModel, precision: str) -> int:
    """Count what FSDP gathers at a time: weights outside of blocks, one block with its gradients, and the next one."""
    blocks: list[nn.Module] = [
        module for module in model.modules() if type(module).__name__ in MoTEModel._no_split_modules
    ]
    blocks = blocks or [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, PreTrainedModel)
    ]
    widest = 2 if precision == "bf16" else 8  # bytes of a number

    def size(weights: Iterable[nn.Parameter]) -> int:
        return sum(weight.numel() * min(weight.element_size(), widest) for weight in weights)

    sizes = [size(block.parameters()) for block in blocks]
    with_gradients = [
        2 * whole + size(weight for weight in block.parameters() if weight.requires_grad)
        for whole, block in zip(sizes, blocks, strict=True)
    ]
    return size(model.parameters()) - sum(sizes) + max(with_gradients, default=0)


# Measured ------------------------------------------------------------------------------------------------------------


class LiveMemory(TorchDispatchMode):
    """Records how many bytes are allocated while it is active.

    Attributes:
        live: Bytes allocated and still in use.
        peak: Maximum of `live`.
    """

    def __init__(self, *ours: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in ours}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and record what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._remove, key, size)
        return result

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def fake_model(
    model: PreTrainedModel | PreTrainedConfig,
    gradient_checkpointing: bool = False,
    device: str = "gpu",
    adapters: "PeftSettings | None" = None,
) -> PreTrainedModel:
    """Build a model without data, in training mode, with gradients, as it is after the first mini-batch.

    To be called within `FakeTensorMode(allow_non_fake_inputs=True)`. The arguments are those of `estimate_memory`.
    """
    fake = _empty_model(_config_of(model, device), adapters)
    if getattr(fake, "pooler", None) is not None:
        fake.pooler = None  # type: ignore[assignment]  # which embeddings do not pass through
    of_model = dict(model.named_parameters()) if isinstance(model, PreTrainedModel) else {}
    for name, parameter in fake.named_parameters():
        if name in of_model:
            parameter.data = parameter.data.to(of_model[name].dtype)
            parameter.requires_grad_(of_model[name].requires_grad)
    for parameter in fake.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    if gradient_checkpointing:
        fake.gradient_checkpointing_enable({"use_reentrant": False})
    return fake.train()


def _empty_model(config: Any, adapters: "PeftSettings | None") -> PreTrainedModel:
    """Build a model from a config on fake tensors; experts under adapters share their weights."""
    share = adapters is not None and is_mote(config)
    if share:
        config.load_only(config.available_experts[:1])
    with unset_fake_temporarily(), torch.device("meta"):
        fake: PreTrainedModel = (
            mote_class(config.model_type, "model")(config) if is_mote(config) else AutoModel.from_config(config)
        )
        if isinstance(config.dtype, torch.dtype) and adapters is None:
            fake.to(dtype=config.dtype)  # type: ignore[call-arg]
        if share:
            share_weights(fake)
        if adapters is not None:
            adapt(fake, adapters)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in fake.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    fake.to_empty(device="cpu")  # which gives each parameter a tensor of its own
    for (module, name), *others in places.values():
        for other, same in others:
            setattr(other, same, getattr(module, name))
    return fake


def _config_of(model: PreTrainedModel | PreTrainedConfig, device: str) -> Any:
    """Copy a config, with an attention that runs without a GPU; for `"gpu"`, without what only CPUs keep."""
    config: Any = copy.deepcopy(model.config if isinstance(model, PreTrainedModel) else model)
    if is_mote(config):
        config = mote_class(config.model_type, "config").from_dict(config.to_dict())
    backbone = getattr(config, "backbone_config", config)
    if isinstance(model, PreTrainedModel) and model.config._attn_implementation == "eager":
        config._attn_implementation = backbone._attn_implementation = "eager"
    elif device == "gpu" and backbone.model_type not in EAGER_ONLY:
        for name in ("attention_probs_dropout_prob", "attention_dropout", "attention_probs_dropout"):
            if getattr(backbone, name, None):
                setattr(backbone, name, 0.0)
    return config


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
    live = LiveMemory(
        *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()
    )
    tokens = torch.ones(rows, length, dtype=torch.long)
    task = {"task": model.config.available_experts[0]} if is_mote(model.config) else {}
    with live:
        outputs = []
        for _ in range(columns):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs.append(_embed(model, tokens, task))
        kept = live.live
        torch.stack(outputs).sum().backward()
    return Activations(kept, live.peak)


def _embed(model: PreTrainedModel, tokens: torch.Tensor, task: dict[str, str]) -> torch.Tensor:
    """Run a model with mean pooling: [B, L] → [B, H]."""
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **task)
    return output.last_hidden_state.float().mean(dim=1)


def _loss(rows: int, batch_size: int, chunk: int, columns: int, width: int) -> int:
    """Measure the peak of Sentence-Transformers' own loss, beyond the embeddings and their gradients."""
    queries = torch.zeros(rows, width, requires_grad=True)
    documents = [torch.zeros(batch_size, width, requires_grad=True) for _ in range(columns - 1)]
    for tensor in (queries, *documents):
        tensor.grad = torch.zeros_like(tensor)
    loss = CachedMultipleNegativesRankingLoss(nn.Sequential(nn.Identity()), mini_batch_size=chunk)  # type: ignore[arg-type]
    with LiveMemory(queries, queries.grad) as live:  # type: ignore[arg-type]
        loss.calculate_loss([[queries], *([document] for document in documents)], with_backward=True)
    gathered = batch_size - rows
    return live.peak + 2 * gathered * columns * width * 4
