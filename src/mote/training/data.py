"""The data of a recipe: cleaned, with a validation split, and labels that suit each task's loss.

The paper's hierarchy is task → datasets. The rows of a dataset go through these steps: invalid rows are counted and
reported, lists of positives become pairs, repeats are dropped, the validation split is cut off, the limit is applied,
labelled texts are paired within their label, texts are truncated, and the weight is applied.
"""

import logging
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.remote.configuration_mote import MoTEConfig
from mote.training.cleaning import (
    DEFAULT_NEGATIVES,
    DatasetReport,
    DatasetRows,
    LabelType,
    content_hash,
    table_of,
    text_id,
)
from mote.training.recipe import Recipe, TaskSettings
from mote.training.teachers import TeacherEmbeddings

logger = logging.getLogger(__name__)

BLENDED = "blended"
"""Name of the training set of all datasets whose tasks have blended batches."""


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
            of each other; if blended, also the number of the row's part. `scored`: a score. `labelled`: the id of a
            label. `embeddings`: the teacher's embeddings.
        instruction: Instruction of the anchors, and of other columns of their task, in place of the task's.
        parts: If blended, the training set of each dataset.
    """

    name: str
    task: str
    settings: TaskSettings
    rows: Dataset
    column_tasks: dict[str, str]
    label_type: LabelType
    instruction: str | None = None
    parts: list["TrainingSet"] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model that the set trains."""
        own = [part.column_tasks for part in self.parts] or [self.column_tasks]
        return [*dict.fromkeys(task for columns in own for task in columns.values())]

    def instructions(self, names: MoTEConfig) -> dict[str, str]:
        """Return the instruction of each text column."""
        found = {column: names.instruction_of(task) for column, task in self.column_tasks.items()}
        if self.instruction is not None:
            instructed = self.column_tasks["anchor"]
            found |= {column: self.instruction for column, task in self.column_tasks.items() if task == instructed}
        return found

    def rows_hash(self) -> str:
        """Return a content hash of the rows: of their texts, and of labels that the data give."""
        left_out = ("dataset_name",) if self.label_type in ("scored", "labelled") else ("label", "dataset_name")
        columns = [column for column in self.rows.column_names if column not in left_out]
        return content_hash(chain.from_iterable(self.rows[column] for column in columns))

    @property
    def teacher_dimension(self) -> int:
        """Width of the teacher's embeddings, for the label type `embeddings`."""
        return int(np.shape(self.rows[0]["label"])[-1])


@dataclass
class TrainingData:
    """Training sets by name, datasets with held-out rows, and a report for each dataset."""

    sets: dict[str, TrainingSet]
    validation: list[DatasetRows]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        return table_of(self.reports)

    def hashes(self) -> dict[str, str]:
        """Return a content hash of each training set's rows."""
        return {name: training_set.rows_hash() for name, training_set in self.sets.items()}


def load_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    teachers: Mapping[str, TeacherEmbeddings] | None = None,
) -> TrainingData:
    """Read and prepare everything that a recipe trains on.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the model, for datasets with a `max_length`.
        teachers: The recipe's, from `teachers_of`, which then embed the texts: this can take hours. Default: rows for
            distillation have no labels.

    Raises:
        FileNotFoundError: If a dataset does not exist.
        ValueError: If a dataset has too many invalid rows, lacks a column, or does not suit its task's loss.
    """
    datasets = _find_datasets(recipe)
    for dataset in datasets:
        logger.info("%s: reading …", dataset.name)
        dataset.clean(recipe)
    held_out = [row.anchor for dataset in datasets for row in dataset.held_out]
    groups: dict[str, list[DatasetRows]] = {}
    for dataset in datasets:
        # After sampling, which should not depend on the other datasets.
        dataset.drop_texts(held_out, "has a text that another dataset holds out")
        dataset.drop_singleton_labels()
        dataset.report.used = len(dataset.rows)
        name = dataset.task_name if dataset.task.batches == "heterogeneous" else dataset.name
        group = groups.setdefault(name, [])
        if name == BLENDED or (group and group[0].task_name != dataset.task_name):
            raise ValueError(f"A dataset and a task are both named {name!r}: rename the task")
        group.append(dataset)
    sets = {name: _training_set(name, group, recipe, tokenizer, teachers or {}) for name, group in groups.items()}
    parts = [sets.pop(name) for name in groups if sets[name].settings.batches == "blended"]
    if parts:
        _warn_of_rare_rows(parts, recipe.training.batch_size)
        sets[BLENDED] = _blended(parts)
    for dataset in datasets:
        # The training sets hold them now; validation needs only `held_out`.
        dataset.rows = []
    validation = [dataset for dataset in datasets if dataset.held_out]
    return TrainingData(sets, validation, [dataset.report for dataset in datasets])


def _find_datasets(recipe: Recipe) -> list[DatasetRows]:
    datasets: dict[str, DatasetRows] = {}
    for name, task in recipe.tasks.items():
        for settings in task.datasets:
            for location in find_datasets(settings, recipe.data.place):
                other = datasets.setdefault(location.name, DatasetRows(location, name, recipe))
                if other.location is not location:
                    raise ValueError(
                        f"Two datasets are named {location.name!r}: {other.settings.path!r} of the task "
                        f"{other.task_name!r}, and {settings.path!r} of the task {name!r}"
                    )
    return list(datasets.values())


def _training_set(
    name: str,
    datasets: list[DatasetRows],
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    teachers: Mapping[str, TeacherEmbeddings],
) -> TrainingSet:
    first, task = datasets[0], datasets[0].task
    teacher = teachers.get(task.teacher.model_dump_json()) if task.teacher is not None else None
    tables = {one.name: _table(one, recipe.training.seed, tokenizer, teacher) for one in datasets}
    columns = {name: ", ".join(one.column_names) for name, one in tables.items()}
    if len(set(columns.values())) > 1:
        raise ValueError(
            f"The batches of task {name!r} mix datasets with different columns ("
            f"{'; '.join(f'{one}: {names}' for one, names in columns.items())}): make its batches homogeneous, or set "
            "`negatives: 0` for datasets with hard negatives"
        )
    rows = concatenate_datasets([*tables.values()])
    anchor, positive = first.tasks
    text_columns = [column for column in rows.column_names if column != "label"]
    if "negative_1" not in text_columns and first.label_type in ("pairs", "labelled"):
        # The last number of a pair's label is its group.
        groups = {label[-1] if first.label_type == "pairs" else label for label in rows["label"]}
        in_batch = first.label_type == "labelled" or task.in_batch_negatives
        if len(groups) < 2 or not in_batch:
            problem = "all have the same label or anchor" if in_batch else "in_batch_negatives is false"
            raise ValueError(
                f"The rows of {name!r} have no negatives: {problem}. Mine some with `mote mine`, or use other labels "
                "with `pairs: label_text`"
            )
    column_tasks = {column: anchor if column == "anchor" else positive for column in text_columns}
    return TrainingSet(name, first.task_name, task, rows, column_tasks, first.label_type, first.instruction)


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
        tables.append(_dataset(texts, pyarrow.array(labels.tolist(), pyarrow.list_(pyarrow.int64()))))
    return TrainingSet(BLENDED, BLENDED, parts[0].settings, concatenate_datasets(tables), {}, "pairs", parts=parts)


def _table(
    dataset: DatasetRows, seed: int, tokenizer: PreTrainedTokenizerBase | None, teacher: TeacherEmbeddings | None
) -> Dataset:
    """Build the rows of one dataset, with the labels that the loss takes, and as often as its weight says."""
    if not round(dataset.weight * len(dataset.rows)):
        raise ValueError("\n  ".join([f"{dataset.name}: no rows are left to train on", *dataset.report.remarks()]))
    rows, label_type = dataset.rows, dataset.label_type
    if dataset.row_type == "labelled" and label_type == "pairs":
        pair = _paired_with_label if dataset.task.pairs == "label_text" else _paired_by_label
        rows = pair(dataset, f"{seed} pairs {dataset.name}")
    columns = _truncated(_text_columns(rows), dataset, tokenizer)
    groups = columns["anchor"]
    if dataset.row_type == "labelled":
        groups = [f"{dataset.name}\0{row.label}" for row in rows]
    label: pyarrow.Array
    if label_type == "embeddings":
        label = pyarrow.nulls(len(rows)) if teacher is None else teacher.labels(columns)
    elif label_type == "scored":
        label = pyarrow.array([row.label for row in rows], pyarrow.float64())
    elif label_type == "labelled":
        label = pyarrow.array(map(text_id, groups), pyarrow.int64())
    else:
        ids = [[*map(text_id, texts)] for texts in zip(*columns.values(), groups, strict=True)]
        label = pyarrow.array(ids, pyarrow.list_(pyarrow.int64()))
    table = _dataset(columns, label)
    if dataset.weight == 1:
        return table
    # Whole copies, then a sample for the fraction.
    whole, count = int(dataset.weight), len(rows)
    sample = random.Random(f"{seed} weight {dataset.name}").sample(
        range(count), round((dataset.weight - whole) * count)
    )
    return table.select([*range(count)] * whole + sorted(sample))


def _paired_by_label(dataset: DatasetRows, seed: str) -> list[Example]:
    """Pair texts with the same label: each is an anchor once and a positive once."""
    members: dict[Any, list[Example]] = defaultdict(list)
    for row in dataset.rows:
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
    if all(re.fullmatch(r"-?[\d.]+", label) for label in labels):
        raise ValueError(
            f"{dataset.name}: `pairs: label_text` needs labels that are texts, got {', '.join(labels[:5])}: name the "
            "column that holds them, `columns: {text: …, label: …}`"
        )
    count = DEFAULT_NEGATIVES if dataset.settings.negatives is None else dataset.settings.negatives
    rng, pairs = random.Random(seed), []
    for row in dataset.rows:
        own = str(row.label)
        others = [text for text in labels if text != own]
        pairs.append(row._replace(positives=(own,), negatives=tuple(rng.sample(others, min(count, len(others))))))
    return pairs


def _text_columns(rows: Sequence[Example]) -> dict[str, list[str]]:
    names = ["anchor", *["positive"] * len(rows[0].positives)]
    names += [f"negative_{number}" for number, _ in enumerate(rows[0].negatives, start=1)]
    columns = zip(*((row.anchor, *row.positives, *row.negatives) for row in rows), strict=True)
    return {name: list(texts) for name, texts in zip(names, columns, strict=True)}


def _truncated(
    columns: dict[str, list[str]], dataset: DatasetRows, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, list[str]]:
    """Truncate texts to the dataset's `max_length` in tokens; instructions are not counted."""
    limit = dataset.settings.max_length
    if limit is None or tokenizer is None:
        return columns
    lengths: Any = {**limit} if isinstance(limit, dict) else {"anchor": limit, "positive": limit}
    lengths.setdefault("negative", lengths.get("positive"))
    truncated = {}
    for name, texts in columns.items():
        length = lengths.get("anchor" if dataset.row_type == "labelled" else name.partition("_")[0])
        if length is not None:
            options = {"add_special_tokens": False, "truncation": True, "max_length": length}
            offsets = tokenizer(texts, return_offsets_mapping=True, **options)["offset_mapping"]
            # A tokenizer may truncate on the left.
            truncated[name] = [
                text[tokens[0][0] : tokens[-1][1]] if len(tokens) == length else text
                for text, tokens in zip(texts, offsets, strict=True)
            ]
    return columns | truncated


def _dataset(columns: dict[str, list[str]], label: pyarrow.Array) -> Dataset:
    return Dataset(pyarrow.table({**columns, "label": label}))
