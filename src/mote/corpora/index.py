"""A FAISS index of a corpus's embeddings."""

from typing import Any

import numpy as np

from mote.corpora.folder import is_intact, sha256, write_whole
from mote.corpora.store import INDEX, Store, read_embeddings

SAMPLE = 2**18
"""Maximum number of embeddings that train an index: as many as FAISS uses for 1,024 clusters."""


def check_index(factory: str, dimension: int | None) -> None:
    """Make sure that FAISS is installed, and can build an index.

    Args:
        factory: FAISS's factory string.
        dimension: Dimension of the embeddings, if it is known.

    Raises:
        OSError: If FAISS is not installed.
        ValueError: If there is no such index for embeddings of this dimension.
    """
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError as error:
        raise OSError('An index needs faiss, which is not installed: pip install "mote-embeddings[corpora]"') from error
    if dimension is not None:
        _new(factory, dimension)


def write_index(store: Store, factory: str) -> None:
    """Write an index of a folder of embeddings, unless it exists.

    Row i is the i-th embedding, normalised, so that inner products are cosines.

    Raises:
        OSError: If it cannot be written.
        ValueError: If FAISS refuses the embeddings, for instance because they are too few for its clusters.
    """
    import faiss

    path, entry = store.folder / INDEX, store.manifest.get("index")
    if entry and entry["factory"] == factory and is_intact(path, entry):
        return
    index = _new(factory, store.manifest["dimension"])
    try:
        if not index.is_trained:
            step = -(-store.manifest["rows"] // SAMPLE)
            index.train(np.concatenate([part[::step] for part in _normalised(store)]))
        for part in _normalised(store):
            index.add(part)
    except RuntimeError as error:
        raise _refusal(factory, error) from error
    write_whole(path, lambda unfinished: faiss.write_index(index, str(unfinished)))
    store.record(index={"factory": factory, "sha256": sha256(path)})


def _normalised(store: Store) -> Any:
    for part in read_embeddings(store.folder)[1]:
        yield part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)


def _new(factory: str, dimension: int) -> Any:
    import faiss

    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise _refusal(factory, error) from error


def _refusal(factory: str, error: RuntimeError) -> ValueError:
    reason = str(error).strip().rpartition("\n")[2]
    return ValueError(f"FAISS cannot build the index {factory!r}: {reason}")
