"""What the tests of all integrations share."""

from pathlib import Path

import pytest
from ecosystem.promises import Reference
from sentence_transformers import SentenceTransformer


@pytest.fixture(scope="session")
def reference(trained_folder: Path) -> Reference:
    """A MoTE whose experts differ, in Transformers."""
    return Reference(trained_folder)


@pytest.fixture(scope="session")
def model(trained_folder: Path) -> SentenceTransformer:
    """The same MoTE, loaded."""
    return SentenceTransformer(str(trained_folder), trust_remote_code=True, device="cpu")
