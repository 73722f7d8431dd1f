"""Checks of a model before its experts are used."""

from typing import TYPE_CHECKING

from mote.checkpoints.reading import ATTENTION_POOLING
from mote.checkpoints.tensors import require_unquantised, token_routing

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


def require_dense_experts(config: "MoTEConfig") -> None:
    """Raise `ValueError` if the task experts are token-routed themselves."""
    if token_routing(config) is not None:
        raise ValueError(
            "The task experts of this model are token-routed, with stacked feed-forward networks: only the matrices of "
            "dense experts can be compressed"
        )


def require_plain_pooling(config: "MoTEConfig") -> None:
    """Raise `ValueError` if the pooling has weights of its own."""
    if config.model_type == ATTENTION_POOLING:
        raise ValueError(
            f"This model pools by {config.pooling!r}, whose weights neither dense nor compressed models can hold: keep "
            "it a MoTE, with one expert if necessary (`mote experts remove`)"
        )


def require_all_experts(config: "MoTEConfig") -> None:
    """Raise `ValueError` unless all experts are loaded."""
    absent = [name for name in config.experts if name not in config.available_experts]
    if absent:
        raise ValueError(
            f"The experts {', '.join(map(repr, absent))} are not loaded (loaded: "
            f"{', '.join(map(repr, config.available_experts))}): the mean needs all experts"
        )


def has_adapters(model: "MoTEModel") -> bool:
    """Whether PEFT has put adapters into a model."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def require_plain_weights(model: "MoTEModel") -> None:
    """Raise `ValueError` if a model has adapters or is quantised."""
    require_unquantised(model)
    if has_adapters(model):
        raise ValueError(
            "The model has PEFT adapters, which belong to no expert until they are merged into the weights: use "
            "what the PeftModel's `merge_and_unload()` returns or, after `add_adapter` or `load_adapter`, call "
            "`mote.training.adapters.merge_adapters(model)` first"
        )


def require_mergeable(model: "MoTEModel") -> None:
    """Raise `ValueError` if the mean of the experts cannot be taken, or would be meaningless."""
    require_task_experts(model.config)
    require_uncompressed(model.config)
    require_all_experts(model.config)
    require_plain_weights(model)


def require_editable(model: "MoTEModel") -> None:
    """Raise `ValueError` if single experts cannot be edited: token-routed, adapted, offloaded or without weights."""
    require_task_experts(model.config)
    require_plain_weights(model)
    if model.offloading is not None:
        raise ValueError("Offloaded experts cannot be edited or read one by one: call mote.restore(model) first")
    if any(weight.is_meta for block in model.blocks for weight in block.experts.parameters()):
        raise ValueError("Weights of experts are on the meta device: load the model with its weights")
