"""Sentence-Transformers' files of a model: its modules, which vectors it gives, whether it pools its instructions."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mote import remote
from mote.files import read_json, write_json

MODULES = "modules.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
MODEL_SETTINGS = "config_sentence_transformers.json"
SPARSE_ENCODER = "SparseEncoder"
ENCODERS = ("SentenceTransformer", SPARSE_ENCODER, "MultiVectorEncoder")
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

# First module of a model that pools all tokens → of a model that leaves instructions out.
_INSTRUCTED = {
    TRANSFORMER: "instruction_mote.InstructedTransformer",
    OUR_TRANSFORMER: "task_instruction_mote.InstructedMoTETransformer",
}

# Files of our modules that import another one.
_IMPORTS = {"task_instruction_mote.py": ("instruction_mote.py", "sentence_transformer_mote.py")}
_INSTRUCTION_CODE = ("instruction_mote.py", "task_instruction_mote.py")

# The settings of the first module, under the names for which Sentence-Transformers looks, in this order.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


@dataclass
class Module:
    """A module of a Sentence-Transformers model."""

    type: str  # import path of its class; one of ours by the name that it has without this package
    path: str  # its folder within the model's; empty for the first, like its settings
    settings: dict[str, Any] = field(default_factory=dict)  # content of its config.json
    others: dict[str, Any] = field(default_factory=dict)  # other entries of modules.json

    @property
    def name(self) -> str:
        """Name of its class."""
        return self.type.rpartition(".")[2]

    @property
    def pools(self) -> bool:
        """Whether it pools tokens into one vector by a rule without weights."""
        return self.name in ("Pooling", "TextPooling")

    @property
    def code(self) -> Path | None:
        """The file of its class, if it is one of ours."""
        name = f"{self.type.partition('.')[0]}.py"
        return next((file for file in Path(remote.__file__).parent.glob("*_mote.py") if file.name == name), None)


@dataclass
class Pipeline:
    """The settings of a Sentence-Transformers model on disk."""

    modules: list[Module]  # none if the folder is not a Sentence-Transformers model
    transformer: dict[str, Any]  # of the first module
    model: dict[str, Any]  # prompts, similarity, kind of encoder

    @classmethod
    def read(cls, folder: Path) -> "Pipeline":
        """Read the files in a folder."""
        modules = []
        for index, entry in enumerate(read_json(folder / MODULES, list, missing_ok=True)):
            kind, path = entry.pop("type").removeprefix(f"{remote.__name__}."), entry.pop("path")
            if (index or path) and folder.resolve() not in (folder / path).resolve().parents:
                raise ValueError(f"{folder / path} is outside the modules of {folder}: put the module itself there")
            module = Module(kind, path, {}, entry)
            if index:  # only a pooling cannot do without settings
                module.settings = read_json(folder / path / "config.json", missing_ok=not module.pools)
            modules.append(module)
        first = folder / modules[0].path if modules else folder
        settings = (read_json(first / f"sentence_{kind}_config.json", missing_ok=True) for kind in _KINDS)
        return cls(modules, next(filter(None, settings), {}), read_json(folder / MODEL_SETTINGS, missing_ok=True))

    def write(self, folder: Path) -> None:
        """Write the files into a folder, with the code of our modules."""
        listed = [
            {**module.others, "idx": index, "name": str(index), "path": module.path, "type": module.type}
            for index, module in enumerate(self.modules)
        ]
        contents = {MODULES: listed, TRANSFORMER_SETTINGS: self.transformer, MODEL_SETTINGS: self.model}
        contents |= {f"{module.path}/config.json": module.settings for module in self.modules[1:]}
        for name, content in contents.items():
            if read_json(folder / name, type(content), missing_ok=True) != content:
                write_json(folder / name, content)
        code = {file.name for module in self.modules if (file := module.code)}
        code |= {name for file in code for name in _IMPORTS.get(file, ())}
        for name in code.union(_INSTRUCTION_CODE):
            (folder / name).unlink(missing_ok=True)  # it may be a link to the source's
        for name in code:
            shutil.copy(Path(remote.__file__).with_name(name), folder)

    @property
    def place(self) -> str:
        """The folder of the network within the model's: its own, but in models of old releases."""
        return self.modules[0].path if self.modules else ""

    @property
    def encoder(self) -> str:
        """The library's class that loads the model."""
        return str(self.model.get("model_type", ENCODERS[0]))

    @property
    def retrieval(self) -> "Retrieval":
        """The vectors that the model gives."""
        if not self.modules or self.model.get("model_type") != SPARSE_ENCODER:
            return Retrieval()
        names, last = [module.name for module in self.modules], self.modules[-1].settings
        kept = self.model.get("max_active_dims")
        if names[1:] == ["SpladePooling"]:
            return Retrieval("sparse", "head", kept)
        if names[1:] == ["SparsePooling"]:
            return Retrieval("sparse", last["sparse_from"], kept)
        if len(names) == 3 and names[2] == "HybridPooling":
            return Retrieval("hybrid", last["sparse_from"], last["max_active_dims"], last["weight"])
        raise ValueError(
            f"A sparse encoder needs a Transformer and a SpladePooling, got one with the modules {', '.join(names)}"
        )

    def set_retrieval(self, retrieval: "Retrieval") -> None:
        """Let the model give sparse or hybrid vectors."""
        first, *others = self.modules
        hybrid, from_head = retrieval.kind == "hybrid", retrieval.sparse_from == "head"
        # A normalised dense score would be negligible beside the sparse one.
        kept = [module for module in others if hybrid and module.name == "Pooling"]
        if hybrid and not kept:
            raise ValueError("The dense part of hybrid vectors needs a pooling, which this model does not have")
        if hybrid:
            names = ("sparse_from", "weight", "max_active_dims")
            settings = {**{name: getattr(retrieval, name) for name in names}, "retrieval": "hybrid"}
            last = Module(HYBRID_POOLING, "2_HybridPooling", settings)
        elif from_head:
            # The strategy and activation of a source's own stay.
            own = [module for module in others if module.name == "SpladePooling"]
            last = Module(SPLADE_POOLING, "1_SpladePooling", own[0].settings if own else {"pooling_strategy": "max"})
        else:
            last = Module(SPARSE_POOLING, "1_SparsePooling", {"sparse_from": "embeddings"})
        self.modules = [first, *kept, last]
        for name in ("transformer_task", "modality_config", "module_output_name"):  # the task sets them by default
            self.transformer.pop(name, None)
        if from_head:
            self.transformer["transformer_task"] = "fill-mask"
        if from_head and hybrid:  # hidden states, from which the pooling computes the head's logits
            self.transformer["modality_config"] = {
                "text": {"method": "embed", "method_output_name": "last_hidden_state"}
            }
            self.transformer["module_output_name"] = "token_embeddings"
        self.model |= {"model_type": SPARSE_ENCODER, "similarity_fn_name": "dot"}
        self.model.pop("max_active_dims", None)
        if not hybrid and retrieval.max_active_dims is not None:  # the library's limit would cut the dense part, too
            self.model["max_active_dims"] = retrieval.max_active_dims

    @property
    def instruction_pooling(self) -> str:
        """Whether the model pools its instructions, as one of `POOLED`."""
        instructed = self.modules and self.modules[0].type in _INSTRUCTED.values()
        return str(self.transformer.get(INSTRUCTION_POOLING, "excluded")) if instructed else "included"

    def set_instruction_pooling(self, value: str) -> None:
        """Let the model pool its instructions or not, as one of `POOLED`."""
        included = value == "included"
        first, *others = self.modules
        pooling = [module for module in others if module.pools or "include_prompt" in module.settings]
        require_poolable(value, self.retrieval.kind if pooling else "unpooled")
        first.type = first_module(first.type, included)
        for module in pooling:
            module.settings["include_prompt"] = included
            if module.pools:
                module.type = POOLING if included else TEXT_POOLING
        self.transformer.pop(INSTRUCTION_POOLING, None)
        if not included:
            self.transformer[INSTRUCTION_POOLING] = value


def first_module(module_type: str, included: bool) -> str:
    """Return the counterpart of a first module that pools its instructions, or of one that leaves them out."""
    for plain, instructed in _INSTRUCTED.items():
        of_library = module_type.startswith("sentence_transformers.") and module_type.endswith(".Transformer")
        if module_type in (plain, instructed) or (of_library and plain == TRANSFORMER):
            return plain if included else instructed
    return module_type


@dataclass(frozen=True)
class Retrieval:
    """The vectors of a model: dense ones, sparse ones (a weight for each token of the vocabulary), or both."""

    kind: Literal["dense", "sparse", "hybrid"] = "dense"
    # The logits of the head (SPLADE), or the hidden states times the token embeddings (CoT-MoTE, Equation 4).
    sparse_from: Literal["head", "embeddings"] = "head"
    max_active_dims: int | None = None  # weights to keep per text, the largest
    weight: float = 1.0  # of the sparse score in a hybrid one

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


def code_of_others(folder: Path) -> list[str]:
    """Name the classes that a model's files refer to, and that neither this package nor Sentence-Transformers has."""
    named = {module.type for module in Pipeline.read(folder).modules}
    for file in folder.rglob("*config.json"):
        named |= {*re.findall(r'"([^"]*\.[^"]*)"', json.dumps(read_json(file).get("auto_map")))}
    return sorted(name for name in named if not (name.startswith("sentence_transformers.") or Module(name, "").code))


def retrieval_in(folder: Path) -> Retrieval:
    """Read from Sentence-Transformers' files which vectors a model gives."""
    return Pipeline.read(folder).retrieval


def write_retrieval(folder: Path, retrieval: Retrieval) -> None:
    """Rewrite Sentence-Transformers' files in a folder, so that its model gives sparse or hybrid vectors."""
    pipeline = Pipeline.read(folder)
    before = {module.path for module in pipeline.modules}
    pipeline.set_retrieval(retrieval)
    for path in before - {module.path for module in pipeline.modules}:
        shutil.rmtree(folder / path)
    pipeline.write(folder)


def instruction_pooling_in(folder: Path) -> str:
    """Read whether a model pools its instructions, as one of `POOLED`."""
    return Pipeline.read(folder).instruction_pooling


def write_instruction_pooling(folder: Path, value: str) -> dict[str, Any]:
    """Rewrite Sentence-Transformers' files, so that a model does or does not pool its instructions; no details."""
    pipeline = Pipeline.read(folder)
    pipeline.set_instruction_pooling(value)
    pipeline.write(folder)
    return {}


def require_poolable(value: str, vectors: str) -> None:
    """Raise `ValueError` if a model with a kind of vectors cannot leave instructions out as asked."""
    if value != "included" and vectors != "dense":
        raise ValueError(f"Instructions can only be left out of the pooling of dense vectors, got {vectors} ones")
