"""The Sentence-Transformers module of a MoTE that leaves instructions out of its pooling."""

from typing import Any

from .instruction_mote import InstructedTransformer
from .sentence_transformer_mote import MoTETransformer


class InstructedMoTETransformer(InstructedTransformer, MoTETransformer):
    """A `MoTETransformer` that marks the tokens to pool, as `InstructedTransformer` does."""

    def preprocess(
        self,
        inputs: Any,
        prompt: str | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize, mark the tokens to pool, and decide on the task."""
        prompt = self.prompt_for(task, prompt) if inputs else prompt
        return super().preprocess(inputs, prompt, processing_kwargs, task=task, **kwargs)
