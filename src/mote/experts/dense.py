"""The blocks of a dense model as an expert: above all, of the model that a MoTE was trained from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import CONFIG_NAME

from mote import hub
from mote.checkpoints import reading
from mote.checkpoints.models import load_dense
from mote.checkpoints.reading import Checkpoint
from mote.checkpoints.staging import EXPERT_FILE
from mote.checkpoints.tensors import weight_name
from mote.experts.artefact import ExpertArtefact, open_artefact

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

BACKBONE = "backbone."  # prefix of the dense model's weights in a MoTE
POOLER = "pooler."  # which a MoTE lacks: it pools by itself


@dataclass(eq=False)
class DenseBlocks:
    """A dense model on disk, the blocks of which can become an expert, or part of one.

    Attributes:
        checkpoint: The dense model.
    """

    checkpoint: Checkpoint

    @property
    def source(self) -> str:
        """Hub id or folder, as the user gave it."""
        return self.checkpoint.name

    @property
    def folder(self) -> Path:
        """Folder of its files."""
        return self.checkpoint.folder

    @property
    def public_name(self) -> str:
        """Hub id, or the folder's name without its parents."""
        return self.checkpoint.public_name

    def provenance(self) -> dict[str, Any]:
        """Describe the model for `mote.json`."""
        return self.checkpoint.provenance()

    def weights_for(self, model: "MoTEModel") -> dict[str, torch.Tensor]:
        """Read the weights that a MoTE has once per expert, named as in the dense model, with the MoTE's dtype.

        Raises:
            ValueError: If the dense model has other weights than the MoTE's backbone, or its files are damaged.
        """
        state = model.state_dict()
        named = [(weight_name(key, model.config), weight) for key, weight in state.items() if key.startswith(BACKBONE)]
        ours = {found.dense: weight for found, weight in named}
        dense, _ = load_dense(self.checkpoint)
        theirs = {name: weight for name, weight in dense.state_dict().items() if not name.startswith(POOLER)}
        expected, given = ({name: tuple(one.shape) for name, one in of.items()} for of in (ours, theirs))
        if wrong := sorted(name for name in expected | given if expected.get(name) != given.get(name)):
            where = model.name_or_path or "the model"
            raise ValueError(
                f"The blocks of {self.source} do not fit {where}: {len(wrong)} weights are missing, unknown or of "
                f"another shape, such as {wrong[0]!r} ({given.get(wrong[0], 'missing')}, expected "
                f"{expected.get(wrong[0], 'none')}). What works: the dense model that {where} was trained from"
            )
        experts = {found.dense: weight for found, weight in named if found.expert is not None}
        return {name: theirs[name].to(weight) for name, weight in experts.items()}


def open_dense(src: str | Path, revision: str | None = None) -> DenseBlocks:
    """Open a dense model for its blocks, without reading the weights.

    Args:
        src: A folder, or an id on the Hub, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If the source does not exist, or has no config or no weights.
        ValueError: If it is a MoTE, its config is damaged, or its architecture is not supported.
    """
    checkpoint = reading.open_checkpoint(str(src), revision)
    if reading.is_mote(checkpoint.config):
        raise ValueError(f"{src} is a whole MoTE, not a dense model: `mote experts extract` writes one of its experts")
    return DenseBlocks(checkpoint)


def opened(word: str) -> str | ExpertArtefact | DenseBlocks:
    """Open what a command-line word names: an artefact, or a dense model, whose folder or id has a slash.

    Any other word, the name of an expert, is returned unchanged.
    """
    if "/" not in word:
        return open_artefact(word) if (Path(word) / EXPERT_FILE).is_file() else word
    folder = Path(word) if Path(word).is_dir() else hub.fetch(word, None, [EXPERT_FILE, CONFIG_NAME])
    is_model = (folder / CONFIG_NAME).is_file() and not (folder / EXPERT_FILE).is_file()
    return open_dense(word) if is_model else open_artefact(word)
