"""Other libraries' embedding classes over a MoTE: one module per library, imported only when it is named."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Name the extra of the package that brings a missing library; without a name, leave the error as it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        if name:
            error.msg += f': pip install "mote-embeddings[{name}]", or in a clone pip install -e ".[{name}]"'
        raise
