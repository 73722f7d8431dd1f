"""Texts of pre-training: read, without repeats, and with a validation split."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mote.data.rows import (
    Location,
    Row,
    find_datasets,
    matching_paths,
    read_rows,
    read_text_lines,
    without_excluded,
)
from mote.training.cleaning import DatasetReport, check_rows, content_hash, table_of, text_id
from mote.training.pretraining_recipe import PretrainingRecipe, TextDatasetSettings
from mote.training.spans import split_into_spans

TEXT_FILES = (".txt", ".txt.gz")


@dataclass
class TextData:
    """Task → texts to train on, task → held-out texts, and a report for each dataset.

    With `cot-mae`, a text is a pair of a text and its context, or a `SplitDocument`.
    """

    texts: dict[str, list[Any]]
    held_out: dict[str, list[Any]]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        return table_of(self.reports)

    def hashes(self) -> dict[str, str]:
        """Return a content hash of each task's texts."""
        return {task: content_hash(texts) for task, texts in self.texts.items()}


@dataclass
class _Dataset:
    """The texts of a dataset.

    Attributes:
        report: What became of the rows.
        limit: Maximum number of texts to train on.
        texts: Id → the text; with `cot-mae`, a pair or a `SplitDocument`.
        validation_ids: Id → ids of the single texts in it that may be held out.
    """

    report: DatasetReport
    limit: int | None
    texts: dict[int, Any]
    validation_ids: dict[int, set[int]]

    def training_texts(self, held_out: set[int], seed: int) -> list[Any]:
        """Return the texts of which nothing is held out, up to the limit."""
        kept = [text for number, text in self.texts.items() if held_out.isdisjoint(self.validation_ids[number])]
        self.report.drop("has a text that is held out", len(self.texts) - len(kept))
        kept = self.report.sample(kept, self.limit, seed)
        self.report.used = len(kept)
        return kept


def load_texts(recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> TextData:
    """Read everything that a recipe of pre-training trains on.

    Repeated texts of a task are dropped. Of each task, a share is held out, up to a limit, by a hash of the text. No
    task trains on a text that one of them holds out. Of a pair, that is the text whose hash decides; the other may
    occur in training.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the model, for the lengths of spans.

    Raises:
        FileNotFoundError: If a dataset does not exist.
        ValueError: If a dataset has too many invalid rows or lacks a column; if a task has no text.
    """
    datasets = {name: _read_task(name, recipe, tokenizer) for name in recipe.tasks}
    data = TextData({}, {name: [] for name in datasets}, [])
    held_out: set[int] = set()
    for name, own in datasets.items():
        candidates = [(number, one) for one in own for number, ids in one.validation_ids.items() if ids]
        candidates.sort(key=lambda candidate: candidate[0])
        for number, dataset in candidates[: recipe.validation.limit]:
            data.held_out[name].append(dataset.texts.pop(number))
            dataset.report.held_out += 1
            held_out |= dataset.validation_ids[number]
    for name, own in datasets.items():
        data.texts[name] = [text for one in own for text in one.training_texts(held_out, recipe.training.seed)]
        data.reports += [one.report for one in own]
        if not data.texts[name]:
            remarks = [remark for one in own for remark in one.report.remarks()]
            raise ValueError("\n  ".join([f"tasks.{name}: no text is left to train on", *remarks]))
    return data


def _read_task(name: str, recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> list[_Dataset]:
    """Read the datasets of a task, each text once."""
    task = recipe.tasks[name]
    paired = recipe.objective == "cot-mae" and task.context == "pair"
    seen: set[int] = set()
    datasets = []
    for settings in task.datasets:
        for location in _find(settings, recipe.data.place):
            report = DatasetReport(location.name, name)
            rows = _read(location, task.texts, paired, recipe.data.max_invalid_fraction, report)
            unique = {text_id("\n".join(row)): row for row in rows}
            unique = {number: row for number, row in unique.items() if number not in seen}
            report.drop("repeated", len(rows) - len(unique))
            seen |= unique.keys()
            texts: dict[int, Any] = unique if paired else {number: text for number, (text,) in unique.items()}
            if recipe.objective == "cot-mae" and not paired:
                split = {
                    number: split_into_spans(text, tokenizer, recipe.spans, recipe.training.seed)
                    for number, text in texts.items()
                }
                texts = {number: document for number, document in split.items() if document is not None}
                report.drop(f"too short for two spans of {recipe.spans.length} tokens", len(split) - len(texts))
            share = recipe.validation.share
            ids = {number: {text_id(text) for text in unique[number]} for number in texts}
            chosen = {number: {one for one in own if (one + 2**63) / 2**64 < share} for number, own in ids.items()}
            datasets.append(_Dataset(report, settings.limit or recipe.data.limit, texts, chosen))
    return datasets


def _find(settings: TextDatasetSettings, folder: Path) -> list[Location[TextDatasetSettings]]:
    """Find datasets as `find_datasets` does, and files of plain text."""
    if not settings.path.endswith(TEXT_FILES):
        return find_datasets(settings, folder)
    files = matching_paths(settings.path, folder)
    found = [Location(file.name.removesuffix(".gz").removesuffix(".txt"), settings, (file,)) for file in files]
    return without_excluded(found, settings.exclude)


def _read(
    location: Location[Any], wanted: str, paired: bool, max_invalid_fraction: float, report: DatasetReport
) -> list[tuple[str, ...]]:
    """Read the texts of a dataset: each alone, or with the text of the other side.

    Raises:
        ValueError: If a column is missing, too many rows are invalid, or none is left.
    """
    if location.files and location.files[0].name.endswith(TEXT_FILES):
        rows = [Row(where, {"text": line}) for where, line in read_text_lines(location.files[0])]
    else:
        rows = list(read_rows(location))
    examples, columns = check_rows(rows, location, max_invalid_fraction, report)
    if wanted != "all" and "positive" not in columns.names:
        raise ValueError(f"{location.name} has single texts, not pairs: leave out `texts: {wanted}`")
    texts: list[tuple[str, ...]] = []
    for example in examples:
        if paired:
            pairs = [(example.anchor, positive) for positive in example.positives]
            texts += pairs if wanted == "anchors" else [(positive, anchor) for anchor, positive in pairs]
            continue
        single = [example.anchor] if wanted != "positives" else []
        single += example.positives if wanted != "anchors" else ()
        single += example.negatives if wanted == "all" else ()
        texts += [(text,) for text in single]
    return texts
