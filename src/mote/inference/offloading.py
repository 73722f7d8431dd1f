"""Offloading: experts that are not in use leave the device, for the CPU's memory or their checkpoint's files.

The device has a fixed number of slots, each holding one expert: one layer per block. Fetching an expert copies its
weights into the slot of the least recently used one, so nothing is allocated or freed, and there are never more experts
on the device. The `experts` of a block are those on the device, so that `.to()`, `.half()` and `parameters()` see only
these.

Accelerate's hooks do not fit. `AlignDevicesHook` (behind `cpu_offload`, `disk_offload`, `device_map`) copies the
weights of a module before each of its calls and drops them right after: nothing is kept for the next text of the same
task; under threads, the first to leave the module takes the weights from the others; and from disk, it opens the file
and parses its header for each weight.
"""

import copy
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mote.checkpoints.tensors import require_unquantised
from mote.experts.checks import has_adapters, require_task_experts
from mote.experts.editing import set_experts
from mote.inference.stores import SAVE_FIRST, CpuStore, DiskStore, Store
from mote.remote.configuration_mote import MoTEConfig, alternatives

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEBlock, MoTEModel

PLACES = ("cpu", "disk")
_OVERRIDDEN = ("state_dict", "save_pretrained")  # methods of a model that need all experts


def offload(model: "MoTEModel", to: str = "cpu", keep: int = 1) -> None:
    """Take all experts but `keep` off the device; each returns when a text of its task arrives.

    For inference: the weights cannot be trained, or otherwise changed, until `restore`. `mote.load(path, offload=…)`
    starts in this state and never holds more in memory.

    Args:
        model: A MoTE in memory, installed or remote code; changed in place.
        to: `"cpu"`, the CPU's memory (pinned, and copied asynchronously on a separate stream, if the device is a GPU),
            or `"disk"`: experts are read from the safetensors files that the model was loaded from.
        keep: Number of experts on the device, the most recently used ones. A call that needs another expert waits while
            all of these are in use.

    Raises:
        ValueError: If a setting is out of range, the model is token-routed, quantised, spread over several devices or
            has adapters, its weights differ from those in its files (`"disk"`), or calls of it are running.
    """
    check_settings(model.config, to, keep)
    _require_offloadable(model)
    if to == "cpu" and model.device.type == "cpu":
        raise ValueError(
            "The model is on the CPU, where experts offloaded to 'cpu' take as much memory as before: move the model "
            "to its device first, or offload to 'disk'"
        )
    weights = weights_of_experts(model)
    store: Store = CpuStore(weights.items()) if to == "cpu" else DiskStore(model.weight_files)
    if to == "disk":
        _require_equal(weights, store)
    Offloading(model, store, keep).start(model)


def restore(model: "MoTEModel") -> None:
    """Bring all experts back to the device. No effect on a model whose experts are not offloaded."""
    offloading = model.offloading
    if offloading is not None:
        offloading.restore(model)
        model.offloading = None


def start_offloaded(model: "MoTEModel", loaded_experts: list[str] | None, to: str, keep: int) -> None:
    """Offload a model that was loaded with its first `keep` experts only; the others come from its files.

    Args:
        model: The model.
        loaded_experts: `loaded_experts` of its config from now on.
        to: As in `offload`.
        keep: As in `offload`.

    Raises:
        ValueError: As `offload`.
    """
    _require_offloadable(model)
    model.config.loaded_experts = loaded_experts
    store: Store = DiskStore(model.weight_files)
    if to == "cpu":
        store = CpuStore(_in_dtypes_of(model, store))
    Offloading(model, store, keep).start(model)


def check_settings(config: MoTEConfig, to: str, keep: int) -> None:
    """Raise `ValueError` if these settings are invalid for a model of this config."""
    require_task_experts(config)
    if to not in PLACES:
        raise ValueError(f"Experts cannot be offloaded to {to!r}." + alternatives(to, PLACES))
    if to == "cpu" and not torch.accelerator.is_available():
        raise ValueError(
            "Experts offloaded to 'cpu' leave a GPU or another accelerator, and there is none here: offload to 'disk'"
        )
    count = len(config.available_experts)
    if not isinstance(keep, int) or isinstance(keep, bool) or not 1 <= keep <= count:
        raise ValueError(f"keep must be an integer from 1 to {count}, the number of experts, got {keep!r}")


def _require_offloadable(model: "MoTEModel") -> None:
    if model.offloading is not None:
        raise ValueError(f"Experts are already offloaded ({model.offloading!r}): call mote.restore(model) first")
    require_unquantised(model)
    if has_adapters(model):
        raise ValueError("Experts with adapters cannot be offloaded: merge the adapters and save the model first")
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("Weights of the model are on the meta device: load it with its weights")
    if len({weight.device for weight in model.parameters()}) > 1 or hasattr(model, "_hf_hook"):
        raise ValueError("The model is spread over several devices: load it on one, with device_map='cuda:0'")


class Slot:
    """A device slot holding the weights of one expert.

    Args:
        layers: Layers of the expert in the slot, one per block. Their weights will be overwritten.
        expert: Name of the expert.
    """

    def __init__(self, layers: list[nn.Module], expert: str) -> None:
        self.layers = layers
        self.expert: str | None = expert
        self.users = 0
        self.ready: torch.cuda.Event | None = None  # on a GPU, recorded after the copy into this slot
        self.read: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # recorded when a stream has read the weights
        self.modules = self._module_ids()
        # Looked up again at each use, because `.to()` replaces tensors.
        self.owners = [
            (index, key, layer.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2])
            for index, layer in enumerate(layers)
            for key in layer.state_dict()
        ]
        self.written = self._versions()

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Iterate over the weights: block, key within its layer, and tensor."""
        for index, key, module, name in self.owners:
            yield index, key, getattr(module, name)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(tensor.device for _, _, tensor in self.tensors())

    def fill(self, store: Store, keys: list[str], copying: torch.cuda.Stream | None = None) -> None:
        """Overwrite the weights with those of another expert.

        Args:
            store: Holds the new weights.
            keys: Key of each weight in the store, in the order of `tensors`.
            copying: On a GPU, the stream for the copy, while others compute.
        """
        tensors = dict(zip(keys, (tensor for _, _, tensor in self.tensors()), strict=True))
        if copying is not None:
            if self.ready is None or self._moved():  # written by `.to()`, on the stream that computes
                copying.wait_stream(torch.cuda.current_stream(copying.device))
            for event in self.read.values():
                copying.wait_event(event)
        with torch.inference_mode(), nullcontext() if copying is None else torch.cuda.stream(copying):
            store.write_to(tensors)
            if copying is not None:
                for tensor in tensors.values():
                    tensor.record_stream(copying)
        self.ready = None if copying is None else copying.record_event()
        self.read.clear()
        self.written = self._versions()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """On a GPU, make computation within the context wait for the copy into this slot, and the next copy for it."""
        device = self.device
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        if self.ready is not None:
            stream.wait_event(self.ready)
        try:
            yield
        finally:
            self.read[stream] = stream.record_event()

    def require_unchanged(self) -> None:
        """Raise `ValueError` if evicting the expert would lose changes or apply them to another one."""
        if self.expert is None:
            return
        if self._module_ids() != self.modules:
            raise ValueError(
                f"Modules of the expert {self.expert!r} were replaced while experts are offloaded, which does not "
                "affect the others: call mote.restore(model) before adding adapters or quantising"
            )
        if not self._moved() and self._versions() != self.written:
            raise ValueError(
                f"The weights of the expert {self.expert!r} were changed while experts are offloaded, and would be "
                "lost if it left the device: mote.restore(model) keeps them"
            )

    def _module_ids(self) -> list[int]:
        return [id(module) for layer in self.layers for module in layer.modules()]

    def _moved(self) -> bool:
        return any(now != then for (now, _), (then, _) in zip(self._versions(), self.written, strict=True))

    def _versions(self) -> list[tuple[int, int]]:
        """Address of each tensor, and how often it was written to."""
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for _, _, t in self.tensors()]


class Offloading:
    """Keeps the experts of a model in a store, and those in use on the device. Thread-safe.

    Args:
        model: A MoTE. Its first `keep` experts must be on the device, and stay; `start` drops the others.
        store: Holds the weights of all experts of the model's config.
        keep: Number of experts on the device.
    """

    def __init__(self, model: "MoTEModel", store: Store, keep: int = 1) -> None:
        self.store = store
        self.keep = keep
        self.names: list[str] = list(model.config.available_experts)
        self.blocks: list[MoTEBlock] = model.blocks
        self.prefixes = _prefixes(model)
        self.trainable = {
            prefix + key: weight.requires_grad
            for prefix, block in zip(self.prefixes, self.blocks, strict=True)
            for key, weight in block.experts.named_parameters()
        }
        # The least recently used comes first.
        self.slots = [Slot([block.experts[name] for block in self.blocks], name) for name in self.names[:keep]]
        self._turn = threading.RLock()  # fair queue: serialises fetches, so that waiting calls are not starved
        self._left = threading.Condition()  # notified when a call has left its slot
        self._copying: torch.cuda.Stream | None = None
        self._attached = True  # whether the blocks hold all experts

    @property
    def on_device(self) -> list[str]:
        """The experts on the device, the least recently used first."""
        return [slot.expert for slot in self.slots if slot.expert is not None]

    def start(self, model: "MoTEModel") -> None:
        """Drop all experts from the model but those in the slots.

        Raises:
            ValueError: If calls of the model are running, which would miss experts.
        """
        with self._turn:  # calls that begin now wait for it
            model.offloading = self
            if self._calls_running(model):
                model.offloading = None
                raise ValueError("Calls of the model are running: offload its experts before or after them")
            self._attached = False
            self._show()
            for method in _OVERRIDDEN:
                vars(model)[method] = partial(self._with_all_experts, model, method)

    def _calls_running(self, model: "MoTEModel") -> bool:
        """Whether another thread runs the model's backbone without a slot, judged by its Python frames."""
        for thread, top in sys._current_frames().items():
            frame: FrameType | None = top if thread != threading.get_ident() else None
            while frame is not None:
                owner = frame.f_locals.get("self")
                if owner is self:  # waits for a slot
                    break
                if owner is model and frame.f_code.co_name == "_run":
                    return True
                frame = frame.f_back
        return False

    @torch.compiler.disable  # a graph would hold the expert that was on the device when it was traced
    def run(self, backbone: nn.Module, *, expert: str, **inputs: Any) -> Any:
        """Run the backbone with an expert on the device.

        Args:
            backbone: The backbone of the model.
            expert: Name of the expert.
            **inputs: Other arguments of the backbone.

        Raises:
            ValueError: If gradients would be recorded; or as from `expert`.
        """
        with self.expert(expert):
            out = backbone(**inputs, expert=expert)
        if out.last_hidden_state.requires_grad and not self._attached:
            raise ValueError(
                "Gradients cannot flow through offloaded experts, whose weights may be overwritten: compute under "
                "torch.no_grad() or torch.inference_mode(), or call mote.restore(model) before training"
            )
        return out

    @contextmanager
    def expert(self, name: str) -> Iterator[None]:
        """Keep an expert on the device within the context. Waits while all slots are in use by other experts.

        Args:
            name: Name of the expert.

        Raises:
            ValueError: If the file with the expert was changed, or the weights that it would replace were.
            FileNotFoundError: If the file is gone.
        """
        with self._turn:
            slot = None if self._attached else self._slot_of(name)  # None: restored while this call waited
        if slot is None:
            yield
            return
        try:
            with slot.reading():
                yield
        finally:
            with self._left:
                slot.users -= 1
                self._left.notify_all()

    @contextmanager
    def all_experts(self) -> Iterator[None]:
        """Attach all experts within the context, those of the store on the CPU. Calls of the model wait meanwhile."""
        with self._alone():
            if self._attached:  # by this thread, further up the stack
                yield
                return
            try:
                self._attach()
                yield
            finally:
                self._show()
                self._attached = False

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Raise `ValueError` if a model would be saved over the files that its experts are read from."""
        files = self.store.states if isinstance(self.store, DiskStore) else ()
        if Path(folder).resolve() in {path.parent.resolve() for path in files}:
            raise ValueError(
                f"The offloaded experts are read from {folder}: save to another folder, or call mote.restore(model) "
                "first"
            )

    def restore(self, model: "MoTEModel") -> None:
        """Put all experts into the model for good."""
        with self._alone():
            self._attach(self.slots[0].device)
            for prefix, block in zip(self.prefixes, self.blocks, strict=True):
                for key, weight in block.experts.named_parameters():
                    weight.requires_grad_(self.trainable.get(prefix + key, weight.requires_grad))
            for method in _OVERRIDDEN:
                vars(model).pop(method, None)

    def _with_all_experts(self, model: "MoTEModel", method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model's class while all experts are in the model."""
        with self.all_experts():
            result = getattr(type(model), method)(model, *args, **kwargs)
            if method == "state_dict":
                prefix = kwargs.get("prefix", "")
                for slot in self.slots:  # copies: the next fetch overwrites what is in the slot
                    for index, key, _ in slot.tensors() if slot.expert is not None else ():
                        name = f"{prefix}{self.prefixes[index]}{slot.expert}.{key}"
                        result[name] = result[name].detach().clone()
        return result

    def _slot_of(self, name: str) -> Slot:
        """Find or fetch an expert, and register one more user of it."""
        slot = next((slot for slot in self.slots if slot.expert == name), None) or self._fetch(name)
        self.slots.remove(slot)
        self.slots.append(slot)
        with self._left:
            slot.users += 1
        return slot

    def _fetch(self, name: str) -> Slot:
        keys = [f"{self.prefixes[index]}{name}.{key}" for index, key, _ in self.slots[0].tensors()]
        self.store.require(keys)  # fail on missing keys before evicting anything
        with self._left:
            self._left.wait_for(lambda: not all(slot.users for slot in self.slots))
            slot = next(slot for slot in self.slots if not slot.users)
        slot.require_unchanged()
        slot.expert = None
        self._show()
        slot.fill(self.store, keys, self._copy_stream(slot.device))
        slot.expert = name
        self._show()
        return slot

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if self._copying is None or self._copying.device != device:
            self._copying = torch.cuda.Stream(device)
        return self._copying

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no call runs, and let none start within the context."""
        with self._turn, self._left:
            self._left.wait_for(lambda: not any(slot.users for slot in self.slots))
            if self._copying is not None:
                self._copying.synchronize()
            yield

    def _show(self) -> None:
        """Expose the experts on the device in the blocks."""
        slots = {slot.expert: slot for slot in self.slots}
        for index, block in enumerate(self.blocks):
            set_experts(block, {name: slots[name].layers[index] for name in self.names if name in slots})

    def _attach(self, device: torch.device | None = None) -> None:
        """Expose all experts in the blocks: those of the store on the CPU, or on a device."""
        attached = []
        for prefix, block, like in zip(self.prefixes, self.blocks, self.slots[0].layers, strict=True):
            layers = dict(block.experts.items())
            for name in self.names:
                if name not in layers:
                    layers[name] = self._layer(f"{prefix}{name}.", like, block).to(device)
            attached.append({name: layers[name] for name in self.names})
        for block, layers in zip(self.blocks, attached, strict=True):
            set_experts(block, layers)
        self._attached = True

    def _layer(self, prefix: str, like: nn.Module, block: "MoTEBlock") -> nn.Module:
        """Build a layer of an expert in the store, from an existing one, with the same shared modules."""
        memo: dict[int, Any] = {id(module): module for module in block.shared.modules()}
        for weight in like.parameters():
            memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        layer = copy.deepcopy(like, memo)
        types = {key: weight.dtype for key, weight in layer.state_dict().items()}
        weights = self.store.read(prefix + key for key in types)
        layer.load_state_dict({key: weights[prefix + key].to(types[key]) for key in types}, assign=True)
        return layer

    def __repr__(self) -> str:
        return f"Offloading(to={self.store.name!r}, keep={self.keep}, on_device={self.on_device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "A model with offloaded experts can be neither copied nor pickled: call mote.restore(model) first, or load "
            "it again"
        )


def weights_of_experts(model: "MoTEModel") -> dict[str, torch.Tensor]:
    """Collect the weights of all experts that are in the model, by their keys in its state dict."""
    return {
        prefix + key: weight
        for prefix, block in zip(_prefixes(model), model.blocks, strict=True)
        for key, weight in block.experts.state_dict().items()
    }


def _prefixes(model: "MoTEModel") -> list[str]:
    """Prefix of the keys of each block's experts."""
    blocks = {id(block) for block in model.blocks}
    return [path + ".experts." for path, module in model.named_modules() if id(module) in blocks]


def _in_dtypes_of(model: "MoTEModel", store: Store) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights of all experts, one by one, in the dtypes of the model's weights."""
    for prefix, block in zip(_prefixes(model), model.blocks, strict=True):
        like = next(iter(block.experts.values())).state_dict()
        for name in model.config.available_experts:
            weights = store.read(f"{prefix}{name}.{key}" for key in like)
            yield from ((f"{prefix}{name}.{key}", weights[f"{prefix}{name}.{key}"].to(like[key].dtype)) for key in like)


def _require_equal(weights: dict[str, torch.Tensor], store: Store) -> None:
    stored = store.read(weights)
    for key, weight in weights.items():
        if not torch.equal(stored[key].to(weight.dtype), weight.cpu()):
            raise ValueError(
                f"{key} differs from the file that the model was loaded from, and would be lost if it left the memory: "
                + SAVE_FIRST
            )
