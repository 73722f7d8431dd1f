"""The sparse and hybrid vectors of a teacher's texts, stored shard by shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mote.corpora.encoding import Model
from mote.corpora.folder import write_whole
from mote.corpora.pairs import Pairs
from mote.corpora.scorers import SparseScorer
from mote.inference.loading import check_device, load_any_encoder
from mote.inference.searching import rows_of

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from sentence_transformers import SparseEncoder

SHARD = 4096
"""Texts that are embedded together, and survive a kill."""


@dataclass(frozen=True)
class SparseTeacher:
    """A sparse or hybrid model that scores pairs. It is loaded when it is first needed.

    Attributes:
        of_queries: The model, as it embeds queries.
        of_documents: The model, as it embeds documents.
        device: Device. Default: the best available.

    Raises:
        ValueError: If the device does not exist.
    """

    of_queries: Model
    of_documents: Model
    device: str | None = None

    def __post_init__(self) -> None:
        check_device(self.device)

    @cached_property
    def encoder(self) -> "SparseEncoder":
        """The model.

        Raises:
            ValueError: If it does not load, reads fewer tokens than asked for, or knows no such task.
        """
        model = self.of_queries
        encoder: Any = load_any_encoder(
            model.source,
            revision=model.revision,
            device=self.device,
            dtype=model.model_dtype,
            trust_remote_code=model.trust_remote_code,
        )
        model.shorten(encoder)
        for each in (self.of_queries, self.of_documents):
            each.arguments(encoder)  # prompts and tasks are found alike
        return encoder

    def scorer(self, pairs: Pairs, work: Path) -> SparseScorer:
        """Make the scorer of a dataset.

        Args:
            pairs: Texts of the dataset.
            work: Folder for vectors, which a run resumes from.
        """
        queries = self._embed(pairs.queries, self.of_queries, work / "queries")
        documents = self._embed(pairs.documents, self.of_documents, work / "documents")
        hybrid = type(self.encoder[-1]).__name__ == "HybridPooling"
        first: Any = self.encoder[0]
        return SparseScorer(queries, documents, first.config.vocab_size if hybrid else queries.shape[1])

    def _embed(self, texts: Sequence[str], model: Model, work: Path) -> "csr_matrix":
        """Embed texts, [N, V] or [N, V + H]."""
        from scipy.sparse import load_npz, vstack

        work.mkdir(parents=True, exist_ok=True)
        shards = []
        with tqdm(total=len(texts), desc=work.name, unit="text", disable=None) as bar:
            for start in range(0, len(texts), SHARD):
                file, part = work / f"shard-{start:09}.npz", list(texts[start : start + SHARD])
                if not file.is_file():
                    arguments = model.arguments(self.encoder) | {"batch_size": model.batch_size}  # type: ignore[arg-type]
                    vectors = rows_of(self.encoder.encode(part, show_progress_bar=False, save_to_cpu=True, **arguments))
                    write_whole(file, partial(_write, vectors=vectors))
                shards.append(load_npz(file))
                bar.update(len(part))
        return vstack(shards, format="csr")


def _write(path: Path, vectors: "csr_matrix") -> None:
    from scipy.sparse import save_npz

    with path.open("wb") as file:
        save_npz(file, vectors)
