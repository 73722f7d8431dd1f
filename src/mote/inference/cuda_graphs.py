"""CUDA graphs: a call with a few short texts costs what the GPU needs, not what Python needs to start its kernels.

A pass is captured once for each expert and bucket of rows and lengths, and replayed for every batch that fits: inputs
are padded to the bucket and copied in, outputs are copied out. Everything else runs as it does without graphs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

ROWS = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 64, 128, 256, 512)
MOST_GRAPHS = 128  # of a model; other calls then run without
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Recorder:
    """Captures and replays on a stream of its own, so that no two graphs overlap, whichever stream a thread uses."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run on the stream, after what the current one has to do, and before what it is given afterwards."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return a function that runs `run` again, and the tensor that it writes the result into."""
        with self.running():
            for _ in range(2):  # libraries allocate their work spaces in the first calls
                run()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out


class CudaGraphs:
    """The captured passes of a model. One runs at a time, as they share the memory of their intermediate results."""

    recorder_class: type = Recorder

    def __init__(self, model: "MoTEModel") -> None:
        self.model = model
        self.captured: dict[tuple, Captured] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple:
        """Leave out the graphs, which hold the weights of this model: its copy has others."""
        return type(self), (self.model,)

    @cached_property
    def recorder(self) -> Recorder:
        """Records on the device that the model is on at first; elsewhere, it runs without graphs."""
        return self.recorder_class(self.model.device)

    @cached_property
    def block(self) -> Any:
        """The first block, whose weights are watched: those of all blocks are replaced, moved or converted together."""
        return self.model.blocks[0]

    @torch.compiler.disable
    def run(self, backbone: nn.Module, *, expert: Any, **inputs: Any) -> Any:
        """Run the backbone, by a graph if the call is one of those that are captured."""
        given = {name: value for name, value in inputs.items() if value is not None and value is not False}
        tensors = {name: given[name] for name in INPUTS if name in given}
        ids = tensors.get("input_ids", torch.empty(0, device="meta"))
        # An adapter can be switched without a change of the weights. Beside tensors there is `return_dict`.
        unusual = torch.is_grad_enabled() or self.model.training or hasattr(self.model, "peft_config")
        unusual |= len(tensors) + 1 < len(given) or any(tensor.dim() != 2 for tensor in tensors.values())
        unusual |= ids.device != self.recorder.device or not isinstance(expert, str)
        if unusual or (size := self.bucket(*ids.shape)) is None:
            return backbone(**inputs, expert=expert)
        weights = [next(part.parameters()).data_ptr() for part in (self.block.experts[expert], self.block.shared)]
        key = (expert, size, *tensors)
        if key not in self.captured and len(self.captured) >= MOST_GRAPHS:
            return backbone(**inputs, expert=expert)
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            captured = self.captured.get(key)
            if captured is None or captured.weights != weights:
                pad = self.model.config.backbone_config.pad_token_id or 0
                padding = {**dict.fromkeys(tensors, 0), "attention_mask": 0, "input_ids": pad}
                self.captured[key] = captured = Captured(backbone, expert, size, padding, weights, self.recorder)
            return BaseModelOutput(last_hidden_state=captured.replay(tensors))

    def bucket(self, rows: int, length: int) -> tuple[int, int] | None:
        """Return the smallest size of captured passes that holds so many rows and tokens, if there is one."""
        longest = getattr(self.model.config, "max_position_embeddings", None) or LENGTHS[-1]
        fitting_rows = next((size for size in ROWS if 0 < rows <= size), None)
        fitting = next((size for size in LENGTHS if 0 < length <= size <= longest), None)
        return None if fitting_rows is None or fitting is None else (fitting_rows, fitting)


class Captured:
    """A pass of one expert, captured for inputs of one size."""

    def __init__(
        self,
        backbone: nn.Module,
        expert: str,
        size: tuple[int, int],
        padding: Mapping[str, int],
        weights: list[int],
        recorder: Recorder,
    ) -> None:
        held = [parameter.data for parameter in backbone.parameters()]
        self.weights, self.held = weights, held  # whose memory must not be given to others
        self.padding, device = padding, held[0].device
        self.inputs = {name: torch.full(size, value, device=device) for name, value in padding.items()}
        self.inputs["attention_mask"][:, 0] = 1
        self.recorder = recorder
        self.graph, self.output = recorder.capture(
            lambda: backbone(**self.inputs, expert=expert, return_dict=True).last_hidden_state
        )

    def replay(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the last hidden states of inputs [B, L] that fit: [B, L, H]."""
        rows, length = tensors["input_ids"].shape
        out = self.output.new_empty(rows, length, self.output.shape[2])
        with self.recorder.running():
            for name, buffer in self.inputs.items():
                buffer.fill_(self.padding[name])
                buffer[:rows, :length] = tensors.get(name, 1)  # without a mask, all are tokens
            self.inputs["attention_mask"][rows:, 0] = 1  # a row without any token would have no attention
            self.graph()
            out.copy_(self.output[:rows, :length])
        return out
