"""Experts of a MoTE in memory: add, remove, rename, merge, average, interpolate, compress, export.

`mote.transform(source, out, mote.experts.NAME, …)` does the same to a checkpoint on disk.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mote.checkpoints.tensors import parameter_counts
    from mote.experts.compression import compress
    from mote.experts.editing import add, remove, rename, weights
    from mote.experts.exporting import export
    from mote.experts.merging import average, interpolate, merge

__all__ = [
    "add",
    "average",
    "compress",
    "export",
    "interpolate",
    "merge",
    "parameter_counts",
    "remove",
    "rename",
    "weights",
]

# Imported on first use: torch and transformers take seconds.
_MODULES = {
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
