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
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.data.test_sets import texts_of_tests
from mote.data.texts import count_longer
from mote.remote.configuration_mote import MoTEConfig
from mote.training.cleaning import (
    DEFAULT_NEGATIVES,
    DatasetReport,
    DatasetRows,
    LabelType,
    content_hash,
    require_rows,
    table_of,
    text_id,
)
from mote.training.recipe import DataSettings, Recipe, TaskSettings
from mote.training.teachers import TeacherEmbeddings

logger = logging.getLogger(__name__)

BLENDED = "blended"  # the training set of all datasets whose tasks have blended batches


@dataclass
class TrainingSet:
    """Rows that are drawn into batches together: `anchor`, `positive`, `negative_1` …, `label`; only those that exist.

    The label holds, by its type, for `pairs`: ids of the row's texts, and of the group whose rows are not negatives of
    each other; with parts, also the number of the row's part. `scored`: a score. `embeddings`: the teacher's. `scores`:
    the teacher's of the positive and of each negative.
    """

    name: str  # of the dataset if batches are homogeneous, of the task if they are heterogeneous, else `blended`
    task: str  # of the recipe, or `blended`
    settings: TaskSettings
    rows: Dataset
    column_tasks: dict[str, str]  # column → task of the model (instruction and expert); empty with parts
    label_type: LabelType
    instruction: str | None = None  # of the anchors, and of other columns of their task, in place of the task's
    parts: list["TrainingSet"] = field(default_factory=list)  # one for each dataset, if their instructions may differ

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model that the set trains."""
        own = [part.column_tasks for part in self.parts] or [self.column_tasks]
        return [*dict.fromkeys(task for columns in own for task in columns.values())]

    def instructions(self, names: MoTEConfig) -> dict[str, str]:
        """Return the instruction of each text column."""
        own = {} if self.instruction is None else {self.column_tasks["anchor"]: self.instruction}
        return {column: own.get(task, names.instruction_of(task)) for column, task in self.column_tasks.items()}


@dataclass
class TrainingData:
    """Training sets by name, datasets with held-out rows, and a report for each dataset."""

    sets: dict[str, TrainingSet]
    validation: list[DatasetRows]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        return table_of(self.reports)

    def hashes(self) -> dict[str, str]:
        """Hash the texts of each training set, and labels that the data give."""
        hashes = {}
        for name, one in self.sets.items():
            left_out = ("dataset_name",) if one.label_type in ("scored", "scores") else ("label", "dataset_name")
            columns = [column for column in one.rows.column_names if column not in left_out]
            hashes[name] = content_hash(chain.from_iterable(one.rows[column] for column in columns))
        return hashes


def load_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    teachers: Mapping[str, TeacherEmbeddings] | None = None,
    longest: int | None = None,
) -> TrainingData:
    """Read and prepare everything that a recipe trains on.

    The tokenizer is for datasets with a `max_length`. Teachers, from `teachers_of`, embed the texts, which can take
    hours; without them, rows for distillation have no labels. Reports count texts of more than `longest` tokens.
    """
    datasets, tests = _find_datasets(recipe), _tests_of(recipe.data)
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
        if tests:
            dataset.report.compare(dataset.rows, tests)
        name = dataset.task_name if dataset.task.batches == "heterogeneous" else dataset.name
        groups.setdefault(name, []).append(dataset)
    for dataset in datasets:
        if (
            longest
            and tokenizer
            and dataset.rows
            and (count := count_longer(chain.from_iterable(_text_columns(dataset.rows).values()), tokenizer, longest))
        ):
            dataset.report.notes.append(f"{count:,} texts are longer than the {longest:,} tokens that the model reads")
    sets = {name: _training_set(name, group, recipe, tokenizer, teachers or {}) for name, group in groups.items()}
    parts = [sets.pop(name) for name in groups if sets[name].settings.batches == "blended"]
    if parts:
        sets[BLENDED] = _in_parts(BLENDED, BLENDED, parts)
    for dataset in datasets:
        # The training sets hold them now; validation needs only `held_out`.
        dataset.rows = []
    validation = [dataset for dataset in datasets if dataset.held_out]
    return TrainingData(sets, validation, [dataset.report for dataset in datasets])


def _tests_of(data: DataSettings) -> dict[str, str]:
    """Return the texts of the test sets to compare with; those of the data's own folder, if they can be read."""
    try:
        return texts_of_tests(data.place if data.tests is None else Path(data.tests))
    except (OSError, ValueError):
        if data.tests is not None:
            raise
        return {}


def _find_datasets(recipe: Recipe) -> list[DatasetRows]:
    datasets: dict[str, DatasetRows] = {}
    for name, task in recipe.tasks.items():
        for settings in task.datasets:
            for location in find_datasets(settings, recipe.data.place):
                # A training set is named after a dataset or a task.
                taken = {*datasets, *(recipe.tasks.keys() - {name}), BLENDED}
                if location.name in taken or name == BLENDED:
                    raise ValueError(
                        f"tasks.{name}: {settings.path!r} is a dataset named {location.name!r}, but datasets and tasks "
                        f"need different names, and none may be {BLENDED!r}: rename or exclude one"
                    )
                datasets[location.name] = DatasetRows(location, name, recipe)
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
    has_pairs_only = first.label_type == "pairs" and "negative_1" not in text_columns
    # The last number of a label is the row's group.
    if has_pairs_only and (not task.in_batch_negatives or len({label[-1] for label in rows["label"]}) < 2):
        raise ValueError(
            f"The rows of {name!r} have no negatives: in_batch_negatives is false, or all have the same label or "
            "anchor. Mine some with `mote mine`, or use other labels with `pairs: label_text`"
        )
    column_tasks = {column: anchor if column == "anchor" else positive for column in text_columns}
    sets = [
        TrainingSet(one.name, first.task_name, task, tables[one.name], column_tasks, first.label_type, one.instruction)
        for one in datasets
    ]
    if len({one.instruction for one in sets}) > 1:
        return _in_parts(name, first.task_name, sets)
    return replace(sets[0], name=name, rows=rows)


def _in_parts(name: str, task: str, parts: list[TrainingSet]) -> TrainingSet:
    """Combine training sets; for hard negatives that a row lacks, it gets a short text, which the loss ignores."""
    columns = max((part.column_tasks for part in parts), key=len)
    tables = []
    for number, part in enumerate(parts):
        texts = {name: part.rows[name][:] if name in part.column_tasks else ["-"] * len(part.rows) for name in columns}
        ids = np.asarray(part.rows["label"][:])
        padding = np.zeros((len(ids), len(columns) - len(part.column_tasks)), dtype=ids.dtype)
        labels = np.hstack([ids[:, :-1], padding, ids[:, -1:], np.full((len(ids), 1), number)])
        ids = pyarrow.array(labels.tolist(), pyarrow.list_(pyarrow.int64()))
        tables.append(Dataset(pyarrow.table({**texts, "label": ids})))
    return TrainingSet(name, task, parts[0].settings, concatenate_datasets(tables), {}, "pairs", parts=parts)


def _table(
    dataset: DatasetRows, seed: int, tokenizer: PreTrainedTokenizerBase | None, teacher: TeacherEmbeddings | None
) -> Dataset:
    """Build the rows of one dataset, with the labels that the loss takes, and as often as its weight says."""
    rows, label_type, weight = dataset.rows, dataset.label_type, dataset.task.weight * dataset.settings.weight
    require_rows(round(weight * len(rows)), dataset.name, [dataset.report])
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
    elif label_type == "scores":
        scores = [[row.scores[text] for text in (*row.positives, *row.negatives)] for row in rows]
        label = pyarrow.array(scores, pyarrow.list_(pyarrow.float64()))
    else:
        ids = [[*map(text_id, texts)] for texts in zip(*columns.values(), groups, strict=True)]
        label = pyarrow.array(ids, pyarrow.list_(pyarrow.int64()))
    table = Dataset(pyarrow.table({**columns, "label": label}))
    return table if weight == 1 else table.select(dataset.report.repeat(len(rows), weight, seed))


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
    known = (*dataset.rows, *dataset.held_out)
    labels = sorted({label for row in known for label in (str(row.label), *row.further_labels)})
    if all(re.fullmatch(r"-?[\d.]+", label) for label in labels):
        raise ValueError(
            f"{dataset.name}: `pairs: label_text` needs labels that are texts, got {', '.join(labels[:5])}: name the "
            "column that holds them, `columns: {text: …, label: …}`"
        )
    count = DEFAULT_NEGATIVES if dataset.settings.negatives is None else dataset.settings.negatives
    rng, pairs = random.Random(seed), []
    for row in dataset.rows:
        own = (str(row.label), *row.further_labels)
        drawn = rng.choice(own) if len(own) > 1 else own[0]
        others = [text for text in labels if text not in own]
        if len(own) == len(labels) > 1:
            continue  # nothing is wrong for it
        negatives = rng.sample(others, min(count, len(others)))
        if len(own) > 1:  # and so fewer others than most rows have
            negatives = [*islice(cycle(negatives), min(count, len(labels) - 1))]
        pairs.append(row._replace(positives=(drawn,), negatives=tuple(negatives), label=drawn))
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
