"""One expert of a MoTE as a dense model of the backbone's own architecture, which needs no code of MoTE.

A task expert that is token-routed becomes a token-routed model, which does need it.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from mote.checkpoints.reading import is_mote, mote_class
from mote.checkpoints.tensors import without_head
from mote.checkpoints.transform import Verb
from mote.experts.blocks import require_plain_weights, require_task_experts, weights_by_expert
from mote.remote.configuration_mote import MoTEConfig, require_known
from mote.remote.modeling_mote import MoTEModel


@Verb("export", "the expert `{name}` of", options={"name": "expert"}, loads="name")
def export(model: MoTEModel, name: str) -> PreTrainedModel:
    """Turn one expert into a dense model of the backbone's own architecture, which needs no code of MoTE.

    If the experts are token-routed themselves, the result is the token-routed model of that expert.

    Args:
        model: A MoTE in memory; not modified.
        name: Name of the expert.

    Returns:
        The native model, without a pooler. Its `last_hidden_state` equals, bit for bit, the MoTE's for this expert.
        Its weights are copies, so both models can be used and trained. Compressed weights are dequantized.
    """
    require_task_experts(model.config)
    require_plain_weights(model)
    require_known(name, model.config.available_experts, "expert")
    parts = weights_by_expert(model.config, dequantized_state_dict(model, name))
    # The expert's own replace the mean that compressed ones share.
    return native_model(model, {key: weight.clone() for key, weight in (parts[None] | parts[name]).items()}, [name])


def dequantized_state_dict(model: nn.Module, expert: str) -> dict[str, torch.Tensor]:
    """Return a model's weights without a head, the matrices of one expert dequantized where they are compressed."""
    weights = without_head(model.state_dict())
    for path, module in model.named_modules():
        if f".experts.{expert}." in path and hasattr(module, "to_linear"):
            dense = {f"{path}.{key}": weight for key, weight in module.to_linear().state_dict().items()}
            weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{path}.")} | dense
    return weights


def native_model(model: MoTEModel, weights: dict[str, torch.Tensor], experts: list[str]) -> PreTrainedModel:
    """Build the native model of a MoTE's backbone from its weights, taken over without a copy.

    A token-routed backbone takes over the tasks of the experts that the weights come from.
    """
    require_known(model.config.pooling, MoTEConfig.pooling_modes, "pooling of a model without task experts:")
    config: Any = copy.deepcopy(model.config.backbone_config)
    config.output_attentions = False  # which the library saves only with its slowest attention
    attention = model.backbone.config._attn_implementation
    if is_mote(config):
        _take_names(config, model.config, experts)
        dense: Any = mote_class(config.model_type, "model")._from_config(config, attn_implementation=attention)
    else:
        dense = AutoModel.from_config(config, attn_implementation=attention)
    if getattr(dense, "pooler", None) is not None:
        dense.pooler = None  # a MoTE has none
    if getattr(config, "is_causal", True) is False:  # sdpa without a mask asks the module, not the config
        for module in dense.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    dense.load_state_dict(weights, assign=True)
    return dense.to(model.device).train(model.training)


def _take_names(config: Any, names: MoTEConfig, experts: list[str]) -> None:
    """Give a token-routed model the tasks, instructions and pooling of the experts that it is made from."""
    config.experts, config.pooling, config.default_task = experts, names.pooling, None
    config.tasks = {task: expert for task, expert in names.tasks.items() if expert in experts}
    config.instructions = {task: names.instruction_of(task) for task in config.tasks}
    config.validate()
