"""Chains: mining of negatives alternates with training, and one stage may mine with the model of another."""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]
from pydantic import Field, field_validator

from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import open_checkpoint
from mote.corpora.folder import write_whole
from mote.corpora.mining import MiningSettings
from mote.corpora.negatives import mine_negatives
from mote.corpora.run import Teacher, locate
from mote.data.rows import HUB, find_datasets
from mote.data.settings import Settings
from mote.remote.configuration_mote import alternatives
from mote.reporting import HOW_TO_RESUME, table
from mote.training.names import names_of
from mote.training.processes import processes
from mote.training.recipe import SHIPPED, Recipe
from mote.training.recipe_files import load_recipe, parse_recipe
from mote.training.run_folder import RECIPE_FILE, RunFolder, as_yaml, differences, fixed_settings
from mote.training.task_settings import DataSettings
from mote.training.train import check_recipe, train

logger = logging.getLogger(__name__)

CHAIN_FILE = "chain.yaml"  # marks the folder of a chain
RECORD_FILE = "chain.json"


class StageSettings(Settings):
    """A stage: negatives are mined, then a model is trained on them.

    Attributes:
        teacher: Model that mines, as settings of `mote.corpora.Teacher`; its `model` is `bm25`, the name of an earlier
            stage, or a model.
        mining: Which candidates become negatives, as settings of `mote.corpora.MiningSettings`.
        recipe: Recipe of the training: a file, or the name of a shipped one.
        train: Settings that override the recipe and the chain's `train`. `model.source` may be the name of an earlier
            stage.
    """

    teacher: Teacher
    mining: MiningSettings = MiningSettings()
    recipe: str
    train: dict[str, Any] = {}


class Chain(Settings):
    """Stages that follow one another.

    Attributes:
        name: Name of the chain.
        description: Purpose of the chain.
        datasets: Datasets that negatives are mined for: paths and patterns in the data folder.
        data: Settings of all datasets, for all stages.
        train: Settings that override the recipes of all stages.
        stages: Name → stage, in order.
        output: Folder of the chain. Default: `runs/NAME`.
    """

    name: str = "custom"
    description: str = ""
    datasets: list[str] = Field(min_length=1)
    data: DataSettings = DataSettings()
    train: dict[str, Any] = {}
    stages: dict[str, StageSettings]
    output: str = ""

    PLACE: ClassVar[Any] = SHIPPED / "chains"

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: dict[str, StageSettings]) -> dict[str, StageSettings]:
        if not stages:
            raise ValueError("the chain has no stages")
        earlier: list[str] = []
        for name, stage in stages.items():
            if not re.fullmatch(r"\w[\w-]*", name):
                raise ValueError(f"the stage {name!r} names a folder: use letters, digits, - and _")
            model = stage.teacher.model
            if model in stages and model not in earlier:
                raise ValueError(
                    f"{name}: its teacher is the model of {model!r}, which is trained later; earlier stages: "
                    f"{', '.join(earlier) or 'none'}"
                )
            earlier.append(name)
        return stages

    @property
    def folder(self) -> Path:
        """Folder of the chain."""
        return Path(self.output or f"runs/{self.name}")


@dataclass
class Stage:
    """A stage that is ready to run.

    Attributes:
        name: Stage name.
        teacher: Model that mines.
        mining: Which candidates become negatives.
        mined: Folder of the datasets with negatives.
        mined_with: `bm25`, an earlier stage, or a model.
        recipe: The training.
    """

    name: str
    teacher: Teacher
    mining: MiningSettings
    mined: Path
    mined_with: str
    recipe: Recipe

    @property
    def run(self) -> RunFolder:
        """Folder of the training."""
        return RunFolder(Path(self.recipe.output))

    def is_trained(self) -> bool:
        """Whether its model exists.

        Raises:
            ValueError: If the model was trained by another recipe.
        """
        if not self.run.model.is_dir() or self.run.last_checkpoint() is not None:
            return False
        theirs = parse_recipe(yaml.safe_load((self.run.path / RECIPE_FILE).read_text(encoding="utf-8")))
        if differing := differences(fixed_settings(theirs), fixed_settings(self.recipe)):
            raise ValueError(
                f"{self.run.model} was trained by another recipe, which differs in {', '.join(differing)}: choose "
                "another `output`, or start over with `--overwrite`"
            )
        return True

    def require_same_source(self) -> None:
        """Check that its model was trained from its source as it is now, which an earlier stage may have replaced.

        Raises:
            ValueError: If it was not.
        """
        source = open_checkpoint(self.recipe.model.source, self.recipe.model.revision)
        trained_from = read_steps(self.run.model)[-1]["sources"][0]
        if source.is_local and trained_from["weights"] != source.sha256_of_weights():
            raise ValueError(
                f"{self.run.model} was trained from other weights than {source.name} has now: remove {self.run.path} "
                "to train this stage again, or start over with `--overwrite`"
            )


def chain(recipe: Chain | str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Run a chain: for each stage mine negatives, then train on them.

    The same call resumes an interrupted chain, even in the middle of a stage, with the same result.

    Args:
        recipe: A chain, its file, or the name of a shipped one.
        overrides: `key=value` pairs that override its settings.
        overwrite: Discard a finished or interrupted chain and start over.

    Returns:
        Folder of the last stage's model. Each stage has `OUTPUT/STAGE/mined`, its datasets with negatives, and
        `OUTPUT/STAGE/train`, its training; `OUTPUT/chain.json` sums them up.

    Raises:
        FileNotFoundError: If a recipe, model or dataset does not exist.
        FileExistsError: If the chain has finished already, or its folder holds something else.
        BlockingIOError: If another process is running in the folder.
        ValueError: If a setting of any stage is invalid, before the first stage begins; or as from `mine_negatives`
            and `train`.
        OSError: If the disk is full or read-only.
    """
    if processes().num_processes > 1:
        raise ValueError(
            "A chain runs in one process: for several GPUs, alternate `mote mine` and `accelerate launch -m mote train`"
        )
    settings = recipe if isinstance(recipe, Chain) else load_recipe(recipe, overrides, Chain)
    stages = prepare(settings)
    _refuse_other(settings.folder)
    trained = [] if overwrite else [stage.is_trained() for stage in stages]
    if trained and all(trained) and stages[-1].name in _records(settings.folder):
        raise FileExistsError(
            f"{settings.folder} holds a finished chain: its model is in {stages[-1].run.model}. Choose another "
            "`output`, or start over with `--overwrite`"
        )
    with RunFolder(settings.folder).lock():
        if overwrite:
            for stage in stages:
                shutil.rmtree(settings.folder / stage.name, ignore_errors=True)
            (settings.folder / RECORD_FILE).unlink(missing_ok=True)
        (settings.folder / CHAIN_FILE).write_text(as_yaml(settings), encoding="utf-8")
        for number, stage in enumerate(stages, start=1):
            logger.info("Stage %d of %d: %s", number, len(stages), stage.name)
            try:
                if stage.is_trained():
                    stage.require_same_source()
                mine_negatives(settings.datasets, stage.mined, stage.teacher, stage.mining, data=settings.data.place)
                if not stage.is_trained():
                    train(stage.recipe)
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(f"in the stage {stage.name}: {interrupt}; {HOW_TO_RESUME}") from None
            _record(settings.folder, stage)
    logger.info("\n%s", _summary(settings.folder))
    return stages[-1].run.model


def plan_chain(recipe: Chain | str | Path, overrides: Sequence[str] = ()) -> str:
    """Describe a chain: its settings, and each stage. Raises the errors that `chain` raises before the first stage."""
    settings = recipe if isinstance(recipe, Chain) else load_recipe(recipe, overrides, Chain)
    stages = prepare(settings)
    _refuse_other(settings.folder)
    names = [location.name for location in locate(settings.datasets, settings.data.place, "train", None)]
    rows = [["stage", "negatives by", "recipe", "source", "output", "trained"]]
    for stage in stages:
        done = "yes" if stage.is_trained() else "no"
        source = stage.recipe.model.source
        rows.append([stage.name, stage.mined_with, stage.recipe.name, source, stage.recipe.output, done])
    return "\n".join([as_yaml(settings), f"datasets: {', '.join(names)}", "", table(rows[0], rows[1:])])


def prepare(settings: Chain) -> list[Stage]:
    """Check all stages of a chain, before any begins.

    Raises:
        FileNotFoundError: If a recipe, model or dataset does not exist.
        ValueError: If a setting is invalid; the message names the stage.
    """
    locations = locate(settings.datasets, settings.data.place, "train", None)
    models: dict[str, Path] = {}
    tasks: dict[str, Any] = {}
    stages = []
    for name, given in settings.stages.items():
        try:
            stage = _stage(settings, name, given, models)
            tasks[name] = _check(stage, settings, {location.name for location in locations}, models)
            _check_teacher(stage, given.teacher, tasks)
        except (ValueError, FileNotFoundError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
            raise kind(f"Stage {name}: {error}") from error
        models[name] = stage.run.model
        stages.append(stage)
    return stages


def _stage(settings: Chain, name: str, given: StageSettings, models: dict[str, Path]) -> Stage:
    """Combine a stage's settings: its recipe, overridden by the chain's `train`, its own `train`, and its folders."""
    place = settings.folder / name
    common = {key: getattr(settings.data, key) for key in settings.data.model_fields_set}
    fixed = {"data": {**common, "folder": str(place / "mined")}, "output": str(place / "train")}
    recipe = load_recipe(given.recipe, changes=(settings.train, given.train, fixed))
    if recipe.model.source in models:
        recipe.model.source, recipe.model.trust_remote_code = str(models[recipe.model.source]), True
    teacher = given.teacher
    if teacher.model in models:
        teacher = replace(teacher, model=str(models[teacher.model]), trust_remote_code=True)
    return Stage(name, teacher, given.mining, place / "mined", given.teacher.model, recipe)


def _check(stage: Stage, settings: Chain, mined: set[str], models: dict[str, Path]) -> Any:
    """Check a stage's training; return the tasks of its model, None if they are those of an earlier stage."""
    check_recipe(stage.recipe)
    for name, task in stage.recipe.tasks.items():
        below = [one for one in task.datasets if not (one.path.startswith(HUB) or Path(one.path).is_absolute())]
        for dataset in below:
            names = {one.name for one in find_datasets(dataset, settings.data.place)}
            if moved := sorted(one for one in names & mined if not fnmatch(one, dataset.path.rstrip("/"))):
                raise ValueError(
                    f"tasks.{name}: the mined rows of {dataset.path} are in a folder {moved[0]}, where the stage would "
                    f"not find them: move the dataset to {moved[0]}/{dataset.split}.jsonl below the data folder"
                )
            if others := names - mined:
                raise ValueError(
                    f"tasks.{name}: no negatives are mined for {', '.join(sorted(others))}, so the stage would not "
                    f"find it: add it to the chain's `datasets` ({', '.join(settings.datasets)}), or name it by its "
                    "full path"
                )
    if Path(stage.recipe.model.source) in models.values():
        return None
    return names_of(stage.recipe, open_checkpoint(stage.recipe.model.source, stage.recipe.model.revision)).tasks


def _check_teacher(stage: Stage, given: Teacher, tasks: dict[str, Any]) -> None:
    """Check that the teacher exists, or will by then, and has the tasks that it is to mine with."""
    if given.model not in tasks:
        stage.teacher.find()
        return
    known = tasks[given.model]
    for task in (given.query_task, given.document_task) if known is not None else ():
        if task not in known:
            raise ValueError(f"teacher: the model of {given.model!r} has no task {task!r}." + alternatives(task, known))


def _refuse_other(folder: Path) -> None:
    """Raise `FileExistsError` if a folder holds something other than a chain."""
    present = {path.name for path in folder.iterdir()} - {".lock"} if folder.is_dir() else set()
    if present and CHAIN_FILE not in present:
        raise FileExistsError(f"{folder} holds something other than a chain: choose another `output`")


def _records(folder: Path) -> dict[str, Any]:
    """Read the chain's record: the finished stages; empty before the first is."""
    with suppress(FileNotFoundError):
        return json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    return {}


def _record(folder: Path, stage: Stage) -> None:
    """Add a finished stage to the chain's record."""
    content = _records(folder)
    mined = json.loads((stage.mined / "record.json").read_text(encoding="utf-8"))["datasets"]
    step = read_steps(stage.run.model)[-1]
    content[stage.name] = {
        "teacher": stage.mined_with,
        "rows": sum(entry["rows"] for entry in mined.values()),
        "negatives": sum(entry["negatives"] for entry in mined.values()),
        **{key: step[key] for key in ("recipe", "steps", "seconds", "validation")},
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / RECORD_FILE, lambda file: file.write_text(text, encoding="utf-8"))


def _summary(folder: Path) -> str:
    rows = []
    for name, stage in _records(folder).items():
        scores = [stage["validation"][when] or {} for when in ("before", "after")]
        means = [f"{score['validation_mean']:.4f}" if "validation_mean" in score else "-" for score in scores]
        counts = (f"{stage[key]:,}" for key in ("rows", "negatives", "steps"))
        rows.append([name, stage["teacher"], *counts, *means])
    return table(["stage", "negatives by", "rows", "negatives", "steps", "before", "after"], rows)
