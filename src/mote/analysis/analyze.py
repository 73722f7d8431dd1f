"""Analyze how far experts have specialised: all measurements of some models."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mote.analysis.divergence import divergence_of, tsne
from mote.analysis.options import AnalyzeOptions
from mote.analysis.results import Analysis, ModelAnalysis
from mote.analysis.similarity import (
    ROLES,
    Encoder,
    check_tasks,
    default_tasks,
    embed,
    instructions_of,
    mote_config,
    similarity_of,
)
from mote.analysis.weight_change import WeightChange, find_start, weight_change_of
from mote.checkpoints.reading import open_checkpoint
from mote.data.texts import TextPairs, Texts, find_pairs, find_texts
from mote.hub import commit_of
from mote.inference.loading import check_device, load_any_encoder
from mote.reporting import label_models

logger = logging.getLogger(__name__)


def analyze(
    models: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    out: str | Path | None = None,
    options: AnalyzeOptions | None = None,
    **settings: Any,
) -> Analysis:
    """Analyze how far the experts of some models have specialised.

    Measures similarity between tasks, divergence between queries and documents, and the weight change of each expert.

    Args:
        models: Folders or Hub ids of anything that Sentence-Transformers loads, or LABEL=MODEL; or a mapping from
            labels; or one model.
        out: Folder for tables, numbers and charts. Default: nothing is written.
        options: What to measure, and on what.
        **settings: Fields of `AnalyzeOptions`, which replace those of `options`.

    Raises:
        FileNotFoundError: If a model, file or folder does not exist.
        OSError: If `out` is not writable.
        ValueError: If an option is invalid, a file is damaged, a task is unknown, or a model has fewer than two tasks,
            brings code that is not trusted, or lacks the kind of vectors.
    """
    options = AnalyzeOptions(**{**dict(options or ()), **settings})
    if isinstance(options.texts, list):
        texts = Texts(tuple(options.texts), "given texts")
    else:
        texts = find_texts(options.texts, options.data, options.limit, options.seed)
    pairs = find_pairs(options.pairs, options.data, options.limit, options.seed)
    named = label_models(models)
    logger.info("Texts: %d (%s)", len(texts.texts), texts.source)
    # What is needed only after models are loaded and texts embedded, is checked before.
    check_device(options.device)
    if options.start is not None:
        open_checkpoint(options.start)
    commits = {label: commit_of(name) for label, name in named.items()}
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    loaded = {}
    for label, name in named.items():
        logger.info("%s: loading …", label)
        loaded[label] = load_any_encoder(
            name,
            retrieval=options.retrieval,
            revision=commits[label],
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
    tasks = _tasks(loaded, options.tasks, only_pairs=pairs is not None)
    analyses = []
    for label, name in named.items():
        logger.info("%s: %d texts under %s …", label, len(texts.texts), ", ".join(tasks) or "no tasks")
        found = _of_embeddings(label, loaded.pop(label), tasks, texts, pairs, options)
        logger.info("%s: weights …", label)
        change, notes = _weight_change(name, options.start)
        analyses.append(replace(found, weight_change=change, notes=(*found.notes, *notes)))
    result = Analysis(tuple(analyses), texts, pairs, options.seed, options.retrieval)
    if out is not None:
        result.save(out)
        logger.info("Wrote %s", out)
    return result


def _tasks(models: Mapping[str, Encoder], tasks: Sequence[str] | None, only_pairs: bool) -> list[str]:
    """Choose the tasks to compare, and check that every model knows them; none if `only_pairs` is allowed."""
    try:
        if tasks is not None:
            chosen = list(tasks)
        else:
            # A model without tasks is named, rather than the first one, of which no task would be left.
            for label, model in models.items():
                check_tasks(model, default_tasks(model), label)
            first, *others = models.values()
            chosen = [task for task in default_tasks(first) if all(task in instructions_of(one) for one in others)]
        for label, model in models.items():
            check_tasks(model, chosen, label)
    except ValueError as error:
        if tasks is not None or not only_pairs:
            raise
        logger.info("Comparing queries and documents only: %s", error)
        return []
    return chosen


def _of_embeddings(
    label: str, model: Encoder, tasks: list[str], texts: Texts, pairs: TextPairs | None, options: AnalyzeOptions
) -> ModelAnalysis:
    """Take all measurements on the model's embeddings."""
    embeddings = {task: embed(model, texts.texts, task, options.batch_size) for task in tasks}
    known, config = instructions_of(model), mote_config(model)
    found = ModelAnalysis(
        label,
        instructions={task: known[task] for task in tasks},
        experts={} if config is None or not config.routes_by_task else {task: config.expert_of(task) for task in tasks},
        similarity=similarity_of(embeddings),
    )
    roles = next((roles for roles in ROLES if all(role in known for role in roles)), None)
    if roles is None:
        known_roles = ", ".join(" and ".join(roles) for roles in ROLES)
        return replace(found, notes=(f"No divergence: the model has no tasks for search ({known_roles})",))
    sides = (texts.texts, texts.texts) if pairs is None else (pairs.queries, pairs.documents)
    queries, documents = (
        embeddings[role] if pairs is None and role in embeddings else embed(model, side, role, options.batch_size)
        for side, role in zip(sides, roles, strict=True)
    )
    same = "Queries and documents are the same texts under both roles: no pairs were given (`--pairs`)"
    return replace(
        found,
        divergence=divergence_of(queries, documents),
        layout=tsne(queries, documents, options.seed),
        notes=(same,) if pairs is None else (),
    )


def _weight_change(name: str, start: str | None) -> tuple[WeightChange | None, tuple[str, ...]]:
    """Measure the change from the start that is given, else the recorded one; or say why it cannot be measured."""
    try:
        source, revision = (start, None) if start is not None else find_start(name)
        return weight_change_of(name, source, revision), ()
    except (ValueError, OSError) as error:
        named = "" if start is None else f" from {Path(start).name}"
        return None, (f"No weight change{named}: {error}. `--start MODEL` names another start",)
