"""The folder of a corpus's embeddings: shards, and the manifest that says which are finished.

A shard takes its place whole, then enters the manifest with the hash of its file. After a kill between the two it is
made again, the same as before.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow
from huggingface_hub.utils.sha import sha_fileobj
from pyarrow import parquet

from mote.checkpoints.staging import try_lock

MANIFEST = "manifest.json"
INDEX = "index.faiss"
FORMAT = 1  # readers refuse later ones
DTYPES = {"float32": pyarrow.float32(), "float16": pyarrow.float16(), "int8": pyarrow.int8()}

# A run resumes another one that agrees in these; names may differ, as files and models are known by their hashes.
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
        content = json.dumps(self.manifest, indent=1, ensure_ascii=False) + "\n"
        write_whole(self.folder / MANIFEST, lambda path: path.write_text(content, encoding="utf-8"))

    def record_shard(self, number: int, entry: dict[str, Any], **changes: Any) -> None:
        """Enter a finished shard."""
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
            raise ValueError(f"{self.folder} holds {foreign[0]}, which is not of this corpus: remove it")
        shards = self.manifest["shards"]
        damaged = [name for name in shards if not is_intact(self.folder / name, shards[name])]
        for name in damaged:
            logger.warning("%s is missing or damaged, and is made again", self.folder / name)
        return [number for number, name in enumerate(names) if name not in shards or name in damaged]


@contextmanager
def open_store(folder: Path, manifest: dict[str, Any], overwrite: bool = False) -> Iterator[Store]:
    """Make or resume a folder of embeddings, as its only writer.

    Args:
        folder: The folder.
        manifest: Content of a new manifest.
        overwrite: Remove other embeddings that are there.

    Raises:
        OSError: If another process is writing there, or the folder cannot be made.
        ValueError: If it holds something else, or, without `overwrite`, other embeddings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder, ours=True)
    if lock is None:
        raise OSError(f"{folder} is being written by another process: wait for it, or choose another folder")
    try:
        found = read_manifest(folder)
        if found is not None and overwrite:
            for path in (*folder.glob("shard-*.parquet"), folder / INDEX):
                path.unlink(missing_ok=True)
        elif found is not None and found["shards"]:
            _require_same(folder, found, manifest)
            manifest = found
        for leftover in folder.glob(".*.writing-*"):  # of a killed writer
            leftover.unlink(missing_ok=True)
        store = Store(folder, manifest)
        store.record()
        try:
            yield store
        finally:
            if not store.manifest["shards"]:
                (folder / MANIFEST).unlink(missing_ok=True)
    finally:
        (folder / "lock").unlink(missing_ok=True)
        os.close(lock)
        with suppress(OSError):  # not empty
            folder.rmdir()


def _require_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in _IDENTITY if _without_names(found.get(key)) != _without_names(wanted[key])]
    if different:
        details = ", ".join(
            f"{key} ({found.get(key)!r}, now {wanted[key]!r})" if key not in ("model", "input", "columns") else key
            for key in different
        )
        raise ValueError(
            f"{folder} holds other embeddings, which differ in: {details}. Choose another folder, or replace them with "
            "--overwrite"
        )


def _without_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_names(item) for item in value]
    return {key: item for key, item in value.items() if key != "name"} if isinstance(value, dict) else value


def write_shard(folder: Path, number: int, ids: Sequence[str], embeddings: np.ndarray) -> dict[str, Any]:
    """Write a shard.

    Args:
        folder: The folder.
        number: Number of the shard.
        ids: Ids of its rows.
        embeddings: Embeddings (rows, dimension), of the dtype that is stored.

    Returns:
        Its entry in the manifest.

    Raises:
        OSError: If it cannot be written.
    """
    values = pyarrow.array(embeddings.reshape(-1), DTYPES[embeddings.dtype.name])
    lists = pyarrow.FixedSizeListArray.from_arrays(values, embeddings.shape[1])
    shard = pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})
    path = folder / shard_name(number)
    write_whole(path, lambda unfinished: parquet.write_table(shard, unfinished, use_dictionary=False))
    return {"rows": len(ids), "sha256": sha256(path)}


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let a function write a file beside its place, and put it there.

    Raises:
        OSError: If it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.writing-{uuid4().hex}")
    try:
        write(unfinished)
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path} could not be written: {error}. The same command resumes") from error
        raise


def is_intact(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file is the one that an entry of the manifest describes."""
    return path.is_file() and sha256(path) == entry["sha256"]


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05}.parquet"


def _shard_names(manifest: dict[str, Any]) -> list[str]:
    return [shard_name(number) for number in range(-(-manifest["rows"] // manifest["shard_size"]))]


def sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as content:
        return sha_fileobj(content).hex()


# Reading -------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder.

    Returns:
        Its content; None if the folder does not exist, or is empty.

    Raises:
        ValueError: If the folder holds something else, or the manifest is damaged or of a later version.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a folder")
    file = folder / MANIFEST
    if not file.is_file():
        if any(not path.name.startswith(".") and path.name != "lock" for path in folder.glob("*")):
            raise ValueError(f"{folder} holds something other than embeddings: choose another folder")
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        later = manifest["format"] > FORMAT
        if not isinstance(manifest["shards"], dict):
            raise TypeError("shards")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: choose another folder") from error
    if later:
        raise ValueError(f"{folder} was written by a later version of MoTE, which is needed to read it")
    return dict(manifest)


def read_embeddings(folder: str | Path) -> tuple[list[str], Iterator[np.ndarray]]:
    """Read embeddings that `embed_corpus` wrote.

    Args:
        folder: The folder.

    Returns:
        The ids, in the order of the corpus, and an iterator over the embeddings of one shard after another, each
        (rows, dimension) in float32; those in int8 are scaled back.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If they are incomplete or damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} holds no embeddings: `mote embed` writes some")
    if not manifest["complete"]:
        raise ValueError(f"The embeddings in {folder} are incomplete: the command that began them resumes")
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
    """Convert embeddings to the dtype that is stored.

    Args:
        embeddings: (rows, dimension), float32.
        dtype: A key of `DTYPES`.
        ranges: For int8, the least and the largest value of each dimension (2, dimension); values beyond are clipped.
    """
    from sentence_transformers.util import quantize_embeddings

    if dtype != "int8":
        with np.errstate(over="ignore"):  # infinities are looked for afterwards
            return embeddings.astype(dtype)
    bounds = np.asarray(ranges, np.float32)
    # clipped first: some versions of the library wrap around
    return np.asarray(quantize_embeddings(np.clip(embeddings, *bounds), precision="int8", ranges=bounds))


def dequantized(values: np.ndarray, ranges: Sequence[Sequence[float]]) -> np.ndarray:
    """Scale int8 values back, to the middles of their intervals."""
    least, largest = np.asarray(ranges, np.float32)
    return least + (values + 128.5) * ((largest - least) / 255)
