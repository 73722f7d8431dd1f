"""The Sentence-Transformers module of a MoTE that leaves instructions out of its pooling."""

from typing import TYPE_CHECKING

if TYPE_CHECKING or not __package__:  # installed, as a top-level module
    try:  # transformers takes an import outside of a `try` for a package that must be installed
        from instruction_mote import InstructedTransformer
        from sentence_transformer_mote import MoTETransformer
    finally:
        pass
else:  # remote code
    from .instruction_mote import InstructedTransformer
    from .sentence_transformer_mote import MoTETransformer


class InstructedMoTETransformer(InstructedTransformer, MoTETransformer):
    """A `MoTETransformer` that says which tokens are pooled, as `InstructedTransformer` does."""

    prompt_for = MoTETransformer.prompt_for
