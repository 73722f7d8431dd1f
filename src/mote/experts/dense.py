"""The blocks of a dense model as an expert: above all, of the model that a MoTE was trained from."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.utils import CONFIG_NAME

from mote import hub
from mote.checkpoints.models import load_dense
from mote.checkpoints.reading import Checkpoint, is_mote, open_checkpoint
from mote.checkpoints.staging import EXPERT_FILE
from mote.checkpoints.tensors import weight_name
from mote.experts.artefact import ExpertArtefact, open_artefact
from mote.experts.checks import require_same_shapes

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

BACKBONE = "backbone."  # prefix of the dense model's weights in a MoTE
POOLER = "pooler."  # which a MoTE lacks: it pools by itself


def open_dense_blocks(src: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a dense model, whose blocks can become an expert or part of one, without reading the weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If the source does not exist, or has no config or no weights.
        ValueError: If it is a MoTE, its config is damaged, or its architecture is not supported.
    """
    checkpoint = open_checkpoint(str(src), revision)
    if is_mote(checkpoint.config):
        raise ValueError(f"{src} is a whole MoTE, not a dense model: `mote experts extract` writes one of its experts")
    return checkpoint


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


def opened(word: str) -> str | ExpertArtefact | Checkpoint:
    """Open what a command-line word names: an artefact, or a dense model, whose folder or id has a slash.

    Any other word, the name of an expert, is returned unchanged.
    """
    if "/" not in word:
        return open_artefact(word) if (Path(word) / EXPERT_FILE).is_file() else word
    folder = Path(word) if Path(word).is_dir() else hub.fetch(word, None, [EXPERT_FILE, CONFIG_NAME])
    return open_artefact(word) if (folder / EXPERT_FILE).is_file() else open_dense_blocks(word)
