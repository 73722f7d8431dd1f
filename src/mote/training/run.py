"""The run of a recipe, which training and pre-training share: started or resumed, trained to the end, written."""

import contextlib
import logging
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PrinterCallback, Trainer
from typing_extensions import Self

from mote.checkpoints.cards import UPCYCLED
from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import command_line, new_step
from mote.checkpoints.reading import Checkpoint, is_mote, open_checkpoint
from mote.checkpoints.writing import Repository
from mote.files import lock, read_json
from mote.reporting import table
from mote.training.processes import processes
from mote.training.progress import Tracker, draw_curves
from mote.training.recipe import RunSettings, load_recipe
from mote.training.run_folder import (
    CURVES_FILE,
    LOCK_FILE,
    RECIPE_FILE,
    RUN_FILE,
    STATE_FILE,
    RunFolder,
    as_yaml,
    fixed_settings,
    read_checkpoint,
    step_of,
)

FEW_STEPS = 50
LITTLE = 2e-3  # steps x learning rate: twice as much as AdamW, at a falling rate, can move a weight by

logger = logging.getLogger(__name__)


class Run(ABC):
    """The run of a recipe; arguments as in `mote.train`."""

    verb: ClassVar[str]
    recipe_class: ClassVar[type[RunSettings]]

    source: Checkpoint
    checkpoint: Path | None  # from which the run resumes
    model: Any
    names: Any  # config with the model's tasks and instructions
    tokenizer: Any
    data: Any
    arguments: Any
    trainer: Trainer

    def __init__(self, recipe: Any, overrides: Sequence[str] = (), *, overwrite: bool = False) -> None:
        self.recipe: Any = recipe
        if not isinstance(recipe, RunSettings):
            self.recipe = load_recipe(recipe, overrides, self.recipe_class)
        self.folder, self.overwrite, self.tracker = RunFolder(Path(self.recipe.output)), overwrite, Tracker()

    def plan(self, verbose: bool = True) -> str:
        """Describe the run: all settings or the most important ones, data and steps. Writes nothing."""
        self._open()
        recipe, training = self.recipe, self.recipe.training
        length = f"{training.max_steps} steps" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
        short = (
            f"{recipe.name}: {recipe.description}\n{recipe.model.source} → {self.folder.model}\n{length}, batches of "
            f"{training.batch_size:,}, learning rate {training.learning_rate:g} (-v: all settings)\n"
        )
        return f"{as_yaml(recipe) if verbose else short}\n{self._describe_data()}"

    def run(self) -> Path:
        """Run to the end, and return the folder of the model; all processes call this together."""
        state = processes()
        with lock(self.folder.path / LOCK_FILE) if state.is_main_process else contextlib.nullcontext():
            self.prepare()
            before = self.scores()
            state.wait_for_everyone()
            self.train()
            self.finish(before)
            state.wait_for_everyone()
        return self.folder.model

    def prepare(self) -> Self:
        """Load everything that the run needs, and only then change its folder."""
        state = processes()
        with state.main_process_first():
            self._open()
            if state.is_main_process:
                shutil.rmtree(self.folder.start, ignore_errors=True)  # left by a kill, perhaps of another source
        models = self.identify_models()
        if self.checkpoint is not None:
            self.folder.require_same(models=models)  # before another teacher embeds the texts
            self.tracker = Tracker(**read_checkpoint(self.checkpoint, check=state.is_main_process))
        self._load_model()
        with state.main_process_first():  # the others find teachers' embeddings in the cache
            logger.info("%s", self._describe_data())
        identity = self._identity(models)
        if self.checkpoint is not None:
            self.folder.require_same(**identity)
        if self.recipe.training.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trainer = self._build_trainer()
        self.trainer.remove_callback(PrinterCallback)
        if state.is_main_process:
            self.folder.begin(self.recipe, identity, self.checkpoint)
        return self

    def is_done(self) -> bool:
        """Whether this very run has finished; one that another run of the folder began is to be replaced."""
        kept = read_json(self.folder.path / RUN_FILE, missing_ok=True)
        if self.overwrite or not kept:
            return False
        self.source = open_checkpoint(self.recipe.model.source, self.recipe.model.revision)
        self._check()
        models = self.identify_models()
        self._load_data()
        self.overwrite = any(kept[part] != ours for part, ours in self._identity(models).items())
        return not self.overwrite and kept["finished"] and self.folder.model.exists()

    def _identity(self, models: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Return what determines the result."""
        return {
            "settings": fixed_settings(self.recipe),
            "models": models,
            "data": self.data.hashes(),
            "processes": {"number": processes().num_processes},
        }

    def train(self) -> None:
        """Train to the end; a run that stops says from which checkpoint it resumes."""
        try:
            self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self.folder.how_to_resume()) from None
        except Exception:
            logger.error("The run was stopped. %s", self.folder.how_to_resume())
            raise
        if processes().is_main_process:
            self.trainer.state.save_to_json(str(self.folder.path / STATE_FILE))

    @abstractmethod
    def _check(self) -> None:
        """Check what needs neither weights nor data; sets `names` and `tokenizer`."""

    @abstractmethod
    def _load_model(self) -> None:
        """Load the model: sets `model`, `names` and `tokenizer`."""

    @abstractmethod
    def _load_data(self) -> int:
        """Read the data, and count the batches of an epoch; sets `data` and `arguments`."""

    @abstractmethod
    def _build_trainer(self) -> Trainer:
        """Return the trainer, whose callbacks include `RunCallback`."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """Score the model on held-out texts; all processes call this."""

    @abstractmethod
    def finish(self, before: dict[str, float]) -> None:
        """Score the trained model and write its repository, given the scores before; all processes call this."""

    def _open(self) -> None:
        self.checkpoint = self.folder.open(self.recipe, self.overwrite)
        self.source = open_checkpoint(self.recipe.model.source, self.recipe.model.revision)
        self._check()

    def _describe_data(self) -> str:
        """Read the data, and describe them and the steps."""
        training, per_epoch = self.recipe.training, self._load_data()
        steps = training.max_steps if training.max_steps > 0 else math.ceil(per_epoch * training.num_train_epochs)
        only_experts = getattr(training, "only_experts", None)
        if steps < FEW_STEPS or (only_experts and steps * training.learning_rate < LITTLE):
            logger.warning(
                "%d steps at a learning rate of %g hardly train the model: set a smaller training.batch_size (now %d), "
                "more training.num_train_epochs, or a higher training.learning_rate",
                *(steps, training.learning_rate, training.batch_size),
            )
        return f"{self.data}\n\n{steps:,} steps, {self.arguments.get_warmup_steps(steps)} of them warmup"

    def identify_models(self) -> dict[str, str]:
        """Identify the model that the run starts from: by its commit on the Hub, or a hash of its files."""
        return {f"source {self.source.name}": self.source.revision or folder_hash(self.source.folder)}

    def _write(self, before: dict[str, float], after: dict[str, float], made: str, **others: Any) -> None:
        """Write the model's repository, replacing an earlier one, and remove the checkpoints.

        `before` and `after` are scores, `made` is for the cards ("trained from"), `others` are attributes of
        `Repository`.
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
            "training_sets": tracker.training_sets,
            "validation": {"before": before, "after": after},
            "data": [report.__dict__ for report in self.data.reports],
        }

        def add_files(folder: Path) -> dict[str, Any]:
            (folder / RECIPE_FILE).write_text(as_yaml(self.recipe), encoding="utf-8")
            log = self.trainer.state.log_history
            draw_curves(log, folder / CURVES_FILE, f"{self.recipe.name}: {tracker.step} steps")
            return {}

        upcycled = self.recipe.model.kind != "dense" and not is_mote(self.source.config)
        origin = {"name": self.source.public_name, "revision": self.source.revision}
        steps = [new_step("upcycle", sources=[origin], made=UPCYCLED)] if upcycled else []
        steps.append(new_step(self.verb, command=command_line(self.verb, RECIPE_FILE), made=made, **record))
        scores = [
            (name.removeprefix("validation_"), f"{before[name]:.4g}" if name in before else "", f"{value:.4g}")
            for name, value in after.items()
            if "/" not in name  # those of datasets are in the record
        ]
        card = {"recipe": self.recipe, "run": record, "scores": scores}
        repository = Repository(self.model, self.source, steps, after=add_files, training=card, **others)
        repository.write(self.folder.model, WriteOptions(overwrite=True), self.folder.path.name)
        self.folder.remove_checkpoints()
        logger.info("%d steps in %.0f s", tracker.step, tracker.seconds)
        if scores:
            logger.info("%s", table(["held out", "before", "after"], scores))
            if all(abs(value - before.get(name, math.inf)) < 0.05 and value < 99 for name, value in after.items()):
                logger.warning("No validation score has changed: try more steps or a higher learning rate")
