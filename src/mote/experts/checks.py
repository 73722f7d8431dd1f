"""Checks of a model and its config before experts are used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mote.checkpoints.tensors import require_unquantised
from mote.remote.configuration_mote import require_known

if TYPE_CHECKING:
    from mote.remote.configuration_mote import MoTEConfig
    from mote.remote.modeling_mote import MoTEModel


def require_task_experts(config: "MoTEConfig") -> None:
    """Raise `ValueError` for a token-routed model."""
    if not config.routes_by_task:
        raise ValueError("A token-routed model has no experts for tasks: this works for task MoTE models only")


def require_uncompressed(config: "MoTEConfig") -> None:
    """Raise `ValueError` if the experts are compressed."""
    if config.compression is not None:
        raise ValueError(
            f"The experts of this model are compressed ({config.compression}): use the model as it was before "
            "`mote compress`"
        )


def require_plain_weights(model: "MoTEModel") -> None:
    """Raise `ValueError` if a model has adapters or is quantised."""
    require_unquantised(model)
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            "The model has PEFT adapters, which belong to no expert until they are merged into the weights: use "
            "what the PeftModel's `merge_and_unload()` returns or, after `add_adapter` or `load_adapter`, call "
            "`mote.training.adapters.merge_adapters(model)` first"
        )


def require_mergeable(model: "MoTEModel") -> None:
    """Raise `ValueError` if the mean of the experts cannot be taken, or would be meaningless."""
    require_task_experts(model.config)
    require_uncompressed(model.config)
    for name in model.config.experts:
        require_known(name, model.config.available_experts, "expert")
    require_plain_weights(model)


def require_editable(model: "MoTEModel", *, uncompressed: bool = False) -> None:
    """Raise `ValueError` if single experts cannot be edited or, if so required, are compressed."""
    require_task_experts(model.config)
    require_plain_weights(model)
    if uncompressed:
        require_uncompressed(model.config)
    if model.offloading is not None:
        raise ValueError("Offloaded experts cannot be edited or read one by one: call mote.restore(model) first")


def require_same_shapes(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` if weights of an expert are missing, unknown or of another shape; it names one of them."""
    ours, theirs = ({name: tuple(weight.shape) for name, weight in one.items()} for one in (expected, given))
    wrong = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if wrong:
        raise ValueError(
            f"The weights do not fit: {len(wrong)} are missing, unknown or of another shape, such as {wrong[0]!r} "
            f"({theirs.get(wrong[0], 'missing')}, expected {ours.get(wrong[0], 'none')})"
        )
