"""The Sentence-Transformers module of a MoTE that leaves instructions out of its pooling."""

from collections.abc import Sequence
from typing import Any

from .instruction_mote import InstructedTransformer
from .sentence_transformer_mote import MoTETransformer


class InstructedMoTETransformer(InstructedTransformer, MoTETransformer):
    """A `MoTETransformer` that marks the tokens to pool, as `InstructedTransformer` does."""

    def preprocess(
        self,
        inputs: Any,
        prompt: str | Sequence[str] | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize, mark the tokens to pool, and decide on the task, in a list of prompts on that of each text."""
        if not inputs or prompt is None or isinstance(prompt, str):
            prompt = self.prompt_for(task, prompt)
            return super().preprocess(inputs, prompt, processing_kwargs, task=task, **kwargs)
        tasks: list[Any] = [self.route_of([text], task, start) for text, start in zip(inputs, prompt, strict=True)]
        features = super().preprocess(inputs, prompt, processing_kwargs, task=tasks[0] or task, **kwargs)
        if len(set(tasks)) > 1:
            features["route"] = self.task_ids_of(tasks)
        return features
