"""MoTE: text-embedding models with one feed-forward expert per task."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configuration_mote import MoTEConfig
    from modeling_mote import MoTEModel
    from mote.analysis.analyze import Analysis, analyze
    from mote.checkpoints.sentence_transformers import prompts_of
    from mote.checkpoints.transform import transform
    from mote.checkpoints.writing import WriteOptions
    from mote.evaluation.evaluate import evaluate
    from mote.evaluation.scores import Evaluation
    from mote.experts.compression import compress, compress_experts
    from mote.experts.exporting import export
    from mote.experts.life import (
        ExpertList,
        add_expert,
        extract_expert,
        list_experts,
        merge_experts,
        remove_expert,
        rename_expert,
    )
    from mote.experts.merging import average, average_experts, interpolate, interpolate_experts
    from mote.inference.bulk import encode
    from mote.inference.runtimes import load_exported
    from mote.training.memory import MemoryEstimate, estimate_memory
    from mote.training.train import train
    from mote.upcycling import UpcyclingPlan, plan_upcycling, upcycle

__all__ = [
    "Analysis",
    "Evaluation",
    "ExpertList",
    "MemoryEstimate",
    "MoTEConfig",
    "MoTEModel",
    "UpcyclingPlan",
    "WriteOptions",
    "add_expert",
    "analyze",
    "average",
    "average_experts",
    "compress",
    "compress_experts",
    "encode",
    "estimate_memory",
    "evaluate",
    "export",
    "extract_expert",
    "interpolate",
    "interpolate_experts",
    "list_experts",
    "load_exported",
    "merge_experts",
    "plan_upcycling",
    "prompts_of",
    "remove_expert",
    "rename_expert",
    "train",
    "transform",
    "upcycle",
]

# Imported when first asked for: torch and transformers take seconds, which `mote --help` need not.
_HOMES = {
    "MoTEConfig": "configuration_mote",
    "MoTEModel": "modeling_mote",
    **dict.fromkeys(["Analysis", "analyze"], "mote.analysis.analyze"),
    **dict.fromkeys(["average", "average_experts", "interpolate", "interpolate_experts"], "mote.experts.merging"),
    **dict.fromkeys(["compress", "compress_experts"], "mote.experts.compression"),
    **dict.fromkeys(
        [
            "ExpertList",
            "add_expert",
            "extract_expert",
            "list_experts",
            "merge_experts",
            "remove_expert",
            "rename_expert",
        ],
        "mote.experts.life",
    ),
    **dict.fromkeys(["MemoryEstimate", "estimate_memory"], "mote.training.memory"),
    "Evaluation": "mote.evaluation.scores",
    "encode": "mote.inference.bulk",
    "evaluate": "mote.evaluation.evaluate",
    "export": "mote.experts.exporting",
    "load_exported": "mote.inference.runtimes",
    "WriteOptions": "mote.checkpoints.writing",
    "prompts_of": "mote.checkpoints.sentence_transformers",
    "transform": "mote.checkpoints.transform",
    "train": "mote.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "mote.upcycling")), name)
