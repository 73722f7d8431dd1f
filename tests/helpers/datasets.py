"""Small datasets on disk, and recipes for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.rows import write_rows

from mote.training.data import TrainingData, TrainingSet, load_data
from mote.training.recipe import Recipe

RETRIEVAL = {"anchor": "search_query", "positive": "search_document", "batches": "homogeneous"}
CLASSIFICATION = {"anchor": "classification", "batches": "heterogeneous"}

Rows = Sequence[dict[str, Any]]


def write(folder: Path, name: str, rows: Rows, file: str = "train.jsonl") -> Path:
    """Write a dataset; the ending of the file decides on its format."""
    return write_rows(folder / name / file, rows)


def recipe_of(folder: Path, task: str = "retrieval", settings: Any = None, **parts: Any) -> Recipe:
    """A recipe of one task, without a validation part if none is asked for."""
    settings = {**(RETRIEVAL if task == "retrieval" else CLASSIFICATION), **(settings or {})}
    parts = {"tasks": {task: settings}, "validation": {"share": 0.0}, **parts}
    data = {"folder": str(folder), **parts.pop("data", {})}
    return Recipe.model_validate({"model": {"source": "none"}, "data": data, **parts})


def load(folder: Path, *datasets: Any, task: str = "retrieval", settings: Any = None, **parts: Any) -> TrainingData:
    return load_data(recipe_of(folder, task, {"datasets": list(datasets), **(settings or {})}, **parts))


def only(data: TrainingData) -> TrainingSet:
    (training_set,) = data.sets.values()
    return training_set


def pairs(count: int, word: str = "text", start: int = 0) -> list[dict[str, Any]]:
    return [{"query": f"{word} {i}", "positive": f"answer to {word} {i}"} for i in range(start, start + count)]


def labelled(**counts: int) -> list[dict[str, Any]]:
    return [{"text": f"{label} {i}", "label": label} for label, count in counts.items() for i in range(count)]


def negatives_of(data: TrainingData, name: str | None = None) -> list[list[str]]:
    rows = (data.sets[name] if name else only(data)).rows
    columns = [column for column in rows.column_names if column.startswith("negative")]
    return [[row[column] for column in columns] for row in rows]
