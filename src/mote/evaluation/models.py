"""Models to evaluate: their labels, their revisions, and how they are loaded."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mote.checkpoints.hashing import folder_hash
from mote.hub import commit_of
from mote.inference.loading import has_own_code, load_any_encoder
from mote.reporting import label_models

if TYPE_CHECKING:
    from mteb.models import ModelMeta
    from sentence_transformers import SentenceTransformer, SparseEncoder


@dataclass
class EvaluatedModel:
    """A model to evaluate.

    Attributes:
        label: Label in tables.
        path: A folder, or an id on the Hub.
        revision: Hash of the folder's files, or the commit on the Hub.
        device: Device that it runs on. Default: Sentence-Transformers' choice.
        dtype: Dtype of its weights. Default: the stored one.
        trust_remote_code: Run the code in its repository.
        retrieval: Kind of vectors: `dense`, `sparse` or `hybrid`; a hybrid model gives all three. Default: its own.
    """

    label: str
    path: str
    revision: str
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    retrieval: str | None = None
    _model: "SentenceTransformer | SparseEncoder | None" = field(default=None, repr=False)

    def meta(self, **experiment: Any) -> "ModelMeta":
        """Describe the model to mteb, whose cache is laid out accordingly.

        Args:
            **experiment: Other settings that a score depends on.
        """
        from mteb.models import ModelMeta

        name = f"local/{Path(self.path).resolve().name}" if Path(self.path).is_dir() else self.path
        name = name if "/" in name else f"sentence-transformers/{name}"  # the organisation that the library assumes
        settings = {"dtype": self.dtype, "retrieval": self.retrieval, "own_code": self._own_code, **experiment}
        experiment = {key: value for key, value in settings.items() if value is not None}
        return ModelMeta.create_empty(
            overwrites={"name": name, "revision": self.revision, "experiment_kwargs": experiment or None}
        )

    @cached_property
    def _own_code(self) -> bool | None:
        """False if the model has code of its own that is not trusted: a class of the library may take its place."""
        revision = None if Path(self.path).is_dir() else self.revision
        return False if not self.trust_remote_code and has_own_code(self.path, revision) else None

    @cached_property
    def described(self) -> dict[str, Any]:
        """Other metadata that mteb records: dimension, parameters, licence …; empty for files of an unknown kind.

        Found once for all datasets, as it reads the whole of the weights for their hash.
        """
        from mote.evaluation.metadata import model_meta

        try:
            meta = model_meta(self.path, None if Path(self.path).is_dir() else self.revision)
        except Exception:  # other modules or architectures, odd cards: mteb fills in what it knows
            return {}
        return {name: value for name, value in meta if value is not None and name != "loader_kwargs"}

    def check(self) -> None:
        """Make sure that the model loads, without reading its weights.

        Raises:
            ValueError: If it does not load, lacks weights, or has untrusted code.
        """
        self._load("meta")

    def load(self) -> "SentenceTransformer | SparseEncoder":
        """Load it, once.

        Raises:
            ValueError: If it does not load, lacks weights, or has untrusted code.
        """
        if self._model is None:
            self._model = self._load(self.device)
        return self._model

    def _load(self, device: str | None) -> "SentenceTransformer | SparseEncoder":
        revision = None if Path(self.path).is_dir() else self.revision
        settings = {"device": device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        return load_any_encoder(self.path, retrieval=self.retrieval, revision=revision, **settings)

    def release(self) -> None:
        """Free its memory."""
        import torch

        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def find_models(models: str | Path | Sequence[str] | Mapping[str, str], **settings: Any) -> list[EvaluatedModel]:
    """Find and label models, without loading them.

    Args:
        models: Folders or ids on the Hub, or LABEL=MODEL; or a mapping from labels to these; or one model.
        settings: `device`, `dtype` and `trust_remote_code`.

    Raises:
        FileNotFoundError: If a model is neither a folder with a model nor on the Hub.
        ValueError: If no model is given, one is given twice, or one is an adapter.
    """
    named = label_models(models)
    if not named:
        raise ValueError("No model to evaluate")
    return [
        EvaluatedModel(label, path, commit_of(path) or folder_hash(Path(path)), **settings)
        for label, path in named.items()
    ]
