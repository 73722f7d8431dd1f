"""Inter-task similarity: the same texts embedded under each task, as in Figures 1 and 3 of the MoTE paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer, PlainValidator
from sentence_transformers import SentenceTransformer, SparseEncoder

from mote.remote.configuration_mote import PAPER_INSTRUCTIONS, alternatives
from mote.statistics import welch

Encoder = SentenceTransformer | SparseEncoder

# How arrays and pairs of names are written to JSON and read again.
Array = Annotated[NDArray[np.float64], PlainValidator(np.asarray), PlainSerializer(np.ndarray.tolist)]
Pair = Annotated[tuple[str, str], BeforeValidator(lambda pair: tuple(pair.split(" / "))), PlainSerializer(" / ".join)]
Similarity = dict[Pair, Array]
"""Pair of tasks → similarity of the two embeddings of each text."""

# Names of the two roles of search, the paper's first; those that Sentence-Transformers adds on its own come last.
ROLES = (("search_query", "search_document"), ("query", "passage"), ("query", "document"))


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
    """Choose the tasks to compare: a MoTE's experts; for another model the paper's four tasks, else all its prompts."""
    config = mote_config(model)
    if config is not None:
        return list(config.available_experts)
    instructions = instructions_of(model)
    of_paper = [task for task in PAPER_INSTRUCTIONS if task in instructions]
    if len(of_paper) > 1:
        return of_paper
    first_of = {text: task for task, text in reversed(instructions.items())}  # text → the first task that has it
    with_text = [task for task, text in instructions.items() if text and first_of[text] == task]
    return with_text if len(with_text) > 1 else [task for task in instructions if task in first_of.values()]


def check_tasks(model: Encoder, tasks: Sequence[str], name: str = "The model") -> None:
    """Check that a model knows all tasks and distinguishes at least two of them."""
    known = instructions_of(model)
    for task in tasks:
        if task not in known:
            raise ValueError(f"{name} does not know the task {task!r}." + alternatives(task, known))
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"A task is repeated: {', '.join(tasks)}")
    same = len({known[task] for task in tasks}) < 2 and mote_config(model) is None
    if len(tasks) < 2 or same:
        told = ", ".join(f"{task} {text!r}" for task, text in known.items()) or "none"
        raise ValueError(
            f"{name} cannot be compared over tasks: that needs two tasks with an expert or a prompt of their own (its "
            f"prompts: {told}). What works: a MoTE, a model trained with instructions (`mote train ic`), or one with "
            "`prompts` in its config_sentence_transformers.json; `--task` chooses among them"
        )


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


def cosines(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the cosine similarity row by row, [N, H] and [N, H] to [N]; of equal rows it is exactly 1."""
    lengths = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1))
    return (first * second).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)


def similarity_of(embeddings: Mapping[str, NDArray[np.float64]]) -> Similarity:
    """Compare the embeddings [N, H] of the same texts under several tasks.

    Returns:
        For each pair of tasks, in their order, the cosine similarity of the two embeddings of each text, [N].
    """
    return {(a, b): cosines(embeddings[a], embeddings[b]) for a, b in combinations(embeddings, 2)}


def inter_task_similarity(
    model: Encoder, texts: Sequence[str], tasks: Sequence[str] | None = None, batch_size: int = 32
) -> Similarity:
    """Embed the same texts under each task, and compare (Figures 1 and 3 of the MoTE paper).

    Args:
        model: A Sentence-Transformers model.
        texts: N texts.
        tasks: Tasks to compare. Default: see `default_tasks`.
        batch_size: Batch size of `encode`.

    Returns:
        For each pair of tasks, in their order, the cosine similarity of the two embeddings of each text, [N].

    Raises:
        ValueError: If the model does not know a task, or distinguishes fewer than two.
    """
    tasks = default_tasks(model) if tasks is None else list(tasks)
    check_tasks(model, tasks)
    return similarity_of({task: embed(model, texts, task, batch_size) for task in tasks})


@dataclass(frozen=True)
class WelchTest:
    """A one-sided Welch's t-test: is the mean of the first model lower than that of the second?

    Attributes:
        first: Label of the first model.
        second: Label of the second model.
        tasks: Pair of tasks; None for the mean over all pairs, text by text.
        mean_first: Mean of the first model.
        mean_second: Mean of the second model.
        t: Test statistic, negative if the first model's mean is lower. None if neither model varies.
        degrees_of_freedom: Welch-Satterthwaite degrees of freedom.
        p: Probability of at least this difference if the first model's mean were not lower.
        measure: Measure whose means are compared: "similarity", or a divergence of queries and documents, "KL" or "JS".
    """

    first: str
    second: str
    tasks: tuple[str, str] | None
    mean_first: float
    mean_second: float
    t: float | None
    degrees_of_freedom: float | None
    p: float | None
    measure: str = "similarity"


def welch_tests(first: str, similarity: Similarity, second: str, other: Similarity) -> list[WelchTest]:
    """Test for each pair of tasks, and over all, whether the first model is less similar: more specialised.

    Args:
        first: Label of the first model.
        similarity: Its similarity.
        second: Label of the second model.
        other: Similarity of the second model, over the same pairs of tasks; empty if tasks are not compared.
    """
    if not similarity:
        return []
    over_all = (None, np.mean(list(similarity.values()), axis=0), np.mean(list(other.values()), axis=0))
    rows = [(pair, values, other[pair]) for pair, values in similarity.items()]
    return [welch_test(first, second, *row) for row in [*rows, over_all]]


def welch_test(
    first: str, second: str, tasks: tuple[str, str] | None, a: Array, b: Array, measure: str = "similarity"
) -> WelchTest:
    """Test whether the mean of the first model's values `a` is lower than that of the second model's `b`."""
    means = float(a.mean()), float(b.mean())
    test = welch(a, b)
    if test is None:
        return WelchTest(first, second, tasks, *means, None, None, None, measure)
    numbers = float(test.statistic), float(test.df), float(test.pvalue)
    return WelchTest(first, second, tasks, *means, *numbers, measure)
