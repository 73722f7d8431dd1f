"""What training and pre-training runs share: training to the end, resuming, writing the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Trainer

from mote.checkpoints.cards import UPCYCLED
from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step
from mote.checkpoints.reading import Checkpoint, is_mote
from mote.checkpoints.writing import Repository
from mote.training.progress import NonFiniteError, TaskProgress, Tracker, draw_curves
from mote.training.run_folder import CURVES_FILE, RECIPE_FILE, RunFolder, as_yaml


@dataclass
class BaseRun:
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
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch's for a full disk
                raise
            raise OSError(f"The run was stopped: {error}. {self.folder.how_to_resume()}") from error
        finally:
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, TaskProgress):
                    callback.close()

    def write(
        self,
        verb: str,
        record: dict[str, Any],
        made: str,
        **others: Any,
    ) -> None:
        """Write the model's repository, replacing an earlier one, and remove the checkpoints.

        Args:
            verb: The command, `train` or `pretrain`.
            record: Record of the run for `mote.json`.
            made: How the model was made, for the cards: "trained from".
            **others: Attributes of `Repository`.
        """

        def add_files(folder: Path) -> dict[str, Any]:
            (folder / RECIPE_FILE).write_text(as_yaml(self.recipe), encoding="utf-8")
            title = f"{self.recipe.name}: {self.tracker.step} steps"
            draw_curves(self.trainer.state.log_history, folder / CURVES_FILE, title)
            return {}

        upcycled = self.recipe.model.kind != "dense" and not is_mote(self.source.config)
        origin = {"name": self.source.public_name, "revision": self.source.revision}
        steps = [new_step("upcycle", sources=[origin], made=UPCYCLED)] if upcycled else []
        steps.append(new_step(verb, command=command_line(verb, RECIPE_FILE), made=made, **record))
        repository = Repository(self.model, self.source, steps, after=add_files, **others)
        repository.write(self.folder.model, WriteOptions(overwrite=True), self.folder.path.name)
        self.folder.remove_checkpoints()


def identity_of(source: Checkpoint) -> dict[str, str]:
    """Identify the model that a run starts from: by its commit on the Hub, or a hash of its files."""
    return {f"source {source.name}": source.revision or folder_hash(source.folder)}
