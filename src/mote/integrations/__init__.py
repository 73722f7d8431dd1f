"""Other libraries' embedding classes over a MoTE: one module per library, imported only when it is named."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Raise an error that names the extra with the missing library."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f'{error.name} is not installed, which this module needs: pip install "mote-embeddings[{name}]"'
        raise ModuleNotFoundError(message, name=error.name) from error
