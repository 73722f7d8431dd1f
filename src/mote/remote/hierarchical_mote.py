"""Task experts that are token-routed themselves: a hierarchical mixture of experts.

The task of a text picks the expert of a block, as in every MoTE. In blocks where the source routed tokens, each expert
has its own router and feed-forward networks, and the router picks the networks of each token. The source's other blocks
become ordinary task experts.

This file is only copied into saved models whose `auto_map` names it. Method: Jordan and Jacobs, "Hierarchical Mixtures
of Experts and the EM Algorithm", Neural Computation 6, 1994, for routing at two levels; the upper level is MoTE's, the
lower one is that of `token_routing_mote.py`.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .configuration_mote import MoTEConfig, of_backbone, require_known
from .modeling_mote import MoTEModel
from .token_routing_mote import (
    FeedForwardExperts,
    TokenRoutedBlock,
    TokenRoutedConfig,
    TokenRoutedModel,
    TokenRoutedOutput,
)


class HierarchicalMoTEConfig(MoTEConfig):
    """Configuration of a [`HierarchicalMoTEModel`]: that of a MoTE, over the config of a token-routed model.

    `backbone_config` is a [`TokenRoutedConfig`], or its dict; it has the settings of the routers, and determines
    `layer_path` and `shared_modules`.
    """

    model_type = "mote_hierarchical"
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": TokenRoutedConfig}

    router_aux_loss_coef = of_backbone("router_aux_loss_coef", "Factor of the load-balancing loss.")

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the defaults and validate."""
        backbone: Any = self.backbone_config or {}
        given = backbone.get("model_type", "") if isinstance(backbone, dict) else backbone.model_type
        require_known(given, ["", TokenRoutedConfig.model_type], "model_type of backbone_config:")
        self.backbone_config = TokenRoutedConfig(**backbone) if isinstance(backbone, dict) else backbone
        architecture = self.backbone_config.architecture
        self.layer_path, self.shared_modules = f"backbone.{architecture.layer_path}", [*architecture.shared_modules]
        super().__post_init__(**kwargs)


class HierarchicalMoTEModel(MoTEModel):
    """A `MoTEModel` over a token-routed backbone: sequences go to the expert of their task, which routes each token."""

    config: HierarchicalMoTEConfig
    config_class = HierarchicalMoTEConfig
    output_class = TokenRoutedOutput
    outputs = (*MoTEModel.outputs, "router_logits")

    def __init__(self, config: HierarchicalMoTEConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(
            config, TokenRoutedModel._from_config(config.backbone_config) if backbone is None else backbone
        )
        routed: Any = self.backbone
        self.arguments |= routed.arguments
        routed.arguments.add("expert")  # which its layers take

    def _shared_modules(self, layer: nn.Module) -> tuple[str, ...]:
        paths = super()._shared_modules(layer)
        return tuple(f"shared.{path}" for path in paths) if isinstance(layer, TokenRoutedBlock) else paths

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # as in `TokenRoutedModel`

    def set_experts_implementation(self, experts_implementation: str | dict) -> None:
        """As in the base class; also updates copies of an expert, which have a copy of the config."""
        super().set_experts_implementation(experts_implementation)
        for module in self.modules():
            if isinstance(module, FeedForwardExperts):
                module.config = self.backbone.config  # type: ignore[assignment]

    def _run_groups(
        self, task: list[str] | None, task_ids: torch.Tensor | None, sequences: dict[str, torch.Tensor], kwargs: dict
    ) -> BaseModelOutputWithPooling:
        rows = next(iter(sequences.values())).shape[0]
        if kwargs.get("balance_share") is None and rows:  # the groups of a batch make up one step
            kwargs = {**kwargs, "balance_share": 1 / rows}
        return super()._run_groups(task, task_ids, sequences, kwargs)


HierarchicalMoTEConfig.register_for_auto_class()
HierarchicalMoTEModel.register_for_auto_class("AutoModel")
