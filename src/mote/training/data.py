"""The data of a recipe: cleaned, with a validation split, and labels that suit each task's loss.

The paper's hierarchy is task → datasets. The rows of a dataset go through these steps: invalid rows are counted and
reported, lists of positives become pairs, repeats are dropped, the validation split is cut off, the limit is applied,
texts are truncated, labelled texts are paired within their label, and the weight is applied.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.remote.configuration_mote import MoTEConfig
from mote.training.cleaning import (
    MOST_NEGATIVES,
    TEACHER_LOSSES,
    DatasetReport,
    DatasetRows,
    LabelType,
    label_type_of,
    table_of,
    text_id,
)
from mote.training.recipe import Recipe
from mote.training.task_settings import TaskSettings
from mote.training.teachers import TeacherEmbeddings, teachers_of

logger = logging.getLogger(__name__)

BLENDED = "blended"  # the training set of all datasets whose tasks have blended batches


@dataclass
class TrainingSet:
    """Rows that are drawn into batches together.

    Attributes:
        name: Name of the dataset if the task's batches are homogeneous, of the task if they are heterogeneous, else
            `blended`.
        task: Task of the recipe, or `blended`.
        settings: Settings of the task, for these rows.
        rows: Columns `anchor`, `positive`, `negative_1` …, `label`; only those that exist.
        column_tasks: Column → task of the model (instruction and expert) of its texts; empty if blended.
        label_type: Content of `label`. `pairs`: ids of the row's texts, and of the group whose rows are not negatives
            of each other; if blended, also the number of the row's part. `scored`: a score. `labelled`: the number of
            a label. `embeddings`: the teacher's embeddings.
        sources: Dataset → number of its rows.
        instruction: Instruction of the anchors, and of other columns of their task, in place of the task's.
        parts: If blended, the training set of each dataset.
    """

    name: str
    task: str
    settings: TaskSettings
    rows: Dataset
    column_tasks: dict[str, str]
    label_type: LabelType
    sources: dict[str, int]
    instruction: str | None = None
    parts: list["TrainingSet"] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model that the set trains."""
        own = [part.column_tasks for part in self.parts] or [self.column_tasks]
        return [*dict.fromkeys(task for columns in own for task in columns.values())]

    def instructions(self, names: MoTEConfig) -> dict[str, str]:
        """Return the instruction of each text column."""
        of_tasks = {column: names.instruction_of(task) for column, task in self.column_tasks.items()}
        if self.instruction is None:
            return of_tasks
        instructed = self.column_tasks["anchor"]
        return {c: self.instruction if self.column_tasks[c] == instructed else text for c, text in of_tasks.items()}

    def rows_hash(self) -> str:
        """Return a content hash of the rows: of their texts, and of labels that the data give."""
        digest = blake2b(digest_size=8)
        left_out = ("dataset_name",) if self.label_type in ("scored", "labelled") else ("label", "dataset_name")
        for name in [column for column in self.rows.column_names if column not in left_out]:
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
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    with_teachers: bool = True,
    teachers: Mapping[str, TeacherEmbeddings] | None = None,
) -> TrainingData:
    """Read and prepare everything that a recipe trains on.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the model, for datasets with a `max_length`.
        with_teachers: Whether teachers embed the texts, which can take hours; otherwise such rows have no labels.
        teachers: The recipe's, from `teachers_of`. Default: they are made here.

    Raises:
        FileNotFoundError: If a dataset does not exist.
        ValueError: If a dataset has too many invalid rows, lacks a column, or does not suit its task's loss.
    """
    for name, task in recipe.tasks.items():
        for settings in (task.of(dataset) for dataset in task.datasets):
            if (settings.teacher is not None) != (label_type_of(settings) == "embeddings"):
                losses = " and ".join(TEACHER_LOSSES)
                raise ValueError(
                    f"Task {name!r} has the loss {settings.loss}: a teacher goes with {losses}, which need one"
                )
    datasets = _find_datasets(recipe)
    for dataset in datasets:
        dataset.clean(recipe)
        report = dataset.report
        logger.info("%s: read %s rows, %s of them invalid", report.name, f"{report.read:,}", f"{report.invalid:,}")
        for error in dataset.report.errors:
            logger.info("  %s", error)
    held_out = [row.anchor for dataset in datasets for row in dataset.held_out]
    for dataset in datasets:  # after sampling, which should not depend on the other datasets
        dataset.drop_texts(held_out, "has a text that another dataset holds out")
        dataset.drop_singleton_labels()
        dataset.truncate(tokenizer)
    teachers = teachers_of(recipe) if teachers is None else teachers
    sets = _training_sets(datasets, recipe, teachers, with_teachers)
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


def _training_sets(
    datasets: list[DatasetRows], recipe: Recipe, teachers: Mapping[str, TeacherEmbeddings], with_teachers: bool
) -> dict[str, TrainingSet]:
    sets: dict[str, TrainingSet] = {}
    for name, task in recipe.tasks.items():
        own = [dataset for dataset in datasets if dataset.task_name == name]
        groups = {name: own} if task.batches == "heterogeneous" else {dataset.name: [dataset] for dataset in own}
        for set_name, group in groups.items():
            if set_name in sets:
                raise ValueError(f"A dataset and a task are both named {set_name!r}: rename the task")
            settings = group[0].task.teacher
            teacher = teachers[settings.model_dump_json()] if settings is not None and with_teachers else None
            made = _training_set(set_name, group, recipe.training.seed, teacher)
            sets[set_name] = replace(made, instruction=recipe.instruction_of(group[0].settings))
    parts = [sets.pop(name) for name in [*sets] if sets[name].settings.batches == "blended"]
    if parts and BLENDED in sets:
        raise ValueError(f"With blended batches, no dataset or task may be named {BLENDED!r}: rename it")
    if parts:
        _warn_of_rare_rows(parts, recipe.training.batch_size)
    return {**sets, BLENDED: _blended(parts)} if parts else sets


def _warn_of_rare_rows(parts: list[TrainingSet], batch_size: int) -> None:
    """Warn of datasets that are mostly alone in a blended batch, where their rows have no negatives: a loss of 0."""
    total = sum(len(part.rows) for part in parts)
    for part in parts:
        expected = batch_size * len(part.rows) / total
        if expected < 2 and "negative_1" not in part.column_tasks:
            logger.warning(
                "%s has %.2g rows per blended batch, and no hard negatives: mostly, its rows have no negatives at all. "
                "Raise its `weight` or training.batch_size, or mine negatives (`mote mine`)",
                part.name,
                expected,
            )


def _blended(parts: list[TrainingSet]) -> TrainingSet:
    """Combine the rows of training sets into one set, with as many columns as the widest.

    Missing hard negatives of a row are replaced by a short text, which the loss ignores.
    """
    columns = max((part.column_tasks for part in parts), key=len)
    tables = []
    for number, part in enumerate(parts):
        texts = {name: part.rows[name][:] if name in part.column_tasks else ["-"] * len(part.rows) for name in columns}
        ids = np.asarray(part.rows["label"][:])
        padding = np.zeros((len(ids), len(columns) - len(part.column_tasks)), dtype=ids.dtype)
        labels = np.hstack([ids[:, :-1], padding, ids[:, -1:], np.full((len(ids), 1), number)])
        tables.append(_columns(texts, pyarrow.array(labels.tolist(), pyarrow.list_(pyarrow.int64()))))
    sources = {name: count for part in parts for name, count in part.sources.items()}
    rows = concatenate_datasets(tables)
    return TrainingSet(BLENDED, BLENDED, parts[0].settings, rows, {}, "pairs", sources, parts=parts)


def _training_set(name: str, datasets: list[DatasetRows], seed: int, teacher: TeacherEmbeddings | None) -> TrainingSet:
    labels: dict[tuple[str, Any], int] = {}
    tables = []
    for dataset in datasets:
        dataset.report.used = len(dataset.rows)
        if not dataset.rows:
            raise ValueError("\n  ".join([f"{dataset.name}: no rows are left to train on", *dataset.report.remarks()]))
        tables.append(_weighted(_table(dataset, seed, labels, teacher), dataset, seed))
    _refuse_mixture(name, datasets, tables)
    first = datasets[0]
    rows = concatenate_datasets(tables) if len(tables) > 1 else tables[0]
    if first.label_type in ("pairs", "labelled") and "negative_1" not in rows.column_names and _is_one_group(rows):
        count = sum(len(dataset.rows) for dataset in datasets)
        left = f" (the weight leaves {len(rows):,} of {count:,})" if len(rows) < count else ""
        raise ValueError(f"All rows of {name!r} have the same label or anchor{left}: there are no negatives")
    anchor, positive = first.tasks
    text_columns = [column for column in rows.column_names if column != "label"]
    column_tasks = {column: anchor if column == "anchor" else positive for column in text_columns}
    if first.label_type == "pairs" and not first.task.in_batch_negatives and "negative_1" not in column_tasks:
        raise ValueError(
            f"{name}: without in-batch negatives, its rows need their own negatives: mine them with `mote mine`, or "
            "use other labels with `pairs: label_text`"
        )
    sources = {dataset.name: len(rows) for dataset, rows in zip(datasets, tables, strict=True)}
    return TrainingSet(name, first.task_name, first.task, rows, column_tasks, first.label_type, sources)


def _is_one_group(rows: Dataset) -> bool:
    """Whether all rows have the same label, or the same group at the end of their ids."""
    groups = (label[-1] if isinstance(label, list) else label for label in rows["label"])
    first = next(groups)
    return all(group == first for group in groups)


def _refuse_mixture(name: str, datasets: list[DatasetRows], tables: list[Dataset]) -> None:
    """Raise `ValueError` if datasets whose rows share batches differ in their columns or tasks."""
    columns = {dataset.name: ", ".join(rows.column_names) for dataset, rows in zip(datasets, tables, strict=True)}
    tasks = {dataset.name: " and ".join(dataset.tasks) for dataset in datasets}
    hint = "set `negatives: 0` for those with hard negatives, or make the task's batches homogeneous"
    for values, what, remedy in ((columns, "columns", hint), (tasks, "tasks", "make its batches homogeneous")):
        if len(set(values.values())) > 1:
            listed = "; ".join(f"{dataset}: {value}" for dataset, value in values.items())
            raise ValueError(f"The batches of task {name!r} mix datasets with different {what} ({listed}): {remedy}")


def _table(
    dataset: DatasetRows, seed: int, labels: dict[tuple[str, Any], int], teacher: TeacherEmbeddings | None
) -> Dataset:
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
        by_text = dataset.task.pairs == "label_text"
        make_pairs = partial(_paired_with_label, dataset) if by_text else partial(_paired_by_label, dataset.rows)
        rows = make_pairs(f"{seed} pairs {dataset.name}")
        groups = [text_id(f"{dataset.name}\0{row.label}") for row in rows]
    else:
        rows, groups = dataset.rows, [text_id(row.anchor) for row in dataset.rows]
    columns = _text_columns(rows)
    ids = [[*map(text_id, texts), group] for *texts, group in zip(*columns.values(), groups, strict=True)]
    return _columns(columns, pyarrow.array(ids, pyarrow.list_(pyarrow.int64())))


def _paired_by_label(rows: Sequence[Example], seed: str) -> list[Example]:
    """Pair texts with the same label: each is an anchor once and a positive once."""
    members: dict[Any, list[Example]] = defaultdict(list)
    for row in rows:
        members[row.label].append(row)
    pairs = []
    for label, same in sorted(members.items()):
        random.Random(f"{seed} {label}").shuffle(same)
        following = [*same[1:], same[0]]
        pairs += [row._replace(positives=(other.anchor,)) for row, other in zip(same, following, strict=True)]
    return pairs


def _paired_with_label(dataset: DatasetRows, seed: str) -> list[Example]:
    """Pair each text with the text of its label; texts of other labels are its hard negatives."""
    labels = sorted({str(row.label) for row in (*dataset.rows, *dataset.held_out)})
    given = dataset.settings.label_texts
    absent = [label for label in labels if label not in given] if given else []
    if absent or (not given and all(map(_is_number, labels))):
        raise ValueError(
            f"{dataset.name}: `pairs: label_text` needs a text for the labels {', '.join((absent or labels)[:5])}: set "
            "`label_texts`, or name the column that holds them, `columns: {text: …, label: …}`"
        )
    texts = {label: given.get(label, label) for label in labels}
    ordered = sorted(set(texts.values()))
    if len(ordered) == 1:
        raise ValueError(f"{dataset.name}: all rows have the label {labels[0]!r}, so there are no negatives")
    wanted = MOST_NEGATIVES if dataset.settings.negatives is None else dataset.settings.negatives
    draw, places, pairs = random.Random(seed), {text: place for place, text in enumerate(ordered)}, []
    for row in dataset.rows:
        own = texts[str(row.label)]
        drawn = draw.sample(range(len(ordered) - 1), min(wanted, len(ordered) - 1))  # of all but `own`
        others = tuple(ordered[place + (place >= places[own])] for place in drawn)
        pairs.append(row._replace(positives=(own,), negatives=others))
    return pairs


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


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
        raise ValueError(f"{dataset.name}: the weight {weight:g} leaves none of {count:,} rows")
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
