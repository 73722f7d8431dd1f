"""What the tests of all integrations share."""

from pathlib import Path

import pytest
from ecosystem.promises import Reference


@pytest.fixture(scope="session")
def reference(trained_folder: Path) -> Reference:
    """A MoTE whose experts differ, in Transformers."""
    return Reference(trained_folder)
