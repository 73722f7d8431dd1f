"""What a section of docs/ecosystem.md promises, as functions that look at what its code has left behind."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

MODEL, EXPORTED = "you/model-mote", "you/model-clustering"  # what the page's code names


class Promise(NamedTuple):
    """What is looked at after the code of a section has run."""

    check: Callable[[dict[str, Any], "Reference"], None]
    needs: tuple[str, ...]
    tier: str | None
    prepare: Callable[[pytest.MonkeyPatch], None] | None


PROMISES: dict[str, Promise] = {}


def promises(
    heading: str,
    *needs: str,
    tier: str | None = None,
    prepare: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> Callable:
    """Register a check of the code under `heading`; with several blocks there, "heading 2" is the second.

    Without a module that it `needs`, the test is skipped; `prepare` replaces what is only on the Hub.
    """

    def register(check: Callable[[dict[str, Any], Reference], None]) -> Callable:
        assert heading not in PROMISES, heading
        PROMISES[heading] = Promise(check, needs, tier, prepare)
        return check

    return register


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


class Reference:
    """A MoTE in Transformers, with its instructions written out: what any library has to agree with."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def embed(self, texts: Sequence[str], task: str, instruction: bool = True) -> np.ndarray:
        """Embed texts as a task, [N, H], of length 1."""
        start = self.model.config.instruction_of(task) if instruction else ""
        batch = self.tokenizer([start + text for text in texts], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            return normalized(self.model(**batch, task=task).pooler_output)

    def is_by(self, vectors: Any, texts: Sequence[str], task: str, instruction: bool = True) -> None:
        """Fail unless `vectors` are those of `texts` by the expert of `task`: cosine above 0.998 for each."""
        expected = self.embed(texts, task, instruction)
        vectors = normalized(vectors)
        assert vectors.shape == expected.shape
        cosines = (vectors * expected).sum(-1)
        assert cosines.min() > 0.998, cosines


def normalized(vectors: Any) -> np.ndarray:
    """Scale rows to length 1, in float32."""
    array = np.atleast_2d(np.asarray(vectors, dtype=np.float32))
    return array / np.linalg.norm(array, axis=-1, keepdims=True)
