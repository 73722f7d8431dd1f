"""Which vectors a model gives for retrieval (dense, sparse or both), a setting in Sentence-Transformers' files."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mote import remote
from mote.files import read_json, write_json

SPLADE_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
SPARSE_POOLING = "sparse_pooling_mote.SparsePooling"
HYBRID_POOLING = "sparse_pooling_mote.HybridPooling"
OUR_POOLINGS = (SPARSE_POOLING, HYBRID_POOLING)

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
MODEL_SETTINGS = "config_sentence_transformers.json"
SPARSE_ENCODER = "SparseEncoder"


@dataclass(frozen=True)
class Retrieval:
    """The vectors of a model.

    Attributes:
        kind: `dense`; `sparse`, a weight for each token of the vocabulary; or `hybrid`, both.
        sparse_from: Source of sparse weights: the logits of the `head` for masked language modelling (SPLADE), or the
            hidden states times the token `embeddings` (CoT-MoTE, Equation 4).
        max_active_dims: Number of weights to keep per text, the largest. Default: all.
        weight: Weight of the sparse score in a hybrid one.
    """

    kind: Literal["dense", "sparse", "hybrid"] = "dense"
    sparse_from: Literal["head", "embeddings"] = "head"
    max_active_dims: int | None = None
    weight: float = 1.0

    def __str__(self) -> str:
        weights = "logits of the head" if self.sparse_from == "head" else "hidden states times token embeddings"
        kept = "" if self.max_active_dims is None else f", the {self.max_active_dims} largest"
        factor = f", {self.weight:g} x the sparse score" if self.kind == "hybrid" else ""
        return self.kind if self.kind == "dense" else f"{self.kind}, weights from {weights}{kept}{factor}"

    @property
    def needs_head(self) -> bool:
        """Whether the model needs its head for masked language modelling."""
        return self.kind != "dense" and self.sparse_from == "head"


def wanted_retrieval(
    own: Retrieval,
    kind: Any = None,
    sparse_from: Any = None,
    max_active_dims: int | None = None,
    weight: float | None = None,
) -> Retrieval:
    """Complete the requested settings with the source's, else the defaults: SPLADE's, for hybrid vectors CoT-MoTE's."""
    kind = kind or own.kind
    default = own.sparse_from if own.kind != "dense" else "embeddings" if kind == "hybrid" else "head"
    kept = own.max_active_dims if max_active_dims is None else max_active_dims
    return Retrieval(kind, sparse_from or default, kept, own.weight if weight is None else weight)


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
    if len(modules) == 2 and name_of(modules[1]) == "SpladePooling":
        return Retrieval("sparse", "head", kept)
    if len(modules) == 2 and name_of(modules[1]) == "SparsePooling":
        return Retrieval("sparse", read_json(folder / modules[1]["path"] / "config.json")["sparse_from"], kept)
    if len(modules) == 3 and name_of(modules[2]) == "HybridPooling":
        own = read_json(folder / modules[2]["path"] / "config.json")
        return Retrieval("hybrid", own["sparse_from"], own["max_active_dims"], own["weight"])
    shown = ", ".join(name_of(module) for module in modules)
    raise ValueError(
        f"{folder.name} is a sparse encoder with the modules {shown}: expected a Transformer and a SpladePooling"
    )


def write_retrieval(folder: Path, retrieval: Retrieval) -> None:
    """Rewrite Sentence-Transformers' files in a folder, so that its model gives these vectors.

    Args:
        folder: A model with these files.
        retrieval: The vectors, sparse or hybrid.

    Raises:
        ValueError: If the model has no pooling for the dense part of hybrid vectors.
    """
    first, *others = read_json(folder / MODULES, list)
    hybrid = retrieval.kind == "hybrid"
    kept = [module for module in others if hybrid and name_of(module) == "Pooling"]
    if hybrid and not kept:
        raise ValueError(f"{folder.name} has no pooling, which the dense part of hybrid vectors needs")
    own, settings = _pooling(retrieval)
    if len(others) == 1 and name_of(others[0]) == name_of({"type": own}) == "SpladePooling":
        settings = read_json(folder / others[0]["path"] / "config.json")  # its strategy and activation stay
    for module in others:
        if module not in kept:  # a normalised dense score would be negligible beside the sparse one
            shutil.rmtree(folder / module["path"])
    if own in OUR_POOLINGS:
        copy_code(own, folder)
    path = f"{len(kept) + 1}_{own.rpartition('.')[2]}"
    modules = [first, *kept, {"path": path, "type": own}]
    numbered = [{**module, "idx": index, "name": str(index)} for index, module in enumerate(modules)]
    write_json(folder / MODULES, numbered)
    (folder / path).mkdir()
    write_json(folder / path / "config.json", settings)
    transformer = read_json(folder / TRANSFORMER_SETTINGS)
    for name in ("transformer_task", "modality_config", "module_output_name"):  # the task sets them by default
        transformer.pop(name, None)
    if retrieval.needs_head:
        transformer["transformer_task"] = "fill-mask"
    if retrieval.needs_head and hybrid:  # hidden states, from which the pooling computes the head's logits
        transformer["modality_config"] = {"text": {"method": "embed", "method_output_name": "last_hidden_state"}}
        transformer["module_output_name"] = "token_embeddings"
    write_json(folder / TRANSFORMER_SETTINGS, transformer)
    model = read_json(folder / MODEL_SETTINGS)
    limit = None if hybrid else retrieval.max_active_dims  # the library's limit would cut the dense part, too
    model |= {"model_type": SPARSE_ENCODER, "similarity_fn_name": "dot", "max_active_dims": limit}
    write_json(folder / MODEL_SETTINGS, {name: value for name, value in model.items() if value is not None})


def _pooling(retrieval: Retrieval) -> tuple[str, dict[str, Any]]:
    """Return the last module's type and settings."""
    if retrieval.kind == "hybrid":
        names = ("sparse_from", "weight", "max_active_dims")
        return HYBRID_POOLING, {**{name: getattr(retrieval, name) for name in names}, "retrieval": "hybrid"}
    if retrieval.sparse_from == "head":
        return SPLADE_POOLING, {"pooling_strategy": "max"}
    return SPARSE_POOLING, {"sparse_from": retrieval.sparse_from}


def copy_code(module_type: str, folder: Path) -> None:
    """Copy the file of one of our modules into a model's folder."""
    code = Path(remote.__file__).with_name(f"{module_type.partition('.')[0]}.py")
    (folder / code.name).unlink(missing_ok=True)  # it may be a link to the source's
    shutil.copy(code, folder)


def name_of(module: dict[str, Any]) -> str:
    """Return the name of a module's class."""
    return str(module["type"]).rpartition(".")[2]
