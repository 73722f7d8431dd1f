"""Experts of a MoTE: functions over a model in memory, and artefacts, which hold one expert in files.

`mote.transform(source, out, mote.experts.add, "legal", …)` does the same to a checkpoint on disk.
"""

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
