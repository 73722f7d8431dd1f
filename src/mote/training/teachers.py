"""Embeddings of a teacher, cached on disk, so that an interrupted run resumes where it was.

The folder for a list of texts is named by a hash of the teacher, the prompt and the texts. It holds one file per chunk
of texts until all are embedded, then a single file. Each file is written under a temporary name and renamed, and has
the hash of its content in its name, which reveals damage. A temporary file that a killed run leaves is removed by
later ones, after a day.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow
from huggingface_hub import cached_assets_path
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from mote.checkpoints.hashing import folder_hash
from mote.hub import commit_of
from mote.inference.loading import load_encoder
from mote.reporting import HOW_TO_RESUME
from mote.training.recipe import Recipe
from mote.training.task_settings import TeacherSettings

CHUNK = 2048  # texts
UNFINISHED = re.compile(r"\.(embeddings|chunk\d+)\.[0-9a-f]{32}")
ABANDONED = 24 * 3600  # seconds since the last write, after which no run is still writing an unfinished file

logger = logging.getLogger(__name__)


class Teacher:
    """A teacher, which is only loaded if an embedding is missing from the cache.

    Args:
        settings: Settings of the recipe.
        cache: Folder of the embeddings. Default: in huggingface_hub's assets cache.

    Attributes:
        commit: Its commit on the Hub; None for a folder.
        identity: A hash of its files, or its commit on the Hub.

    Raises:
        FileNotFoundError: If there is no such teacher.
        ValueError: If a folder is given with a revision, or holds an adapter.
    """

    def __init__(self, settings: TeacherSettings, cache: Path | None = None) -> None:
        self.settings = settings
        self.cache = cache
        self.commit = _commit_of(settings)
        self.identity = f"{settings.source}@{self.commit}" if self.commit else folder_hash(Path(settings.source))
        self._model: SentenceTransformer | None = None

    def labels(self, columns: dict[str, list[str]]) -> pyarrow.Array:
        """Embed the text columns of a dataset, each with the recipe's prompt for it.

        Returns:
            For each row the embedding or, with several columns, a list of one embedding per column.
        """
        prompts: Any = self.settings.prompts
        embeddings = [self.embed(texts, prompts.get(name)) for name, texts in columns.items()]
        dimension = embeddings[0].shape[1]
        if len(embeddings) == 1:
            return _lists(embeddings[0], dimension)
        rows = _lists(np.stack(embeddings, axis=1), dimension)  # (rows, columns, dimension)
        return pyarrow.FixedSizeListArray.from_arrays(rows, len(embeddings))

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
        """Embed texts, or read their embeddings from the cache.

        Args:
            texts: The texts.
            prompt: The teacher's prompt. Default: its own default prompt, or none.

        Returns:
            Embeddings (texts, dimension), float32, memory-mapped.

        Raises:
            ValueError: If the embeddings are non-finite.
            OSError: If they cannot be written.
        """
        cache = self.cache or cached_assets_path("mote", "teachers")
        digest = blake2b(digest_size=16)
        for text in (self.identity, repr(prompt), str(CHUNK), *texts):
            content = text.encode()
            digest.update(len(content).to_bytes(8, "big") + content)
        folder = cache / digest.hexdigest()
        whole = self._find(folder, "embeddings")
        if whole is None:
            _remove_abandoned(cache)
            starts = tqdm(range(0, len(texts), CHUNK), desc=f"Embedding with {self.settings.source}", disable=None)
            chunks = [self._chunk(folder, start, texts[start : start + CHUNK], prompt) for start in starts]
            whole = _store(folder, "embeddings", chunks)
            for chunk in folder.glob("chunk*"):
                chunk.unlink(missing_ok=True)
        return np.load(whole, mmap_mode="r")

    def _chunk(self, folder: Path, start: int, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        """Return some texts' embeddings, memory-mapped: open files outlive their removal by another run."""
        name = f"chunk{start // CHUNK:06}"
        found = self._find(folder, name)
        if found is None:
            embeddings = np.asarray(self._encode(texts, prompt), dtype=np.float32)
            if not np.isfinite(embeddings).all():
                raise ValueError(f"The embeddings of the teacher {self.settings.source} are non-finite")
            found = _store(folder, name, [embeddings])
        return np.load(found, mmap_mode="r")

    def _encode(self, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        if self._model is None:
            logger.info("Loading the teacher %s …", self.settings.source)
            trust = self.settings.trust_remote_code
            revision = self.settings.revision  # not the commit: offline, a branch is found only if it was asked for
            self._model = load_encoder(self.settings.source, revision=revision, trust_remote_code=trust)
        batch_size = self.settings.batch_size
        try:
            return self._model.encode(list(texts), prompt=prompt, batch_size=batch_size, show_progress_bar=False)
        except ValueError as error:
            if "default_task" not in str(error):
                raise
            source = self.settings.source
            raise ValueError(
                f"The teacher {source} is a MoTE that knows no task for a text, whose prompt is {prompt!r}: begin the "
                "teacher's `prompts` with the instruction of a task, or set one for all texts, "
                f"`mote set {source} --out DIR default_task=TASK`, and take DIR"
            ) from error

    def _find(self, folder: Path, name: str) -> Path | None:
        for path in sorted(folder.glob(f"{name}-*.npy")):
            if path.stem == f"{name}-{_hash_of_file(path)}":
                return path
            logger.info("%s is damaged, and will be recomputed", path)
            path.unlink(missing_ok=True)
        return None


def _store(folder: Path, name: str, arrays: Sequence[np.ndarray]) -> Path:
    """Write arrays, one below the other, into one file."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (sum(map(len, arrays)), arrays[0].shape[1])
    unfinished = folder / f".{name}.{uuid4().hex}"
    try:
        with unfinished.open("wb") as file:  # not memory-mapped: there, a full disk ends the process without a message
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for array in arrays:
                file.write(np.asarray(array, dtype="<f4").tobytes())
        return unfinished.replace(folder / f"{name}-{_hash_of_file(unfinished)}.npy")
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(
                f"A teacher's embeddings could not be written to {folder}: {error}; {HOW_TO_RESUME}"
            ) from error
        raise


def _remove_abandoned(cache: Path) -> None:
    """Remove unfinished files that killed runs have left, for any list of texts."""
    for path in cache.glob("*/.*"):
        if UNFINISHED.fullmatch(path.name):
            with suppress(OSError):  # another run has moved or removed it
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()


def _lists(values: np.ndarray, size: int) -> pyarrow.Array:
    """View numbers as lists of one size, without a copy: they stay on the disk."""
    flat = pyarrow.Array.from_buffers(pyarrow.float32(), values.size, [None, pyarrow.py_buffer(values)])
    return pyarrow.FixedSizeListArray.from_arrays(flat, size)


def teachers_of(recipe: Recipe) -> dict[str, Teacher]:
    """Return the teachers of a recipe, each once, by their settings as JSON."""
    by_key = {one.model_dump_json(): one for one in _settings_of(recipe)}
    return {key: Teacher(one) for key, one in by_key.items()}


def _settings_of(recipe: Recipe) -> list[TeacherSettings]:
    """List the teacher's settings of each dataset that has a teacher."""
    all_settings = [task.of(dataset).teacher for task in recipe.tasks.values() for dataset in task.datasets]
    return [settings for settings in all_settings if settings is not None]


def versions_of(recipe: Recipe, teachers: Mapping[str, Teacher]) -> dict[str, str]:
    """Return the identity of each teacher, by its source; if datasets use several revisions of it, those of all."""
    versions: dict[str, list[str]] = {}
    for one in _settings_of(recipe):
        versions.setdefault(one.source, []).append(teachers[one.model_dump_json()].identity)
    return {source: own[0] if len({*own}) == 1 else ", ".join(own) for source, own in versions.items()}


def _commit_of(settings: TeacherSettings) -> str | None:
    if settings.revision is not None and Path(settings.source).is_dir():
        raise ValueError(
            f"The teacher {settings.source} is a folder: it has no revision {settings.revision!r}, only teachers "
            "on the Hub have one"
        )
    try:
        return commit_of(settings.source, settings.revision)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"The teacher {error}") from error


def _hash_of_file(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
