"""A FAISS index of a corpus's embeddings."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mote.corpora.record import Record
from mote.corpora.shards import read_embeddings
from mote.files import replaced

INDEX = "index.faiss"
SAMPLE = 2**18
"""Maximum number of embeddings that train an index: as many as FAISS uses for 1,024 clusters."""


def new_index(factory: str, dimension: int) -> Any:
    """Make an empty index of a FAISS factory string, for inner products.

    Raises:
        RuntimeError: If there is no such index.
    """
    import faiss

    return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)


def build_index(record: Record, factory: str) -> None:
    """Write an index of a folder of embeddings, unless it exists.

    Row i is the i-th embedding, normalised, so that inner products are cosines.

    Raises:
        RuntimeError: If FAISS refuses the embeddings, for instance because they are too few for its clusters.
    """
    import faiss

    if record.is_finished(INDEX) and record.finished[INDEX]["factory"] == factory:
        return
    index = new_index(factory, record.content["dimension"])
    if not index.is_trained:
        step = -(-record.content["texts"]["rows"] // SAMPLE)
        index.train(np.concatenate([part[::step] for part in _normalised(record)]))
    for part in _normalised(record):
        index.add(part)
    with replaced(record.folder / INDEX) as file:
        faiss.write_index(index, str(file))
    record.add(INDEX, factory=factory)


def _normalised(record: Record) -> Iterator[np.ndarray]:
    for part in read_embeddings(record.folder)[1]:
        yield part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
