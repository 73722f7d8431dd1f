"""A token behind each text, which the tokenizer itself adds, after truncation: long texts keep it, in every reader.

Some models were trained with one that their code appended to the texts, so that truncation cut it off; others ask for
it by `add_eos_token` in `tokenizer_config.json`, which transformers 5 ignores where there is a `tokenizer.json`.
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
    """Let a fast tokenizer put a token behind each text, in place; one that does so already stays as it is.

    Args:
        tokenizer: A fast tokenizer of transformers.
        token: The token, or `eos`: the tokenizer's end-of-sequence token.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If it does not have the token, puts another one there, or is not a fast one.
    """
    name = tokenizer.eos_token if token == EOS else token
    number = None if name is None else tokenizer.get_vocab().get(name)
    if number is None:
        raise ValueError(f"The tokenizer has no token {token!r} to put behind texts")
    last = tokenizer("a")["input_ids"][-1]
    if last == number:
        return tokenizer
    if last in tokenizer.all_special_ids:
        own = tokenizer.convert_ids_to_tokens(last)
        raise ValueError(f"The tokenizer puts {own!r} behind texts already, and {name!r} cannot follow it")
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise ValueError(f"{kind} cannot be told to put {name!r} behind texts: use a fast tokenizer")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["post_processor"] = _ending_in(settings["post_processor"], name, number)
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(settings)).post_processor
    for flag in ("add_bos_token", "add_eos_token"):  # saved, they would have transformers make another one
        tokenizer.init_kwargs.pop(flag, None)
    return tokenizer


def ends_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a special token behind texts."""
    return tokenizer("a")["input_ids"][-1] in tokenizer.all_special_ids


def end_as_asked(tokenizer: Any, source: Checkpoint, token: str | None) -> Any:
    """Let a source's tokenizer put a token behind each text, if a setting asks for it, or the source itself does.

    Args:
        tokenizer: The tokenizer.
        source: Where it is from.
        token: As in `with_end_token`. None: its end-of-sequence token, if its settings say `add_eos_token`.
    """
    if token is not None:
        return with_end_token(tokenizer, token)
    own = source.read_json("tokenizer_config.json").get("add_eos_token") is True and tokenizer.eos_token_id is not None
    if not own or tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        return tokenizer
    try:
        ending = with_end_token(tokenizer)
    except ValueError as error:  # nobody has asked for it here
        logger.warning("The tokenizer's add_eos_token has no effect: %s", error)
        return tokenizer
    logger.info("The tokenizer puts %s behind each text, as its add_eos_token says", tokenizer.eos_token)
    return ending


def _ending_in(processor: dict[str, Any] | None, token: str, number: int) -> dict[str, Any]:
    """Return a post-processor of the library `tokenizers` that adds a token; two templates in a row it cannot run."""
    steps = processor["processors"] if processor and processor["type"] == "Sequence" else [processor or _template()]
    if not any(step["type"] == "TemplateProcessing" for step in steps):
        if any(step["type"] != "ByteLevel" for step in steps):  # those of BERT and RoBERTa have an end of their own
            kinds = ", ".join(step["type"] for step in steps)
            raise ValueError(f"The tokenizer puts tokens around texts in a way ({kinds}) that {token!r} cannot join")
        steps = [*steps, _template()]
    steps = [_with(step, token, number) if step["type"] == "TemplateProcessing" else step for step in steps]
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}


def _template() -> dict[str, Any]:
    """Return a template that adds nothing."""
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    return {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}


def _with(template: dict[str, Any], token: str, number: int) -> dict[str, Any]:
    """Add a token to a template, behind each text."""

    def end(type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    pair = [[piece, end(0)] if piece.get("Sequence", {}).get("id") == "A" else [piece] for piece in template["pair"]]
    return {
        **template,
        "single": [*template["single"], end(0)],
        "pair": [*itertools.chain(*pair), end(1)],
        "special_tokens": {**template["special_tokens"], token: {"id": token, "ids": [number], "tokens": [token]}},
    }
