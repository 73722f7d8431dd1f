"""Steps of Sentence-Transformers' own trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from helpers.checkpoints import trusted_sparse
from helpers.families import make_different
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses


def train(
    model: SentenceTransformer, loss: Any, folder: Path, texts: list[str], **arguments: Any
) -> dict[str, torch.Tensor]:
    """Take real steps of the unmodified trainer on pairs of texts; return what was learned, by parameter."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "seed": 0}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, **arguments}
    pairs = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
    args = SentenceTransformerTrainingArguments(str(folder), **settings)
    SentenceTransformerTrainer(model=model, args=args, train_dataset=pairs, loss=loss).train()
    return {key: value - before[key] for key, value in model.state_dict().items()}


def trained_experts(learned: dict[str, torch.Tensor]) -> set[str]:
    moved = [key for key, move in learned.items() if ".experts." in key and move.any()]
    return {key.split(".experts.")[1].split(".")[0] for key in moved}


def plain_and_cached(
    cached: str,
    make: Callable[[], SentenceTransformer],
    features: Callable[[SentenceTransformer], list[Any]],
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Compute the plain loss and the cached one, in mini-batches of two: the value as `loss`, and all gradients.

    `features` makes the columns of a batch for the model.
    """
    results = []
    for name in (cached.removeprefix("Cached"), cached):
        model = make()
        settings = {**arguments, "mini_batch_size": 2} if name == cached else arguments
        loss: Any = getattr(losses, name)(model, **settings)
        value = loss(features(model), labels=None)
        value.backward()
        results.append({"loss": value.detach(), **{key: p.grad for key, p in model.named_parameters()}})
    return results


def assert_cached_equals_plain(*arguments: Any, **settings: Any) -> None:
    """Assert that a loss in mini-batches has the value and the gradients of the plain one."""
    plain, cached = plain_and_cached(*arguments, **settings)
    for key, gradient in plain.items():
        assert (gradient is None) == (cached[key] is None), key
        assert gradient is None or (gradient - cached[key]).abs().max() <= 1e-5, key


def with_different_experts(folder: Path, out: Path) -> Path:
    """Make the experts of a sparse or hybrid encoder differ, and save it."""
    model = trusted_sparse(folder)
    make_different(model[0].model)
    model.save(str(out))
    return out
