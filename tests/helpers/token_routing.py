"""Token-routed models and their gradients, for several test files."""

import copy
from typing import Any

import torch
from helpers import families
from helpers.families import dense_model, difference
from torch import nn
from transformers import PreTrainedModel

from mote.remote.hierarchical_mote import HierarchicalMoTEConfig, HierarchicalMoTEModel
from mote.remote.token_routing_mote import TokenRoutedConfig, TokenRoutedModel

EXPERTS = ["a", "b", "c", "d"]


def upcycled(dense: PreTrainedModel, **settings: Any) -> TokenRoutedModel:
    config = TokenRoutedConfig(**{"backbone_config": dense.config, "experts": EXPERTS, **settings})
    return TokenRoutedModel(config, dense).eval()


def fresh(name: str, **settings: Any) -> TokenRoutedModel:
    """A token-routed model of a family, whose experts are copies."""
    return upcycled(dense_model(name), **settings)


def trained(name: str, **settings: Any) -> TokenRoutedModel:
    """Experts that differ, and a router that prefers some."""
    return make_different(fresh(name, **settings))


def fresh_hierarchical(source: TokenRoutedModel, **settings: Any) -> HierarchicalMoTEModel:
    """Two task experts, each a copy of a token-routed model, which stays as it is."""
    config = HierarchicalMoTEConfig(**{"backbone_config": source.config, "experts": ["x", "y"], **settings})
    return HierarchicalMoTEModel(config, copy.deepcopy(source)).eval()


def trained_hierarchical(name: str = "bert", router_aux_loss_coef: float = 0.005, **settings: Any) -> Any:
    """Two task experts that differ, over routers that prefer some; block 0 stays dense within."""
    source = trained(name, mote_layers=[1], router_aux_loss_coef=router_aux_loss_coef)
    return families.make_different(fresh_hierarchical(source, **settings))


def make_different(model: PreTrainedModel) -> Any:
    """Give experts and routers noise of their own."""
    generator = torch.Generator().manual_seed(1)
    blocks = [module for module in model.modules() if type(module).__name__ == "TokenRoutedBlock"]
    assert blocks
    with torch.no_grad():
        for block in blocks:
            for parameter in block.feed_forward.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def without_dropout(model: nn.Module) -> Any:
    """In training mode, which the load-balancing loss needs, but deterministic."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


def loss_weights(model: nn.Module) -> list[float]:
    """The factors of the load-balancing loss in the blocks, which passes append here."""
    weights: list[float] = []
    for module in model.modules():
        if type(module).__name__ == "TokenRoutedFeedForward":  # by name: remote code is another class
            module.register_forward_pre_hook(
                lambda _, args, kwargs: weights.append(kwargs["routing"].loss_weight), with_kwargs=True
            )
    return weights


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}


def relative(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As fractions of the largest."""
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    return {key: gradient / largest for key, gradient in gradients.items()}


def same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for key, gradient in one.items():
        assert difference(gradient, other[key]) <= tolerance, key


def backward(model: TokenRoutedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    """The gradients of a loss that knows nothing of routing."""
    model.zero_grad()
    model(**inputs, **kwargs).pooler_output.square().sum().backward()
    return gradients(model)
