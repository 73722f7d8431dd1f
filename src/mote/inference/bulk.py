"""Encode many texts in batches of about as many tokens each, which computes less padding than as many rows each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

if TYPE_CHECKING:
    import numpy as np
    from sentence_transformers import SentenceTransformer


def encode(
    model: "SentenceTransformer",
    texts: Sequence[str],
    *,
    batch_tokens: int = 2048,
    show_progress_bar: bool = False,
    convert_to_tensor: bool = False,
    **arguments: Any,
) -> "np.ndarray | torch.Tensor":
    """Embed texts as `model.encode` does, in batches that hold about as many tokens each.

    Args:
        model: Any Sentence-Transformers model for texts, a MoTE or a dense one.
        texts: To embed.
        batch_tokens: Of a batch, its padding included. A longer text is a batch by itself. On a GPU, more is faster, as
            far as its memory goes.
        show_progress_bar: Show one, of texts.
        convert_to_tensor: Return a tensor on the model's device instead of an array.
        **arguments: What `model.encode` takes: `prompt_name`, `prompt`, `task`, `normalize_embeddings`, `truncate_dim`,
            `device`. Embeddings in int8 are made of the result, by Sentence-Transformers' `quantize_embeddings`.

    Returns:
        One embedding per text, in their order: [N, H].

    Raises:
        ValueError: If `texts` is one text, the number of tokens is not positive, or an argument has no meaning here.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts: one text is encoded by model.encode(text)")  # noqa: TRY004
    if not isinstance(batch_tokens, int) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise ValueError(f"batch_tokens must be a whole number, 1 or more, not {batch_tokens!r}")
    elsewhere = {"batch_size", "precision", "output_value", "pool", "chunk_size", "convert_to_numpy"} & arguments.keys()
    if elsewhere:
        raise ValueError(
            f"{', '.join(sorted(elsewhere))}: not with batches of tokens, where `batch_tokens` decides on the rows and "
            "each batch is encoded by itself: use model.encode"
        )
    if not len(texts):
        return model.encode([], convert_to_tensor=convert_to_tensor, **arguments)
    batches = cut(_lengths(model, texts, arguments), batch_tokens)
    embeddings: list[torch.Tensor] = []
    with tqdm(total=len(texts), disable=not show_progress_bar, unit="text") as bar:
        for batch in batches:
            some = [texts[index] for index in batch]
            embedded = model.encode(
                some, batch_size=len(batch), convert_to_tensor=True, show_progress_bar=False, **arguments
            )
            embeddings.append(embedded if convert_to_tensor else embedded.float().cpu())
            bar.update(len(batch))
    order = torch.tensor([index for batch in batches for index in batch]).argsort()
    result = torch.cat(embeddings)[order.to(embeddings[0].device)]
    return result if convert_to_tensor else result.numpy()


def cut(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut texts, from the longest to the shortest, into batches that hold at most so many tokens with their padding.

    Args:
        lengths: Of each text, in tokens.
        batch_tokens: Of a batch. A longer text is a batch by itself.

    Returns:
        Indices of the texts of each batch. The longest come first: where memory is short, it shows at once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def _lengths(model: "SentenceTransformer", texts: Sequence[str], arguments: dict[str, Any]) -> list[int]:
    """Count the tokens of each text with its prompt, as far as the model reads them."""
    prompt = arguments.get("prompt")
    if prompt is None:
        prompt = model.prompts.get(arguments.get("prompt_name") or model.default_prompt_name or "")
    prompt = prompt or ""
    longest = model.max_seq_length
    limits = {"truncation": True, "max_length": longest} if longest else {}
    return [len(tokens) for tokens in model.tokenizer([prompt + text for text in texts], **limits)["input_ids"]]
