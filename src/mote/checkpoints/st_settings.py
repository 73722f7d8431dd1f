"""Settings in Sentence-Transformers' files: which vectors a model gives, and whether it pools its instructions."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mote import remote
from mote.files import read_json, write_json
from mote.remote.configuration_mote import alternatives

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
MODEL_SETTINGS = "config_sentence_transformers.json"
SPARSE_ENCODER = "SparseEncoder"
INSTRUCTION_POOLING = "instruction_pooling"
POOLED = ("included", "excluded", "excluded_by_count")

# Import paths of the modules' classes; importing them takes longer than upcycling.
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
SPLADE_POOLING = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
OUR_TRANSFORMER = "sentence_transformer_mote.MoTETransformer"
ATTENTION_POOLING_MODULE = "attention_pooling_mote.AttentionPooling"
TEXT_POOLING = "instruction_mote.TextPooling"
SPARSE_POOLING = "sparse_pooling_mote.SparsePooling"
HYBRID_POOLING = "sparse_pooling_mote.HybridPooling"
OUR_POOLINGS = (SPARSE_POOLING, HYBRID_POOLING, TEXT_POOLING, ATTENTION_POOLING_MODULE)

# First module of a model that pools all tokens → of a model that leaves instructions out.
_INSTRUCTED = {
    TRANSFORMER: "instruction_mote.InstructedTransformer",
    OUR_TRANSFORMER: "task_instruction_mote.InstructedMoTETransformer",
}
INSTRUCTED = tuple(_INSTRUCTED.values())


# Modules -------------------------------------------------------------------------------------------------------------


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Read the modules of a model, ours by the names that they have without this package; empty if it has none."""
    modules = read_json(folder / MODULES, list, missing_ok=True)
    for module in modules:
        module["type"] = module["type"].removeprefix(f"{remote.__name__}.")
    return modules


def name_of(module: dict[str, Any]) -> str:
    """Return the name of a module's class."""
    return str(module["type"]).rpartition(".")[2]


def names_of(types: tuple[str, ...]) -> list[str]:
    """Return the names of classes."""
    return [name_of({"type": one}) for one in types]


def copy_code(module_type: str, folder: Path) -> None:
    """Copy the file of one of our modules into a model's folder."""
    code = Path(remote.__file__).with_name(f"{module_type.partition('.')[0]}.py")
    (folder / code.name).unlink(missing_ok=True)  # it may be a link to the source's
    shutil.copy(code, folder)


def copy_instruction_code(modules: list[dict[str, Any]], folder: Path) -> None:
    """Copy the code of the modules that leave instructions out into a model's folder, and no other such code."""
    for name in (*INSTRUCTED, TEXT_POOLING):
        (folder / f"{name.partition('.')[0]}.py").unlink(missing_ok=True)
    for name in {module["type"] for module in modules}.intersection((*INSTRUCTED, TEXT_POOLING)):
        for file in (name, TEXT_POOLING):  # which all of them import
            copy_code(file, folder)


# Vectors for retrieval -----------------------------------------------------------------------------------------------


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
    """Read from Sentence-Transformers' files which vectors a model gives."""
    modules = read_modules(folder)
    settings = read_json(folder / MODEL_SETTINGS, missing_ok=True)
    if not modules or settings.get("model_type") != SPARSE_ENCODER:
        return Retrieval()
    kept = settings.get("max_active_dims")
    names = [name_of(module) for module in modules]
    own = read_json(folder / modules[-1]["path"] / "config.json", missing_ok=True)
    if names[1:] == ["SpladePooling"]:
        return Retrieval("sparse", "head", kept)
    if names[1:] == ["SparsePooling"]:
        return Retrieval("sparse", own["sparse_from"], kept)
    if len(names) == 3 and names[2] == "HybridPooling":
        return Retrieval("hybrid", own["sparse_from"], own["max_active_dims"], own["weight"])
    raise ValueError(
        f"{folder.name} is a sparse encoder with the modules {', '.join(names)}: expected a Transformer and a "
        "SpladePooling"
    )


def write_retrieval(folder: Path, retrieval: Retrieval) -> None:
    """Rewrite Sentence-Transformers' files in a folder, so that its model gives sparse or hybrid vectors."""
    first, *others = read_modules(folder)
    hybrid = retrieval.kind == "hybrid"
    kept = [module for module in others if hybrid and name_of(module) == "Pooling"]
    if hybrid and not kept:
        raise ValueError(f"{folder.name} has no pooling, which the dense part of hybrid vectors needs")
    own, settings = _sparse_pooling(retrieval)
    if own == SPLADE_POOLING and names_of(tuple(module["type"] for module in others)) == ["SpladePooling"]:
        settings = read_json(folder / others[0]["path"] / "config.json")  # its strategy and activation stay
    for module in others:
        if module not in kept:  # a normalised dense score would be negligible beside the sparse one
            shutil.rmtree(folder / module["path"])
    if own in OUR_POOLINGS:
        copy_code(own, folder)
    path = f"{len(kept) + 1}_{own.rpartition('.')[2]}"
    modules = [first, *kept, {"path": path, "type": own}]
    write_json(folder / MODULES, [{**one, "idx": index, "name": str(index)} for index, one in enumerate(modules)])
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


def _sparse_pooling(retrieval: Retrieval) -> tuple[str, dict[str, Any]]:
    """Return the last module's type and settings."""
    if retrieval.kind == "hybrid":
        names = ("sparse_from", "weight", "max_active_dims")
        return HYBRID_POOLING, {**{name: getattr(retrieval, name) for name in names}, "retrieval": "hybrid"}
    if retrieval.sparse_from == "head":
        return SPLADE_POOLING, {"pooling_strategy": "max"}
    return SPARSE_POOLING, {"sparse_from": retrieval.sparse_from}


# Pooling of instructions ---------------------------------------------------------------------------------------------


def check_instruction_pooling(value: str, vectors: str = "dense") -> str:
    """Return the value if it is one of `POOLED` and fits the kind of vectors, else raise `ValueError`."""
    if value not in POOLED:
        raise ValueError(f"Unknown {INSTRUCTION_POOLING} {value!r}." + alternatives(str(value), POOLED))
    if value != "included" and vectors != "dense":
        raise ValueError(f"Instructions can only be left out of the pooling of dense vectors, got {vectors} ones")
    return value


def instruction_pooling_in(folder: Path) -> str:
    """Read whether a model pools its instructions, as one of `POOLED`."""
    modules = read_modules(folder)
    if not modules or name_of(modules[0]) not in names_of(INSTRUCTED):
        return "included"
    return str(read_json(folder / TRANSFORMER_SETTINGS).get(INSTRUCTION_POOLING, "excluded"))


def write_instruction_pooling(folder: Path, value: str) -> dict[str, Any]:
    """Rewrite Sentence-Transformers' files in a folder, so that its model does or does not pool its instructions.

    Returns:
        No details for `mote.json`: the setting is already recorded with the step.
    """
    included = check_instruction_pooling(value, retrieval_in(folder).kind) == "included"
    modules = read_modules(folder)
    modules[0]["type"] = first_module(modules[0]["type"], included)
    pooled = False
    for module in modules[1:]:
        own = read_json(folder / module["path"] / "config.json", missing_ok=True)
        pools = name_of(module) in ("Pooling", "TextPooling")
        if pools:
            module["type"] = POOLING if included else TEXT_POOLING
        if pools or "include_prompt" in own:
            pooled = True
            write_json(folder / module["path"] / "config.json", {**own, "include_prompt": included})
    if not pooled and not included:
        raise ValueError(f"{folder.name} has no module that pools tokens, so no instruction can be left out of it")
    write_json(folder / MODULES, modules)
    settings = read_json(folder / TRANSFORMER_SETTINGS)
    settings.pop(INSTRUCTION_POOLING, None)
    write_json(folder / TRANSFORMER_SETTINGS, settings if included else {**settings, INSTRUCTION_POOLING: value})
    copy_instruction_code(modules, folder)
    return {}


def first_module(module_type: str, included: bool) -> str:
    """Return the counterpart of a first module that pools its instructions, or of one that leaves them out."""
    for plain, instructed in _INSTRUCTED.items():
        if name_of({"type": module_type}) in names_of((plain, instructed)):
            return plain if included else instructed
    return module_type
