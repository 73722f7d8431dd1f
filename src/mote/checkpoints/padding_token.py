"""A padding token for tokenizers that come without one, as those of many decoders do (Llama, Mistral)."""

import logging
from typing import Any

logger = logging.getLogger(__name__)


def with_padding_token(tokenizer: Any) -> Any:
    """Let a tokenizer without a padding token pad with its end-of-sequence token, in place.

    Padding is masked out, so which token it is does not matter to embeddings. A tokenizer with neither token is left as
    it is.

    Returns:
        The tokenizer.
    """
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("The tokenizer has no padding token, and pads with %s", tokenizer.eos_token)
    return tokenizer
