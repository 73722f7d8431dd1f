"""The data of a recipe: cleaned, with a validation split, and labels that suit each task's loss.

The paper's hierarchy is task → datasets. The rows of a dataset go through these steps: invalid rows are counted and
reported, lists of positives become pairs, repeats are dropped, the validation split is cut off, the limit is applied,
texts are truncated, labelled texts are paired within their label, and the weight is applied.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from configuration_mote import MoTEConfig
from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.training.cleaning import (
    TEACHER_LOSSES,
    DatasetReport,
    DatasetRows,
    LabelType,
    label_type_of,
    table_of,
    text_id,
)
from mote.training.recipe import Recipe, TaskSettings
from mote.training.teachers import Teacher

logger = logging.getLogger(__name__)


@dataclass
class TrainingSet:
    """Rows that are drawn into batches together.

    Attributes:
        name: Name of the dataset if the task's batches are homogeneous, else of the task.
        task: Task of the recipe.
        settings: Its settings, for these rows.
        rows: Columns `anchor`, `positive`, `negative_1` …, `label`; only those that exist.
        column_tasks: Column → task of the model (instruction and expert) of its texts.
        label_type: Content of `label`. `pairs`: ids of the row's texts, and of the group whose rows are not negatives
            of one another. `scored`: a score. `labelled`: the number of a label. `embeddings`: the teacher's.
        sources: Dataset → number of its rows.
        instruction: Instruction of the anchors in place of their task's, and of other columns of that task.
    """

    name: str
    task: str
    settings: TaskSettings
    rows: Dataset
    column_tasks: dict[str, str]
    label_type: LabelType
    sources: dict[str, int]
    instruction: str | None = None

    def instructions(self, names: MoTEConfig) -> dict[str, str]:
        """Return the instruction of each text column."""
        of_tasks = {column: names.instruction_of(task) for column, task in self.column_tasks.items()}
        if self.instruction is None:
            return of_tasks
        instructed = self.column_tasks["anchor"]
        return {c: self.instruction if self.column_tasks[c] == instructed else text for c, text in of_tasks.items()}

    def rows_hash(self) -> str:
        """Return a content hash of the rows."""
        digest = blake2b(digest_size=8)
        for name in self.column_tasks:
            for text in self.rows[name]:
                digest.update(f"{text}\0".encode())
        return digest.hexdigest()

    @property
    def teacher_dimension(self) -> int:
        """Width of the teacher's embeddings, for the label type `embeddings`."""
        return int(np.shape(self.rows[0]["label"])[-1])


@dataclass
class ValidationSet:
    """The validation split of one dataset, which is never trained on.

    Attributes:
        name: Name of the dataset.
        task: Task of the recipe.
        row_type: `pairs` (columns `anchor`, `positive`), `scored` (also `score`) or `labelled` (`text`, `label`).
        rows: Rows, in the order of their hashes.
        anchor: Task of the model for anchors, and for labelled texts.
        positive: Task of the model for positives.
        instruction: As in the training set.
    """

    name: str
    task: str
    row_type: str
    rows: Dataset
    anchor: str
    positive: str
    instruction: str | None = None


@dataclass
class TrainingData:
    """Training sets by name, validation sets, and a report for each dataset."""

    sets: dict[str, TrainingSet]
    validation: list[ValidationSet]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        return table_of(self.reports)


def load_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None, *, with_teachers: bool = True
) -> TrainingData:
    """Read and prepare everything that a recipe trains on.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the model, for datasets with a `max_length`.
        with_teachers: Whether teachers embed the texts, which can take hours; without, such rows have no labels.

    Raises:
        FileNotFoundError: If a dataset does not exist.
        ValueError: If a dataset has too many invalid rows, lacks a column, or does not suit its task's loss.
    """
    for name, task in recipe.tasks.items():
        for settings in (task.of(dataset) for dataset in task.datasets):
            if (settings.teacher is not None) != (label_type_of(settings) == "embeddings"):
                losses = " and ".join(TEACHER_LOSSES)
                raise ValueError(
                    f"Task {name!r} has the loss {settings.loss}: a teacher goes with {losses}, and they with one"
                )
    datasets = _find_datasets(recipe)
    for dataset in datasets:
        dataset.clean(recipe)
        report = dataset.report
        logger.info("%s: read %s rows, %s of them invalid", report.name, f"{report.read:,}", f"{report.invalid:,}")
        for error in dataset.report.errors:
            logger.info("  %s", error)
    held_out = [row.anchor for dataset in datasets for row in dataset.held_out]
    for dataset in datasets:  # after the samples, which should not depend on the other datasets
        dataset.drop_texts(held_out, "has a text that another dataset holds out")
        dataset.drop_singleton_labels()
        dataset.truncate(tokenizer)
    sets = _training_sets(datasets, recipe, with_teachers)
    return TrainingData(
        sets,
        [
            replace(_validation_set(dataset), instruction=recipe.instruction_of(dataset.settings))
            for dataset in datasets
            if dataset.held_out
        ],
        [dataset.report for dataset in datasets],
    )


def _find_datasets(recipe: Recipe) -> list[DatasetRows]:
    datasets: dict[str, DatasetRows] = {}
    for name, task in recipe.tasks.items():
        for settings in task.datasets:
            for location in find_datasets(settings, recipe.data.place):
                other = datasets.setdefault(location.name, DatasetRows(location, name, task))
                if other.location is not location:
                    raise ValueError(
                        f"Two datasets are named {location.name!r}: {other.settings.path!r} of the task "
                        f"{other.task_name!r}, and {settings.path!r} of the task {name!r}"
                    )
    return list(datasets.values())


def _training_sets(datasets: list[DatasetRows], recipe: Recipe, with_teachers: bool) -> dict[str, TrainingSet]:
    sets: dict[str, TrainingSet] = {}
    teachers: dict[str, Teacher] = {}  # several datasets may have the same one, which is loaded once
    for name, task in recipe.tasks.items():
        own = [dataset for dataset in datasets if dataset.task_name == name]
        groups = {dataset.name: [dataset] for dataset in own} if task.batches == "homogeneous" else {name: own}
        for set_name, group in groups.items():
            if set_name in sets:
                raise ValueError(f"A dataset and a task are both named {set_name!r}: rename the task")
            settings, teacher = group[0].task.teacher, None
            if settings is not None:
                key = settings.model_dump_json()
                teacher = teachers.get(key) or teachers.setdefault(key, Teacher(settings))
            made = _training_set(set_name, group, recipe.training.seed, teacher if with_teachers else None)
            sets[set_name] = replace(made, instruction=recipe.instruction_of(group[0].settings))
    return sets


def _training_set(name: str, datasets: list[DatasetRows], seed: int, teacher: Teacher | None) -> TrainingSet:
    labels: dict[tuple[str, Any], int] = {}
    tables = []
    for dataset in datasets:
        dataset.report.used = len(dataset.rows)
        if not dataset.rows:
            raise ValueError("\n  ".join([f"{dataset.name}: no row is left to train on", *dataset.report.remarks()]))
        tables.append(_weighted(_table(dataset, seed, labels, teacher), dataset, seed))
    _refuse_mixture(name, datasets, tables)
    first = datasets[0]
    if first.label_type in ("pairs", "labelled") and not first.rows[0].negatives:
        groups = {
            (dataset.name, row.label) if dataset.row_type == "labelled" else row.anchor
            for dataset in datasets
            for row in dataset.rows
        }
        if len(groups) == 1:
            raise ValueError(f"All rows of {name!r} have the same label or anchor: there are no negatives")
    rows = concatenate_datasets(tables) if len(tables) > 1 else tables[0]
    anchor, positive = first.tasks
    text_columns = [column for column in rows.column_names if column != "label"]
    column_tasks = {column: anchor if column == "anchor" else positive for column in text_columns}
    sources = {dataset.name: len(rows) for dataset, rows in zip(datasets, tables, strict=True)}
    return TrainingSet(name, first.task_name, first.task, rows, column_tasks, first.label_type, sources)


def _refuse_mixture(name: str, datasets: list[DatasetRows], tables: list[Dataset]) -> None:
    """Raise if datasets whose rows share batches differ in their columns or tasks."""
    columns = {dataset.name: ", ".join(rows.column_names) for dataset, rows in zip(datasets, tables, strict=True)}
    tasks = {dataset.name: " and ".join(dataset.tasks) for dataset in datasets}
    hint = "set `negatives: 0` for those with hard negatives, or make the task's batches homogeneous"
    for values, what, remedy in ((columns, "columns", hint), (tasks, "tasks", "make its batches homogeneous")):
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{dataset}: {value}" for dataset, value in values.items())
            raise ValueError(f"The batches of task {name!r} mix datasets with different {what} ({listed}): {remedy}")


def _table(dataset: DatasetRows, seed: int, labels: dict[tuple[str, Any], int], teacher: Teacher | None) -> Dataset:
    """Build the rows of one dataset, each once, with the labels that the loss takes."""
    if dataset.label_type == "embeddings":
        columns = _text_columns(dataset.rows)
        return _columns(columns, pyarrow.nulls(len(dataset.rows)) if teacher is None else teacher.labels(columns))
    if dataset.label_type == "scored":
        return _columns(
            _text_columns(dataset.rows), pyarrow.array([row.label for row in dataset.rows], pyarrow.float64())
        )
    if dataset.label_type == "labelled":
        numbers = [labels.setdefault((dataset.name, row.label), len(labels)) for row in dataset.rows]
        return _columns(_text_columns(dataset.rows), pyarrow.array(numbers, pyarrow.int64()))
    if dataset.row_type == "labelled":
        rows = _paired_by_label(dataset.rows, f"{seed} pairs {dataset.name}")
        groups = [text_id(f"{dataset.name}\0{row.label}") for row in rows]
    else:
        rows, groups = dataset.rows, [text_id(row.anchor) for row in dataset.rows]
    columns = _text_columns(rows)
    ids = [[*map(text_id, texts), group] for *texts, group in zip(*columns.values(), groups, strict=True)]
    return _columns(columns, pyarrow.array(ids, pyarrow.list_(pyarrow.int64())))


def _paired_by_label(rows: Sequence[Example], seed: str) -> list[Example]:
    """Pair texts of the same label: each is an anchor once and a positive once."""
    members: dict[Any, list[Example]] = defaultdict(list)
    for row in rows:
        members[row.label].append(row)
    pairs = []
    for label, same in sorted(members.items()):
        random.Random(f"{seed} {label}").shuffle(same)
        following = [*same[1:], same[0]]
        pairs += [row._replace(positives=(other.anchor,)) for row, other in zip(same, following, strict=True)]
    return pairs


def _text_columns(rows: Sequence[Example]) -> dict[str, list[str]]:
    columns = zip(*((row.anchor, *row.positives, *row.negatives) for row in rows), strict=True)
    first = rows[0]
    names = [
        "anchor",
        *["positive"] * len(first.positives),
        *(f"negative_{i + 1}" for i in range(len(first.negatives))),
    ]
    return {name: list(texts) for name, texts in zip(names, columns, strict=True)}


def _columns(columns: dict[str, list[str]], label: pyarrow.Array) -> Dataset:
    return Dataset(pyarrow.table({**columns, "label": label}))


def _weighted(rows: Dataset, dataset: DatasetRows, seed: int) -> Dataset:
    """Repeat rows: whole copies, then a sample for the fraction."""
    weight, count = dataset.task.weight * dataset.settings.weight, len(rows)
    whole = int(weight)
    sample = random.Random(f"{seed} weight {dataset.name}").sample(range(count), round((weight - whole) * count))
    numbers = [*range(count)] * whole + sorted(sample)
    if not numbers:
        raise ValueError(f"{dataset.name}: the weight {weight:g} leaves no row of {count:,}")
    return rows if weight == 1 else rows.select(numbers)


def _validation_set(dataset: DatasetRows) -> ValidationSet:
    anchors, labels = [row.anchor for row in dataset.held_out], [row.label for row in dataset.held_out]
    columns: dict[str, list[Any]] = {"text": anchors, "label": labels}
    if dataset.row_type != "labelled":
        columns = {"anchor": anchors, "positive": [text for row in dataset.held_out for text in row.positives]}
    if dataset.row_type == "scored":
        columns["score"] = labels
    rows = Dataset(pyarrow.table(columns))
    return ValidationSet(dataset.name, dataset.task_name, dataset.row_type, rows, *dataset.tasks)
