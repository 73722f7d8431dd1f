"""Embeddings in parquet files: how a shard is written, quantised and read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from mote.files import read_json, replaced

RECORD = "manifest.json"


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05}.parquet"


def write_shard(
    path: Path, ids: Sequence[str], embeddings: np.ndarray, dtype: str, ranges: Sequence[Sequence[float]] | None
) -> None:
    """Write embeddings (rows, dimension) in float32 as a shard of another dtype, see `quantized`.

    Raises:
        ValueError: If an embedding is not finite.
    """
    stored = quantized(embeddings, dtype, ranges)
    broken = np.flatnonzero(~(np.isfinite(embeddings) & np.isfinite(stored)).all(axis=1))
    if len(broken):
        first, count = ids[broken[0]], f"{len(broken)} of {len(ids)}"
        raise ValueError(f"the embedding of {first!r} is not finite in {dtype} (in its shard {count} are not)")
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(stored.reshape(-1)), stored.shape[1])
    shard = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})
    with replaced(path) as part:
        parquet.write_table(shard, part, use_dictionary=False)


def read_embeddings(folder: str | Path) -> tuple[list[str], Iterator[np.ndarray]]:
    """Read embeddings that `embed_corpus` wrote.

    Args:
        folder: The folder.

    Returns:
        The ids, in the order of the corpus, and an iterator over the embeddings of one shard after another, each
        (rows, dimension) in float32; int8 embeddings are scaled back.

    Raises:
        FileNotFoundError: If there are no embeddings.
        ValueError: If they are incomplete.
    """
    folder = Path(folder)
    manifest = read_json(folder / RECORD)
    if not manifest["complete"]:
        raise ValueError(f"The embeddings in {folder} are incomplete: run the same command again to resume")
    files = [folder / name for name in manifest["files"] if name.endswith(".parquet")]
    ids = [text for file in files for text in _column(file, "id").to_pylist()]
    return ids, (_floats(_column(file, "embedding"), manifest) for file in files)


def _column(path: Path, name: str) -> pyarrow.Array:
    return parquet.read_table(path, columns=[name], partitioning=None)[name].combine_chunks()


def _floats(column: pyarrow.FixedSizeListArray, manifest: dict[str, Any]) -> np.ndarray:
    values = column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32)
    return dequantized(values, manifest["ranges"]) if manifest["dtype"] == "int8" else values


def quantized(embeddings: np.ndarray, dtype: str, ranges: Sequence[Sequence[float]] | None = None) -> np.ndarray:
    """Convert embeddings to the dtype to store.

    `ranges` are for int8: the smallest and largest value of each dimension (2, dimension); values beyond are clipped.
    """
    from sentence_transformers.util import quantize_embeddings

    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is an error afterwards
        if dtype != "int8":
            return embeddings.astype(dtype)
        bounds = np.asarray(ranges, np.float32)
        # clipped first: some versions of the library wrap around
        return np.asarray(quantize_embeddings(np.clip(embeddings, *bounds), precision="int8", ranges=bounds))


def dequantized(values: np.ndarray, ranges: Sequence[Sequence[float]]) -> np.ndarray:
    """Scale int8 values back, to the centers of their intervals."""
    least, largest = np.asarray(ranges, np.float32)
    return least + (values + 128.5) * ((largest - least) / 255)
