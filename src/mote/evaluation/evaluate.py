"""Score models on tasks of MTEB; finished scores are cached, and the same call resumes from them."""

import logging
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import torch
from huggingface_hub import cached_assets_path
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.models import SentenceTransformerEncoderWrapper, SparseEncoderWrapper
from mteb.results import TaskResult
from sentence_transformers import SparseEncoder
from tqdm import tqdm

from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.reading import is_mote
from mote.checkpoints.tensors import DTYPES
from mote.evaluation.cache import Cache, CacheError, with_subtasks
from mote.evaluation.charts import draw_gains
from mote.evaluation.models import EvaluatedModel, find_models
from mote.evaluation.scores import Evaluation
from mote.evaluation.tasks import choose_tasks
from mote.inference.loading import check_device, check_retrieval, first_line
from mote.remote.configuration_mote import MTEB_PROMPTS, alternatives
from mote.reporting import write_together

logger = logging.getLogger(__name__)


def evaluate(
    models: str | Path | Sequence[str] | Mapping[str, str],
    *,
    benchmark: str | None = None,
    data: str | Path | None = None,
    tasks: str | Sequence[str] = (),
    limit: int | None = None,
    retrieval: str | Sequence[str] = (),
    definitions: Mapping[str, str] | None = None,
    template: str | None = None,
    batch_size: int = 32,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reference: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Evaluation:
    """Score models with `mteb.evaluate`.

    Scores are cached by model, data, limit and dtype. A dataset on which a model fails does not stop the others.

    Args:
        models: Any Sentence-Transformers models: folders or ids on the Hub, or LABEL=MODEL; or a mapping from labels
            to these; or one model.
        benchmark: A benchmark of MTEB, as in "MTEB(eng, v1)".
        data: A folder of datasets, in place of a benchmark.
        tasks: Datasets of the folder or the benchmark, or patterns such as "beir/*"; without either of them, names
            of MTEB tasks. Default: all.
        limit: Approximate number of texts that datasets of the folder are cut to.
        retrieval: Kinds of vectors to score, `dense`, `sparse` or `hybrid`; a hybrid model gives all of them. With
            several, each model is scored with each. Default: the models' own.
        definitions: Dataset → definition of its task, which becomes an instruction in front of its texts, or only its
            queries if it has documents. It replaces the instructions of all models.
        template: The instruction around a definition, as in `mote.instruction_with`.
        batch_size: Batch size for embedding.
        device: Device that models run on. Default: Sentence-Transformers' choice.
        dtype: Dtype of the models' weights: "float32", "float16" or "bfloat16". Default: the stored one.
        out: Folder for tables, chart, scores and the cache. Default: only a cache in the user's Hugging Face assets.
        reference: Label or path of the baseline that gains are computed against. Default: the first of several models.
        trust_remote_code: Whether to run the code in the models' repositories and folders. A MoTE needs it.
        overwrite: Recompute cached scores.

    Returns:
        The scores and the failures.

    Raises:
        FileNotFoundError: If a model or the data do not exist.
        ValueError: If arguments are invalid, or a model does not load.
        OSError: If results cannot be written.
    """
    tasks = [tasks] if isinstance(tasks, str) else tasks
    retrieval = [retrieval] if isinstance(retrieval, str) else retrieval
    for name, value in (("batch size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"The {name} is {value}: expected 1 or more")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"Unknown dtype {dtype!r}: expected {', '.join(DTYPES)}")
    check_device(device)
    for kind in retrieval:
        check_retrieval(kind)
    with _quiet():
        chosen = choose_tasks(benchmark, data, tasks, limit)
    instructions = _instructions(definitions or {}, template, [task.metadata.name for task in chosen])
    found = find_models(models, device=device, dtype=dtype, trust_remote_code=trust_remote_code)  # reads all weights
    if retrieval:
        kinds = [*dict.fromkeys(retrieval)]
        labels = {kind: f" ({kind})" if len(kinds) > 1 else "" for kind in kinds}
        found = [replace(one, label=one.label + labels[kind], retrieval=kind) for one in found for kind in kinds]
    base = _reference(reference, found)
    with _quiet():
        folder = cached_assets_path("mote", "evaluation") if out is None else Path(out)
        run = _Run(found, chosen, Cache(folder, chosen), limit, batch_size, overwrite, instructions)
        run.check_models()
        if overwrite:
            run.set_aside()
        run.score_all()
    evaluation = Evaluation(
        scores={model.label: run.scores[model.label] for model in found},
        types={task.metadata.name: str(task.metadata.type) for task in chosen},
        metrics={task.metadata.name: str(task.metadata.main_score) for task in chosen},
        failures={label: dict(failures) for label, failures in run.failures.items()},
        settings={
            "benchmark": benchmark,
            "data": None if data is None else str(data),
            "tasks": list(tasks),
            "limit": limit,
            "retrieval": list(retrieval),
            "instructions": instructions,
            "batch_size": batch_size,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "mteb": sorted(run.versions),
            "models": {model.label: {"path": model.path, "revision": model.revision} for model in found},
            "seconds": {label: dict(seconds) for label, seconds in run.seconds.items()},
        },
        reference=base,
    )
    if out is not None:
        write(evaluation, Path(out))
    return evaluation


@dataclass
class _Run:
    """One pass over models and tasks."""

    models: list[EvaluatedModel]
    tasks: list[AbsTask]
    cache: Cache
    limit: int | None
    batch_size: int
    overwrite: bool
    instructions: dict[str, str]
    scores: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    failures: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    versions: set[str] = field(default_factory=set)
    encoder: "_FiniteEncoder | _FiniteSparse | None" = None
    not_loaded: Exception | None = None  # of the same model

    def check_models(self) -> None:
        """Check each model that has scores to compute, so that loading errors show before the work starts.

        Raises:
            ValueError: If a model does not load.
        """
        missing = {one.label: sum(self._cached(one, task) is None for task in self.tasks) for one in self.models}
        logger.info(
            f"Models: {len(self.models)}, datasets: {len(self.tasks)}, scores to compute: {sum(missing.values())}; "
            f"results are cached in {self.cache.cache_path}"
        )
        for model in self.models:
            if missing[model.label]:
                model.check()

    def set_aside(self) -> None:
        """Set all earlier scores aside at once, so that those found after an interruption are new."""
        for model in self.models:
            for task in self.tasks:
                self.cache.set_aside(task, self._meta(model, task))

    def score_all(self) -> None:
        """Score each model on each task.

        Raises:
            KeyboardInterrupt: If interrupted; the message says what is cached.
            CacheError: If results cannot be written.
        """
        total = len(self.models) * len(self.tasks)
        with tqdm(total=total, unit="dataset", disable=None, leave=False, dynamic_ncols=True) as bar:
            try:
                for number, model in enumerate(self.models, start=1):
                    _log(f"Model {number} of {len(self.models)}: {model.label}")
                    for index, task in enumerate(self.tasks, start=1):
                        bar.set_description(f"{model.label} on {task.metadata.name}")
                        outcome = self._score(model, task)
                        bar.update()
                        _log(f"  {index}/{len(self.tasks)} {task.metadata.name}: {outcome}")
                    self.encoder = self.not_loaded = None
                    model.release()
            except KeyboardInterrupt:
                cached = sum(len(scores) for scores in self.scores.values())
                again = "the same command" + (" without --overwrite" if self.overwrite else "")
                raise KeyboardInterrupt(
                    f"{cached} of {total} scores are cached in {self.cache.cache_path}; {again} resumes there"
                ) from None

    def _score(self, model: EvaluatedModel, task: AbsTask) -> str:
        """Score a model on a task, or take the cached score; return the outcome in a few words."""
        label, name = model.label, task.metadata.name
        result = self._cached(model, task)
        how = " (cached)" if result is not None else ""
        try:
            result = result or self._compute(model, task)
            score = _main_score(result, task)
        except CacheError:
            raise
        except Exception as error:  # of a dataset, of a model's code, of a device: the others continue
            self.failures[label][name] = first_line(error)
            self._restore(model, task)
            return f"failed: {first_line(error)}"
        self._restore(model, task)
        self.scores[label][name] = score
        self.seconds[label][name] = round(result.evaluation_time or 0.0, 2)
        self.versions.add(str(result.mteb_version))
        return f"{score:.2f}, {self.seconds[label][name]:.1f} s{how}"

    def _restore(self, model: EvaluatedModel, task: AbsTask) -> None:
        if self.overwrite:
            self.cache.restore(task, self._meta(model, task))

    def _cached(self, model: EvaluatedModel, task: AbsTask) -> TaskResult | None:
        return None if self.overwrite else self.cache.find(task, self._meta(model, task))

    def _meta(self, model: EvaluatedModel, task: AbsTask) -> Any:
        text = self.instructions.get(task.metadata.name)
        digest = None if text is None else blake2b(text.encode(), digest_size=8).hexdigest()
        return model.meta(limit=self.limit, instruction=digest)

    def _compute(self, model: EvaluatedModel, task: AbsTask) -> TaskResult:
        encoder = self._encoder(model)
        meta = self._meta(model, task)
        key = {name: getattr(meta, name) for name in ("name", "revision", "experiment_kwargs")}
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update={**model.described, **key})
        options: Any = {"batch_size": self.batch_size, "show_progress_bar": False}
        for part in with_subtasks([task]):  # otherwise each model would get different samples
            part.rng_state, part.np_rng = random.Random(part.seed), np.random.default_rng(part.seed)
        random.seed(task.seed)
        np.random.seed(task.seed)
        loaded = task.data_loaded
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
                    overwrite_strategy="always" if self.overwrite else "only-missing",
                    encode_kwargs=options,
                    show_progress_bar=False,
                    co2_tracker=False,
                )
        finally:
            if task.data_loaded and not loaded:  # mteb does so, except for a task that failed
                task.unload_data()
        if results.exceptions:  # what mteb reports instead of raising: private data
            raise OSError(results.exceptions[0].exception)
        return self.cache.find(task, meta)  # rounded there: the score is the same now and when it is read again

    def _encoder(self, model: EvaluatedModel) -> "_FiniteEncoder | _FiniteSparse":
        """Return mteb's encoder of a model, the same for all datasets: it takes a while to check the prompts."""
        if self.not_loaded is not None:
            raise self.not_loaded
        if self.encoder is None:
            try:
                found = model.load()
            except Exception as error:
                self.not_loaded = error
                raise
            self.encoder = _FiniteSparse(found) if isinstance(found, SparseEncoder) else _FiniteEncoder(found)
            _warn_of_unused_prompts(model.label, self.encoder)
        return self.encoder


def _warn_of_unused_prompts(label: str, encoder: "_FiniteEncoder | _FiniteSparse") -> None:
    """Name the prompts that mteb ignores; `_quiet` silences its own warning.

    It also ignores a MoTE's own names of its instructions, which it uses under the names of its types.
    """
    prompts: dict[str, str | None] = encoder.model.prompts
    default = prompts.get(encoder.model.default_prompt_name or "")
    used = {"", None, default, *(encoder.model_prompts or {}).values()}
    unused = [name for name, text in prompts.items() if text not in used]
    if unused:
        with tqdm.external_write_mode():
            logger.warning(
                f"{label}: MTEB does not use the prompts {', '.join(map(repr, unused))}, whose names it does not know. "
                "It knows `query`, `document`, and its task types and tasks, such as `STS` or `Retrieval-query`"
            )


class _Finite:
    """Makes an encoder of mteb fail on NaN and infinity; retrieval would count them as a score of 0."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Embed texts.

        Raises:
            ValueError: If an embedding is not finite.
        """
        embeddings = super().encode(*args, **kwargs)  # type: ignore[misc]  # of the other base class
        if isinstance(embeddings, torch.Tensor):
            embeddings = embeddings.float()  # as Sentence-Transformers does where it gives arrays
        sparse = isinstance(embeddings, torch.Tensor) and embeddings.is_sparse
        values = torch.as_tensor(embeddings.coalesce().values() if sparse else embeddings)  # on any device
        if not values.isfinite().all():
            raise ValueError("the model gives embeddings that are not finite (NaN or infinite)")
        return embeddings


class _FiniteEncoder(_Finite, SentenceTransformerEncoderWrapper):
    """For dense vectors."""


class _FiniteSparse(_Finite, SparseEncoderWrapper):
    """For sparse vectors."""


def _main_score(result: TaskResult, task: AbsTask) -> float:
    """The score of a task: the mean over its splits and subsets, x 100, as exact as mteb stores it."""
    score = round(100 * float(result.validate_and_filter_scores(task).get_score()), 4)
    if not np.isfinite(score):
        equal = ": all scores of the dataset, or all that the model gives, are equal"
        raise ValueError(f"the score is {score}" + (equal if task.metadata.type in ("STS", "Summarization") else ""))
    return score


def _instructions(definitions: Mapping[str, str], template: str | None, names: Sequence[str]) -> dict[str, str]:
    """Turn the definitions of datasets into instructions.

    Raises:
        ValueError: If there is no such dataset, or the template is invalid.
    """
    for name in definitions:
        if name not in names:
            raise ValueError(f"A definition for the dataset {name!r}, which is not scored." + alternatives(name, names))
    if template is not None and not definitions:
        raise ValueError("A template is for definitions, but there are none: add `--definition DATASET=TEXT`")
    return {name: instruction_with(text, template) for name, text in definitions.items()}


@contextmanager
def instructed(encoder: Any, task: AbsTask, instruction: str | None) -> Iterator[None]:
    """Put an instruction in front of a dataset's texts, or only its queries if it has documents; None: the model's own.

    Within the context, the instruction belongs to the task of a MoTE that serves such datasets. If that task has no
    instruction and no role (`query`, `document`) picks an expert, it becomes the default task, unless there is another.

    Raises:
        ValueError: If the model is a MoTE that has no such task.
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


def _reference(reference: str | None, models: list[EvaluatedModel]) -> str | None:
    """Find the label of the reference."""
    if reference is None:
        return models[0].label if len(models) > 1 else None
    for model in models:
        if reference in (model.label, model.path):
            return model.label
    labels = ", ".join(model.label for model in models)
    raise ValueError(f"The reference {reference} is not one of the models: {labels}")


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


def write(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `table.md`, `datasets.md`, `scores.json` and, if there are gains, `gains.png`.

    Those of an earlier run are replaced once all are complete.

    Returns:
        The files.

    Raises:
        OSError: If they cannot be written.
    """
    texts = {
        "table.md": f"{evaluation}\n",
        "datasets.md": evaluation.per_dataset() + "\n",
        "scores.json": evaluation.to_json(),
    }
    chart = folder / "gains.png"
    writers: dict[Path, Callable[[Path], object]] = {
        folder / name: partial(Path.write_text, data=text, encoding="utf-8") for name, text in texts.items()
    }
    if evaluation.reference is not None and any(evaluation.gains(evaluation.reference).values()):
        writers[chart] = partial(draw_gains, evaluation, evaluation.reference)
    write_together(writers, [] if chart in writers else [chart], "The scores")
    return [*writers]
