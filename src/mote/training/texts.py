"""Texts of pre-training: read, cleaned, and turned into masked batches.

The masks of a text depend only on the seed, the epoch and the index of the text, so that a resumed run draws the same
masks as an uninterrupted one.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BatchEncoding, DataCollatorForLanguageModeling, PreTrainedTokenizerBase, TrainerCallback

from mote.data.columns import check_row, find_columns
from mote.data.rows import (
    Location,
    Row,
    find_datasets,
    matching_paths,
    read_rows,
    read_text_lines,
    without_excluded,
)
from mote.training.cleaning import DatasetReport, table_of, text_id
from mote.training.pretraining_recipe import MaskingSettings, PretrainingRecipe, TextDatasetSettings
from mote.training.spans import cut

TEXT_FILES = (".txt", ".txt.gz")
ROWS_AT_A_TIME = 1000


@dataclass
class TextData:
    """Task → texts to train on, task → held-out texts, and a report for each dataset.

    With `cot-mae`, a text is a pair of a text and its context, or a `Document`.
    """

    texts: dict[str, list[Any]]
    held_out: dict[str, list[Any]]
    reports: list[DatasetReport]

    def __str__(self) -> str:
        return table_of(self.reports)

    def hashes(self) -> dict[str, str]:
        """Return a content hash of each task's texts."""
        hashes = {}
        for task, texts in self.texts.items():
            digest = blake2b(digest_size=8)
            for text in texts:
                digest.update(f"{text}\0".encode())
            hashes[task] = digest.hexdigest()
        return hashes


@dataclass
class _Dataset:
    """The texts of a dataset, of which some are then held out.

    Attributes:
        report: What became of the rows.
        limit: Maximum number of texts to train on.
        texts: Number that identifies a text → the text; with `cot-mae`, a pair or a `Document`.
        candidates: The same number → numbers of single texts, for those that may be held out.
    """

    report: DatasetReport
    limit: int | None
    texts: dict[int, Any]
    candidates: dict[int, set[int]]

    def hold_out(self, number: int) -> tuple[Any, set[int]]:
        """Take out a text for validation, and return it with the numbers of its single texts."""
        self.report.held_out += 1
        return self.texts.pop(number), self.candidates.pop(number)

    def to_train_on(self, held_out: set[int], seed: int) -> list[Any]:
        """Return the texts that are left, without those that a pair or another task holds out."""
        kept = [text for number, text in self.texts.items() if held_out.isdisjoint(self.candidates.get(number, ()))]
        self.report.drop("has a text that is held out", len(self.texts) - len(kept))
        if self.limit is not None and len(kept) > self.limit:
            self.report.drop("over the limit", len(kept) - self.limit)
            sample = random.Random(f"{seed} limit {self.report.name}")
            kept = [kept[place] for place in sorted(sample.sample(range(len(kept)), self.limit))]
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
    tasks = {name: _read_task(name, recipe, tokenizer) for name in recipe.tasks}
    data = TextData({}, {}, [])
    held_out: set[int] = set()
    for name, datasets in tasks.items():
        candidates = sorted((number, place) for place, one in enumerate(datasets) for number in one.candidates)
        data.held_out[name] = []
        for number, place in candidates[: recipe.validation.limit]:
            text, numbers = datasets[place].hold_out(number)
            data.held_out[name].append(text)
            held_out |= numbers
    for name, datasets in tasks.items():
        data.texts[name] = [text for one in datasets for text in one.to_train_on(held_out, recipe.training.seed)]
        data.reports += [one.report for one in datasets]
        if not data.texts[name]:
            spans = recipe.objective == "cot-mae" and recipe.tasks[name].context != "pair"
            long = f" that is long enough for two spans of {recipe.spans.length} tokens" if spans else ""
            raise ValueError(f"tasks.{name}: no text{long} is left to train on")
    return data


def _read_task(name: str, recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> list[_Dataset]:
    """Read the datasets of a task, each text once."""
    task = recipe.tasks[name]
    paired = recipe.objective == "cot-mae" and task.context == "pair"
    spans = recipe.objective == "cot-mae" and not paired
    seen: set[int] = set()
    datasets = []
    for settings in task.datasets:
        for location in _find(settings, recipe.data.place):
            report = DatasetReport(location.name, name)
            rows = _read(location, task.texts, paired, recipe.data.max_invalid_fraction, report)
            new: dict[int, Any] = {text_id("\n".join(row)): row for row in rows}
            new = {number: row for number, row in new.items() if number not in seen}
            report.drop("repeated", len(rows) - len(new))
            seen |= new.keys()
            shares = ((number, _in_share(row, recipe.validation.share)) for number, row in new.items())
            candidates = {number: numbers for number, numbers in shares if numbers}
            if not paired:
                new = {number: text for number, (text,) in new.items()}
            if spans:
                seed = recipe.training.seed
                cuts = {number: cut(text, tokenizer, recipe.spans, seed) for number, text in new.items()}
                new = {number: document for number, document in cuts.items() if document is not None}
                report.drop(f"too short for two spans of {recipe.spans.length} tokens", len(cuts) - len(new))
                candidates = {number: numbers for number, numbers in candidates.items() if number in new}
            datasets.append(_Dataset(report, settings.limit or recipe.data.limit, new, candidates))
    return datasets


def _in_share(texts: tuple[str, ...], share: float) -> set[int]:
    """Return the numbers of the texts that may be held out."""
    return {number for number in map(text_id, texts) if (number + 2**63) / 2**64 < share}


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
    present = sorted({column for row in rows for column in row.content})
    if not present:
        raise ValueError(f"{location.name} has no rows, or none with columns")
    columns = find_columns(location.settings, present, location.name)
    if wanted != "all" and "positive" not in columns.names:
        raise ValueError(f"{location.name} has single texts, not pairs: leave out `texts: {wanted}`")
    texts: list[tuple[str, ...]] = []
    errors = []
    for row in rows:
        try:
            if row.fault:
                raise ValueError(row.fault)
            example = check_row(row.content, columns)
        except ValueError as error:
            errors.append(f"{row.where}: {error}")
            continue
        if paired:
            pairs = [(example.anchor, positive) for positive in example.positives]
            texts += pairs if wanted == "anchors" else [(positive, anchor) for anchor, positive in pairs]
            continue
        single = [example.anchor] if wanted != "positives" else []
        single += example.positives if wanted != "anchors" else ()
        single += example.negatives if wanted == "all" else ()
        texts += [(text,) for text in single]
    report.count_invalid(errors, len(rows), max_invalid_fraction)
    return texts


class TextRows(Dataset):
    """Tokenized texts of several tasks, each with the seed of its masks.

    Args:
        texts: Task → its texts.
        prefixes: Task → text in front of each text, for tasks that have one.
        task_ids: Task → its index in the config; None: a text's task makes no difference.
        tokenizer: Tokenizer of the model, which truncates to its `model_max_length`.
        seed: Seed of the masks.
        offsets: Whether to return the offsets of tokens, for whole words.

    Attributes:
        epoch: The epoch, so that masks differ between epochs.
    """

    def __init__(
        self,
        texts: Mapping[str, Sequence[str]],
        prefixes: Mapping[str, str],
        task_ids: Mapping[str, int] | None,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        offsets: bool,
    ) -> None:
        self.rows = [(task, text) for task, found in texts.items() for text in found]
        self.prefixes, self.task_ids, self.tokenizer = prefixes, task_ids, tokenizer
        self.seed, self.offsets, self.epoch = seed, offsets, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, text = self.rows[index]
        return {**self._encoded(self.prefixes.get(task, "") + text), **self._others(task, index)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all rows, as `group_by_length` does before the first step; many are tokenized at a time."""
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            rows = self.rows[start : start + ROWS_AT_A_TIME]
            encoded = self._encoded([self.prefixes.get(task, "") + text for task, text in rows])
            for place, (task, _) in enumerate(rows):
                yield {key: of[place] for key, of in encoded.items()} | self._others(task, start + place)

    def _encoded(self, texts: str | list[str]) -> BatchEncoding:
        return self.tokenizer(
            texts, truncation=True, return_special_tokens_mask=True, return_offsets_mapping=self.offsets
        )

    def _others(self, task: str, index: int) -> dict[str, Any]:
        ids = {} if self.task_ids is None else {"task_ids": self.task_ids[task]}
        return {**ids, "draw": f"{self.seed} {self.epoch} {index}"}


class NewMasks(TrainerCallback):
    """Tells the rows the epoch: accelerate does not if an epoch is resumed or shared by several processes."""

    def __init__(self, rows: TextRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch."""
        self.rows.epoch = int(state.epoch)


class Masking(DataCollatorForLanguageModeling):
    """Transformers' collator, drawing the masks of a batch from the seeds in its rows.

    Args:
        tokenizer: Tokenizer of the model.
        settings: Which tokens are masked.

    Raises:
        ValueError: If the tokenizer has no mask token, or does not show where words end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: MaskingSettings) -> None:
        if settings.whole_words and not _shows_words(tokenizer):
            raise ValueError(
                "masking.whole_words needs a tokenizer that knows the offsets of its tokens, without the spaces "
                f"between words: {type(tokenizer).__name__} does not"
            )
        whole: dict[str, Any] = {"whole_word_mask": True, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
        super().__init__(tokenizer, mlm_probability=settings.rate, **(whole if settings.whole_words else {}))

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Mask a batch."""
        draws = "\n".join(example.pop("draw") for example in examples)
        seed = int.from_bytes(blake2b(draws.encode(), digest_size=7).digest(), "big")
        self.generator = torch.Generator().manual_seed(seed)
        if self.whole_word_mask:  # the tokenizer does not pad these
            length = max(len(example["input_ids"]) for example in examples)
            for example in examples:
                offsets = example["offset_mapping"]
                padding = [(0, 0)] * (length - len(offsets))
                left = self.tokenizer.padding_side == "left"
                example["offset_mapping"] = [*padding, *offsets] if left else [*offsets, *padding]
        return super().torch_call(examples)


def _shows_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    if not tokenizer.is_fast:
        return False
    offsets = tokenizer("one two", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return any(before[1] < after[0] for before, after in itertools.pairwise(offsets))
