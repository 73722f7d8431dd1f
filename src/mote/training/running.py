"""What training and pre-training runs share: training to the end, resuming, writing the model."""

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Trainer

from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step, read_steps
from mote.checkpoints.reading import Checkpoint, is_mote
from mote.checkpoints.writing import write_repository
from mote.training.progress import NonFiniteError, TaskProgress, Tracker, draw_curves, read_log
from mote.training.run_folder import CURVES_FILE, RECIPE_FILE, RunFolder, as_yaml, differences, read_metadata


@dataclass
class Run:
    """A run that is ready to start.

    Attributes:
        recipe: The recipe.
        folder: Folder of the run.
        source: Checkpoint of the model.
        data: What it trains on.
        model: The model.
        tracker: Counts of what was trained on.
        trainer: The library's trainer.
        checkpoint: Checkpoint from which the run resumes.
    """

    recipe: Any
    folder: RunFolder
    source: Checkpoint
    data: Any
    model: Any
    tracker: Tracker
    trainer: Trainer
    checkpoint: Path | None

    def train(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: If the loss, a gradient or a weight becomes non-finite.
            OSError: If a checkpoint cannot be written.
        """
        try:
            self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self.folder.how_to_resume()) from None
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error}. This step was not saved. {self.folder.how_to_resume()} Try a lower training.learning_rate "
                "first."
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            if not _is_write_error(error):
                raise
            raise OSError(f"A checkpoint could not be written: {error}. {self.folder.how_to_resume()}") from error
        finally:
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, TaskProgress):
                    callback.close()

    def write(
        self,
        verb: str,
        record: dict[str, Any],
        made: str,
        write_card: Callable[[Path, dict[str, Any]], None],
        **others: Any,
    ) -> None:
        """Write the model's repository, replacing an earlier one, and remove the checkpoints.

        Args:
            verb: The command, `train` or `pretrain`.
            record: Record of the run for `mote.json`.
            made: How the model was made, for the cards: "trained from".
            write_card: As in `write_repository`.
            **others: As in `write_repository`.
        """
        log = read_log(self.folder.path)

        def add_files(folder: Path) -> dict[str, Any]:
            (folder / RECIPE_FILE).write_text(as_yaml(self.recipe), encoding="utf-8")
            draw_curves(log, folder / CURVES_FILE, f"{self.recipe.name}: {self.tracker.step} steps")
            return {}

        upcycled = self.recipe.model.kind != "dense" and not is_mote(self.source.config)
        earlier = read_steps(self.source.folder)
        origin = {"name": self.source.public_name, "revision": self.source.revision}
        write_repository(
            self.folder.model,
            self.model,
            step=new_step(verb, command=command_line(verb, RECIPE_FILE), made=made, **record),
            sources=[self.source],
            earlier=[*earlier, new_step("upcycle", sources=[origin], made="upcycled from")] if upcycled else earlier,
            write_card=write_card,
            after=add_files,
            options=WriteOptions(overwrite=True),
            **others,
        )
        self.folder.remove_checkpoints()


def models_of(source: Checkpoint, teachers: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Identify the models that a run starts and learns from, for the metadata of its checkpoints.

    Args:
        source: Checkpoint of the model. In a folder, all of its files are read, to hash them.
        teachers: Teacher → its identity.
    """
    of_teachers = {f"teacher {name}": {"version": identity} for name, identity in (teachers or {}).items()}
    if source.revision:
        return {f"source {source.name}": {"commit": source.revision}, **of_teachers}
    return {
        f"source {source.name}": source.sha256_of_weights(),
        f"folder of the source {source.name}": source.sha256_beside_weights(),  # apart: older checkpoints have none
        **of_teachers,
    }


def require_same_models(checkpoint: Path, models: dict[str, dict[str, str]]) -> None:
    """Check that a run resumes with the models that it began with.

    Args:
        checkpoint: The checkpoint.
        models: The run's own, as from `models_of`.

    Raises:
        ValueError: If the source or a teacher has changed. Those of older checkpoints are unknown, and not compared.
    """
    kept = read_metadata(checkpoint).get("models", {})
    for name, ours in models.items():
        theirs = kept.get(name, ours)
        if theirs != ours:
            raise ValueError(
                f"The {name} differs from the one that {checkpoint} was trained with, in "
                f"{', '.join(differences(theirs, ours))}. Resume with that one{_how_to_name(theirs)}, or start over "
                "with `--overwrite`"
            )


def _how_to_name(model: dict[str, str]) -> str:
    """Name the setting that selects a model of the Hub at the commit that a checkpoint records."""
    if "commit" in model:
        return f", with model.revision={model['commit']}"
    commits = re.findall("@([0-9a-f]{40})", model.get("version", ""))
    return f", with `revision: {commits[0]}` among the settings of this `teacher`" if len(commits) == 1 else ""


def restore(checkpoint: Path, metadata: dict[str, Any], tracker: Tracker) -> None:
    """Check that a checkpoint belongs to a run, and restore its counts.

    Args:
        checkpoint: The checkpoint.
        metadata: What the run's own checkpoints record.
        tracker: Tracker of the run.

    Raises:
        ValueError: If the number of processes or the data differ.
    """
    kept = read_metadata(checkpoint)
    if kept["processes"] != metadata["processes"]:
        raise ValueError(
            f"{checkpoint} belongs to a run of {kept['processes']} processes, this one has {metadata['processes']}: "
            "their batches differ"
        )
    if kept["data"] != metadata["data"]:
        differing = ", ".join(key for key in metadata["data"] if kept["data"].get(key) != metadata["data"][key])
        raise ValueError(
            f"The data differ from those that {checkpoint} was trained on: {differing or 'a training set'} changed"
        )
    tracker.restore(kept["tracker"])


def _is_write_error(error: Exception) -> bool:
    """Recognize a full disk: torch and safetensors raise errors of their own, without an errno."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return "inline_container" in str(error) or "os error" in str(error).lower() or "I/O error" in str(error)
