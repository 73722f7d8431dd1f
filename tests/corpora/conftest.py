"""A tiny Sentence-Transformers model."""

from pathlib import Path

import pytest
from helpers.checkpoints import dense_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"prompts": {"query": "query: ", "document": ""}}
    return dense_checkpoint(tmp_path_factory.mktemp("dense") / "tiny", sentence_transformers=settings)
