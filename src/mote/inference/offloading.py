"""Offloading: experts that are not in use leave the device, for CPU memory or their checkpoint's files.

The device has a fixed number of slots, each holding one expert: one layer per block. Fetching an expert copies its
weights into the slot of the least recently used one, so nothing is allocated or freed, and there are never more experts
on the device. The `experts` of a block are those on the device, so that `.to()`, `.half()` and `parameters()` see only
these.

Accelerate's hooks (`cpu_offload`, `disk_offload`, `device_map`) do not fit: they drop a module's weights after each of
its calls, and under threads, the first to leave it takes them from the others.
"""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mote.experts.blocks import require_plain_weights, require_task_experts, set_experts
from mote.inference.stores import CpuStore, DiskStore
from mote.remote.configuration_mote import MoTEConfig, require_known
from mote.remote.weights_mote import find_files, read_index

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

PLACES = ("cpu", "disk")
_OVERRIDDEN = ("state_dict", "save_pretrained")  # methods of a model that need all experts


def offload(model: "MoTEModel", to: str = "cpu", keep: int = 1) -> None:
    """Take all experts but `keep` off the device; each returns when a text of its task arrives.

    A model whose experts are already offloaded is restored first.

    For inference: weights must not be trained, or otherwise changed, until `restore`. Do not call it while other
    threads call the model. `mote.load(path, offload=…)` starts in this state and never holds more in memory.

    Args:
        model: A MoTE in memory, installed or remote code; changed in place.
        to: `"cpu"`, the CPU's memory (pinned if the device is a GPU), or `"disk"`: experts are read from the
            safetensors files that the model was loaded from.
        keep: Number of experts on the device, at least 1, the most recently used ones. A call that needs another expert
            waits while all of these are in use.
    """
    check_settings(model.config, to)
    restore(model)
    _require_offloadable(model)
    weights = _weights_of_experts(model)
    if to == "cpu":
        store: CpuStore | DiskStore = CpuStore(weights)
    else:
        store = DiskStore(model.weight_files)
        _require_stored(weights, store, equal=True)
    Offloading(model, store, keep)


def restore(model: "MoTEModel") -> None:
    """Bring all experts back to the device. No effect on a model whose experts are not offloaded."""
    if model.offloading is not None:
        model.offloading.restore(model)


def offload_others(
    model: "MoTEModel", loaded_experts: list[str] | None, to: str, keep: int, hub: Mapping[str, Any]
) -> None:
    """Offload a model that was loaded with its first `keep` experts; `loaded_experts` are those of its config then."""
    _require_offloadable(model)
    folder, model.config.loaded_experts = Path(model.weight_files[0]).parent, loaded_experts
    if index := read_index(folder):
        model.weight_files = tuple(find_files(str(model.name_or_path), folder, index, model.config, **hub))
    store = DiskStore(model.weight_files)
    _require_stored(_weights_of_experts(model), store)
    offloading = Offloading(model, store, keep)
    if to == "cpu":
        with offloading.all_experts():
            offloading.store = CpuStore(_weights_of_experts(model))


def check_settings(config: MoTEConfig, to: str) -> None:
    """Raise `ValueError` for a token-routed model, or an unknown place."""
    require_task_experts(config)
    require_known(to, PLACES, "place to offload experts to:")


def _require_offloadable(model: "MoTEModel") -> None:
    require_plain_weights(model)
    if len({weight.device for weight in model.parameters()}) > 1 or hasattr(model, "_hf_hook"):
        raise ValueError("The model is spread over several devices: load it on one, with device_map='cuda:0'")


def _require_stored(weights: Mapping[str, torch.Tensor], store: DiskStore, *, equal: bool = False) -> None:
    """Raise `ValueError` if weights of a model are not in its files or, if asked, differ from those."""
    wrong = next((key for key in weights if key not in store.locations), None)
    if wrong is None and equal:
        stored = {key: torch.empty_like(weight, device="cpu") for key, weight in weights.items()}
        store.copy_into(stored)
        wrong = next((key for key, weight in weights.items() if not torch.equal(stored[key], weight.cpu())), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong} differs from the safetensors files that the model was loaded from, or is not in them: save the "
            "model with save_pretrained(), then load it with mote.load(folder, offload='disk')"
        )


class Slot:
    """Room on the device for one expert: a layer per block, whose weights will be overwritten."""

    def __init__(self, prefixes: list[str], layers: list[nn.Module], expert: str) -> None:
        self.prefixes = prefixes  # of the keys of each block's experts
        self.layers = layers
        self.expert: str | None = expert
        self.users = 0
        self.state = self._state()

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Map the keys of the expert `name` to the tensors of the slot."""
        return {
            f"{prefix}{name}.{key}": tensor
            for prefix, layer in zip(self.prefixes, self.layers, strict=True)
            for key, tensor in layer.state_dict().items()
        }

    def fill(self, store: CpuStore | DiskStore, name: str) -> None:
        """Overwrite the weights with those of another expert."""
        self.expert = None
        tensors = self.tensors(name)
        _synchronize(tensors)  # threads with streams of their own may still read the slot
        with torch.inference_mode():
            store.copy_into(tensors)
        _synchronize(tensors)
        self.expert, self.state = name, self._state()

    def is_changed(self) -> bool:
        """Whether modules were replaced or weights written since the slot was filled; `.to()` does not count."""
        modules, tensors = self._state()
        then_modules, then_tensors = self.state
        moved = any(now != then for (now, _), (then, _) in zip(tensors, then_tensors, strict=False))
        return modules != then_modules or (tensors != then_tensors and not moved)

    def _state(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Identity of each module; address of each weight, and how often it was written to."""
        modules = [id(module) for layer in self.layers for module in layer.modules()]
        weights = [weight for layer in self.layers for weight in layer.parameters()]
        return modules, [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _synchronize(tensors: Mapping[str, torch.Tensor]) -> None:
    device = next(iter(tensors.values())).device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Offloading:
    """Keeps the weights of all experts in a store, and at most `keep` experts on the device. Thread-safe."""

    def __init__(self, model: "MoTEModel", store: CpuStore | DiskStore, keep: int = 1) -> None:
        self.store = store
        self.names: list[str] = list(model.config.available_experts)
        self.blocks: list[Any] = model.blocks
        self.trainable = {key: weight.requires_grad for key, weight in model.named_parameters() if ".experts." in key}
        # The least recently used comes first.
        self.slots = [
            Slot(_prefixes(model), [block.experts[name] for block in self.blocks], name)
            for name in self.names[: max(1, keep)]
        ]
        # Serialises fetches, so that a call that waits for a slot is not overtaken for ever.
        self._turn = threading.RLock()
        self._left = threading.Condition()  # notified when a call has left its slot
        self._attached = False  # whether the blocks hold all experts
        self._show()
        model.offloading = self
        for method in _OVERRIDDEN:
            vars(model)[method] = partial(self._with_all_experts, model, method)

    @property
    def on_device(self) -> list[str]:
        """The experts on the device, the least recently used first."""
        return [slot.expert for slot in self.slots if slot.expert is not None]

    @torch.compiler.disable  # a graph would hold the expert that was on the device when it was traced
    def run(self, backbone: nn.Module, *, expert: str, **inputs: Any) -> Any:
        """Run the backbone with an expert on the device; raise `ValueError` if gradients would be recorded."""
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
        """Keep an expert on the device within the context. Waits while all slots are in use by other experts."""
        with self._turn:
            slot = None if self._attached else self._slot_of(name)  # None: restored while this call waited
        try:
            yield
        finally:
            if slot is not None:
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
                self._attach("cpu")
                yield
            finally:
                self._show()
                self._attached = False

    def restore(self, model: "MoTEModel") -> None:
        """Put all experts into the model for good."""
        with self._alone():
            self._attach(model.device)
            for key, weight in model.named_parameters():
                weight.requires_grad_(self.trainable.get(key, weight.requires_grad))
            for method in _OVERRIDDEN:
                vars(model).pop(method)
            model.offloading = None

    def _with_all_experts(self, model: "MoTEModel", method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model's class while all experts are in the model."""
        with self.all_experts():
            result = getattr(type(model), method)(model, *args, **kwargs)
            for slot in self.slots if method == "state_dict" else ():
                # Copies, because the next fetch overwrites what is in a slot.
                for key in slot.tensors(slot.expert) if slot.expert else ():
                    name = kwargs.get("prefix", "") + key
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
        with self._left:
            self._left.wait_for(lambda: not all(slot.users for slot in self.slots))
            slot = next(slot for slot in self.slots if not slot.users)
        if slot.expert is not None and slot.is_changed():
            raise ValueError(
                f"The expert {slot.expert!r} was changed while experts are offloaded, and the change would be lost, or "
                "apply to another expert, if it left the device: call mote.restore(model) before changing experts"
            )
        self.store.check(slot.tensors(name))
        try:
            slot.fill(self.store, name)
        finally:
            self._show()
        return slot

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no call runs, and let none start within the context."""
        with self._turn, self._left:
            self._left.wait_for(lambda: not any(slot.users for slot in self.slots))
            yield

    def _show(self, *others: Slot) -> None:
        """Expose the experts on the device, and others, in the blocks."""
        slots = {slot.expert: slot for slot in (*self.slots, *others)}
        for index, block in enumerate(self.blocks):
            set_experts(block, {name: slots[name].layers[index] for name in self.names if name in slots})

    def _attach(self, device: torch.device | str) -> None:
        """Expose all experts in the blocks: those of the store on a device."""
        first, others = self.slots[0], []
        shared = {id(module): module for block in self.blocks for module in block.shared.modules()}
        for name in self.names:
            if name not in self.on_device:
                layers = [copy.deepcopy(layer, dict(shared)).to(device) for layer in first.layers]
                others.append(Slot(first.prefixes, layers, name))
                others[-1].fill(self.store, name)
        self._show(*others)
        self._attached = True


def _weights_of_experts(model: "MoTEModel") -> dict[str, torch.Tensor]:
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
