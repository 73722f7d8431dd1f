"""Instructions that a model reads but does not pool: only the tokens of the text itself are pooled.

Sentence-Transformers' `include_prompt=False` tokenizes the instruction alone, and skips this number of tokens in all
rows of a batch. Here each row has its own instruction, and the boundary is the tokenizer's: the first pooled token is
the first that holds a character of the text. Instructions are left out as in NV-Embed (arXiv:2405.17428, section 4).

This file is only copied into saved models that leave instructions out; `modules.json` names its classes.
"""

from typing import Any, Literal

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.utils import logging

logger: Any = logging.get_logger(__name__)

EXCLUDED = ("excluded", "excluded_by_count")


class InstructedTransformer(Transformer):
    """A `Transformer` module that marks the tokens to pool: those of the text, without its instruction.

    The instruction of a text is the prompt, or, if there is none, the longest of the model's instructions that the text
    itself begins with. All tokens are attended to. Special tokens after a text are pooled with it; those before it are
    not, unless there is no instruction.

    Args:
        instruction_pooling: `excluded`: the first pooled token is the first that holds a character of the text.
            `excluded_by_count`: as many tokens are left out, from the start of the row, as the instruction alone has
            without special tokens, as in NV-Embed's own code.
    """

    config_keys = [*Transformer.config_keys, "instruction_pooling"]

    def __init__(
        self,
        *args: Any,
        instruction_pooling: Literal["excluded", "excluded_by_count"] = "excluded",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if instruction_pooling not in EXCLUDED:
            raise ValueError(f"instruction_pooling must be one of {', '.join(EXCLUDED)}, got {instruction_pooling!r}")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not tell which characters a token stands for, which is needed "
                "to leave instructions out of the pooling: use a fast tokenizer"
            )
        self.instruction_pooling = instruction_pooling

    def on_model_ready(self, model: Any) -> None:
        """Remember the model, whose prompts a text may begin with, without registering it as a module of this one."""
        super().on_model_ready(model)
        object.__setattr__(self, "owner", model)

    def preprocess(
        self,
        inputs: Any,
        prompt: str | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize: the features of the base class, and `pooling_mask` [B, L], 1 for tokens that are pooled.

        A row without a token to pool, for example because its instruction fills the maximum length, is a `ValueError`.
        """
        if not inputs:
            return {}
        features: Any = super().preprocess(inputs, prompt, processing_kwargs, task=task, **kwargs)
        encodings = features.encodings
        texts = [(prompt or "") + _text_of(each) for each in inputs]
        instructions = [prompt or self._instruction_in(text) for text in texts]
        rows = zip(encodings, instructions, strict=True)
        first = torch.tensor([self._first_pooled(*row) if row[1] else 0 for row in rows])  # [B]
        mask = features["attention_mask"]
        features["pooling_mask"] = mask = mask * (torch.arange(mask.shape[1]) >= first[:, None])
        for row in (mask.sum(dim=1) == 0).nonzero().flatten().tolist():
            instruction, limit = instructions[row], sum(encodings[row].attention_mask)
            cut = f": its instruction {instruction!r} fills the {limit} tokens that the row was truncated to"
            raise ValueError(
                f"The text {texts[row].removeprefix(instruction)[:60]!r} has no token to pool"
                + (cut if encodings[row].overflowing else "")
            )
        tokenizer: Any = self.tokenizer
        if tokenizer.truncation_side == "left" and any(one.overflowing for one in encodings):
            logger.warning_once("Long texts were truncated from the left, and lost their instruction")
        return features

    def _instruction_in(self, text: str) -> str:
        """Return the instruction that a text begins with, possibly empty."""
        if not getattr(self.config, "route_by_text", True):  # for untrusted texts
            return ""
        prompts = getattr(getattr(self, "owner", None), "prompts", {})
        known = {*prompts.values(), *getattr(self.config, "instructions", {}).values()} - {None}
        return max((start for start in known if text.startswith(start)), key=len, default="")

    def _first_pooled(self, encoding: Any, instruction: str) -> int:
        """Return the position of the first pooled token of a row; past its end if there is none."""
        if self.instruction_pooling == "excluded_by_count":
            tokenizer: Any = self.tokenizer  # its own call would change settings that other threads are using
            alone = tokenizer.backend_tokenizer.encode(instruction, add_special_tokens=False)
            return encoding.attention_mask.index(1) + sum(alone.attention_mask)
        last = -1
        for index, (sequence, (_, end)) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True)):
            if sequence is not None:
                if sequence or end > len(instruction):
                    return index
                last = index
        return len(encoding) if encoding.overflowing else last + 1  # an empty text: the special tokens after it

    def _get_prompt_length(self, *args: Any, **kwargs: Any) -> None:
        """Skip counting the tokens of the prompt: the mask is more precise."""

    def _should_flatten_inputs(self, *args: Any, **kwargs: Any) -> bool:
        """Keep rows apart: flash attention without padding would concatenate them."""
        return False

    def forward(self, features: dict[str, Any], task: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the model on all tokens, and add `token_embeddings` [B, L, H] to the features."""
        mask = {name: value for name, value in features.items() if name == "pooling_mask"}
        others = {name: value for name, value in features.items() if name not in mask}
        out = super().forward(others, task=task, **kwargs)
        features.update(out)  # as the base class leaves them; losses over layers read them there
        return {**out, **mask}


class TextPooling(Pooling):
    """A `Pooling` of the tokens of the text: those in `pooling_mask`, see `InstructedTransformer`.

    With `include_prompt=True`, all tokens are pooled after all. The attention mask is not modified, because losses that
    cache gradients use the features again.
    """

    def __init__(self, *args: Any, include_prompt: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, include_prompt=include_prompt, **kwargs)
        if "weightedmean" in self.pooling_mode:
            raise ValueError("Instructions cannot be left out of the pooling 'weightedmean', which counts positions")

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` [B, H] to the features, which must have a `pooling_mask`."""
        if self.include_prompt:
            return super().forward(features, **kwargs)
        masked = {**features, "attention_mask": features["pooling_mask"]}
        features["sentence_embedding"] = super().forward(masked, **kwargs)["sentence_embedding"]
        return features


def _text_of(value: Any) -> str:
    """Return the text of a string, of Sentence-Transformers' `{"text": …}`, or of the first of a pair of texts."""
    text: str = value["text"] if isinstance(value, dict) else value if isinstance(value, str) else value[0]
    return text
