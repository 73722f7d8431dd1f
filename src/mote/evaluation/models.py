"""The models that are evaluated: what they are called, which bytes they are, and how they are loaded."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mote.identity import fingerprint, newest_commit

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
            ValueError: If it does not load.
        """
        from sentence_transformers import SentenceTransformer

        if self._model is None:
            try:
                self._model = SentenceTransformer(
                    self.path,
                    device=self.device,
                    revision=None if self.is_local else self.revision,
                    trust_remote_code=self.trust_remote_code or self.is_local,
                    model_kwargs={"dtype": self.dtype} if self.dtype else None,
                )
            except Exception as error:  # whatever a library or the model's own code raises
                raise ValueError(f"{self.path} does not load in Sentence-Transformers: {first_line(error)}") from error
        return self._model

    def release(self) -> None:
        """Free its memory."""
        import torch

        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def find_candidates(models: Sequence[str] | Mapping[str, str], **settings: Any) -> list[Candidate]:
    """Find models and name them, without loading them.

    Args:
        models: Folders or ids on the Hub; with a mapping, by the names that they are to have.
        settings: Of `Candidate`.

    Raises:
        FileNotFoundError: If a model is neither a folder with a model nor on the Hub.
        ValueError: If there are none, or one is given twice.
    """
    named = dict(models) if isinstance(models, Mapping) else name_models([str(path) for path in models])
    if not named:
        raise ValueError("There is no model to evaluate")
    return [Candidate(label, str(path), revision_of(str(path)), **settings) for label, path in named.items()]


def name_models(paths: Sequence[str]) -> dict[str, str]:
    """Name folders by the last parts of their paths, as many as tell them apart, and others by their id.

    Raises:
        ValueError: If one is given twice.
    """
    parts = [Path(path).resolve().parts if Path(path).is_dir() else (path,) for path in paths]
    for index, one in enumerate(parts):
        if one in parts[:index]:
            raise ValueError(f"{paths[index]} is given twice")
    depth = 1
    while len({"/".join(one[-depth:]) for one in parts}) < len(parts):
        depth += 1
    lengths = [
        next(n for n in range(1, depth + 1) if sum(other[-n:] == one[-n:] for other in parts) == 1) for one in parts
    ]
    return {"/".join(one[-n:]): path for one, n, path in zip(parts, lengths, paths, strict=True)}


def revision_of(path: str) -> str:
    """What tells a model from all others: a hash of its files, or its commit on the Hub.

    Raises:
        FileNotFoundError: If it is neither a folder with a model nor on the Hub.
    """
    folder = Path(path)
    if not folder.is_dir():
        return newest_commit(path)
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise FileNotFoundError(f"{path} has neither config.json nor modules.json: it is not a model")
    return fingerprint(folder)


def check_device(device: str | None) -> None:
    """Make sure that a device is there.

    Raises:
        ValueError: If it is not; the message lists those that are.
    """
    import torch

    if device is None:
        return
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    there += ["mps"] if torch.backends.mps.is_available() else []
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or (str(wanted) not in there and not (device == "cuda" and "cuda:0" in there)):
        raise ValueError(f"There is no device {device!r} here, but {', '.join(there)}")


def first_line(error: BaseException) -> str:
    """An error in one line: its kind and what it says first."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
