"""Texts of pre-training: read, without repeats, and with a validation split."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from mote.data.columns import Example, read_examples
from mote.data.rows import find_datasets
from mote.training.cleaning import DatasetReport, content_hash, share_of, table_of, text_id
from mote.training.pretraining_recipe import PretrainingRecipe, TextTaskSettings
from mote.training.spans import split_into_spans


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


class _Text(NamedTuple):
    """A text, pair or `SplitDocument`, its id, and the ids of the single texts in it that may be held out."""

    id: int
    content: Any
    candidates: set[int]


@dataclass
class _Dataset:
    report: DatasetReport
    limit: int | None
    texts: list[_Text]


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
    held_out, held_out_ids = {}, set()
    datasets: list[_Dataset] = []
    for name in recipe.tasks:
        own = _read_task(name, recipe, tokenizer)
        candidates = [text for dataset in own for text in dataset.texts if text.candidates]
        chosen = sorted(candidates, key=lambda text: text.id)[: recipe.validation.limit]
        held_out[name] = [text.content for text in chosen]
        held_out_ids |= {number for text in chosen for number in text.candidates}
        for dataset in own:
            dataset.report.held_out = len({text.id for text in chosen} & {text.id for text in dataset.texts})
        datasets += own
    texts: dict[str, list[Any]] = {name: [] for name in recipe.tasks}
    for dataset in datasets:
        report = dataset.report
        kept = [text.content for text in dataset.texts if held_out_ids.isdisjoint(text.candidates)]
        report.drop("has a text that is held out", len(dataset.texts) - report.held_out - len(kept))
        kept = report.sample(kept, dataset.limit, recipe.training.seed)
        report.used = len(kept)
        texts[report.task] += kept
    reports = [dataset.report for dataset in datasets]
    for name in recipe.tasks:
        if not texts[name]:
            remarks = [remark for report in reports if report.task == name for remark in report.remarks()]
            raise ValueError("\n  ".join([f"tasks.{name}: no text is left to train on", *remarks]))
    return TextData(texts, held_out, reports)


def _read_task(name: str, recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> list[_Dataset]:
    """Read the datasets of a task, each text once."""
    task = recipe.tasks[name]
    paired = recipe.objective == "cot-mae" and task.context == "pair"
    seen: set[int] = set()
    datasets = []
    for settings in task.datasets:
        for location in find_datasets(settings, recipe.data.place):
            report = DatasetReport(location.name, name)
            read = read_examples(location, recipe.data.max_invalid_fraction)
            report.count(read)
            if task.texts != "all" and "positive" not in read.columns.names:
                raise ValueError(f"{location.name} has single texts, not pairs: leave out `texts: {task.texts}`")
            rows = [row for example in read.rows for row in _texts_of(example, task, paired)]
            unique = {number: row for row in rows if (number := text_id("\n".join(row))) not in seen}
            report.drop("repeated", len(rows) - len(unique))
            seen |= unique.keys()
            texts = []
            for number, row in unique.items():
                content: Any = row if paired else row[0]
                if recipe.objective == "cot-mae" and not paired:
                    content = split_into_spans(row[0], tokenizer, recipe.spans, recipe.training.seed)
                candidates = {text_id(text) for text in row if share_of(text) < recipe.validation.share}
                texts += [_Text(number, content, candidates)] if content is not None else []
            report.drop(f"too short for two spans of {recipe.spans.length} tokens", len(unique) - len(texts))
            datasets.append(_Dataset(report, settings.limit or recipe.data.limit, texts))
    return datasets


def _texts_of(example: Example, task: TextTaskSettings, paired: bool) -> list[tuple[str, ...]]:
    """Return the texts of a row: each alone, or with the text of the other side."""
    if paired and task.texts == "anchors":
        return [(example.anchor, positive) for positive in example.positives]
    if paired:
        return [(positive, example.anchor) for positive in example.positives]
    texts = {"anchors": [example.anchor], "positives": example.positives}
    return [(text,) for text in texts.get(task.texts, (example.anchor, *example.positives, *example.negatives))]
