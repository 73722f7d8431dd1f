"""Score models on tasks of MTEB; finished scores are cached, and the same call resumes from them."""

import logging
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from huggingface_hub import cached_assets_path
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.results import TaskResult
from tqdm import tqdm

from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.reading import is_mote
from mote.evaluation.cache import Cache, CacheError, with_subtasks
from mote.evaluation.charts import draw_gains
from mote.evaluation.models import EvaluatedModel, find_models
from mote.evaluation.options import EvaluateOptions
from mote.evaluation.scores import Evaluation
from mote.evaluation.tasks import choose_tasks
from mote.files import replaced
from mote.inference.loading import check_device, first_line
from mote.remote.configuration_mote import MTEB_PROMPTS, alternatives
from mote.reporting import HOW_TO_RESUME

logger = logging.getLogger(__name__)


def evaluate(
    models: str | Path | Sequence[str] | Mapping[str, str],
    out: str | Path | None = None,
    options: EvaluateOptions | None = None,
    **settings: Any,
) -> Evaluation:
    """Score models with MTEB.

    Scores are cached by model, data, limit and dtype; the same call resumes an interrupted evaluation. A dataset on
    which a model fails does not stop the others.

    Args:
        models: Any Sentence-Transformers models: folders or ids on the Hub, or LABEL=MODEL; or a mapping from labels
            to these; or one model.
        out: Folder for tables, chart, scores and the cache. Default: only a cache in the user's Hugging Face assets.
        options: What to score, and how.
        **settings: Fields of `EvaluateOptions`, which replace those of `options`.

    Returns:
        The scores and the failures.

    Raises:
        FileNotFoundError: If a model or the data do not exist.
        ValueError: If options are invalid, or a model does not load.
        OSError: If results cannot be written.
    """
    options = EvaluateOptions(**{**dict(options or ()), **settings})
    check_device(options.device)
    with _quiet():
        tasks = choose_tasks(options.benchmark, options.data, options.tasks, options.limit)
        instructions = _instructions(options, [task.metadata.name for task in tasks])
        found = find_models(models, options)  # hashes all weights
        reference = _reference(options.reference, found)
        cache = Cache(cached_assets_path("mote", "evaluation") if out is None else Path(out), tasks)
        scorer = _Scorer(tasks, cache, options, instructions)
        scorer.check(found)
        scorer.score(found)
    evaluation = Evaluation(
        scores={model.label: scorer.scores[model.label] for model in found},
        types={task.metadata.name: str(task.metadata.type) for task in tasks},
        metrics={task.metadata.name: str(task.metadata.main_score) for task in tasks},
        failures=dict(scorer.failures),
        settings={
            **options.model_dump(mode="json", exclude={"definitions", "template", "reference", "overwrite"}),
            "instructions": instructions,
            "mteb": sorted(scorer.versions),
            "models": {model.label: {"path": model.path, "revision": model.revision} for model in found},
            "seconds": dict(scorer.seconds),
        },
        reference=reference,
    )
    if out is not None:
        write(evaluation, Path(out))
    return evaluation


@dataclass
class _Scorer:
    """Scores models on tasks, and collects scores, failures, seconds (model → dataset → …) and versions of mteb."""

    tasks: list[AbsTask]
    cache: Cache
    options: EvaluateOptions
    instructions: dict[str, str]
    scores: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    failures: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    versions: set[str] = field(default_factory=set)

    def check(self, models: Sequence[EvaluatedModel]) -> None:
        """Load each model that has scores to compute without its weights, so that errors show before the work starts.

        With `overwrite`, the cached scores are discarded then.
        """
        missing = {
            model.label: sum(self.options.overwrite or self._cached(model, task) is None for task in self.tasks)
            for model in models
        }
        logger.info(
            f"Models: {len(models)}, datasets: {len(self.tasks)}, scores to compute: {sum(missing.values())}; "
            f"results are cached in {self.cache.cache_path}"
        )
        for model in models:
            if missing[model.label]:
                model.check()
        for model in models if self.options.overwrite else ():
            for task in self.tasks:
                self.cache.forget(task, model.meta(**self._experiment(task)))

    def score(self, models: Sequence[EvaluatedModel]) -> None:
        """Score each model on each task; an interrupt's message says what is cached."""
        total = len(models) * len(self.tasks)
        with tqdm(total=total, unit="dataset", disable=None, leave=False, dynamic_ncols=True) as bar:
            try:
                for number, model in enumerate(models, start=1):
                    _log(f"Model {number} of {len(models)}: {model.label}")
                    for index, task in enumerate(self.tasks, start=1):
                        bar.set_description(f"{model.label} on {task.metadata.name}")
                        outcome = self._score(model, task)
                        bar.update()
                        _log(f"  {index}/{len(self.tasks)} {task.metadata.name}: {outcome}")
                    model.release()
            except KeyboardInterrupt:
                cached = (
                    f"{sum(map(len, self.scores.values()))} of {total} scores are cached in {self.cache.cache_path}"
                )
                raise KeyboardInterrupt(f"{cached}; {HOW_TO_RESUME}") from None

    def _score(self, model: EvaluatedModel, task: AbsTask) -> str:
        """Score a model on a task, or take the cached score; return the outcome in a few words."""
        label, name = model.label, task.metadata.name
        cached = self._cached(model, task)
        try:
            result = cached or self._compute(model, task)
            score = _main_score(result, task)
        except CacheError:
            raise
        except Exception as error:  # of a dataset, of a model's code, of a device: the others continue
            self.failures[label][name] = first_line(error)
            return f"failed: {first_line(error)}"
        self.scores[label][name] = score
        self.seconds[label][name] = round(result.evaluation_time or 0.0, 2)
        self.versions.add(str(result.mteb_version))
        return f"{score:.2f}, {self.seconds[label][name]:.1f} s{' (cached)' if cached else ''}"

    def _experiment(self, task: AbsTask) -> dict[str, Any]:
        """What the score of a task depends on, beside the model and the data."""
        text = self.instructions.get(task.metadata.name)
        digest = None if text is None else blake2b(text.encode(), digest_size=8).hexdigest()
        return {"limit": self.options.limit, "instruction": digest}

    def _cached(self, model: EvaluatedModel, task: AbsTask) -> TaskResult | None:
        return self.cache.find(task, model.meta(**self._experiment(task)))

    def _compute(self, model: EvaluatedModel, task: AbsTask) -> TaskResult:
        encoder = model.encoder()
        key = model.key(**self._experiment(task))
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=key)
        encode_kwargs: Any = {"batch_size": self.options.batch_size, "show_progress_bar": False}
        _seed(task)
        try:
            with (
                instructed(encoder, task, self.instructions.get(task.metadata.name)),
                Path(os.devnull).open("w") as nowhere,
                redirect_stderr(nowhere),  # bars that cannot be turned off
            ):
                results = mteb.evaluate(
                    encoder,
                    task,
                    cache=self.cache,
                    encode_kwargs=encode_kwargs,
                    show_progress_bar=False,
                    co2_tracker=False,
                )
        finally:
            if task.data_loaded:  # mteb unloads it, unless the task failed
                task.unload_data()
        if results.exceptions:  # what mteb reports instead of raising: private data
            raise OSError(results.exceptions[0].exception)
        result = self._cached(model, task)  # rounded there: the score is the same now and when it is read again
        assert result is not None
        return result


def _seed(task: AbsTask) -> None:
    """Start a task from its own random numbers; otherwise each model would get different samples."""
    for part in with_subtasks([task]):
        part.rng_state, part.np_rng = random.Random(part.seed), np.random.default_rng(part.seed)
    random.seed(task.seed)
    np.random.seed(task.seed)


def _main_score(result: TaskResult, task: AbsTask) -> float:
    """The score of a task: the mean over its splits and subsets, x 100, as exact as mteb stores it."""
    score = round(100 * float(result.validate_and_filter_scores(task).get_score()), 4)
    if not np.isfinite(score):
        equal = ": all scores of the dataset, or all that the model gives, are equal"
        raise ValueError(f"the score is {score}" + (equal if task.metadata.type in ("STS", "Summarization") else ""))
    return score


def _instructions(options: EvaluateOptions, names: Sequence[str]) -> dict[str, str]:
    """Turn the definitions of datasets into instructions."""
    for name in options.definitions:
        if name not in names:
            raise ValueError(f"A definition for the dataset {name!r}, which is not scored." + alternatives(name, names))
    if options.template is not None and not options.definitions:
        raise ValueError("A template is for definitions, but there are none: add `--definition DATASET=TEXT`")
    return {name: instruction_with(text, options.template) for name, text in options.definitions.items()}


def _reference(reference: str | None, models: Sequence[EvaluatedModel]) -> str | None:
    """Find the label of the reference."""
    if reference is None:
        return models[0].label if len(models) > 1 else None
    for model in models:
        if reference in (model.label, model.path):
            return model.label
    raise ValueError(
        f"The reference {reference} is not one of the models: {', '.join(model.label for model in models)}"
    )


@contextmanager
def instructed(encoder: Any, task: AbsTask, instruction: str | None) -> Iterator[None]:
    """Put an instruction in front of a dataset's texts, or only its queries if it has documents; None: the model's own.

    Within the context, the instruction belongs to the task of a MoTE that serves such datasets. If that task has no
    instruction and no role (`query`, `document`) picks an expert, it becomes the default task, unless there is another.
    """
    kind, parts = str(task.metadata.type), [*with_subtasks([task])]
    names = [part.metadata.name for part in parts]  # mteb looks prompts up by the name of a subtask
    role = "-query" if any(isinstance(part, AbsTaskRetrieval) for part in parts) else ""
    prompts: Any = encoder.model_prompts
    config: Any = getattr(encoder.model[0], "config", None)  # a static model has none
    own = None
    if config is not None and is_mote(config) and config.routes_by_task:
        served = "query" if role else MTEB_PROMPTS.get(kind, "")
        own = (config.tasks, config.instructions, config.default_task)
        if instruction is not None and served not in config.tasks:
            raise ValueError(f"The model has no task for datasets of the type {kind!r}")
        if not role and served in config.tasks and not config.instruction_of(served):
            config.default_task = config.default_task or served
        if instruction is not None:  # in front: among tasks with the same instruction, the first counts
            own_instructions = {one: config.instruction_of(one) for one in config.tasks}
            config.instructions = {**own_instructions, **dict.fromkeys(names, instruction)}
            config.tasks = {**dict.fromkeys(names, config.tasks[served]), **config.tasks}
    if instruction is not None:
        encoder.model_prompts = {**(prompts or {}), **{f"{name}{role}": instruction for name in names}}
    try:
        yield
    finally:
        encoder.model_prompts = prompts
        if own is not None:
            config.tasks, config.instructions, config.default_task = own


def _log(line: str) -> None:
    with tqdm.external_write_mode():
        logger.info(line)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries: one line for each dataset is enough."""
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("mteb", "sentence_transformers", "transformers", "datasets")]
    levels = [library.level for library in loggers]
    bars = [bar for bar in (datasets_logging, transformers_logging) if bar.is_progress_bar_enabled()]
    for library in loggers:
        library.setLevel(logging.ERROR)
    for bar in bars:
        bar.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for library, level in zip(loggers, levels, strict=True):
            library.setLevel(level)
        for bar in bars:
            bar.enable_progress_bar()


def write(evaluation: Evaluation, folder: Path) -> None:
    """Write `table.md`, `datasets.md`, `scores.json` and, if there are gains, `gains.png`.

    Those of an earlier run are replaced once all are complete.
    """
    texts = {
        "table.md": f"{evaluation}\n",
        "datasets.md": f"{evaluation.per_dataset()}\n",
        "scores.json": evaluation.to_json(),
    }
    chart = folder / "gains.png"
    has_gains = evaluation.reference is not None and any(evaluation.gains(evaluation.reference).values())
    with ExitStack() as files:
        for name, text in texts.items():
            files.enter_context(replaced(folder / name)).write_text(text, encoding="utf-8")
        if has_gains:
            draw_gains(evaluation, files.enter_context(replaced(chart)))
    if not has_gains:
        chart.unlink(missing_ok=True)
