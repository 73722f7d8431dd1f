"""Score models on the task types of MTEB; what was finished is kept, and the same call goes on from there."""

import logging
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.models import SentenceTransformerEncoderWrapper
from tqdm import tqdm

from mote.evaluation.cache import Cache, CacheError, default_cache, with_parts
from mote.evaluation.charts import draw_gains
from mote.evaluation.models import DTYPES, Candidate, find_candidates
from mote.evaluation.scores import Evaluation
from mote.evaluation.selection import choose_tasks
from mote.inference.loading import check_device, first_line

Report = Callable[[str], None]


def evaluate(
    models: Sequence[str] | Mapping[str, str],
    *,
    benchmark: str | None = None,
    data: str | Path | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    batch_size: int = 32,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
    reference: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Evaluation:
    """Score models with `mteb.evaluate`.

    A score that was computed before is taken from the cache if model, data, limit and dtype are the same. A dataset
    on which a model fails does not stop the others.

    Args:
        models: What Sentence-Transformers loads: folders or ids on the Hub, or LABEL=MODEL; with a mapping, by their
            names in tables.
        benchmark: A benchmark of MTEB, as in "MTEB(eng, v1)".
        data: A folder of datasets, instead.
        tasks: Which datasets of the folder or the benchmark, also by patterns as in "beir/*"; without either of them,
            names of MTEB tasks.
        limit: Cut the sets of the folder down to about so many texts.
        batch_size: Texts embedded at once.
        device: Where models run. Default: the best there is.
        dtype: "float32", "float16" or "bfloat16", of the models' weights. Default: that in which they are stored.
        out: Folder for tables, chart, scores and the cache. Default: nothing is written but a cache of the user's.
        reference: The model that gains are taken over, by its name or path. Default: the first, if there are several.
        trust_remote_code: Run code of models on the Hub. That of folders is always run.
        overwrite: Compute scores anew.
        report: Called with each line of progress.

    Returns:
        The scores and the failures.

    Raises:
        FileNotFoundError: If a model or the data are not there.
        ValueError: If arguments do not fit, or a model does not load.
        OSError: If results cannot be written.
    """
    _check(batch_size, limit, dtype, device)
    candidates = find_candidates(models, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    base = _reference(reference, candidates)
    with _quiet():
        chosen = choose_tasks(benchmark, data, tasks, limit)
        cache = Cache(default_cache() if out is None else Path(out), chosen)
        run = _Run(candidates, chosen, cache, limit, batch_size, overwrite, report)
        run.load_all()
        run.score_all()
    evaluation = Evaluation(
        scores={candidate.label: run.scores[candidate.label] for candidate in candidates},
        types={task.metadata.name: str(task.metadata.type) for task in chosen},
        metrics={task.metadata.name: str(task.metadata.main_score) for task in chosen},
        failures={label: dict(some) for label, some in run.failures.items()},
        settings={
            "benchmark": benchmark,
            "data": None if data is None else str(data),
            "tasks": list(tasks),
            "limit": limit,
            "batch_size": batch_size,
            "dtype": dtype,
            "mteb": sorted(run.versions),
            "models": {one.label: {"path": one.path, "revision": one.revision} for one in candidates},
            "seconds": {label: dict(some) for label, some in run.seconds.items()},
        },
        reference=base,
    )
    if out is not None:
        write(evaluation, Path(out))
    return evaluation


@dataclass
class _Run:
    """One pass over models and tasks."""

    candidates: list[Candidate]
    tasks: list[Any]
    cache: Cache
    limit: int | None
    batch_size: int
    overwrite: bool
    report: Report
    scores: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    failures: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    versions: set[str] = field(default_factory=set)

    def load_all(self) -> None:
        """Load each model that has work to do, so that one that does not load is known before the work begins."""
        missing = {one.label: sum(self._kept(one, task) is None for task in self.tasks) for one in self.candidates}
        self.report(
            f"Models: {len(self.candidates)}, datasets: {len(self.tasks)}, scores to compute: {sum(missing.values())}; "
            f"results are kept in {self.cache.cache_path}"
        )
        waiting = [one for one in self.candidates if missing[one.label]]
        for candidate in reversed(waiting):
            candidate.load()
            if candidate is not waiting[0]:  # the first can stay
                candidate.release()

    def score_all(self) -> None:
        """Score each model on each task.

        Raises:
            KeyboardInterrupt: With what the user should know.
            CacheError: If results cannot be written.
        """
        total = len(self.candidates) * len(self.tasks)
        with tqdm(total=total, unit="dataset", disable=None, leave=False, dynamic_ncols=True) as bar:
            try:
                for number, candidate in enumerate(self.candidates, start=1):
                    self._say(f"Model {number} of {len(self.candidates)}: {candidate.label}")
                    for index, task in enumerate(self.tasks, start=1):
                        bar.set_description(f"{candidate.label} on {task.metadata.name}")
                        outcome = self._score(candidate, task)
                        bar.update()
                        self._say(f"  {index}/{len(self.tasks)} {task.metadata.name}: {outcome}")
                    candidate.release()
            except KeyboardInterrupt:
                kept = sum(len(scores) for scores in self.scores.values())
                again = "the same command" + (" without --overwrite" if self.overwrite else "")
                raise KeyboardInterrupt(
                    f"{kept} of {total} scores are kept in {self.cache.cache_path}; {again} goes on from there"
                ) from None

    def _score(self, candidate: Candidate, task: Any) -> str:
        """Score, or take the score from the cache; say in a few words what came of it."""
        label, name = candidate.label, task.metadata.name
        result = self._kept(candidate, task)
        how = " (kept)" if result is not None else ""
        try:
            result = result or self._compute(candidate, task)
            score = _main_score(result, task)
        except CacheError:
            raise
        except Exception as error:  # of a dataset, of a model's code, of a device: the others go on
            self.failures[label][name] = first_line(error)
            return f"failed: {first_line(error)}"
        self.scores[label][name] = score
        self.seconds[label][name] = round(result.evaluation_time or 0.0, 2)
        self.versions.add(str(result.mteb_version))
        return f"{score:.2f}, {self.seconds[label][name]:.1f} s{how}"

    def _kept(self, candidate: Candidate, task: Any) -> Any:
        return None if self.overwrite else self.cache.find(task, candidate.meta(limit=self.limit))

    def _compute(self, candidate: Candidate, task: Any) -> Any:
        encoder = _FiniteEncoder(candidate.load())
        of_model = candidate.meta(limit=self.limit)
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(
            update={name: getattr(of_model, name) for name in ("name", "revision", "experiment_kwargs")}
        )
        options: Any = {"batch_size": self.batch_size, "show_progress_bar": False}
        _seed(task)
        loaded = task.data_loaded
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):  # bars that cannot be turned off
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
            if task.data_loaded and not loaded:  # mteb does so, but for a task that failed
                task.unload_data()
        if results.exceptions:  # what mteb reports instead of raising: private data
            raise OSError(results.exceptions[0].exception)
        return self.cache.find(task, of_model)  # as it was rounded there: the same now and when it is read again

    def _say(self, line: str) -> None:
        with tqdm.external_write_mode():
            self.report(line)


class _FiniteEncoder(SentenceTransformerEncoderWrapper):
    """mteb's encoder, which fails where a model gives no numbers; to retrieval they would be a score of 0."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Embed texts.

        Raises:
            ValueError: If an embedding is not finite.
        """
        embeddings = super().encode(*args, **kwargs)
        if not np.isfinite(np.asarray(embeddings)).all():
            raise ValueError("the model gives embeddings that are not finite (NaN or infinite)")
        return embeddings


def _main_score(result: Any, task: Any) -> float:
    """The score of a task: the mean over its splits and subsets, x 100, as exact as mteb keeps it."""
    score = round(100 * float(result.validate_and_filter_scores(task).get_score()), 4)
    if not np.isfinite(score):
        equal = ": all scores of the set, or all that the model gives, are equal"
        raise ValueError(f"the score is {score}" + (equal if task.metadata.type in ("STS", "Summarization") else ""))
    return score


def _check(batch_size: int, limit: int | None, dtype: str | None, device: str | None) -> None:
    for name, value in (("batch size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"The {name} is {value}: expected 1 or more")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"There is no dtype {dtype!r}: expected {', '.join(DTYPES)}")
    check_device(device)


def _reference(reference: str | None, candidates: list[Candidate]) -> str | None:
    """Find the label of the reference."""
    if reference is None:
        return candidates[0].label if len(candidates) > 1 else None
    for candidate in candidates:
        if reference in (candidate.label, candidate.path):
            return candidate.label
    labels = ", ".join(candidate.label for candidate in candidates)
    raise ValueError(f"The reference {reference} is none of the models: {labels}")


def _seed(task: Any) -> None:
    """Put a task's random numbers back to their start: else the second model would get other samples than the first."""
    for part in with_parts([task]):
        part.rng_state, part.np_rng = random.Random(part.seed), np.random.default_rng(part.seed)
    random.seed(task.seed)
    np.random.seed(task.seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep libraries from talking: one line for each dataset is enough."""
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("mteb", "sentence_transformers", "transformers", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = [library for library in (datasets_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for library in bars:
        library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for library in bars:
            library.enable_progress_bar()


def write(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `table.md`, `datasets.md`, `scores.json` and, where there are gains, `gains.png`; each whole or not at all.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "table.md": evaluation.table("markdown") + "\n",
        "datasets.md": evaluation.per_dataset("markdown") + "\n",
        "scores.json": evaluation.to_json(),
    }
    for name, text in texts.items():
        part = _part(folder / name)
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    written = [folder / name for name in texts]
    chart = folder / "gains.png"
    if evaluation.reference is not None and any(evaluation.gains(evaluation.reference).values()):
        part = _part(chart)
        draw_gains(evaluation, evaluation.reference, part)
        written.append(part.replace(chart))
    else:
        chart.unlink(missing_ok=True)  # of an earlier run
    return written


def _part(file: Path) -> Path:
    """Where a file is written before it is moved into place; of each process another."""
    return file.with_name(f".{file.name}.{os.getpid()}.part")
