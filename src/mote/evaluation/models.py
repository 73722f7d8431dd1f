"""The models that are evaluated: what they are called, which bytes they are, and how they are loaded."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mote.checkpoints.hashing import folder_hash
from mote.hub import commit_of
from mote.inference.loading import load_encoder
from mote.reporting import name_models

DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class Candidate:
    """A model to evaluate.

    Attributes:
        label: Its name in tables.
        path: A folder, or an id on the Hub.
        revision: Hash of the folder's files, or the commit on the Hub.
        device: Where it runs. Default: what Sentence-Transformers picks.
        dtype: Of its weights. Default: that in which they are stored.
        trust_remote_code: Whether code of a model on the Hub may be run. That of a folder always is.
    """

    label: str
    path: str
    revision: str
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    _model: Any = field(default=None, repr=False)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder."""
        return Path(self.path).is_dir()

    def meta(self, **experiment: Any) -> Any:
        """What mteb is told of the model; where results are cached follows from it.

        Two folders of one name differ in their revision. `experiment` is what else a score depends on.
        """
        from mteb.models import ModelMeta

        name = f"local/{Path(self.path).resolve().name}" if self.is_local else self.path
        name = name if "/" in name else f"sentence-transformers/{name}"  # the organisation that the library assumes
        experiment = {key: value for key, value in {"dtype": self.dtype, **experiment}.items() if value is not None}
        return ModelMeta.create_empty(
            overwrites={"name": name, "revision": self.revision, "experiment_kwargs": experiment or None}
        )

    def load(self) -> Any:
        """Load it, once.

        Raises:
            ValueError: If it does not load, or lacks weights.
        """
        if self._model is None:
            self._model = load_encoder(
                self.path,
                revision=None if self.is_local else self.revision,
                device=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code or self.is_local,
            )
        return self._model

    def release(self) -> None:
        """Free its memory."""
        import torch

        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def revision_of(model: str) -> str:
    """Return the commit of a model on the Hub, or the hash of a folder's files; errors are those of `commit_of`."""
    return commit_of(model) or folder_hash(Path(model))


def find_candidates(models: Sequence[str] | Mapping[str, str], **settings: Any) -> list[Candidate]:
    """Find models and name them, without loading them.

    Args:
        models: Folders or ids on the Hub, or LABEL=MODEL; with a mapping, by the names that they are to have.
        settings: Of `Candidate`.

    Raises:
        FileNotFoundError: If a model is neither a folder with a model nor on the Hub.
        ValueError: If there are none, one is given twice, or one is an adapter.
    """
    named = dict(models) if isinstance(models, Mapping) else name_models([str(path) for path in models])
    if not named:
        raise ValueError("There is no model to evaluate")
    return [Candidate(label, str(path), revision_of(str(path)), **settings) for label, path in named.items()]
