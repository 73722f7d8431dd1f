"""Experts of a MoTE: functions over a model in memory, and artefacts, which hold one expert in files.

`mote.transform(source, out, mote.experts.add, "legal", …)` does the same to a checkpoint on disk.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mote.checkpoints.tensors import parameter_counts
    from mote.experts.artefact import ExpertArtefact, ExpertList, extract, list_experts, open_expert
    from mote.experts.compression import compress
    from mote.experts.editing import add, remove, rename, weights
    from mote.experts.exporting import export
    from mote.experts.merging import average, interpolate, merge

__all__ = [
    "ExpertArtefact",
    "ExpertList",
    "add",
    "average",
    "compress",
    "export",
    "extract",
    "interpolate",
    "list_experts",
    "merge",
    "open_expert",
    "parameter_counts",
    "remove",
    "rename",
    "weights",
]

# Imported on first use: torch and transformers take seconds.
_MODULES = {
    **dict.fromkeys(
        ["ExpertArtefact", "ExpertList", "extract", "list_experts", "open_expert"], "mote.experts.artefact"
    ),
    **dict.fromkeys(["add", "remove", "rename", "weights"], "mote.experts.editing"),
    **dict.fromkeys(["average", "interpolate", "merge"], "mote.experts.merging"),
    "compress": "mote.experts.compression",
    "export": "mote.experts.exporting",
    "parameter_counts": "mote.checkpoints.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
