"""A token-routed model with a head for masked language modelling: see `masked_lm_mote.py`.

This file is only copied into saved models of this kind.
"""

from transformers import AutoModelForMaskedLM, PreTrainedModel

from .masked_lm_mote import MoTEForMaskedLM
from .token_routing_mote import TokenRoutedConfig, TokenRoutedModel


class TokenRoutedForMaskedLM(MoTEForMaskedLM, TokenRoutedModel):
    """A [`MoTEForMaskedLM`] that is token-routed.

    In training, the load-balancing loss adds its gradient; `loss` is the head's alone.
    """

    config: TokenRoutedConfig
    config_class = TokenRoutedConfig

    def __init__(self, config: TokenRoutedConfig, dense: PreTrainedModel | None = None) -> None:
        config.backbone_config._experts_implementation = None  # see `TokenRoutedModel`
        super().__init__(config, dense)


TokenRoutedForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
AutoModelForMaskedLM.register(TokenRoutedConfig, TokenRoutedForMaskedLM, exist_ok=True)
