"""Tensors of checkpoints: counted."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from architectures_mote import weight_name

if TYPE_CHECKING:
    from modeling_mote import MoTEModel


def parameter_counts(model: "MoTEModel") -> dict[str, Any]:
    """Count the parameters of a MoTE.

    Args:
        model: A MoTE in memory, or on the meta device. Offloaded experts count as if they were on the device.

    Returns:
        `total`; `active`, those that a sequence passes through, as many as in the dense model without its pooler
        (token-routed: those that a token passes through); `shared`, by all experts (routers are); `experts`: name →
        parameters of that expert alone.
    """
    with nullcontext() if model.offloading is None else model.offloading.all_experts():
        counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(counts.values())
    available, active_experts = model.config.available_experts, 1
    routed = sum(count for name, count in counts.items() if ".feed_forward.experts." in name)
    if routed:
        experts = dict.fromkeys(available, routed // len(available))
        active_experts = getattr(model.config, "num_experts_per_tok", None) or model.config.experts_per_token
    else:
        experts = dict.fromkeys(available, 0)
        for name, count in counts.items():
            expert = weight_name(name, model.config).expert
            if expert is not None:
                experts[expert] += count
    shared = total - sum(experts.values())
    active = shared + active_experts * max(experts.values())
    return {"total": total, "active": active, "shared": shared, "experts": experts}
