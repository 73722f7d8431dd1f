"""What can be done with single experts of a model in memory: take one out as a dense model.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch and
transformers alone.
"""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

try:
    from .compression_mote import whole_weights  # type: ignore[import-not-found]
    from .configuration_mote import MoTEConfig  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from compression_mote import whole_weights
    from configuration_mote import MoTEConfig


class SingleExperts:
    """The methods of a [`MoTEModel`] for single experts."""

    config: MoTEConfig

    def export_expert(self, name: str) -> PreTrainedModel:
        """Make one expert a dense model of the backbone's own architecture, which needs no code of MoTE.

        Args:
            name: Of the expert.

        Returns:
            The native model, without a pooler: its `last_hidden_state` equals that of the MoTE for this expert, bit
            for bit. Its weights are copies, so that both can be used and trained on. Those of a compressed expert are
            multiplied out.

        Raises:
            ValueError: If there is no such expert, it is not loaded, or a router picks experts token by token.
        """
        self.config.require_experts_of_tasks("exported")
        expert = self.config.require_expert(name)
        key = weight_of_an_expert(self)
        weights: dict[str, torch.Tensor] = {}
        for path, weight in whole_weights(self, expert).items():
            found = key.fullmatch(path)
            if found is None:
                weights[path.removeprefix("backbone.")] = weight.clone()
            elif found["expert"] in (None, expert):  # an expert's own come after the mean of compressed ones
                weights[found["layer"] + found["weight"]] = weight.clone()
        return native_model(self, weights)


def weight_of_an_expert(model: Any) -> re.Pattern[str]:
    """Describe the keys of blocks with experts: `layer`, `expert` (none in what is shared) and `weight`."""
    layers = re.escape(model.architecture.layer_path)
    indices = "|".join(map(str, model.config.mote_layer_indices))
    return re.compile(
        rf"backbone\.(?P<layer>{layers}\.(?:{indices})\.)(?:shared|experts\.(?P<expert>[^.]+))\.(?P<weight>.+)"
    )


def native_model(model: Any, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the native model of a MoTE's backbone around some weights, all of which must fit."""
    config = copy.deepcopy(model.config.backbone_config)
    attention = model.backbone.config._attn_implementation
    dense: PreTrainedModel = AutoModel.from_config(config, attn_implementation=attention)
    if getattr(dense, "pooler", None) is not None:
        dense.pooler = None  # type: ignore[assignment]  # a MoTE has none
    attend_both_ways(dense)
    dense.load_state_dict(weights, assign=True)
    return dense.to(model.device).train(model.training)


def attend_both_ways(backbone: nn.Module) -> None:
    """Tell the modules of a decoder what its config says: sdpa without a mask asks the module, not the config."""
    if getattr(backbone.config, "is_causal", True) is False:
        for module in backbone.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False  # type: ignore[assignment]
