"""Atomic folders of models: which may be replaced, and which files in them belong to somebody else and are kept."""

import fnmatch
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from mote.checkpoints.provenance import read_steps, recorded_files
from mote.files import Staging, link
from mote.remote.weights_mote import FILES, OLD_FILES

WEIGHTS = (*FILES, *OLD_FILES, SAFE_WEIGHTS_INDEX_NAME)

# Files that a replaced model loses beside those that its `mote.json` lists: weights, also those that others converted
# them into, and settings that readers would combine with the new model's. All other files are kept.
_PICKLES = ("pytorch_model.bin", "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin.index.json")
_OTHERS = (
    *("onnx/*.onnx*", "openvino/*.xml", "openvino/*.bin"),
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)


def refuse_occupied(out: Path, overwrite: bool = False) -> None:
    """Raise `FileExistsError` if `out` is in use; `overwrite` allows a model of this package."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (overwrite and out.is_dir() and _is_ours(out)):
        problem = "holds something other than a MoTE: it is not overwritten, choose another folder"
        in_use = "is in use: choose another folder, or replace the model there with `--overwrite`"
        raise FileExistsError(f"{out} {problem if overwrite else in_use}")


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model of this package: whether a `mote.json` says how it was made."""
    with suppress(OSError, ValueError):
        return bool(read_steps(folder))
    return False


def refuse_source(out: Path, source: Path) -> None:
    """Raise `ValueError` if the result would replace, contain, or lie inside its source."""
    ours, theirs = out.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ValueError(f"{out} is, holds or lies in the source {source}: choose another folder for the result")


class ModelStaging(Staging):
    """A folder that becomes a model's: of a new one, of one that it replaces, or of one that it changes in place.

    Files of others in the folder are kept; in place, all files but weights and code. A model that is changed in place
    must still be the one with these `steps`.
    """

    write_errors = (OSError, SafetensorError)  # the second is safetensors' error for a full disk

    def __init__(self, out: Path, overwrite: bool = False, steps: list[dict[str, Any]] | None = None) -> None:
        super().__init__(out)
        self.overwrite = overwrite
        self.steps = steps

    def before_move(self) -> None:
        """Check the place and the files that `mote.json` lists; keep files of others that are in the place."""
        missing = [name for name in recorded_files(self.folder) if not (self.folder / name).is_file()]
        if missing:
            self.lost(", ".join(missing))
        refuse_occupied(self.out, self.overwrite)
        if self.steps is not None and read_steps(self.out) != self.steps:
            raise ValueError(f"{self.out} was changed by another process in the meantime: run this change again")
        if self.out.is_dir():
            self._keep_other_files()

    def _keep_other_files(self) -> None:
        """Link files of the replaced folder into the new one, unless they belong to the replaced model."""
        recorded = set(recorded_files(self.out))
        for path in self.out.rglob("*"):
            name = path.relative_to(self.out)
            target = self.folder / name
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):  # git needs empty folders
                    target.mkdir(parents=True, exist_ok=True)
            elif not (self._belongs_to_model(name.as_posix(), recorded) or os.path.lexists(target)):
                link(path, target)

    def _belongs_to_model(self, name: str, recorded: set[str]) -> bool:
        """Whether a file goes with the replaced model; of hidden ones, only what a killed `save_pretrained` left."""
        if "/." in f"/{name}":
            return "/.writing-" in f"/{name}"
        if self.steps is not None:
            return _matches(name, (*WEIGHTS, *_PICKLES)) or (name.endswith(".py") and name in recorded)
        return name in recorded or _matches(name, (*WEIGHTS, *_PICKLES, *_OTHERS))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
