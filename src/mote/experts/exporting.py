"""One expert of a MoTE as a dense model of the backbone's own architecture, which needs no code of MoTE."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from mote.checkpoints.reading import require_expert
from mote.checkpoints.tensors import weight_name
from mote.checkpoints.transform import verb
from mote.experts.checks import require_task_experts

if TYPE_CHECKING:
    from modeling_mote import MoTEModel


@verb("export", "the expert `{name}` of", options={"name": "expert"}, loads="name")
def export(model: "MoTEModel", name: str) -> PreTrainedModel:
    """Make one expert a dense model of the backbone's own architecture, which needs no code of MoTE.

    Args:
        model: A MoTE in memory; not modified.
        name: Name of the expert.

    Returns:
        The native model, without a pooler: its `last_hidden_state` equals that of the MoTE for this expert, bit for
        bit. Its weights are copies, so both models can be used and trained. Compressed weights are dequantized.

    Raises:
        ValueError: If there is no such expert, it is not loaded, or the model is token-routed.
    """
    require_task_experts(model.config)
    require_expert(model.config, name)
    weights: dict[str, torch.Tensor] = {}
    for key, weight in dequantized_state_dict(model, name).items():
        found = weight_name(key, model.config)
        if found.expert in (None, name):  # an expert's own come after the shared mean of compressed ones
            weights[found.dense] = weight.clone()
    return native_model(model, weights)


def dequantized_state_dict(model: nn.Module, expert: str) -> dict[str, torch.Tensor]:
    """Return a model's state dict, with the matrices of one expert dequantized where they are compressed."""
    weights = model.state_dict()
    for path, module in model.named_modules():
        if f".experts.{expert}." in path and hasattr(module, "to_linear"):
            dense = {f"{path}.{key}": weight for key, weight in module.to_linear().state_dict().items()}
            weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{path}.")} | dense
    return weights


def native_model(model: "MoTEModel", weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the native model of a MoTE's backbone from its weights, all of which must fit.

    Args:
        model: The MoTE.
        weights: Name in the dense model → weight; taken over without a copy.
    """
    config = copy.deepcopy(model.config.backbone_config)
    attention = model.backbone.config._attn_implementation
    dense: Any = AutoModel.from_config(config, attn_implementation=attention)
    if getattr(dense, "pooler", None) is not None:
        dense.pooler = None  # a MoTE has none
    if getattr(config, "is_causal", True) is False:  # sdpa without a mask asks the module, not the config
        for module in dense.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    dense.load_state_dict(weights, assign=True)
    return dense.to(model.device).train(model.training)
