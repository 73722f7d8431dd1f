"""Bulk encoding in batches of about as many tokens each."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import trusted
from helpers.paths import ROOT
from sentence_transformers import SentenceTransformer

import mote
from mote.inference.bulk import cut

TEXTS = [
    "whales breathe air",
    "bread",
    "a much longer text " * 12,
    "rain " * 5,
    "tide",
    "the moon pulls at the sea " * 3,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    return trusted(mote.upcycle(str(ROOT / "examples" / "small-encoder"), tmp_path_factory.mktemp("bulk") / "mote"))


@pytest.mark.parametrize("batch_tokens", [1, 40, 128, 10_000])
@pytest.mark.parametrize(
    "arguments",
    [{"prompt_name": "search_query"}, {"task": "clustering"}, {"prompt": "clustering: ", "truncate_dim": 9}],
)
def test_the_embeddings_are_those_of_encode(
    model: SentenceTransformer, arguments: dict[str, Any], batch_tokens: int
) -> None:
    expected = model.encode(TEXTS, **arguments)
    found = mote.encode(model, TEXTS, batch_tokens=batch_tokens, **arguments)
    assert isinstance(found, np.ndarray)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=1e-5)
    tensor = mote.encode(model, TEXTS, batch_tokens=batch_tokens, convert_to_tensor=True, **arguments)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.cpu().numpy(), found)


def test_a_batch_holds_no_more_tokens_than_it_may(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    forward = type(model[0]).forward

    def counted(self: Any, features: dict[str, Any], **kwargs: Any) -> Any:
        shapes.append(features["input_ids"].shape)
        return forward(self, features, **kwargs)

    monkeypatch.setattr(type(model[0]), "forward", counted)
    mote.encode(model, TEXTS * 10, batch_tokens=90, prompt_name="clustering")
    assert sum(rows for rows, _ in shapes) == 10 * len(TEXTS)
    assert all(rows * length <= 90 or rows == 1 for rows, length in shapes)
    assert len({rows for rows, _ in shapes}) > 2  # more of the short ones


def test_the_cut() -> None:
    assert cut([3, 9, 1, 4, 2], 8) == [[1], [3, 0], [4, 2]]
    assert cut([], 8) == []
    assert sorted(index for batch in cut(list(range(1, 50)), 64) for index in batch) == list(range(49))


def test_no_texts(model: SentenceTransformer) -> None:
    assert len(mote.encode(model, [], task="clustering")) == 0


@pytest.mark.parametrize(
    ("texts", "arguments", "said"),
    [
        ("one text", {}, "must be a list of texts"),
        (TEXTS, {"batch_tokens": 0}, "batch_tokens must be a whole number, 1 or more, not 0"),
        (TEXTS, {"batch_size": 8}, "batch_size: not with batches of tokens"),
        (TEXTS, {"precision": "int8"}, "precision: not with batches of tokens"),
        (TEXTS, {"task": "clusterin"}, "Did you mean 'clustering'"),
    ],
)
def test_what_cannot_be_is_named(model: SentenceTransformer, texts: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mote.encode(model, texts, **arguments)
