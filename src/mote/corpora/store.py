"""The folder of a corpus's embeddings: shards, and the manifest that says which are finished."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from mote.corpora.folder import (
    is_intact,
    only_writer,
    read_record,
    remove_leftovers,
    sha256,
    write_record,
    write_whole,
)

MANIFEST = "manifest.json"
INDEX = "index.faiss"
DTYPES = {"float32": pyarrow.float32(), "float16": pyarrow.float16(), "int8": pyarrow.int8()}

# A run resumes another one if these settings agree; names may differ, as files and models are identified by hashes.
_IDENTITY = ("format", "model", "input", "columns", "task", "prompt", "dtype", "dimensions", "shard_size")

logger = logging.getLogger(__name__)


# Writing -------------------------------------------------------------------------------------------------------------


class Store:
    """The folder, while this process is its writer.

    Attributes:
        folder: The folder.
        manifest: Content of the manifest.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    def record(self, **changes: Any) -> None:
        """Change the manifest."""
        self.manifest |= changes
        write_record(self.folder / MANIFEST, self.manifest)

    def record_shard(self, number: int, entry: dict[str, Any], **changes: Any) -> None:
        """Add a finished shard to the manifest."""
        shards = {**self.manifest["shards"], shard_name(number): entry}
        self.record(shards=dict(sorted(shards.items())), **changes)

    def unfinished(self) -> list[int]:
        """Find the shards that are missing from the manifest or damaged.

        Raises:
            ValueError: If there are shards of another corpus.
        """
        names = _shard_names(self.manifest)
        foreign = sorted({path.name for path in self.folder.glob("shard-*.parquet")} - set(names))
        if foreign:
            raise ValueError(f"{self.folder} holds {foreign[0]}, which does not belong to this corpus: remove it")
        shards = self.manifest["shards"]
        damaged = [name for name in shards if not is_intact(self.folder / name, shards[name])]
        for name in damaged:
            logger.warning("%s is missing or damaged, and will be written again", self.folder / name)
        return [number for number, name in enumerate(names) if name not in shards or name in damaged]


@contextmanager
def open_store(folder: Path, manifest: dict[str, Any], overwrite: bool = False) -> Iterator[Store]:
    """Create or resume a folder of embeddings, as its only writer.

    Args:
        folder: The folder.
        manifest: Content of a new manifest.
        overwrite: Remove any other embeddings in the folder.

    Raises:
        OSError: If another process is writing there, or the folder cannot be made.
        ValueError: If it holds something else, or, without `overwrite`, other embeddings.
    """
    with only_writer(folder):
        found = read_manifest(folder)
        remove_leftovers(folder)
        if found is not None and (overwrite or not found["shards"]):  # written, but not recorded: written again
            for path in (*folder.glob("shard-*.parquet"), folder / INDEX):
                path.unlink(missing_ok=True)
        elif found is not None:
            _require_same(folder, found, manifest)
            manifest = found
        store = Store(folder, manifest)
        store.record()
        try:
            yield store
        finally:
            if not store.manifest["shards"] and not any(folder.glob("shard-*.parquet")):
                (folder / MANIFEST).unlink(missing_ok=True)


def _require_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in _IDENTITY if without_names(found.get(key)) != without_names(wanted[key])]
    if different:
        details = ", ".join(
            f"{key} ({found.get(key)!r}, now {wanted[key]!r})" if key not in ("model", "input", "columns") else key
            for key in different
        )
        raise ValueError(
            f"{folder} holds other embeddings, which differ in: {details}. Choose another folder, or replace them with "
            "--overwrite"
        )


def key_of(manifest: dict[str, Any]) -> str:
    """Name a folder after everything that determines its embeddings."""
    identity = {key: without_names(manifest[key]) for key in _IDENTITY}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def without_names(value: Any) -> Any:
    """Leave out the names of models and files, however nested: their content identifies them."""
    if isinstance(value, list):
        return [without_names(item) for item in value]
    if isinstance(value, dict):
        return {key: without_names(item) for key, item in value.items() if key != "name"}
    return value


def write_shard(folder: Path, number: int, ids: Sequence[str], embeddings: np.ndarray) -> dict[str, Any]:
    """Write a shard.

    Args:
        folder: The folder.
        number: Number of the shard.
        ids: Ids of its rows.
        embeddings: Embeddings (rows, dimension), in the dtype to store.

    Returns:
        The shard's entry in the manifest.

    Raises:
        OSError: If it cannot be written.
    """
    values = pyarrow.array(embeddings.reshape(-1), DTYPES[embeddings.dtype.name])
    lists = pyarrow.FixedSizeListArray.from_arrays(values, embeddings.shape[1])
    shard = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})
    path = folder / shard_name(number)
    write_whole(path, lambda unfinished: parquet.write_table(shard, unfinished, use_dictionary=False))
    return {"rows": len(ids), "sha256": sha256(path)}


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05}.parquet"


def _shard_names(manifest: dict[str, Any]) -> list[str]:
    return [shard_name(number) for number in range(-(-manifest["rows"] // manifest["shard_size"]))]


# Reading -------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder.

    Returns:
        Content of the manifest; None if the folder does not exist, or is empty.

    Raises:
        ValueError: If the folder holds something else, or the manifest is damaged or of a later version.
    """
    return read_record(folder, MANIFEST, "shards", "embeddings")


def read_embeddings(folder: str | Path) -> tuple[list[str], Iterator[np.ndarray]]:
    """Read embeddings that `embed_corpus` wrote.

    Args:
        folder: The folder.

    Returns:
        The ids, in the order of the corpus, and an iterator over the embeddings of one shard after another, each
        (rows, dimension) in float32; int8 embeddings are scaled back.

    Raises:
        FileNotFoundError: If there are no embeddings.
        ValueError: If they are incomplete or damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} holds no embeddings: `mote embed` writes some")
    if not manifest["complete"]:
        raise ValueError(f"The embeddings in {folder} are incomplete: run the same command again to resume")
    names = _shard_names(manifest)
    ids = [text for name in names for text in _column(folder / name, "id").to_pylist()]
    if len(ids) != manifest["rows"]:
        raise ValueError(f"{folder} holds {len(ids)} embeddings, expected {manifest['rows']}: its shards are damaged")
    return ids, (_floats(_column(folder / name, "embedding"), manifest) for name in names)


def _column(path: Path, name: str) -> pyarrow.Array:
    try:
        return parquet.read_table(path, columns=[name], partitioning=None)[name].combine_chunks()
    except (pyarrow.ArrowInvalid, KeyError, OSError) as error:
        raise ValueError(f"{path} is missing or damaged: run the command that wrote it again") from error


def _floats(column: pyarrow.FixedSizeListArray, manifest: dict[str, Any]) -> np.ndarray:
    values = column.flatten().to_numpy().reshape(len(column), -1).astype(np.float32)
    return dequantized(values, manifest["ranges"]) if manifest["dtype"] == "int8" else values


# Data types ----------------------------------------------------------------------------------------------------------


def quantized(embeddings: np.ndarray, dtype: str, ranges: Sequence[Sequence[float]] | None = None) -> np.ndarray:
    """Convert embeddings to the dtype to store.

    Args:
        embeddings: (rows, dimension), float32.
        dtype: A key of `DTYPES`.
        ranges: For int8, the smallest and largest value of each dimension (2, dimension); values beyond are clipped.
    """
    from sentence_transformers.util import quantize_embeddings

    if dtype != "int8":
        with np.errstate(over="ignore"):  # infinities are detected afterwards
            return embeddings.astype(dtype)
    bounds = np.asarray(ranges, np.float32)
    # clipped first: some versions of the library wrap around
    return np.asarray(quantize_embeddings(np.clip(embeddings, *bounds), precision="int8", ranges=bounds))


def dequantized(values: np.ndarray, ranges: Sequence[Sequence[float]]) -> np.ndarray:
    """Scale int8 values back, to the centers of their intervals."""
    least, largest = np.asarray(ranges, np.float32)
    return least + (values + 128.5) * ((largest - least) / 255)
