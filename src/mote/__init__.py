"""MoTE: text-embedding models with one feed-forward expert per task."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mote import experts
    from mote.analysis.analyze import analyze
    from mote.analysis.results import Analysis
    from mote.checkpoints.cards import write_card
    from mote.checkpoints.definitions import instruction_with
    from mote.checkpoints.options import WriteOptions
    from mote.checkpoints.sentence_transformers import prompts_of
    from mote.checkpoints.transform import transform
    from mote.corpora.embed import embed_corpus
    from mote.corpora.filtering import filter_pairs
    from mote.corpora.mining import mine_negatives
    from mote.evaluation.evaluate import evaluate
    from mote.evaluation.metadata import model_meta
    from mote.evaluation.scores import Evaluation
    from mote.experts.configuring import configure
    from mote.inference.loading import load, load_encoder
    from mote.inference.offloading import offload, restore
    from mote.inference.runtimes import load_exported
    from mote.lengthening import lengthen
    from mote.remote.configuration_mote import MoTEConfig
    from mote.remote.modeling_mote import MoTEModel
    from mote.training.memory import MemoryEstimate, estimate_memory
    from mote.training.pretraining import pretrain
    from mote.training.train import train
    from mote.upcycling.options import UpcyclingOptions
    from mote.upcycling.plan import UpcyclingPlan, plan_upcycling
    from mote.upcycling.upcycle import upcycle

    __version__: str

__all__ = [
    "Analysis",
    "Evaluation",
    "MemoryEstimate",
    "MoTEConfig",
    "MoTEModel",
    "UpcyclingOptions",
    "UpcyclingPlan",
    "WriteOptions",
    "analyze",
    "configure",
    "embed_corpus",
    "estimate_memory",
    "evaluate",
    "experts",
    "filter_pairs",
    "instruction_with",
    "lengthen",
    "load",
    "load_encoder",
    "load_exported",
    "mine_negatives",
    "model_meta",
    "offload",
    "plan_upcycling",
    "pretrain",
    "prompts_of",
    "restore",
    "train",
    "transform",
    "upcycle",
    "write_card",
]

# Imported on first use: torch and transformers take seconds, for which `mote --help` should not wait.
_MODULES = {
    "Analysis": "mote.analysis.results",
    "analyze": "mote.analysis.analyze",
    "Evaluation": "mote.evaluation.scores",
    **dict.fromkeys(["MemoryEstimate", "estimate_memory"], "mote.training.memory"),
    "MoTEConfig": "mote.remote.configuration_mote",
    "MoTEModel": "mote.remote.modeling_mote",
    "UpcyclingOptions": "mote.upcycling.options",
    **dict.fromkeys(["UpcyclingPlan", "plan_upcycling"], "mote.upcycling.plan"),
    "upcycle": "mote.upcycling.upcycle",
    "WriteOptions": "mote.checkpoints.options",
    "configure": "mote.experts.configuring",
    "embed_corpus": "mote.corpora.embed",
    "filter_pairs": "mote.corpora.filtering",
    "mine_negatives": "mote.corpora.mining",
    "evaluate": "mote.evaluation.evaluate",
    "instruction_with": "mote.checkpoints.definitions",
    "lengthen": "mote.lengthening",
    **dict.fromkeys(["load", "load_encoder"], "mote.inference.loading"),
    "load_exported": "mote.inference.runtimes",
    **dict.fromkeys(["offload", "restore"], "mote.inference.offloading"),
    "model_meta": "mote.evaluation.metadata",
    "prompts_of": "mote.checkpoints.sentence_transformers",
    "pretrain": "mote.training.pretraining",
    "train": "mote.training.train",
    "transform": "mote.checkpoints.transform",
    "write_card": "mote.checkpoints.cards",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("mote-embeddings")
    if name == "experts":
        return import_module("mote.experts")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
