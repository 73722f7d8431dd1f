"""Tokens that a tokenizer adds to texts: an end token, and padding.

An end token that the tokenizer itself appends to each text after truncation stays in long texts everywhere. Some models
were trained with an end token that their code appended to the texts, so that truncation cut it off. Others ask for it
by `add_eos_token` in `tokenizer_config.json`, which transformers 5 ignores if there is a `tokenizer.json`.
"""

import itertools
import json
import logging
from typing import Any

from tokenizers import Tokenizer

from mote.checkpoints.reading import Checkpoint

logger = logging.getLogger(__name__)

EOS = "eos"  # the tokenizer's own


def with_end_token(tokenizer: Any, token: str = EOS) -> Any:
    """Let a fast tokenizer append a token, or its own end-of-sequence token, to each text, in place."""
    name = tokenizer.eos_token if token == EOS else token
    number = None if name is None else tokenizer.get_vocab().get(name)
    if number is None:
        raise ValueError(f"The tokenizer has no token {token!r} to append to texts")
    last = tokenizer("a")["input_ids"][-1]
    if last == number:
        return tokenizer
    if last in tokenizer.all_special_ids:
        own = tokenizer.convert_ids_to_tokens(last)
        raise ValueError(f"The tokenizer already appends {own!r} to texts, and {name!r} cannot follow it")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["post_processor"] = _ending_in(settings["post_processor"], name, number)
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(settings)).post_processor
    for flag in ("add_bos_token", "add_eos_token"):  # saved, they would make transformers build another post-processor
        tokenizer.init_kwargs.pop(flag, None)
    return tokenizer


def ends_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer appends a special token to texts."""
    return tokenizer("a")["input_ids"][-1] in tokenizer.all_special_ids


def apply_end_token(tokenizer: Any, source: Checkpoint, token: str | None) -> Any:
    """Let a source's tokenizer append a token to each text; without one, its own if it says `add_eos_token`."""
    if token is not None:
        return with_end_token(tokenizer, token)
    own = source.read_json("tokenizer_config.json").get("add_eos_token") is True and tokenizer.eos_token_id is not None
    if not own or tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        return tokenizer
    try:
        ending = with_end_token(tokenizer)
    except ValueError as error:  # the user has not asked for it
        logger.warning("The tokenizer's add_eos_token has no effect: %s", error)
        return tokenizer
    logger.info("The tokenizer appends %s to each text, as its add_eos_token says", tokenizer.eos_token)
    return ending


def _ending_in(processor: dict[str, Any] | None, token: str, number: int) -> dict[str, Any]:
    """Return a post-processor of the library `tokenizers` that adds a token; it cannot run two templates in a row."""
    steps = processor["processors"] if processor and processor["type"] == "Sequence" else [processor or _template()]
    if not any(step["type"] == "TemplateProcessing" for step in steps):
        steps = [*steps, _template()]
    steps = [_with(step, token, number) if step["type"] == "TemplateProcessing" else step for step in steps]
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}


def _template() -> dict[str, Any]:
    """Return a template that adds nothing."""
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    return {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}


def _with(template: dict[str, Any], token: str, number: int) -> dict[str, Any]:
    """Add a token to a template, after each text."""

    def end(type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    pair = [[piece, end(0)] if piece.get("Sequence", {}).get("id") == "A" else [piece] for piece in template["pair"]]
    return {
        **template,
        "single": [*template["single"], end(0)],
        "pair": [*itertools.chain(*pair), end(1)],
        "special_tokens": {**template["special_tokens"], token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def with_padding_token(tokenizer: Any) -> Any:
    """Let a tokenizer without a padding token pad with its end-of-sequence token, in place.

    Padding is masked out, so which token it is does not matter to embeddings.
    """
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("The tokenizer has no padding token, and pads with %s", tokenizer.eos_token)
    return tokenizer
