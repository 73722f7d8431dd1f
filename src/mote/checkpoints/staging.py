"""Atomic folders of models: which may be replaced, and which files in them belong to somebody else and are kept."""

import fnmatch
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from mote.checkpoints.provenance import RECORD_FILE, read_steps, recorded_files
from mote.files import Staging, read_json

EXPERT_FILE = "expert.safetensors"

# Files with these names belong to a model and are removed when it is replaced, as are those that its `mote.json` lists;
# all other files are somebody else's.
_WEIGHTS = (
    *("model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-[0-9]*-of-[0-9]*.bin", "pytorch_model.bin.index.json"),
)
_CODE = ("*_mote.py",)
_MODULES = ("[0-9]*_*/*",)
_MODEL_FILES = (
    *_WEIGHTS,
    *("config.json", "generation_config.json", "modules.json", "README.md", RECORD_FILE),
    *("config_sentence_transformers.json", "sentence_bert_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "sentencepiece*.model", "spiece.model"),
    *("onnx/*.onnx*", "openvino/*.xml", "openvino/*.bin", EXPERT_FILE),
)


def refuse_occupied(out: Path, overwrite: bool = False) -> None:
    """Raise `FileExistsError` if `out` is in use; `overwrite` allows a model or an expert of this package."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} is in use: choose another folder, or replace the model there with `--overwrite`")
    if not (out.is_dir() and _is_ours(out)):
        raise FileExistsError(f"{out} holds something other than a MoTE: it is not overwritten, choose another folder")


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model or an expert of this package, judged by the content of its files."""
    with suppress(OSError, ValueError):
        if read_steps(folder):
            return True
    try:  # a MoTE that was saved by other means
        config = read_json(folder / "config.json")
        fields = (config["backbone_config"], config["experts"])
    except (OSError, ValueError, KeyError):
        return False
    return str(config.get("model_type")).startswith("mote") and tuple(map(type, fields)) == (dict, list)


def refuse_source(out: Path, source: Path) -> None:
    """Raise `ValueError` if the result would replace, contain, or lie inside its source."""
    ours, theirs = out.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ValueError(f"{out} is, holds or lies in the source {source}: choose another folder for the result")


class ModelStaging(Staging):
    """A folder that becomes a model's; see `Staging`.

    Args:
        out: Final place: free, or, with `overwrite`, a model.
        overwrite: Replace an existing model. Files in its folder that are not part of it are kept.
        in_place: The new model is a modification of the existing one: keep all of its other files, too.
    """

    write_errors = (OSError, SafetensorError)  # the second is safetensors' error for a full disk

    def __init__(self, out: Path, overwrite: bool = False, in_place: bool = False) -> None:
        super().__init__(out)
        self.overwrite = overwrite
        self.in_place = in_place

    def before_move(self) -> None:
        """Check the place and the files that `mote.json` lists; keep files of others that are in the place."""
        missing = [name for name in recorded_files(self.folder) if not (self.folder / name).is_file()]
        if missing:
            self.lost(", ".join(missing))
        refuse_occupied(self.out, self.overwrite)
        if self.out.is_dir():
            self._keep_other_files()

    def _keep_other_files(self) -> None:
        """Link files of the replaced folder into the new one, unless they belong to the replaced model."""
        belongs = self._belongs_to_model()
        for path in self.out.rglob("*"):
            name = path.relative_to(self.out)
            target = self.folder / name
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()) and not _matches(name, ("[0-9]*_*",)):  # git needs empty folders
                    target.mkdir(parents=True, exist_ok=True)
            elif not (belongs(name) or os.path.lexists(target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target, follow_symlinks=False)
                except (OSError, NotImplementedError):  # a file or operating system without such links
                    shutil.copy2(path, target, follow_symlinks=False)

    def _belongs_to_model(self) -> Callable[[Path], bool]:
        """Return a function that tells whether a file of the replaced folder goes with the replaced model.

        Patterns as wide as those of code and modules, which other files may match, only count without a `mote.json`.
        """
        recorded: set[str] = set()
        with suppress(ValueError):
            recorded = set(recorded_files(self.out))
        if self.in_place:
            return lambda name: (
                _matches(name, _WEIGHTS) or (_matches(name, _CODE) and (not recorded or name.as_posix() in recorded))
            )
        patterns = _MODEL_FILES if recorded else (*_MODEL_FILES, *_CODE, *_MODULES)
        return lambda name: name.as_posix() in recorded or _matches(name, patterns)


def _matches(name: Path, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns, part by part."""
    return any(
        len(name.parts) == len(parts) and all(map(fnmatch.fnmatchcase, name.parts, parts))
        for parts in (pattern.split("/") for pattern in patterns)
    )
