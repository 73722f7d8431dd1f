"""MoTE: text-embedding models with one feed-forward expert per task."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configuration_mote import MoTEConfig
    from modeling_mote import MoTEModel
    from mote import experts
    from mote.analysis.analyze import Analysis, analyze
    from mote.checkpoints.sentence_transformers import prompts_of
    from mote.checkpoints.transform import transform
    from mote.checkpoints.writing import WriteOptions
    from mote.evaluation.evaluate import evaluate
    from mote.evaluation.scores import Evaluation
    from mote.inference.loading import load, load_encoder
    from mote.inference.offloading import offload, restore
    from mote.inference.runtimes import load_exported
    from mote.training.memory import MemoryEstimate, estimate_memory
    from mote.training.train import train
    from mote.upcycling import UpcyclingOptions, UpcyclingPlan, plan_upcycling, upcycle

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
    "estimate_memory",
    "evaluate",
    "experts",
    "load",
    "load_encoder",
    "load_exported",
    "offload",
    "plan_upcycling",
    "prompts_of",
    "restore",
    "train",
    "transform",
    "upcycle",
]

# Imported when first asked for: torch and transformers take seconds, which `mote --help` need not.
_HOMES = {
    "MoTEConfig": "configuration_mote",
    "MoTEModel": "modeling_mote",
    **dict.fromkeys(["Analysis", "analyze"], "mote.analysis.analyze"),
    **dict.fromkeys(["MemoryEstimate", "estimate_memory"], "mote.training.memory"),
    "Evaluation": "mote.evaluation.scores",
    "evaluate": "mote.evaluation.evaluate",
    **dict.fromkeys(["load", "load_encoder"], "mote.inference.loading"),
    **dict.fromkeys(["offload", "restore"], "mote.inference.offloading"),
    "load_exported": "mote.inference.runtimes",
    "WriteOptions": "mote.checkpoints.writing",
    "prompts_of": "mote.checkpoints.sentence_transformers",
    "transform": "mote.checkpoints.transform",
    "train": "mote.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "experts":
        return import_module("mote.experts")
    return getattr(import_module(_HOMES.get(name, "mote.upcycling")), name)
