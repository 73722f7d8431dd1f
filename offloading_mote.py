"""Experts that are not in use leave the device: they wait in the CPU's memory, or in the files they were loaded from.

As many experts as may be on the device at once have a place there, which is one layer per block. To fetch an expert is
to copy its weights into the place of the one that was not used for longest: nothing is allocated or freed, and at no
moment are more experts on the device. The `experts` of a block are those that are there, so that `.to()`, `.half()`,
and `parameters()` see these and no others.

Accelerate's hooks do not fit. `AlignDevicesHook` (behind `cpu_offload`, `disk_offload`, `device_map`) copies the
weights of a module before each of its calls and drops them right after, nothing is kept for the next text of the same
task; under threads, the first to leave the module takes the weights from the others; and from disk, it opens the file
and parses its header for each weight.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch,
transformers and what that needs itself.
"""

import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

try:
    from .configuration_mote import MoTEConfig, alternatives  # type: ignore[import-not-found]
    from .stored_experts_mote import SAVE_FIRST, CpuStore, DiskStore, Store  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from configuration_mote import MoTEConfig, alternatives
    from stored_experts_mote import SAVE_FIRST, CpuStore, DiskStore, Store


class OffloadSettings(NamedTuple):
    """Where experts that are not in use go, and how many stay: see `OffloadedExperts.offload_experts`."""

    to: str = "cpu"
    keep: int = 1

    @classmethod
    def read(cls, settings: Any) -> "OffloadSettings":
        """Understand `from_pretrained(offload_experts=…)`: a place, or a dict with `to` and `keep`.

        Raises:
            ValueError: If it is something else.
        """
        if isinstance(settings, str):
            settings = {"to": settings}
        if not isinstance(settings, dict) or "to" not in settings or set(settings) - set(cls._fields):
            raise ValueError(
                f"offload_experts must be 'cpu', 'disk', or a dict as in {{'to': 'disk', 'keep': 2}}, not {settings!r}"
            )
        return cls(**settings)

    def validate(self, config: MoTEConfig) -> None:
        """Raise `ValueError` where these are no settings for a model of this config."""
        config.require_experts_of_tasks("offloaded")
        if self.to not in ("cpu", "disk"):
            raise ValueError(f"Experts cannot be offloaded to {self.to!r}." + alternatives(self.to, ("cpu", "disk")))
        if self.to == "cpu" and not torch.accelerator.is_available():
            raise ValueError(
                "Experts offloaded to 'cpu' leave a GPU or another accelerator, and there is none here: offload to "
                "'disk'"
            )
        count = len(config.available_experts)
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or not 1 <= self.keep <= count:
            raise ValueError(
                f"keep must be a whole number from 1 to {count}, the number of experts, not {self.keep!r}: so many of "
                "them stay on the device"
            )


class OffloadedExperts:
    """The methods of a [`MoTEModel`] for keeping experts off the device.

    Attributes:
        offloading: None while all experts are in the model.
    """

    config: MoTEConfig
    offloading: "Offloading | None" = None
    weight_files: tuple[str, ...] = ()  # that the model was loaded from

    def offload_experts(self, to: str = "cpu", keep: int = 1) -> None:
        """Take the experts off the device, all but `keep`; from then on, each comes when a text of its task does.

        For inference: the weights cannot be trained, or changed otherwise, until `restore_experts()`. To begin like
        this, and never hold more in memory, load with `from_pretrained(…, offload_experts=…)`. No call of the model may
        run meanwhile.

        Args:
            to: `"cpu"`, into the CPU's memory (pinned, and copied asynchronously on a stream of its own, where the
                device is a GPU), or `"disk"`, which reads experts from the safetensors files that the model was loaded
                from, and holds none in memory.
            keep: How many experts may be on the device at once, those that were used last. Calls that need another
                one wait while all of them are in use.

        Raises:
            ValueError: If a setting is out of range, a router picks experts token by token, the model is quantised or
                has adapters, or its weights are not (or no longer) those of its files (`"disk"`).
        """
        settings = OffloadSettings(to, keep)
        settings.validate(self.config)
        self._refuse_to_offload()
        model: Any = self
        if to == "cpu" and model.device.type == "cpu":
            raise ValueError(
                "The model is on the CPU, where experts offloaded to 'cpu' take as much memory as before: move the "
                "model to its device first, or offload to 'disk'"
            )
        weights = _weights_of_experts(model)
        store: Store = CpuStore(weights.items()) if to == "cpu" else DiskStore(self.weight_files)
        if to == "disk":
            _require_equal(weights, store)
        self.offloading = Offloading(model, store, keep)

    def restore_experts(self) -> None:
        """Bring all experts back to the device for good. Does nothing where none are offloaded."""
        if self.offloading is not None:
            self.offloading.restore()
            self.offloading = None

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        """Have all experts in the model for the time of the block, to read their weights: some on the CPU.

        Calls of the model wait meanwhile, so the block must not make one.
        """
        offloading = self.offloading
        with nullcontext() if offloading is None else offloading.all_experts():
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return all weights, those of offloaded experts on the CPU; what is on disk is mapped, not read."""
        with self.every_expert():
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def require_experts_in_memory(self, done: str) -> None:
        """Raise `ValueError` where experts are offloaded; `done` says what cannot be done to them."""
        if self.offloading is not None:
            raise ValueError(f"Experts that are offloaded cannot be {done}: call restore_experts() first")

    def _start_offloaded(self, settings: OffloadSettings, loaded_experts: list[str] | None) -> None:
        """Let a model that was loaded with its first experts alone have the others from its files."""
        self._refuse_to_offload()
        self.config.loaded_experts = loaded_experts
        model: Any = self
        store: Store = DiskStore(self.weight_files)
        if settings.to == "cpu":
            store = CpuStore(_as_in_the_model(model, store))
        self.offloading = Offloading(model, store, settings.keep)

    def _refuse_to_offload(self) -> None:
        model: Any = self
        if self.offloading is not None:
            raise ValueError(f"Experts are offloaded already ({self.offloading!r}): call restore_experts() first")
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError("The experts of a quantised model cannot be offloaded: load it without quantisation")
        if any(type(module).__module__.startswith("peft.") for module in model.modules()):
            raise ValueError("Experts with adapters cannot be offloaded: merge the adapters and save the model first")
        if any(weight.is_meta for weight in model.parameters()):
            raise ValueError("The model's weights are not in memory, they are on the device `meta`: load it with them")
        if len({weight.device for weight in model.parameters()}) > 1 or hasattr(model, "_hf_hook"):
            raise ValueError("The model is spread over several devices: load it on one, with device_map='cuda:0'")


class Place:
    """Room on the device for one expert.

    Args:
        layers: Of the expert that is there, one per block.
        expert: Its name.
    """

    def __init__(self, layers: list[nn.Module], expert: str) -> None:
        """Take the layers over: their weights will be written over."""
        self.layers = layers
        self.expert: str | None = expert
        self.users = 0
        self.ready: Any = None  # on a GPU, the event after which the weights are there
        self.read: dict[Any, Any] = {}  # stream → the event after which it has read them
        self.modules = self._modules()
        # Looked up again at each turn, because `.to()` puts other tensors there.
        self.homes = [
            (index, key, layer.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2])
            for index, layer in enumerate(layers)
            for key in layer.state_dict()
        ]
        self.written = self._fingerprint()

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Go through the weights: block, key within its layer, and tensor."""
        for index, key, module, name in self.homes:
            yield index, key, getattr(module, name)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(tensor.device for _, _, tensor in self.tensors())

    def fill(self, store: Store, keys: list[str], copying: Any = None) -> None:
        """Write the weights of another expert over those that are here.

        Args:
            store: Has them.
            keys: Of each weight, in the order of `tensors`.
            copying: On a GPU, the stream that does it, while others compute.
        """
        tensors = dict(zip(keys, (tensor for _, _, tensor in self.tensors()), strict=True))
        if copying is not None:
            if self.ready is None or self._moved():  # written by `.to()`, on the stream that computes
                copying.wait_stream(torch.cuda.current_stream(copying.device))
            for event in self.read.values():
                copying.wait_event(event)
        with torch.inference_mode(), nullcontext() if copying is None else torch.cuda.stream(copying):
            store.write_to(tensors)
            for tensor in tensors.values() if copying is not None else ():
                tensor.record_stream(copying)
        self.ready = None if copying is None else copying.record_event()
        self.read.clear()
        self.written = self._fingerprint()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """On a GPU, let what is computed in the block wait for the copy to here, and the next copy wait for it."""
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
        """Raise `ValueError` where something would be lost, or done to the wrong expert, if another one came here."""
        if self.expert is None:
            return
        if self._modules() != self.modules:
            raise ValueError(
                f"Modules of the expert {self.expert!r} were replaced while experts are offloaded, which does not "
                "reach the others: call restore_experts() before adapters or quantisation"
            )
        if not self._moved() and self._fingerprint() != self.written:
            raise ValueError(
                f"The weights of the expert {self.expert!r} were changed while experts are offloaded, and would be "
                "lost if it left the device: restore_experts() keeps them"
            )

    def _modules(self) -> list[int]:
        return [id(module) for layer in self.layers for module in layer.modules()]

    def _moved(self) -> bool:
        return any(now != then for (now, _), (then, _) in zip(self._fingerprint(), self.written, strict=True))

    def _fingerprint(self) -> list[tuple[int, int]]:
        """Where each tensor is in memory, and how often it was written to."""
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for _, _, t in self.tensors()]


class Offloading:
    """Keeps the experts of a model in a store, and those in use on the device. Safe under threads.

    Args:
        model: A `MoTEModel`. Its first `keep` experts must be there, and stay; others that are there leave.
        store: Has the weights of all experts of the model's config.
        keep: How many experts may be on the device at once.
    """

    def __init__(self, model: Any, store: Store, keep: int = 1) -> None:
        """Take the experts out of the model."""
        self.store = store
        self.keep = keep
        self.names: list[str] = list(model.config.available_experts)
        self.blocks: list[Any] = model.blocks
        self.prefixes = _prefixes(model)
        self.trainable = {
            prefix + key: weight.requires_grad
            for prefix, block in zip(self.prefixes, self.blocks, strict=True)
            for key, weight in block.experts.named_parameters()
        }
        # The least recently used comes first.
        self.places = [Place([block.experts[name] for block in self.blocks], name) for name in self.names[:keep]]
        self._turn = threading.RLock()  # to be the next who gets an expert: those in use cannot starve those that wait
        self._left = threading.Condition()  # somebody no longer uses a place
        self._copying: Any = None
        self._attached = False  # whether the blocks have all experts
        self._show()

    @torch.compiler.disable  # a graph would hold the expert that was on the device when it was made
    def run(self, backbone: Any, *, expert: str, **inputs: Any) -> Any:
        """Run the backbone with an expert on the device."""
        with self.expert(expert):
            out = backbone(expert=expert, **inputs)
        require_no_gradients(out.last_hidden_state)
        return out

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Raise `ValueError` where a model is to be saved over the files that its experts are read from."""
        store = self.store
        if isinstance(store, DiskStore) and Path(folder).resolve() in {path.parent.resolve() for path in store.states}:
            raise ValueError(
                f"The experts that are not in memory are read from {folder}: save to another folder, or call "
                "restore_experts() first"
            )

    @property
    def resident(self) -> list[str]:
        """The experts on the device, the least recently used first."""
        return [place.expert for place in self.places if place.expert is not None]

    @contextmanager
    def expert(self, name: str) -> Iterator[None]:
        """Have an expert on the device for the time of the block. Waits while all places are in use by others.

        Args:
            name: Of the expert.

        Raises:
            ValueError: If the file with the expert was changed, or the weights that would have to leave for it.
            FileNotFoundError: If the file is gone.
        """
        with self._turn:
            place = None if self._attached else self._place_of(name)  # restored while this call waited
        if place is None:
            yield
            return
        try:
            with place.reading():
                yield
        finally:
            with self._left:
                place.users -= 1
                self._left.notify_all()

    @contextmanager
    def all_experts(self) -> Iterator[None]:
        """Have all experts in the model for the time of the block, those of the store on the CPU; calls wait."""
        with self._alone():
            if self._attached:  # by this thread, further up
                yield
                return
            try:
                self._attach()
                yield
            finally:
                self._show()
                self._attached = False

    def restore(self) -> None:
        """Put all experts into the model for good."""
        with self._alone():
            self._attach(self.places[0].device)
            for prefix, block in zip(self.prefixes, self.blocks, strict=True):
                for key, weight in block.experts.named_parameters():
                    weight.requires_grad_(self.trainable.get(prefix + key, weight.requires_grad))

    def _place_of(self, name: str) -> Place:
        """Find or fetch an expert, and enter one more user of it."""
        place = next((place for place in self.places if place.expert == name), None) or self._fetch(name)
        self.places.remove(place)
        self.places.append(place)
        with self._left:
            place.users += 1
        return place

    def _fetch(self, name: str) -> Place:
        keys = [f"{self.prefixes[index]}{name}.{key}" for index, key, _ in self.places[0].tensors()]
        self.store.require(keys)  # what is missing, is missed before anything has left
        with self._left:
            self._left.wait_for(lambda: not all(place.users for place in self.places))
            place = next(place for place in self.places if not place.users)
        place.require_unchanged()
        place.expert = None
        self._show()
        place.fill(self.store, keys, self._copying_to(place.device))
        place.expert = name
        self._show()
        return place

    def _copying_to(self, device: torch.device) -> Any:
        """The stream for copies to a GPU, and None for other devices."""
        if device.type != "cuda":
            return None
        if self._copying is None or self._copying.device != device:
            self._copying = torch.cuda.Stream(device)
        return self._copying

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no call run for the time of the block."""
        with self._turn, self._left:
            self._left.wait_for(lambda: not any(place.users for place in self.places))
            if self._copying is not None:
                self._copying.synchronize()
            yield

    def _show(self) -> None:
        """Let the blocks have the experts on the device."""
        places = {place.expert: place for place in self.places}
        for index, block in enumerate(self.blocks):
            _set_experts(block, {name: places[name].layers[index] for name in self.names if name in places})

    def _attach(self, device: torch.device | None = None) -> None:
        """Let the blocks have all experts: those of the store as they are there, or on a device."""
        attached = []
        for prefix, block, like in zip(self.prefixes, self.blocks, self.places[0].layers, strict=True):
            layers = dict(block.experts.items())
            for name in self.names:
                if name not in layers:
                    layers[name] = self._layer(f"{prefix}{name}.", like, block).to(device)
            attached.append({name: layers[name] for name in self.names})
        for block, layers in zip(self.blocks, attached, strict=True):
            _set_experts(block, layers)
        self._attached = True

    def _layer(self, prefix: str, like: nn.Module, block: Any) -> nn.Module:
        """Build a layer of an expert in the store, like one that is there."""
        layer = _without_weights(like, block)
        types = {key: weight.dtype for key, weight in layer.state_dict().items()}
        weights = self.store.read(prefix + key for key in types)
        layer.load_state_dict({key: weights[prefix + key].to(types[key]) for key in types}, assign=True)
        return layer

    def __repr__(self) -> str:
        return f"Offloading(to={self.store.name!r}, keep={self.keep}, resident={self.resident})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "A model with offloaded experts can be neither copied nor pickled: call restore_experts() first, or load "
            "it once more"
        )


def require_no_gradients(hidden: torch.Tensor) -> None:
    """Raise `ValueError` where gradients were recorded, whose weights may be written over before they are used."""
    if hidden.requires_grad:
        raise ValueError(
            "Gradients cannot go through offloaded experts: compute under torch.no_grad() or torch.inference_mode(), "
            "or call restore_experts() before training"
        )


def _set_experts(block: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Give a block its experts, in a new dict: threads that go through the old one are not disturbed."""
    experts = nn.ModuleDict(layers)
    experts.training = block.training
    block.experts = experts


def _without_weights(layer: nn.Module, block: Any) -> nn.Module:
    """Copy a layer of an expert, with parameters on the device meta, and with the same shared modules."""
    memo: dict[int, Any] = {id(module): module for module in block.shared.modules()}
    for weight in layer.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    return copy.deepcopy(layer, memo)


def _prefixes(model: Any) -> list[str]:
    """What the keys of each block's experts begin with."""
    blocks = {id(block) for block in model.blocks}
    return [path + ".experts." for path, module in model.named_modules() if id(module) in blocks]


def _weights_of_experts(model: Any) -> dict[str, torch.Tensor]:
    """Collect the weights of all experts that are in the model, by their keys in its state dict."""
    return {
        prefix + key: weight
        for prefix, block in zip(_prefixes(model), model.blocks, strict=True)
        for key, weight in block.experts.state_dict().items()
    }


def _as_in_the_model(model: Any, store: Store) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights of all experts, one by one, in the types of those that are in the model."""
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
                f"{key} is not as in the file that the model was loaded from, and would be lost if it left the memory: "
                + SAVE_FIRST
            )
