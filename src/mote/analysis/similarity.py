"""Inter-task similarity: the same texts embedded under each task, as in Figures 1 and 3 of the MoTE paper."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator
from sentence_transformers import SentenceTransformer, SparseEncoder

from mote.remote.configuration_mote import PAPER_INSTRUCTIONS, alternatives

Encoder = SentenceTransformer | SparseEncoder

# How arrays are written to JSON and read again.
Array = Annotated[NDArray[np.float64], PlainValidator(np.asarray), PlainSerializer(np.ndarray.tolist)]
Samples = dict[str, Array]
"""Name of a measure, such as "classification / clustering" → its value for each text or pair."""

ALL_PAIRS = "all pairs"

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
    first_of = {text: task for task, text in reversed(instructions.items())}
    distinct = [task for task, text in instructions.items() if first_of[text] == task]
    with_text = [task for task in distinct if instructions[task]]
    return with_text if len(with_text) > 1 else distinct


def check_tasks(model: Encoder, tasks: Sequence[str], name: str = "The model") -> None:
    """Check that a model knows all tasks and distinguishes at least two of them."""
    known = instructions_of(model)
    for task in tasks:
        if task not in known:
            raise ValueError(f"{name} does not know the task {task!r}." + alternatives(task, known))
    same = len({known[task] for task in tasks}) < 2 and mote_config(model) is None
    if len(set(tasks)) < 2 or same:
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


def similarity_of(embeddings: Mapping[str, NDArray[np.float64]]) -> Samples:
    """Compare the embeddings [N, H] of the same texts under several tasks.

    Returns:
        For each pair of tasks, in their order, the cosine similarity of the two embeddings of each text, [N]; and the
        mean over the pairs, text by text. Empty if there are no tasks.
    """
    pairs = {f"{a} / {b}": cosines(embeddings[a], embeddings[b]) for a, b in combinations(embeddings, 2)}
    return {**pairs, ALL_PAIRS: np.mean(list(pairs.values()), axis=0)} if pairs else {}
