"""Experts from disk: extracted ones, and the blocks of a dense model, as of the one that a MoTE was trained from."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers.utils import CONFIG_NAME

from mote import hub
from mote.checkpoints.models import load_dense
from mote.checkpoints.reading import Checkpoint, open_checkpoint
from mote.checkpoints.staging import EXPERT_FILE
from mote.checkpoints.tensors import weight_name
from mote.experts.artefact import HEADER, ExpertArtefact
from mote.experts.checks import require_same_shapes

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

BACKBONE = "backbone."  # prefix of the dense model's weights in a MoTE
POOLER = "pooler."  # which a MoTE lacks: it pools by itself


def open_expert(src: str | Path, revision: str | None = None) -> ExpertArtefact | Checkpoint:
    """Open what an expert can start from: an extracted expert, or a dense model. Their weights are not read.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.
    """
    folder, commit = Path(src), None
    if not folder.is_dir():
        folder = hub.fetch(str(src), revision, [EXPERT_FILE, CONFIG_NAME])
        commit = folder.name  # the cache names a snapshot after its commit
    if not (folder / EXPERT_FILE).is_file():
        return open_checkpoint(str(src), revision)
    with safe_open(folder / EXPERT_FILE, framework="pt") as file:
        description = json.loads(file.metadata()[HEADER])
    return ExpertArtefact(str(src), folder, commit, **description)


def open_word(word: str) -> str | ExpertArtefact | Checkpoint:
    """Open what a command-line word names: an expert on disk, whose folder or id has a slash or which was extracted.

    Any other word, the name of an expert, is returned unchanged.
    """
    return open_expert(word) if "/" in word or (Path(word) / EXPERT_FILE).is_file() else word


def weights_of_blocks(checkpoint: Checkpoint, model: "MoTEModel") -> dict[str, torch.Tensor]:
    """Read the weights that a MoTE has once per expert, named as in the dense model, with the MoTE's dtype."""
    where, state = model.name_or_path or "the model", model.state_dict()
    named = [(weight_name(key, model.config), weight) for key, weight in state.items() if key.startswith(BACKBONE)]
    dense, _ = load_dense(checkpoint)
    theirs = {name: weight for name, weight in dense.state_dict().items() if not name.startswith(POOLER)}
    require_same_shapes(
        theirs,
        {found.dense: weight for found, weight in named},
        f"The blocks of {checkpoint.name} do not fit {where}",
        f". What works: the dense model that {where} was trained from",
    )
    return {found.dense: theirs[found.dense].to(weight) for found, weight in named if found.expert is not None}
