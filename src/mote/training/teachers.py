"""Embeddings of a teacher, cached on disk by chunks of rows, so that an interrupted run resumes where it was."""

import logging
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow
from huggingface_hub import cached_assets_path
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from mote.checkpoints.hashing import folder_hash
from mote.files import replaced
from mote.hub import commit_of
from mote.inference.loading import load_encoder
from mote.training.recipe import Recipe, TeacherSettings

CHUNK = 4096  # rows

logger = logging.getLogger(__name__)


class TeacherEmbeddings:
    """The embeddings of a teacher, which is only loaded if one is missing from the cache, by default huggingface_hub's.

    Its identity is its commit on the Hub, or a hash of its files.
    """

    def __init__(self, settings: TeacherSettings, cache: Path | None = None) -> None:
        self.settings, self.cache = settings, cache or Path(cached_assets_path("mote", "teachers"))
        commit = commit_of(settings.source, settings.revision)
        self.identity = f"{settings.source}@{commit}" if commit else folder_hash(Path(settings.source))
        self.name = f"teacher {settings.source} ({settings.revision or 'newest'})"
        self._model: SentenceTransformer | None = None

    def labels(self, columns: dict[str, list[str]]) -> pyarrow.ChunkedArray:
        """Return for each row the embedding of its text or, with several columns, a list of their embeddings."""
        labels = []
        for chunk in self.embed(columns):
            _, count, dimension = chunk.shape
            flat = pyarrow.Array.from_buffers(pyarrow.float32(), chunk.size, [None, pyarrow.py_buffer(chunk)])
            embeddings = pyarrow.FixedSizeListArray.from_arrays(flat, dimension)  # a view: they stay on the disk
            labels.append(embeddings if count == 1 else pyarrow.FixedSizeListArray.from_arrays(embeddings, count))
        return pyarrow.chunked_array(labels)

    def embed(self, columns: dict[str, list[str]]) -> list[np.ndarray]:
        """Embed the text columns of a dataset, each with the recipe's prompt for it, or read them from the cache.

        Returns chunks of rows (rows, columns, dimension), float32, memory-mapped.
        """
        prompts = {name: self.settings.prompts.get(name) for name in columns}  # type: ignore[call-overload]
        digest = blake2b(repr((self.identity, prompts, CHUNK)).encode(), digest_size=16)
        for texts in columns.values():
            for text in texts:
                digest.update(f"{len(text)} {text}".encode())
        folder = self.cache / digest.hexdigest()
        chunks = []
        starts = range(0, len(next(iter(columns.values()))), CHUNK)
        for start in tqdm(starts, desc=f"Embedding with {self.settings.source}", disable=None):
            file = folder / f"{start:09}.npy"
            if not file.exists():
                part = {name: texts[start : start + CHUNK] for name, texts in columns.items()}
                embedded = [self._encode(texts, prompts[name]) for name, texts in part.items()]
                with replaced(file) as unfinished:
                    np.save(unfinished, np.stack(embedded, axis=1))
            chunks.append(np.load(file, mmap_mode="r"))
        return chunks

    def _encode(self, texts: list[str], prompt: str | None) -> np.ndarray:
        if self._model is None:
            logger.info("Loading the teacher %s …", self.settings.source)
            revision = self.settings.revision  # not the commit: offline, a branch is found only if it was asked for
            trusted = self.settings.trust_remote_code
            self._model = load_encoder(self.settings.source, revision=revision, trust_remote_code=trusted)
        batch_size = self.settings.batch_size
        found = self._model.encode(texts, prompt=prompt, batch_size=batch_size, show_progress_bar=False)
        embeddings = np.asarray(found, dtype=np.float32)
        if not np.isfinite(embeddings).all():
            raise ValueError(f"The embeddings of the teacher {self.settings.source} are non-finite")
        return embeddings


def teachers_of(recipe: Recipe) -> dict[str, TeacherEmbeddings]:
    """Return the teachers of a recipe, each once, by their settings as JSON."""
    settings = {task.teacher.model_dump_json(): task.teacher for task in recipe.tasks.values() if task.teacher}
    return {key: TeacherEmbeddings(one) for key, one in settings.items()}
