"""Experts trained each by itself, beside `general`, the source: a run for each task, and the MoTE of them all.

Everything that experts share is frozen. So a task's expert depends on its own data, the source and the settings alone:
it is the same file, byte for byte, whichever other tasks are trained, and on whichever machine of one kind.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from mote.checkpoints.models import load_mote, load_tokenizer
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.provenance import new_step, read_steps
from mote.checkpoints.reading import is_mote, open_checkpoint, open_mote
from mote.checkpoints.writing import Repository
from mote.cluster import ray_cluster
from mote.experts.artefact import ExpertArtefact, open_expert
from mote.experts.editing import add, weights
from mote.files import lock, read_json
from mote.remote.configuration_mote import GENERAL
from mote.remote.modeling_mote import MoTEModel
from mote.training.own_tasks import ROLES
from mote.training.processes import processes
from mote.training.progress import draw_curves
from mote.training.recipe import ModelSettings, Recipe
from mote.training.run_folder import CURVES_FILE, LOCK_FILE, RECIPE_FILE, STATE_FILE, RunFolder, as_yaml
from mote.training.train import TrainingRun

logger = logging.getLogger(__name__)


class SeparateRuns:
    """The runs of a recipe, one for each task, in `tasks/NAME` of its folder."""

    def __init__(self, recipe: Recipe, *, overwrite: bool = False) -> None:
        self.recipe, self.folder, self.overwrite = recipe, RunFolder(Path(recipe.output)), overwrite
        self.folder.refuse_source(recipe)
        self._refuse_loss()
        if GENERAL in recipe.tasks:
            raise ValueError(
                f"{GENERAL!r} is the source itself, which is not trained: choose another name for the task"
            )
        source = open_checkpoint(recipe.model.source, recipe.model.revision)
        self.dtype = getattr(source.config, "dtype", None)
        self.runs: dict[str, TrainingRun] = {}
        for name, task in recipe.tasks.items():
            own = recipe.updated(
                output=str(self.folder.path / "tasks" / name),
                model=recipe.model.updated(**({} if is_mote(source.config) else _settings_of(recipe.model, name))),
                tasks={name: task},
                training=recipe.training.updated(only_experts=[name]),
                together=True,
            )
            self.runs[name] = TrainingRun(own, overwrite=overwrite)

    def _refuse_loss(self) -> None:
        """Refuse to replace a model that has more than this recipe would make."""
        kept = self.folder.model / RECIPE_FILE
        if self.overwrite or not kept.is_file():
            return
        earlier = yaml.safe_load(kept.read_text(encoding="utf-8"))
        lost = [name for name in earlier["tasks"] if name not in self.recipe.tasks]
        if lost or earlier.get("together", True) or earlier["model"]["source"] != self.recipe.model.source:
            raise FileExistsError(
                f"{self.folder.model} was made from {earlier['model']['source']} for the tasks "
                f"{', '.join(earlier['tasks'])}: name them again with the new ones, choose another `output`, or start "
                "over with `--overwrite`"
            )

    def plan(self, verbose: bool = True) -> str:
        """Describe the runs, as `Run.plan` does. Writes nothing."""
        return "\n\n".join(_done(name) if run.is_done() else run.plan(verbose) for name, run in self.runs.items())

    def run(self) -> Path:
        """Train the experts that are not there yet, and return the folder of the MoTE with all of them."""
        state = processes()
        with lock(self.folder.path / LOCK_FILE) if state.is_main_process else nullcontext():
            left = {name: run for name, run in self.runs.items() if not run.is_done()}
            for name in self.runs:
                if name not in left:
                    logger.info("%s", _done(name))
            if self.recipe.engine == "ray":
                _train_on_ray([*left.values()])
            else:
                for number, (name, run) in enumerate(left.items(), start=1):
                    logger.info("Task %d of %d: %s", number, len(left), name)
                    run.run()
            if state.is_main_process:
                self._write()
            state.wait_for_everyone()
        return self.folder.model

    def _write(self) -> None:
        """Write the MoTE: the first one that was trained, with the others' experts."""
        names = [*self.runs]
        folders = {name: run.folder.model for name, run in self.runs.items()}
        source = open_mote(str(folders[names[0]]))
        model = load_mote(source, with_head=True)
        others = [open_expert(folders[name], name) for name in names[1:]]
        for expert in others:
            _put(model, expert)
        if self.dtype is not None:  # trained in float32; what was not trained is again the source's, to the last bit
            model.to(getattr(torch, str(self.dtype).removeprefix("torch.")))
        steps = [read_steps(folders[name])[-1] for name in names]
        log = [read_json(run.folder.path / STATE_FILE)["log_history"] for run in self.runs.values()]

        def add_files(folder: Path) -> dict[str, Any]:
            (folder / RECIPE_FILE).write_text(as_yaml(self.recipe), encoding="utf-8")
            draw_curves([line for lines in log for line in lines], folder / CURVES_FILE, self.recipe.name)
            return {}

        found = {name: step["validation"] for name, step in zip(names, steps, strict=True)}
        scores = [
            (name, f"{one['before'][f'validation_{name}']:.4g}", f"{one['after'][f'validation_{name}']:.4g}")
            for name, one in found.items()
            if f"validation_{name}" in one["after"]
        ]
        totals = {key: sum(step[key] for step in steps) for key in ("steps", "seconds")}
        record = {**steps[0], **totals, "data": [report for step in steps for report in step["data"]]}
        repository = Repository(
            model,
            source,
            [*(step for step in steps[1:]), new_step("join")],
            others,
            tokenizer=load_tokenizer(source),
            after=add_files,
            training={"recipe": self.runs[names[0]].recipe, "run": record, "scores": scores},
        )
        repository.write(self.folder.model, WriteOptions(overwrite=True), self.folder.path.name)


def _settings_of(model: ModelSettings, name: str) -> dict[str, Any]:
    """Return the settings of the model of one task, made from a dense source; the expert's prompts are its roles'."""
    known = {name, GENERAL, *(role for roles in ROLES.values() for role in roles)}
    texts = {task: text for task, text in model.instruction_texts.items() if task in known}
    return {
        "experts": [GENERAL, name],
        "tasks": {task: expert for task, expert in model.tasks.items() if expert in (name, GENERAL)},
        "instructions": model.instructions and {GENERAL: "", name: "", **texts},
    }


def _done(name: str) -> str:
    return f"{name}: already trained on the same data with the same settings"


def _put(model: MoTEModel, expert: ExpertArtefact) -> None:
    """Put an expert into a MoTE, as a new one or in place of the one of its name."""
    if expert.name in model.config.experts:
        trained = expert.weights_for(model)
        with torch.no_grad():
            for key, weight in weights(model, expert.name).items():
                weight.copy_(trained[key])
    else:
        add(model, expert.name, expert)


def _train_on_ray(runs: Sequence[TrainingRun]) -> None:
    """Train through Ray, each run in a process of its own; folders are on storage that all machines share."""
    with ray_cluster() as ray:
        gpus = 1 if torch.accelerator.is_available() else 0
        train = ray.remote(num_gpus=gpus, max_retries=0)(_train_in)
        for done in [train.remote(os.getcwd(), run.recipe, run.overwrite) for run in runs]:  # noqa: PTH109
            ray.get(done)


def _train_in(folder: str, recipe: Recipe, overwrite: bool) -> None:
    os.chdir(folder)  # a worker starts in one of its own
    TrainingRun(recipe, overwrite=overwrite).run()
