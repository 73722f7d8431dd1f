"""The Sentence-Transformers module of a MoTE that leaves instructions out of its pooling."""

from collections.abc import Sequence
from typing import Any

from .instruction_mote import InstructedTransformer
from .sentence_transformer_mote import MoTETransformer


class InstructedMoTETransformer(InstructedTransformer, MoTETransformer):
    """A `MoTETransformer` that marks the tokens to pool, as `InstructedTransformer` does."""

    prompt_for = MoTETransformer.prompt_for

    def preprocess(
        self,
        inputs: Any,
        prompt: str | Sequence[str] | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize, mark the tokens to pool, and decide on the task.

        Args:
            inputs: Texts.
            prompt: The instruction to put in front of each text; or a list with one for each text, whose task it
                decides by the same rules.
            processing_kwargs: See the base class.
            task: A task of the config, or the hints "query" and "document".
            **kwargs: See the base class.

        Returns:
            The features of the base classes: with `pooling_mask` [B, L] and `route`.

        Raises:
            ValueError: If the task is unknown, no rule decides on one, a row has no token to pool, or there are not as
                many prompts as texts.
        """
        if not inputs or prompt is None or isinstance(prompt, str):
            return super().preprocess(inputs, prompt, processing_kwargs, task=task, **kwargs)
        tasks: list[Any] = [self.route_of([text], task, start) for text, start in zip(inputs, prompt, strict=True)]
        features = super().preprocess(inputs, prompt, processing_kwargs, task=tasks[0] or task, **kwargs)
        if len(set(tasks)) > 1:
            features["route"] = self.task_ids_of(tasks)
        return features
