"""The data of a recipe: checked, its validation part cut off, in the form that each task's loss wants.

The paper's hierarchy is task → datasets. What becomes of a dataset's rows, in this order: rows with a fault are counted
and reported, lists of positives become pairs, repeats are left out, the validation part is cut off, the limit is
applied, texts are cut, labelled texts are paired within their label, and the weight is applied.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.training.cleaning import TEACHER_LOSSES, DatasetReport, Part, identity, label_form
from mote.training.recipe import Recipe, TaskSettings, TeacherSettings
from mote.training.teachers import Teacher

__all__ = ["DatasetReport", "TrainingData", "TrainingSet", "ValidationSet", "identity", "load_data"]

Report = Callable[[str], None]


@dataclass
class TrainingSet:
    """Rows that are drawn into batches together.

    Attributes:
        name: Of the dataset if the task's batches are homogeneous, else of the task.
        task: The recipe's.
        settings: The task's, as they hold for these rows.
        rows: Columns `anchor`, `positive`, `negative_1` …, `label`, as far as there are any.
        column_tasks: Column → the task of the model (instruction and expert) that its texts are for.
        form: What `label` is. `pairs`: identities of the row's texts, and of the group whose rows are not negatives of
            one another. `scored`: a score. `labelled`: the number of a label. `texts`: the teacher's embeddings.
        sources: Dataset → how many of the rows are its.
    """

    name: str
    task: str
    settings: TaskSettings
    rows: Dataset
    column_tasks: dict[str, str]
    form: str
    sources: dict[str, int]

    def fingerprint(self) -> str:
        """Tell these rows from any others."""
        digest = blake2b(digest_size=8)
        for name in self.column_tasks:
            for text in self.rows[name]:
                digest.update(f"{text}\0".encode())
        return digest.hexdigest()

    @property
    def teacher_dimension(self) -> int:
        """Size of the teacher's embeddings, of form `texts`."""
        return int(np.shape(self.rows[0]["label"])[-1])


@dataclass
class ValidationSet:
    """What was cut off one dataset, and is never trained on.

    Attributes:
        name: Of the dataset.
        task: The recipe's.
        form: `pairs` (columns `anchor`, `positive`), `scored` (also `score`) or `labelled` (`text`, `label`).
        rows: In the order of their hashes.
        anchor: Task of the model for anchors, and for labelled texts.
        positive: Task of the model for positives.
    """

    name: str
    task: str
    form: str
    rows: Dataset
    anchor: str
    positive: str


@dataclass
class TrainingData:
    """All data of a recipe."""

    sets: dict[str, TrainingSet]
    validation: list[ValidationSet]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        """A table for people: a line for each dataset, then what they should know about it."""
        titles = ("task", "dataset", "read", "bad", "held out", "left out", "used")
        lines = [titles, *(_table_line(report) for report in self.reports)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        table = []
        for line in lines:
            texts = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
            table.append("  ".join(texts + numbers))
        return "\n".join([*table, *(remark for report in self.reports for remark in report.remarks())])


def _table_line(report: DatasetReport) -> tuple[str, ...]:
    counts = (report.read, report.bad, report.held_out, sum(report.left_out.values()), report.used)
    return (report.task, report.name, *(f"{count:,}" for count in counts))


def load_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    report: Report = lambda line: None,
    *,
    with_teachers: bool = True,
) -> TrainingData:
    """Read and prepare everything that a recipe trains on.

    Args:
        recipe: The recipe.
        tokenizer: Of the model; needed where datasets have a `max_length`.
        report: Called with each line of progress.
        with_teachers: Whether teachers embed the texts, which can take hours; without, such rows have no labels.

    Returns:
        The training sets by name, the validation parts, and what became of the rows.

    Raises:
        FileNotFoundError: If a dataset is not there.
        ValueError: If a dataset has too many rows with a fault, lacks a column, or does not fit its task's loss.
    """
    _check_teachers(recipe)
    parts = _find_parts(recipe)
    for part in parts:
        part.read(recipe.data.max_bad_share)
        part.fit_to_loss()
        part.drop_repeats()
        part.hold_out(recipe.validation)
        part.drop_unlike_pairs()
        part.take_sample(part.settings.limit or recipe.data.limit, recipe.training.seed)
        report(f"{part.name}: read {part.report.read:,} rows, {part.report.bad:,} of them bad")
        for fault in part.report.faults:
            report(f"  {fault}")
    held_out = [row.anchor for part in parts for row in part.held_out]
    for part in parts:  # after the samples, which should not depend on the other datasets
        part.drop_texts(held_out, "has a text that another dataset holds out")
        part.drop_lonely()
        part.cut_texts(tokenizer)
    sets = _training_sets(parts, recipe, report, with_teachers)
    return TrainingData(sets, [_validation_set(part) for part in parts if part.held_out], [p.report for p in parts])


def _check_teachers(recipe: Recipe) -> None:
    for name, task in recipe.tasks.items():
        for settings in (task.of(dataset) for dataset in task.datasets):
            if (settings.teacher is not None) != (label_form(settings) == "texts"):
                losses = " and ".join(TEACHER_LOSSES)
                raise ValueError(
                    f"Task {name!r} has the loss {settings.loss}: a teacher goes with {losses}, and they with one"
                )


def _find_parts(recipe: Recipe) -> list[Part]:
    parts: dict[str, Part] = {}
    for name, task in recipe.tasks.items():
        for settings in task.datasets:
            for location in find_datasets(settings, Path(recipe.data.folder)):
                other = parts.setdefault(location.name, Part(location, name, task))
                if other.location is not location:
                    raise ValueError(
                        f"Two datasets are named {location.name!r}: {other.settings.path!r} of the task "
                        f"{other.task_name!r}, and {settings.path!r} of the task {name!r}"
                    )
    return list(parts.values())


def _training_sets(parts: list[Part], recipe: Recipe, report: Report, with_teachers: bool) -> dict[str, TrainingSet]:
    sets: dict[str, TrainingSet] = {}
    teachers: dict[str, Teacher] = {}
    for name, task in recipe.tasks.items():
        own = [part for part in parts if part.task_name == name]
        groups = {part.name: [part] for part in own} if task.batches == "homogeneous" else {name: own}
        for set_name, group in groups.items():
            if set_name in sets:
                raise ValueError(f"A dataset and a task are both named {set_name!r}: rename the task")
            teacher = _teacher(group[0].task.teacher, teachers, report)  # looked for in any case
            sets[set_name] = _training_set(set_name, group, recipe.training.seed, teacher if with_teachers else None)
    return sets


def _teacher(settings: TeacherSettings | None, known: dict[str, Teacher], report: Report) -> Teacher | None:
    """Find a teacher; several datasets may have the same one, which is loaded once."""
    if settings is None:
        return None
    key = settings.model_dump_json()
    if key not in known:
        known[key] = Teacher(settings, report=report)
    return known[key]


def _training_set(name: str, parts: list[Part], seed: int, teacher: Teacher | None) -> TrainingSet:
    labels: dict[tuple[str, Any], int] = {}
    tables = []
    for part in parts:
        part.report.used = len(part.rows)
        if not part.rows:
            raise ValueError("\n  ".join([f"{part.name}: no row is left to train on", *part.report.remarks()]))
        table = _table(part, seed, labels, teacher)
        tables.append(_weighted(table, part, seed))
    _refuse_mixture(name, parts, tables)
    _refuse_one_group(name, parts)
    rows = concatenate_datasets(tables) if len(tables) > 1 else tables[0]
    anchor, positive = parts[0].tasks
    text_columns = [column for column in rows.column_names if column != "label"]
    column_tasks = {column: anchor if column == "anchor" else positive for column in text_columns}
    sources = {part.name: len(table) for part, table in zip(parts, tables, strict=True)}
    return TrainingSet(name, parts[0].task_name, parts[0].task, rows, column_tasks, parts[0].form, sources)


def _refuse_mixture(name: str, parts: list[Part], tables: list[Dataset]) -> None:
    """Make sure that datasets whose rows share batches have the same columns, for the same tasks."""
    columns = {part.name: ", ".join(table.column_names) for part, table in zip(parts, tables, strict=True)}
    tasks = {part.name: " and ".join(part.tasks) for part in parts}
    hint = "set `negatives: 0` for those with hard negatives, or make the task's batches homogeneous"
    for unlike, what, way_out in ((columns, "columns", hint), (tasks, "tasks", "make its batches homogeneous")):
        if len(set(unlike.values())) > 1:
            listed = "; ".join(f"{dataset}: {value}" for dataset, value in unlike.items())
            raise ValueError(f"The batches of task {name!r} mix datasets with unlike {what} ({listed}): {way_out}")


def _refuse_one_group(name: str, parts: list[Part]) -> None:
    """Make sure that there are rows that are negatives of one another."""
    if parts[0].form in ("scored", "texts") or parts[0].rows[0].negatives:
        return
    groups = {
        (part.name, row.label) if part.row_type == "labelled" else row.anchor for part in parts for row in part.rows
    }
    if len(groups) == 1:
        raise ValueError(f"All rows of {name!r} have one label or anchor: there is nothing to tell apart")


def _table(part: Part, seed: int, labels: dict[tuple[str, Any], int], teacher: Teacher | None) -> Dataset:
    """Make the rows of one dataset, each once, in the form that the loss wants."""
    if part.form == "texts":
        columns = _text_columns(part.rows)
        return _dataset(columns, pyarrow.nulls(len(part.rows)) if teacher is None else teacher.labels(columns))
    if part.form == "scored":
        return _dataset(_text_columns(part.rows), pyarrow.array([row.label for row in part.rows], pyarrow.float64()))
    if part.form == "labelled":
        numbers = [labels.setdefault((part.name, row.label), len(labels)) for row in part.rows]
        return _dataset(_text_columns(part.rows), pyarrow.array(numbers, pyarrow.int64()))
    if part.row_type == "labelled":
        rows = _paired_by_label(part.rows, f"{seed} pairs {part.name}")
        groups = [identity(f"{part.name}\0{row.label}") for row in rows]
    else:
        rows, groups = part.rows, [identity(row.anchor) for row in part.rows]
    columns = _text_columns(rows)
    identities = [[*map(identity, texts), group] for *texts, group in zip(*columns.values(), groups, strict=True)]
    return _dataset(columns, pyarrow.array(identities, pyarrow.list_(pyarrow.int64())))


def _paired_by_label(rows: Sequence[Example], seed: str) -> list[Example]:
    """Pair texts of the same label: each is an anchor once, and a positive once."""
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


def _dataset(columns: dict[str, list[str]], label: pyarrow.Array) -> Dataset:
    return Dataset(pyarrow.table({**columns, "label": label}))


def _weighted(rows: Dataset, part: Part, seed: int) -> Dataset:
    """Repeat rows: whole copies, then a sample for the fraction."""
    weight, count = part.task.weight * part.settings.weight, len(rows)
    whole = int(weight)
    sample = random.Random(f"{seed} weight {part.name}").sample(range(count), round((weight - whole) * count))
    numbers = [*range(count)] * whole + sorted(sample)
    if not numbers:
        raise ValueError(f"{part.name}: the weight {weight:g} leaves no row of {count:,}")
    return rows if weight == 1 else rows.select(numbers)


def _validation_set(part: Part) -> ValidationSet:
    anchors = [row.anchor for row in part.held_out]
    columns: dict[str, list[Any]] = {"anchor": anchors, "positive": [p for row in part.held_out for p in row.positives]}
    if part.row_type == "labelled":
        columns = {"text": anchors, "label": [row.label for row in part.held_out]}
    elif part.row_type == "scored":
        columns["score"] = [row.label for row in part.held_out]
    return ValidationSet(part.name, part.task_name, part.row_type, Dataset(pyarrow.table(columns)), *part.tasks)
