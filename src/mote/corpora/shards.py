"""Embeddings in files: how a shard is written and read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mote.files import read_json, replaced

RECORD = "manifest.json"


def write_shard(path: Path, ids: Sequence[str], embeddings: Any, dtype: str = "float32") -> None:
    """Write embeddings [N, D] with their ids as parquet, or a SciPy matrix as it is.

    Raises:
        ValueError: If an embedding is not finite.
    """
    if not isinstance(embeddings, np.ndarray):
        from scipy.sparse import save_npz

        with replaced(path) as unfinished:
            save_npz(unfinished, embeddings)
        return
    import pyarrow
    from pyarrow import parquet

    with np.errstate(over="ignore"):
        stored = embeddings.astype(dtype)
    broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
    if len(broken):
        first, count = ids[broken[0]], f"{len(broken)} of {len(ids)}"
        raise ValueError(f"the embedding of {first!r} is not finite in {dtype} (in its shard {count} are not)")
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(stored.reshape(-1)), stored.shape[1])
    shard = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})
    with replaced(path) as unfinished:
        parquet.write_table(shard, unfinished, use_dictionary=False)


def read_embeddings(folder: str | Path) -> tuple[list[str], Iterator[np.ndarray]]:
    """Read embeddings that `embed_corpus` wrote.

    Args:
        folder: The folder.

    Returns:
        The ids, in the order of the corpus, and an iterator over the embeddings of one shard after another, each
        (rows, dimension) in float32.

    Raises:
        FileNotFoundError: If there are no embeddings.
        ValueError: If they are incomplete.
    """
    folder = Path(folder)
    manifest = read_json(folder / RECORD)
    if not manifest["complete"]:
        raise ValueError(f"The embeddings in {folder} are incomplete: run the same command again to resume")
    files = [folder / name for name in manifest["files"]]
    ids = [name for file in files for name in _column(file, "id").to_pylist()]
    return ids, map(read_shard, files)


def read_shard(path: Path) -> Any:
    """Read the embeddings of a shard: an array in float32, or a SciPy matrix."""
    if path.suffix == ".npz":
        from scipy.sparse import load_npz

        return load_npz(path)
    column = _column(path, "embedding")
    return column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32)


def _column(path: Path, name: str) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path, columns=[name], partitioning=None)[name].combine_chunks()
