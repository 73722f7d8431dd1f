"""Which vectors a model gives for retrieval: dense ones, or sparse ones; written into Sentence-Transformers' files."""

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mote.checkpoints.reading import read_json

SPLADE_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
SPARSE_POOLING = "sparse_pooling_mote.SparsePooling"
OUR_POOLINGS = (SPARSE_POOLING,)

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
MODEL_SETTINGS = "config_sentence_transformers.json"
SPARSE_ENCODER = "SparseEncoder"


@dataclass(frozen=True)
class Retrieval:
    """The vectors of a model.

    Attributes:
        kind: `dense`, or `sparse`: a weight for each token of the vocabulary.
        sparse_from: What sparse weights are made of: the logits of the `head` for masked language modelling (SPLADE),
            or the hidden states times the token `embeddings` (CoT-MoTE, Equation 4).
        max_active_dims: Number of weights of a text that are kept, the largest. Default: all.
    """

    kind: Literal["dense", "sparse"] = "dense"
    sparse_from: Literal["head", "embeddings"] = "head"
    max_active_dims: int | None = None

    def __str__(self) -> str:
        weights = "logits of the head" if self.sparse_from == "head" else "hidden states times token embeddings"
        kept = "" if self.max_active_dims is None else f", the {self.max_active_dims} largest"
        return self.kind if self.kind == "dense" else f"{self.kind}, weights from {weights}{kept}"

    @property
    def needs_head(self) -> bool:
        """Whether the model needs its head for masked language modelling."""
        return self.kind != "dense" and self.sparse_from == "head"


def retrieval_in(folder: Path) -> Retrieval:
    """Read from Sentence-Transformers' files which vectors a model gives.

    Raises:
        ValueError: If it is a sparse encoder of another kind.
    """
    if not (folder / MODULES).is_file():
        return Retrieval()
    modules = read_json(folder / MODULES, list)
    settings = read_json(folder / MODEL_SETTINGS) if (folder / MODEL_SETTINGS).is_file() else {}
    if settings.get("model_type") != SPARSE_ENCODER:
        return Retrieval()
    kept = settings.get("max_active_dims")
    if len(modules) == 2 and _name(modules[1]) == "SpladePooling":
        return Retrieval("sparse", "head", kept)
    if len(modules) == 2 and _name(modules[1]) == "SparsePooling":
        return Retrieval("sparse", read_json(folder / modules[1]["path"] / "config.json")["sparse_from"], kept)
    shown = ", ".join(_name(module) for module in modules)
    raise ValueError(
        f"{folder.name} is a sparse encoder with the modules {shown}: expected a Transformer and a SpladePooling"
    )


def write_retrieval(folder: Path, retrieval: Retrieval) -> None:
    """Rewrite Sentence-Transformers' files in a folder, so that the model there gives such vectors.

    Args:
        folder: A model with these files.
        retrieval: The vectors, sparse ones.
    """
    first, *others = read_json(folder / MODULES, list)
    for module in others:
        shutil.rmtree(folder / module["path"])
    own = SPLADE_POOLING if retrieval.sparse_from == "head" else SPARSE_POOLING
    settings: dict[str, Any] = {"pooling_strategy": "max"}
    if own in OUR_POOLINGS:
        settings = {"sparse_from": retrieval.sparse_from}
        copy_code(own, folder)
    path = f"1_{own.rpartition('.')[2]}"
    _write(folder / MODULES, [first, {"idx": 1, "name": "1", "path": path, "type": own}])
    (folder / path).mkdir()
    _write(folder / path / "config.json", settings)
    transformer = read_json(folder / TRANSFORMER_SETTINGS)
    for name in ("transformer_task", "modality_config", "module_output_name"):  # what the task says by default
        transformer.pop(name, None)
    if retrieval.needs_head:
        transformer["transformer_task"] = "fill-mask"
    _write(folder / TRANSFORMER_SETTINGS, transformer)
    model = read_json(folder / MODEL_SETTINGS)
    model |= {"model_type": SPARSE_ENCODER, "similarity_fn_name": "dot", "max_active_dims": retrieval.max_active_dims}
    _write(folder / MODEL_SETTINGS, {name: value for name, value in model.items() if value is not None})


def copy_code(module_type: str, folder: Path) -> None:
    """Copy the file of one of our modules into a model's folder."""
    code = find_spec(module_type.partition(".")[0])
    shutil.copy(code.origin, folder)  # type: ignore[union-attr, arg-type]  # it is installed with this package


def _name(module: dict[str, Any]) -> str:
    return str(module["type"]).rpartition(".")[2]


def _write(path: Path, content: Any) -> None:
    path.unlink(missing_ok=True)  # it may be a link to the source's
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
