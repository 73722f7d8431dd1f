"""The Sentence-Transformers module of a token-routed model that leaves instructions out of its pooling."""

from .instruction_mote import InstructedTransformer
from .token_routed_transformer_mote import TokenRoutedTransformer


class InstructedTokenRoutedTransformer(InstructedTransformer, TokenRoutedTransformer):
    """A `TokenRoutedTransformer` that says which tokens are pooled, as `InstructedTransformer` does."""

    prompt_for = TokenRoutedTransformer.prompt_for
