"""Experts within a model: what verbs require of it, and its modules and weights under the names of the dense model."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mote.checkpoints.tensors import require_unquantised, weight_name, without_head
from mote.remote.configuration_mote import MoTEConfig, require_known
from mote.remote.modeling_mote import MoTEBlock, MoTEModel


def require_task_experts(config: MoTEConfig) -> None:
    """Raise `ValueError` for a token-routed model."""
    if not config.routes_by_task:
        raise ValueError("A token-routed model has no experts for tasks: this works for task MoTE models only")


def require_uncompressed(config: MoTEConfig) -> None:
    """Raise `ValueError` if the experts are compressed."""
    if config.compression is not None:
        raise ValueError(
            f"The experts of this model are compressed ({config.compression}): use the model as it was before "
            "`mote compress`"
        )


def require_plain_weights(model: MoTEModel) -> None:
    """Raise `ValueError` if a model has adapters or is quantised."""
    require_unquantised(model)
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            "The model has PEFT adapters, which belong to no expert until they are merged into the weights: use "
            "what the PeftModel's `merge_and_unload()` returns or, after `add_adapter` or `load_adapter`, call "
            "`mote.training.adapters.merge_adapters(model)` first"
        )


def require_mergeable(model: MoTEModel) -> None:
    """Raise `ValueError` if the mean of the experts cannot be taken, or would be meaningless."""
    require_task_experts(model.config)
    require_uncompressed(model.config)
    for name in model.config.experts:
        require_known(name, model.config.available_experts, "expert")
    require_plain_weights(model)


def require_editable(model: MoTEModel, *, uncompressed: bool = False) -> None:
    """Raise `ValueError` if single experts cannot be edited or, if so required, are compressed."""
    require_task_experts(model.config)
    require_plain_weights(model)
    if uncompressed:
        require_uncompressed(model.config)
    if model.offloading is not None:
        raise ValueError("Offloaded experts cannot be edited or read one by one: call mote.restore(model) first")


def set_experts(block: MoTEBlock, experts: Mapping[str, nn.Module]) -> None:
    """Give a block its experts in a new dict, so that threads that iterate over the old one are not disturbed."""
    new = nn.ModuleDict(experts)
    new.training = block.training
    block.experts = new


def weights_by_expert(
    config: MoTEConfig, state: Mapping[str, torch.Tensor]
) -> dict[str | None, dict[str, torch.Tensor]]:
    """Group the weights of a state dict by expert, under their names in the dense model; None: those that are shared.

    Those of a head for masked language modelling are left out.
    """
    found: dict[str | None, dict[str, torch.Tensor]] = {None: {}}
    for key, weight in without_head(state).items():
        name = weight_name(key, config)
        found.setdefault(name.expert, {})[name.dense] = weight
    return found


def mean(weights: Sequence[torch.Tensor], shares: Sequence[float] | None = None) -> torch.Tensor:
    """Average tensors of one shape, with shares that are scaled to sum to 1.

    The result is in float64 on the CPU, so that the mean of equal float32 weights is exactly these weights.
    """
    stacked = torch.stack([weight.to("cpu", torch.float64) for weight in weights])
    if shares is None or len(set(shares)) == 1:
        return stacked.mean(dim=0)
    return torch.tensordot(torch.tensor(shares, dtype=torch.float64) / sum(shares), stacked, dims=1)


def mean_of_experts(
    experts: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float] | None = None
) -> dict[str, torch.Tensor]:
    """Average the weights of several experts, in the dtype of the first; see `mean`."""
    return {key: mean([expert[key] for expert in experts], shares).to(first) for key, first in experts[0].items()}
