"""The demo without its user interface: embeddings as a map, search, and how a text is routed to its expert."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import orthogonal_procrustes
from sentence_transformers import SentenceTransformer
from sklearn.decomposition import PCA

RULES = {
    1: "`task=` names the task. It picks the expert and leaves the text as it is.",
    2: "The prompt is the instruction of a task: it is put in front of the text, and picks the expert.",
    3: "`encode_query` and `encode_document` pick the instruction and the expert of their side of search.",
    4: "The text itself begins with an instruction (unless `route_by_text` is off).",
    5: "The model has a `default_task`.",
}


class View(NamedTuple):
    """How one expert sees some texts: points [N, 2], cosines [N, N], and statistics about the groups."""

    points: np.ndarray
    similarity: np.ndarray
    nearest: float
    within: float
    between: float


class Way(NamedTuple):
    """How a text is routed: its task and expert, the text that the model reads, the number of the rule that applied."""

    task: str
    expert: str
    reads: str
    rule: int


def config_of(model: SentenceTransformer) -> Any:
    """Return the `MoTEConfig` of a model.

    Raises:
        ValueError: If the model has no task experts.
    """
    config = getattr(model[0], "config", None)
    if not getattr(config, "routes_by_task", False):
        raise ValueError("This is not a MoTE with an expert per task: the demo has nothing to show with it.")
    return config


def embed(model: SentenceTransformer, texts: Sequence[str], task: str) -> np.ndarray:
    """Return normalised embeddings [N, H] of texts, by a task's instruction and expert."""
    prompt = model.prompts.get(task, config_of(model).instruction_of(task))  # it may be reworded
    return model.encode(list(texts), task=task, prompt=prompt, normalize_embeddings=True, show_progress_bar=False)


def task_of(config: Any, expert: str) -> str:
    """Return the first of an expert's tasks with an instruction, beginning with its own; its own if none has any."""
    tasks = [expert, *(task for task, of in config.tasks.items() if of == expert)]
    return next((task for task in tasks if config.instruction_of(task)), expert)


def views(model: SentenceTransformer, texts: Sequence[str], groups: Sequence[str]) -> dict[str, View]:
    """Return how each expert sees the texts.

    The points are the first two principal components of an expert's embeddings. PCA does not fix their rotation, so
    they are rotated onto the points of the first expert (orthogonal Procrustes): the remaining movement is due to the
    expert.
    """
    if len(texts) < 3:
        raise ValueError("A map needs at least three texts.")
    of_group = np.array(groups)
    same = of_group[:, None] == of_group[None, :]
    others = ~np.eye(len(texts), dtype=bool)
    seen: dict[str, View] = {}
    config = config_of(model)
    for expert in config.available_experts:
        embeddings = embed(model, texts, task_of(config, expert))
        points = PCA(2).fit_transform(embeddings)
        if seen:
            points = points @ orthogonal_procrustes(points, next(iter(seen.values())).points)[0]
        similarity = embeddings @ embeddings.T
        nearest = np.where(others, similarity, -np.inf).argmax(axis=1)
        within, between = similarity[same & others], similarity[~same]
        seen[expert] = View(
            points,
            similarity,
            float((of_group[nearest] == of_group).mean()),
            float(within.mean()) if within.size else float("nan"),
            float(between.mean()) if between.size else float("nan"),
        )
    return seen


def search(
    model: SentenceTransformer, query: str, documents: Sequence[str], query_task: str, document_task: str
) -> list[tuple[int, float, str]]:
    """Return the rank, cosine and text of each document, best first."""
    scores = embed(model, documents, document_task) @ embed(model, [query], query_task)[0]
    return [(rank, float(scores[i]), documents[i]) for rank, i in enumerate((-scores).argsort(), 1)]


def way(
    model: SentenceTransformer,
    text: str,
    task: str | None = None,
    prompt_name: str | None = None,
    *,
    default_task: str | None = None,
    route_by_text: bool = True,
) -> Way:
    """Apply the model's own rules (`MoTEConfig.task_of`) to a text.

    Args:
        model: A MoTE.
        text: Text that the user wrote.
        task: As in `encode(task=…)`; `encode_query` and `encode_document` pass "query" and "document".
        prompt_name: As in `encode(prompt_name=…)`.
        default_task: Value for `default_task`, in place of the config's.
        route_by_text: Value for `route_by_text`, in place of the config's.

    Raises:
        ValueError: If no rule applies, or a name is unknown; the message is the model's.
    """
    config = copy.deepcopy(config_of(model))  # other threads read the model's config
    config.default_task, config.route_by_text = default_task, route_by_text
    prompt = model.prompts[prompt_name] if prompt_name else ""
    chosen = config.task_of([text], task, prompt)
    if task or prompt_name:
        rule = 3 if task in ("query", "document") else 1 if task else 2
    else:
        config.default_task = None
        rule = 4 if _begins_with_instruction(config, text) else 5
    return Way(chosen, config.expert_of(chosen), prompt + text, rule)


def _begins_with_instruction(config: Any, text: str) -> bool:
    try:
        return bool(config.task_of([text]))
    except ValueError:
        return False


def about(model: SentenceTransformer, source: str) -> str:
    """Say which model this is, and how it was trained, as far as its folder records it."""
    config, name = config_of(model), Path(source).name
    first, *rest = (model.encode("A text.", task=expert, prompt="") for expert in config.available_experts)
    if rest and all(np.array_equal(first, other) for other in rest):
        return f"**{name}** is **not trained**: its experts are copies of one another. Only the instructions differ."
    record = Path(source) / "mote.json"
    steps = json.loads(record.read_text(encoding="utf-8"))["steps"] if record.is_file() else []
    run = next((step for step in reversed(steps) if step["step"] == "train"), None)
    if run is None:
        link = f"[{source}](https://huggingface.co/{source})" if not Path(source).exists() else f"`{name}`"
        return f"Model: **{link}**. Its card says how it was trained."
    rows = sum(dataset["used"] for dataset in run["data"])
    said = (
        f"Model: **{name}**, made of {run['sources'][0]['name']}: {len(config.experts)} experts, trained for "
        f"{run['steps']} steps on {rows:,} rows by the recipe `{run['recipe']}`."
    )
    if run["recipe"] == "small-mote":
        said += " `general` is that source, unchanged. None of the texts here were trained on."
    return said
