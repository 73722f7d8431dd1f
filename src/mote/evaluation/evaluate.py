"""Score models on tasks of MTEB; finished scores are cached, and the same call resumes from them."""

import gc
import logging
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import torch
from huggingface_hub import cached_assets_path
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.models import ModelMeta
from mteb.results import TaskResult
from mteb.types import OutputDType

from mote.checkpoints.definitions import instruction_with
from mote.evaluation.cache import Cache, CacheError, with_subtasks
from mote.evaluation.models import EvaluatedModel, Quantized, experts_of, own_task
from mote.evaluation.options import EvaluateOptions
from mote.evaluation.scores import Evaluation
from mote.evaluation.tasks import choose_tasks, matching
from mote.hub import commit_of
from mote.inference.loading import first_line
from mote.remote.configuration_mote import require_known
from mote.reporting import label_models, quieted

FURTHER = ("mrr_at_10", "recall_at_10", "recall_at_100")  # beside nDCG@10, what papers on retrieval compare
LIBRARIES = ("mteb", "sentence_transformers", "transformers", "datasets")  # one line for each dataset is enough

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
        out: Folder for tables, scores and the cache. Default: only a cache in the user's Hugging Face assets.
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
    with quieted(*LIBRARIES, level=logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks = choose_tasks(options.benchmark, options.data, options.tasks, options.limit)
        instructions = _instructions(options, [task.metadata.name for task in tasks])
        known = {
            one for task in tasks for one in (task.metadata.name, task.metadata.dataset["path"].rpartition("/")[2])
        }
        for name in options.experts:
            require_known(name, sorted(known), "dataset")
        found = [
            EvaluatedModel(name, path, commit, options, dimensions, None if precision == "float32" else precision)
            for name, path in label_models(models).items()
            for commit in [commit_of(path)]
            for dimensions in tuple(options.dimensions) or (None,)
            for precision in tuple(options.precisions) or (None,)
        ]
        evaluation = Evaluation(
            scores={model.label: {} for model in found},
            types={task.metadata.name: str(task.metadata.type) for task in tasks},
            metrics={task.metadata.name: str(task.metadata.main_score) for task in tasks},
            settings={
                **options.model_dump(mode="json", exclude={"definitions", "template", "reference"}),
                "instructions": instructions,
                "mteb": [],
                "models": {model.label: {"path": model.path, "revision": model.revision} for model in found},
            },
            reference=options.reference or (found[0].label if len(found) > 1 else None),
        )
        cache = Cache(cached_assets_path("mote", "evaluation") if out is None else Path(out), tasks)
        _Scorer(tasks, cache, options.batch_size, options.limit, instructions, evaluation).score(found)
    if out is not None:
        evaluation.save(out)
    return evaluation


@dataclass
class _Scorer:
    """Scores models on tasks, and fills an evaluation with scores and failures."""

    tasks: list[AbsTask]
    cache: Cache
    batch_size: int
    limit: int | None
    instructions: dict[str, str]
    evaluation: Evaluation

    def score(self, models: Sequence[EvaluatedModel]) -> None:
        """Score each model on each task; an interrupt's message says what is cached."""
        place = self.cache.cache_path
        torch.empty(0, device=self.evaluation.settings["device"])  # else each dataset fails for want of the device
        logger.info(f"Models: {len(models)}, datasets: {len(self.tasks)}; results are cached in {place}")
        for model in models:
            if None in self._cached(model):
                model.load("meta")  # without its weights, so that errors show before the work starts
        try:
            for number, model in enumerate(models, start=1):
                logger.info(f"Model {number} of {len(models)}: {model.label}")
                self._score(model)
                gc.collect()  # an encoder refers to itself
        except KeyboardInterrupt:
            done, total = sum(map(len, self.evaluation.scores.values())), len(models) * len(self.tasks)
            raise KeyboardInterrupt(
                f"{done} of {total} scores are cached in {place}; the same command resumes"
            ) from None

    def _score(self, model: EvaluatedModel) -> None:
        """Score a model on each task, or take the cached score."""
        results = self._cached(model)
        encoder, load_error = None, None
        if None in results:
            try:
                encoder = model.encoder(prompts_of(self.tasks, self.instructions))
            except Exception as error:  # of each of its scores, without another try
                load_error = error
        for number, (task, cached) in enumerate(zip(self.tasks, results, strict=True), start=1):
            name = task.metadata.name
            try:
                if cached is None and load_error is not None:
                    raise load_error
                result = cached or self._compute(model, encoder, task)
                score = _main_score(result, task)
            except CacheError:
                raise
            except Exception as error:  # of a dataset, of a model's code, of a device: the others continue
                outcome = f"failed: {first_line(error)}"
                self.evaluation.failures.setdefault(model.label, {})[name] = first_line(error)
            else:
                made_by = ""
                if model.config is not None:
                    experts = experts_of(model.config, task.metadata, model.options.experts)
                    self.evaluation.experts.setdefault(model.label, {})[name] = experts
                    made_by = f" by {experts}"
                outcome = f"{score:.2f}{made_by}, {result.evaluation_time or 0.0:.1f} s{' (cached)' if cached else ''}"
                self.evaluation.scores[model.label][name] = score
                self.evaluation.further.setdefault(model.label, {})[name] = _further_scores(result, task)
                versions = self.evaluation.settings["mteb"]  # cached scores may be another's
                if result.mteb_version not in versions:
                    versions.append(result.mteb_version)
            logger.info(f"  {number}/{len(self.tasks)} {name}: {outcome}")

    def _meta(self, model: EvaluatedModel, task: AbsTask) -> ModelMeta:
        """Describe a model, and what else its score on a task depends on, beside the data."""
        text = self.instructions.get(task.metadata.name, "")
        digest = blake2b(text.encode(), digest_size=8).hexdigest() if text else None
        own = model.config and own_task(model.config, task.metadata, model.options.experts)
        return model.meta(limit=self.limit, instruction=digest, task=own)

    def _cached(self, model: EvaluatedModel) -> list[TaskResult | None]:
        return [self.cache.find(task, self._meta(model, task)) for task in self.tasks]

    def _compute(self, model: EvaluatedModel, encoder: Any, task: AbsTask) -> TaskResult:
        meta = self._meta(model, task)
        scored: Any = Quantized(encoder, OutputDType(model.precision)) if model.precision else encoder
        key = meta.model_dump(include={"name", "revision", "experiment_kwargs"})
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=key)
        encoder.longer = 0
        encode_kwargs: Any = {"batch_size": self.batch_size, "show_progress_bar": False}
        _seed(task)
        try:
            # The bars of some libraries cannot be turned off.
            with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
                mteb.evaluate(
                    scored,
                    task,
                    cache=self.cache,
                    encode_kwargs=encode_kwargs,
                    show_progress_bar=False,
                    co2_tracker=False,
                    public_only=False,  # private data are an error
                )
            if encoder.longer:
                cut = encoder.model.max_seq_length
                logger.info(f"  {encoder.longer:,} texts of {task.metadata.name} are cut to {cut:,} tokens")
        finally:
            if task.data_loaded:  # mteb unloads it, unless the task failed
                task.unload_data()
        # Scores are rounded in the cache: they are the same now and when they are read again.
        return self.cache.find(task, meta)


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
        raise ValueError(f"the score is {score}: are all embeddings of the model equal?")
    return score


def _further_scores(result: TaskResult, task: AbsTask) -> dict[str, float]:
    """The other scores of retrieval, and the main score of each subset, such as a language, if there are several."""
    splits = result.validate_and_filter_scores(task).scores.values()
    rows: list[dict[str, Any]] = [dict(row) for split in splits for row in split]
    found = {name: [row[name] for row in rows if name in row] for name in FURTHER if name != task.metadata.main_score}
    subsets = dict.fromkeys(row["hf_subset"] for row in rows)
    if len(subsets) > 1:
        found |= {name: [row["main_score"] for row in rows if row["hf_subset"] == name] for name in subsets}
    return {name: round(100 * float(np.mean(scores)), 4) for name, scores in found.items() if scores}


def _instructions(options: EvaluateOptions, names: Sequence[str]) -> dict[str, str]:
    if options.template is not None and not options.definitions:
        raise ValueError("A template is for definitions, but there are none: add `--definition DATASET=TEXT`")
    return {
        names[index]: instruction_with(text, options.template)
        # The name of a dataset counts more than a pattern, whatever their order.
        for pattern, text in sorted(options.definitions.items(), key=lambda given: given[0] in names)
        for index in matching([[name] for name in names], [pattern])
    }


def prompts_of(tasks: Sequence[AbsTask], instructions: Mapping[str, str]) -> dict[str, str]:
    """Instructions by mteb's names of prompts; if a dataset has documents, the prompt is that of its queries."""
    found: dict[str, str] = {}
    for task in tasks:
        if instruction := instructions.get(task.metadata.name):
            parts = [*with_subtasks([task])]  # mteb looks prompts up by the name of a subtask
            role = "-query" if any(isinstance(part, AbsTaskRetrieval) for part in parts) else ""
            found |= {f"{part.metadata.name}{role}": instruction for part in parts}
    return found
