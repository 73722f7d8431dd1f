"""The Sentence-Transformers module of a token-routed model, which needs no task.

This file is only copied into saved token-routed models, whose `modules.json` names `TokenRoutedTransformer`.
"""

from typing import Any

from sentence_transformers.base.modules import Transformer

from .configuration_mote import ROLE_HINTS
from .sentence_transformer_mote import MoTETransformer, require_one_prompt


class TokenRoutedTransformer(MoTETransformer):
    """A `Transformer` module whose model routes tokens.

    An instruction is a prompt as in any dense model, and a text needs no task. The optional feature `balance_share`, a
    number, is passed to the model (see `TokenRoutedModel.forward`).
    """

    def preprocess(
        self,
        inputs: Any,
        prompt: str | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize.

        Args:
            inputs: Texts.
            prompt: Text to put in front of each text.
            processing_kwargs: See the base class.
            task: Checked, then ignored: a task of the config, or the hints "query" and "document".
            **kwargs: See the base class.

        Returns:
            The features of the base class.

        Raises:
            ValueError: If the task is unknown, or the prompt is a list.
        """
        if not inputs:
            return {}
        require_one_prompt(prompt)
        if task is not None and task not in ROLE_HINTS:
            self.config.expert_of(task)
            prompt = self.prompt_for(task, prompt)
        self.config.warn_of_instructions(inputs, prompt)
        return Transformer.preprocess(self, inputs, prompt, processing_kwargs, task=task, **kwargs)

    def forward(self, features: dict[str, Any], task: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the model.

        Args:
            features: The output of `preprocess`, possibly with `balance_share`.
            task: Ignored.
            **kwargs: See the base class.

        Returns:
            The features, with `token_embeddings` [B, L, H].
        """
        inputs = {name: value for name, value in features.items() if name != "balance_share"}
        share = features.get("balance_share")
        out = Transformer.forward(self, inputs, task=None, balance_share=share, **kwargs)
        features.update(out)  # as the base class leaves them; losses over layers read them there
        return out
