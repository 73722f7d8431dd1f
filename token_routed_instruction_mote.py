"""The Sentence-Transformers module of a token-routed model that leaves instructions out of its pooling."""

from typing import TYPE_CHECKING

if TYPE_CHECKING or not __package__:  # installed, as a top-level module
    try:  # transformers takes an import outside of a `try` for a package that must be installed
        from instruction_mote import InstructedTransformer
        from token_routed_transformer_mote import TokenRoutedTransformer
    finally:
        pass
else:  # remote code
    from .instruction_mote import InstructedTransformer
    from .token_routed_transformer_mote import TokenRoutedTransformer


class InstructedTokenRoutedTransformer(InstructedTransformer, TokenRoutedTransformer):
    """A `TokenRoutedTransformer` that says which tokens are pooled, as `InstructedTransformer` does."""

    prompt_for = TokenRoutedTransformer.prompt_for
