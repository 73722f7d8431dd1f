"""Tensors of checkpoints: counted."""

from typing import Any

from transformers import PreTrainedModel


def parameter_counts(model: PreTrainedModel) -> dict[str, Any]:
    """Count the parameters of a MoTE.

    Returns:
        `total`; `active`, those that a sequence passes through (with a token router: a token); `shared`, by all
        experts; `experts`, name → those of that expert alone.
    """
    return model.parameter_counts()  # type: ignore[operator]
