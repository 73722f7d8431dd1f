"""Analyze how far experts have specialised: all measurements of some models."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, SparseEncoder

from mote.analysis.measures import divergence_of, similarity_of, tsne
from mote.analysis.options import AnalyzeOptions
from mote.analysis.results import Analysis, ModelAnalysis
from mote.analysis.weight_change import weight_change_of
from mote.data.texts import Texts, find_pairs, find_texts
from mote.hub import commit_of
from mote.inference.loading import load_any_encoder
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.reporting import label_models

logger = logging.getLogger(__name__)

Encoder = SentenceTransformer | SparseEncoder

# Names of the two roles of search, the paper's first; those that Sentence-Transformers adds on its own come last.
ROLES = (("search_query", "search_document"), ("query", "passage"), ("query", "document"))


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
        ValueError: If an option is invalid, a file is damaged, the models do not know two tasks, or the start is not
            theirs; or if a model brings code that is not trusted, or lacks the kind of vectors.
    """
    options = AnalyzeOptions(**{**dict(options or ()), **settings})
    if isinstance(options.texts, list):
        texts = Texts(tuple(options.texts), "given texts")
    else:
        texts = find_texts(options.texts, options.data, options.limit, options.seed)
    pairs = find_pairs(options.pairs, options.data, options.limit, options.seed)
    named = label_models(models)
    logger.info("Texts: %d (%s)", len(texts.texts), texts.source)
    commits = {label: commit_of(name) for label, name in named.items()}
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    start = options.start
    changes = {label: None if start is None else weight_change_of(name, start) for label, name in named.items()}
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
    for label, change in changes.items():
        logger.info("%s: %d texts under %s …", label, len(texts.texts), ", ".join(tasks) or "no tasks")
        found = _of_embeddings(label, loaded.pop(label), tasks, texts, pairs, options)
        analyses.append(replace(found, weight_change=change))
    result = Analysis(tuple(analyses), texts, pairs, options.seed, options.retrieval)
    if out is not None:
        result.save(out)
        logger.info("Wrote %s", out)
    return result


def _tasks(models: Mapping[str, Encoder], given: Sequence[str] | None, only_pairs: bool) -> list[str]:
    """Choose the tasks to compare, by default the first model's; none if only pairs can be compared."""
    known = {label: instructions_of(model) for label, model in models.items()}
    wanted = given or default_tasks(next(iter(models.values())))
    tasks = [task for task in wanted if all(task in instructions for instructions in known.values())]
    if len(set(tasks)) > 1 and (not given or len(tasks) == len(given)):
        return tasks
    told = "; ".join(
        f"{label}: {', '.join(f'{task} {text!r}' for task, text in one.items())}" for label, one in known.items()
    )
    problem = f"Similarity needs two tasks that all models know, with an expert or a prompt of their own ({told})"
    if given or not only_pairs:
        raise ValueError(f"{problem}. `--task` chooses among them; `--pairs` compares queries and documents alone")
    logger.info("Comparing queries and documents only: %s", problem)
    return []


def _of_embeddings(
    label: str, model: Encoder, tasks: list[str], texts: Texts, pairs: Texts | None, options: AnalyzeOptions
) -> ModelAnalysis:
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
        return found
    sides = (texts.texts, texts.texts) if pairs is None else tuple(zip(*pairs.texts, strict=True))
    queries, documents = (
        embeddings[role] if pairs is None and role in embeddings else embed(model, side, role, options.batch_size)
        for side, role in zip(sides, roles, strict=True)
    )
    return replace(found, divergence=divergence_of(queries, documents), layout=tsne(queries, documents, options.seed))


def mote_config(model: Encoder) -> Any | None:
    """Return the config of a MoTE, None for any other model."""
    config: Any = getattr(model[0], "config", None)
    return config if getattr(config, "model_type", "").startswith("mote") else None


def instructions_of(model: Encoder) -> dict[str, str]:
    """Return the tasks that a model knows, each with its prompt."""
    config = mote_config(model)
    if config is None:
        return {task: text or "" for task, text in model.prompts.items()}
    prompts: dict[str, Any] = model.prompts
    return {task: prompts.get(task, config.instruction_of(task)) for task in config.available_tasks}


def default_tasks(model: Encoder) -> list[str]:
    """Choose a MoTE's experts; of another model the paper's tasks, else its prompts, of equal ones the first."""
    config = mote_config(model)
    if config is not None:
        return list(config.available_experts)
    instructions = instructions_of(model)
    of_paper = [task for task in PAPER_INSTRUCTIONS if task in instructions]
    if len(of_paper) > 1:
        return of_paper
    first_of = {text: task for task, text in reversed(instructions.items())}
    return [task for task, text in instructions.items() if first_of[text] == task]


def embed(model: Encoder, texts: Sequence[str], task: str, batch_size: int = 32) -> NDArray[np.float64]:  # [N, H]
    """Embed texts for a task: with its instruction in front, in a MoTE by its expert, in a `Router` by its model."""
    routed = mote_config(model) is not None or task in getattr(model[0], "sub_modules", ())  # a MoTE, a Router
    options: dict[str, Any] = {"task": task} if routed else {}
    if isinstance(model, SparseEncoder):
        options["convert_to_sparse_tensor"] = False
    embeddings: Any = model.encode(
        list(texts),
        prompt=instructions_of(model)[task],
        batch_size=batch_size,
        show_progress_bar=False,
        convert_to_tensor=True,
        **options,
    )
    result = embeddings.double().cpu().numpy()
    if not np.isfinite(result).all():
        raise ValueError(f"The model's embeddings for the task {task!r} are not finite: it is damaged")
    return result
