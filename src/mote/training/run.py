"""The run of a recipe, which training and pre-training share: begun or resumed, trained to the end, written."""

import contextlib
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from transformers import PrinterCallback, Trainer, TrainingArguments
from typing_extensions import Self

from mote.checkpoints.cards import UPCYCLED
from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step
from mote.checkpoints.reading import Checkpoint, is_mote, open_checkpoint
from mote.checkpoints.writing import Repository
from mote.files import read_json
from mote.reporting import table
from mote.training.arguments import describe_steps
from mote.training.processes import processes, require_sharded_checkpoints
from mote.training.progress import NonFiniteError, RunCallback, TaskProgress, Tracker, draw_curves
from mote.training.recipe import RunSettings
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import (
    CHECKPOINT_FILE,
    CURVES_FILE,
    RECIPE_FILE,
    RunFolder,
    as_yaml,
    fixed_settings,
    step_of,
)

logger = logging.getLogger(__name__)


class Run(ABC):
    """The run of a recipe; arguments as in `mote.train`.

    Attributes:
        recipe: The recipe.
        folder: Folder of the run.
        tracker: Counts of what was trained on.
        source: Checkpoint of the model.
        checkpoint: Checkpoint from which the run resumes.
        model: The model.
        names: Config with the model's tasks and instructions.
        tokenizer: The model's tokenizer.
        data: What it trains on.
        trainer: The library's trainer.
    """

    verb: ClassVar[str]
    recipe_class: ClassVar[type[RunSettings]]
    score_name: ClassVar[str]
    """What `scores` gives, in the summary."""

    source: Checkpoint
    checkpoint: Path | None
    model: Any
    names: Any
    tokenizer: Any
    data: Any
    arguments: TrainingArguments
    trainer: Trainer

    def __init__(self, recipe: Any, overrides: Sequence[str] = (), *, overwrite: bool = False) -> None:
        self.recipe: Any = recipe
        if not isinstance(recipe, RunSettings):
            self.recipe = load_recipe(recipe, overrides, self.recipe_class)
        self.folder, self.overwrite, self.tracker = RunFolder(Path(self.recipe.output)), overwrite, Tracker()
        self._check_settings()
        self.folder.check(self.recipe)

    # A run -----------------------------------------------------------------------------------------------------------

    def plan(self) -> str:
        """Describe the run: settings, data and steps. Writes nothing."""
        self._open()
        self._check_model()
        return f"{as_yaml(self.recipe)}\n{self._describe_data()}"

    def run(self) -> Path:
        """Run to the end, and return the folder of the model; all processes call this together."""
        state = processes()
        with self.folder.lock() if state.is_main_process else contextlib.nullcontext():
            self.prepare()
            before = self._scores_of_start()
            self.train()
            self.finish(before)
            state.wait_for_everyone()
        return self.folder.model

    def prepare(self) -> Self:
        """Load everything that the run needs, and only then change its folder."""
        state = processes()
        require_sharded_checkpoints()
        with state.main_process_first():
            self._open()
            if state.is_main_process:
                shutil.rmtree(self.folder.start, ignore_errors=True)  # left by a kill, perhaps of another source
        models = self.identify_models()
        if self.checkpoint is not None:
            self.folder.require_same(models=models)  # before another teacher embeds the texts
        self._load_model()
        with state.main_process_first():  # the others find teachers' embeddings in the cache
            logger.info("%s", self._describe_data())
        identity: dict[str, dict[str, Any]] = {
            "settings": fixed_settings(self.recipe),
            "models": models,
            "data": self.data.hashes(),
            "processes": {"number": state.num_processes},
        }
        if self.checkpoint is not None:
            self.folder.require_same(**identity)
            self.tracker.restore(read_json(self.checkpoint / CHECKPOINT_FILE))
        if self.recipe.training.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trainer = self._build_trainer()
        self.trainer.remove_callback(PrinterCallback)
        if state.is_main_process:
            self.folder.begin(self.recipe, identity, self.checkpoint)
        return self

    def train(self) -> None:
        """Train to the end; errors say from which checkpoint the run resumes."""
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

    # What training and pre-training do in their own ways --------------------------------------------------------------

    @abstractmethod
    def _check_settings(self) -> None:
        """Check the recipe and how the processes were launched, before anything is read."""

    @abstractmethod
    def _check_model(self) -> None:
        """Check that the source suits the recipe, without its weights; sets `names` and `tokenizer`."""

    @abstractmethod
    def _load_model(self) -> None:
        """Load the model: sets `model`, `names` and `tokenizer`."""

    @abstractmethod
    def _load_data(self) -> Any:
        """Read the data."""

    @abstractmethod
    def _build_arguments(self) -> TrainingArguments:
        """Return the trainer's arguments."""

    @abstractmethod
    def _count_batches(self) -> int:
        """Count the batches of an epoch."""

    @abstractmethod
    def _build_trainer(self) -> Trainer:
        """Return the trainer, whose callbacks include those of `_callbacks`."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Score the model on held-out texts."""

    @abstractmethod
    def _scores_of_start(self) -> dict[str, float]:
        """Return the scores before the run; all processes call this."""

    @abstractmethod
    def finish(self, before: dict[str, float]) -> None:
        """Score the trained model and write its repository, replacing an earlier one; all processes call this."""

    # Parts ------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.checkpoint = self.folder.open(self.recipe, self.overwrite)
        self.source = open_checkpoint(self.recipe.model.source, self.recipe.model.revision)

    def _describe_data(self) -> str:
        """Read the data, and describe them and the steps."""
        self.data = self._load_data()
        self.arguments = self._build_arguments()
        return f"{self.data}\n\n{describe_steps(self.recipe.training, self._count_batches(), self.arguments)}"

    def identify_models(self) -> dict[str, str]:
        """Identify the model that the run starts from: by its commit on the Hub, or a hash of its files."""
        return {f"source {self.source.name}": self.source.revision or folder_hash(self.source.folder)}

    def _callbacks(self, losses: dict[str, Any]) -> list[Any]:
        """Return the callbacks that follow a run, given the losses with weights of their own."""
        run = RunCallback(self.tracker, self.folder.path, losses, scaled=self.recipe.training.fp16)
        return [run, TaskProgress()]

    def _write(
        self,
        details: dict[str, Any],
        scores: Sequence[tuple[str, str, str]],
        made: str,
        card: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Write the model's repository, replacing an earlier one, remove the checkpoints, and print a summary.

        Args:
            details: Details of the run for `mote.json`, beside those of every run.
            scores: Names and scores on held-out texts before and after.
            made: How the model was made, for the cards: "trained from".
            card: Values for the card's section on training, beside the record of the run.
            **others: Attributes of `Repository`.
        """
        tracker, device = self.tracker, processes().device
        record = {
            "recipe": self.recipe.name,
            "steps": tracker.step,
            "seconds": round(tracker.seconds, 1),
            "resumed_from_step": None if self.checkpoint is None else step_of(self.checkpoint),
            "processes": processes().num_processes,
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{torch.get_num_threads()} CPU threads",
            "tasks": tracker.tasks,
            "training_sets": tracker.training_sets,
            **details,
            "data": [report.__dict__ for report in self.data.reports],
        }

        def add_files(folder: Path) -> dict[str, Any]:
            (folder / RECIPE_FILE).write_text(as_yaml(self.recipe), encoding="utf-8")
            title = f"{self.recipe.name}: {tracker.step} steps"
            draw_curves(self.trainer.state.log_history, folder / CURVES_FILE, title)
            return {}

        upcycled = self.recipe.model.kind != "dense" and not is_mote(self.source.config)
        origin = {"name": self.source.public_name, "revision": self.source.revision}
        steps = [new_step("upcycle", sources=[origin], made=UPCYCLED)] if upcycled else []
        steps.append(new_step(self.verb, command=command_line(self.verb, RECIPE_FILE), made=made, **record))
        training = None if card is None else {"recipe": self.recipe, "run": record, "scores": scores, **card}
        repository = Repository(self.model, self.source, steps, after=add_files, training=training, **others)
        repository.write(self.folder.model, WriteOptions(overwrite=True), self.folder.path.name)
        self.folder.remove_checkpoints()
        seen = [(task, f"{count['texts']:,}", f"{count['tokens']:,}") for task, count in tracker.tasks.items()]
        parts = [f"{tracker.step} steps in {tracker.seconds:,.0f} s", table(["task", "texts", "tokens"], seen)]
        parts += [table([self.score_name, "before", "after"], scores)] if scores else []
        logger.info("%s", "\n\n".join(parts))
