"""A MoTE on disk is read, changed in memory, and written with all that belongs to it, elsewhere or in its own place."""

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mote.checkpoints import writing as repository
from mote.checkpoints.reading import Source, load_mote, load_tokenizer, open_mote
from mote.checkpoints.staging import Staging, refuse_occupied, refuse_source
from mote.experts.editing import require_task_experts, weights

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in one piece

Report = Callable[[str], None]


class Change:
    """A MoTE on its way from one folder to another, or to the same.

    Args:
        src: The MoTE: a folder or an id on the Hub.
        out: Folder to write. None: the source itself, with `overwrite`.
        revision: Of a source on the Hub.
        overwrite: Replace `out` where it holds a model.
        done: What is done to its experts, for the error where that cannot be, as in "added".

    Attributes:
        source: The MoTE as it is.
        model: The MoTE in memory, which is to be changed.
    """

    def __init__(self, src: str, out: str | Path | None, revision: str | None, overwrite: bool, done: str) -> None:
        """Find the source, make sure that the result may be written, and load the model."""
        self.source = open_mote(src, revision)
        if out is None and not (overwrite and self.source.is_local):
            raise ValueError(
                "Say where to write: a folder with `--out`"
                + (f", or `--overwrite` to change {src} itself" if self.source.is_local else "")
            )
        self.out = self.source.folder if out is None else Path(out)
        self.overwrite = overwrite
        refuse_occupied(self.out, overwrite)
        self.in_place = self.out.resolve() == self.source.folder.resolve()
        if not self.in_place:
            refuse_source(self.out, self.source.folder)
        require_task_experts(self.source.config)
        self.model: Any = load_mote(self.source)
        self.were_copies = _are_copies(self.model) and len(self.model.config.available_experts) > 1

    def write(self, what: list[str], options: list[str], made: str, max_shard_size: str, report: Report) -> Path:
        """Write the changed model with what belongs to it, whole or not at all.

        Args:
            what: Of the command line: its verb, and what follows the source.
            options: Of the command line, beside the folder.
            made: What was done to the source.
            max_shard_size: Of the files with the weights.
            report: Called with each line of progress.
        """
        model, source = self.model, self.source
        place = ["--overwrite"] if self.in_place else ["--out", self.out.resolve().name]
        command = shlex.join(["mote", "experts", what[0], source.public_name, *what[1:], *options, *place])
        tokenizer = load_tokenizer(source)
        name = self.out.resolve().name
        with Staging(self.out, self.overwrite) as folder:
            repository.write_model(model, tokenizer, source, folder, max_shard_size)
            repository.write_sentence_transformer(model, source, folder)
            repository.write_card(
                model,
                source,
                folder,
                name,
                command,
                made=made,
                fresh=self.were_copies and _are_copies(model),
                record_file=repository.EXPERTS_RECORD,
            )
            tasks = model.config.tasks
            experts = {expert: [task for task in tasks if tasks[task] == expert] for expert in model.config.experts}
            record = repository.describe_change(model, source, command, experts=experts)
            repository.write_record(record, folder, repository.EXPERTS_RECORD)
            if self.in_place:
                _keep_other_files(source, folder)
        report(f"Wrote {self.out}: the experts {', '.join(model.config.experts)}")
        return self.out


def _are_copies(model: Any) -> bool:
    """Whether all experts are copies of one another still."""
    if model.config.compression is not None:
        return False
    first, *others = [weights(model, name) for name in model.config.available_experts]
    return all(torch.equal(weight, other[key]) for other in others for key, weight in first.items())


def _keep_other_files(source: Source, folder: Path) -> None:
    """Take along what else lies in the folder of a MoTE that is replaced, by links that cost no space."""
    replaced = {*source.weights, *(source.folder / f"{name}.index.json" for name in _WEIGHTS)}
    for path in source.folder.rglob("*"):
        target = folder / path.relative_to(source.folder)
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder or path in replaced or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target, follow_symlinks=False)
        except (OSError, NotImplementedError):  # of a file system, or a system, without such links
            shutil.copy2(path, target, follow_symlinks=False)
