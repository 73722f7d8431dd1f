"""Texts of pre-training: read, without repeats, with a validation split; and their masked batches.

For CoT-MAE, texts have contexts: other texts, or spans of the same document. What is drawn for a row depends only on
the seed, the epoch and its index, so that a resumed run draws the same spans and masks.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, TrainerCallback

from mote.data.columns import Example
from mote.data.rows import find_datasets
from mote.remote.configuration_mote import MoTEConfig
from mote.training.cleaning import DatasetReport, content_hash, require_rows, share_of, table_of, text_id
from mote.training.pretraining_recipe import (
    MaskingSettings,
    PretrainingRecipe,
    SpanSettings,
    TextDatasetSettings,
    TextTaskSettings,
)

KINDS = ("nearby", "random", "overlap")
REACH = 100  # spans on either side, among which a random one is drawn

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\s*\n\s*|(?<=[。！？])")  # noqa: RUF001  # so intended


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

    def fill_rows(self, recipe: PretrainingRecipe, config: MoTEConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make rows of the texts to train on as their tasks say; held-out texts stay as they are, to be comparable."""
        for name, task in recipe.tasks.items():
            if task.rows != "truncated":
                prefix = config.instruction_of(name) if recipe.model.instructions else ""
                special = tokenizer.num_special_tokens_to_add() + len(tokenizer.tokenize(prefix))
                length = max(1, (recipe.model.max_length or 0) - special)  # an instruction may fill the row
                self.texts[name] = [*rows_of(self.texts[name], tokenizer, length, task.rows == "packed")]

    def hashes(self) -> dict[str, str]:
        """Hash each task's texts."""
        return {task: content_hash(texts) for task, texts in self.texts.items()}


class _Text(NamedTuple):
    """A text, pair or `SplitDocument`, its id, and the ids of the single texts in it that may be held out."""

    id: int
    content: Any
    candidates: set[int]


class _Dataset(NamedTuple):
    report: DatasetReport
    settings: TextDatasetSettings
    texts: list[_Text]


def load_texts(recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerBase) -> TextData:
    """Read everything that a recipe of pre-training trains on; the tokenizer measures spans.

    Of each task, a share is held out, up to a limit, by a hash of the text. No task trains on a text that one of them
    holds out. Of a pair, that is the text whose hash decides; the other may occur in training.
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
    parts: dict[str, list[tuple[DatasetReport, float, list[Any]]]] = {name: [] for name in recipe.tasks}
    for report, settings, read in datasets:
        kept = [text.content for text in read if held_out_ids.isdisjoint(text.candidates)]
        report.drop("has a text that is held out", len(read) - report.held_out - len(kept))
        kept = report.sample(kept, settings.limit or recipe.data.limit, recipe.training.seed)
        report.used = len(kept)
        if kept:
            parts[report.task].append((report, settings.weight, kept))
    texts: dict[str, list[Any]] = {}
    for name, of_task in parts.items():
        temperature = recipe.tasks[name].temperature
        scale = sum(len(kept) for *_, kept in of_task) / (sum(len(kept) ** temperature for *_, kept in of_task) or 1)
        texts[name] = []
        for report, weight, kept in of_task:
            times = weight * scale * len(kept) ** (temperature - 1)
            report.notes += [f"each text is seen {times:.3g} times per epoch"] if times != 1 else []
            texts[name] += [kept[number] for number in report.repeat(len(kept), times, recipe.training.seed)]
    reports = [dataset.report for dataset in datasets]
    for name, of_task in texts.items():
        require_rows(len(of_task), f"tasks.{name}", [report for report in reports if report.task == name])
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
            read = report.read_rows(location, recipe.data.max_invalid_fraction)
            found = [_texts_of(example, task, paired) for example in read.rows]
            report.drop("not a pair", sum(not texts for texts in found))
            rows = [row for texts in found for row in texts]
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
            datasets.append(_Dataset(report, settings, texts))
    return datasets


def _texts_of(example: Example, task: TextTaskSettings, paired: bool) -> list[tuple[str, ...]]:
    """Return the texts of a row: each alone, or with the text of the other side."""
    if paired and task.texts == "anchors":
        return [(example.anchor, positive) for positive in example.positives]
    if paired:
        return [(positive, example.anchor) for positive in example.positives]
    texts = {"anchors": [example.anchor], "positives": example.positives}
    return [(text,) for text in texts.get(task.texts, (example.anchor, *example.positives, *example.negatives))]


@dataclass(frozen=True)
class SplitDocument:
    """A text that was split into sentences, grouped into spans."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of each sentence
    spans: tuple[tuple[int, int], ...]  # first sentence of each, and the one after its last
    longest: int  # approximate number of tokens in a span

    def __str__(self) -> str:
        return "".join(self.sentences)

    def text_of(self, span: tuple[int, int]) -> str:
        """Return the text of some sentences."""
        return "".join(self.sentences[slice(*span)])

    def draw(self, kind: str, rng: random.Random) -> tuple[str, str]:
        """Draw a span and a context for it: `nearby`, `random`, `overlap`, or `mixed`, one of these."""
        anchor = rng.randrange(len(self.spans))
        if kind == "mixed":
            kind = rng.choice(KINDS)
        if kind == "overlap":
            return self.text_of(self.spans[anchor]), self.text_of(self._overlapping(anchor, rng))
        reach = 1 if kind == "nearby" else REACH
        near = range(max(0, anchor - reach), min(len(self.spans), anchor + reach + 1))
        context = rng.choice([other for other in near if other != anchor])
        return self.text_of(self.spans[anchor]), self.text_of(self.spans[context])

    def _overlapping(self, anchor: int, rng: random.Random) -> tuple[int, int]:
        """Return up to half of a span's sentences with those after it; of the last span, with those before it."""
        first, end = self.spans[anchor]
        shared = rng.randint(1, max(1, (end - first) // 2))
        if anchor < len(self.spans) - 1:
            first, end = end - shared, end + 1
            while end < len(self.sentences) and sum(self.lengths[first:end]) < self.longest:
                end += 1
        else:
            first, end = first - 1, first + shared
            while first > 0 and sum(self.lengths[first:end]) < self.longest:
                first -= 1
        return first, end


def split_into_spans(
    text: str, tokenizer: PreTrainedTokenizerBase, settings: SpanSettings, seed: object
) -> SplitDocument | None:
    """Split a text into sentences, and add these to a span until it is long enough; None if there are not two spans."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    pieces = [text[start:end] for start, end in pairwise(dict.fromkeys([0, *ends, len(text)]))]
    sentences = tuple(piece for piece in pieces if piece.strip())
    if len(sentences) < 2:
        return None
    tokens = tokenizer([*sentences], add_special_tokens=False, verbose=False)["input_ids"]
    lengths = tuple(map(len, tokens))
    rng = random.Random(f"{seed} spans {text}")
    spans, first, length = [], 0, 0
    target = settings.draw_length(rng)
    for number, count in enumerate(lengths, start=1):
        length += count
        if length >= target or number == len(lengths):
            spans.append((first, number))
            first, length, target = number, 0, settings.draw_length(rng)
    return SplitDocument(sentences, lengths, tuple(spans), settings.length) if len(spans) > 1 else None


def rows_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, packed: bool) -> Iterator[str]:
    """Cut texts into rows of at most `length` tokens, between words where it can; packed, a row is filled up.

    Rows are texts, too: they are masked as others are. Texts in one row have the separator token between them.
    """
    separator = tokenizer.sep_token or tokenizer.eos_token or ""
    parts: list[str] = []
    used = 0
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        first = 0
        while first < len(tokens):
            room = length - used - bool(parts)
            end = min(first + room, len(tokens))
            while first < end < len(tokens) and tokens[end - 1][1] == tokens[end][0]:  # within a word
                end -= 1
            if end <= first and not parts:  # a word that is longer than a row
                end = first + room
            if end > first:
                used += end - first + bool(parts)
                parts.append(text[tokens[first][0] : tokens[end - 1][1]])
            if not packed or end < len(tokens):
                yield separator.join(parts)
                parts, used = [], 0
            first = max(first, end)
    if parts:
        yield separator.join(parts)


class TextRows(Dataset):
    """Tokenized texts of several tasks, each with the seed of its masks; for CoT-MAE each with its context.

    Items are strings, pairs of a text and its context, or documents of which two spans are drawn.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[Any]],
        recipe: PretrainingRecipe,
        config: MoTEConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.rows = [(task, item) for task, found in items.items() for item in found]
        self.recipe, self.config, self.tokenizer = recipe, config, tokenizer
        self.epoch = 0  # so that masks differ between epochs

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, item = self.rows[index]
        settings, seed = self.recipe.tasks[task], f"{self.recipe.training.seed} {self.epoch} {index}"
        if isinstance(item, str):
            return self._encoded(item, task, seed)
        text, context = item.draw(settings.context, random.Random(seed)) if isinstance(item, SplitDocument) else item
        return {
            "text": self._encoded(text, task, f"{seed} text"),
            "context": self._encoded(context, settings.context_task or task, f"{seed} context"),
        }

    def _encoded(self, text: str, task: str, seed: str) -> dict[str, Any]:
        encoded = self.tokenizer(
            (self.config.instruction_of(task) if self.recipe.model.instructions else "") + text,
            truncation=True,
            return_offsets_mapping=self.recipe.masking.whole_words,
        )
        task_id = {"task_ids": list(self.config.tasks).index(task)} if self.config.routes_by_task else {}
        return {**encoded, **task_id, "seed": seed}


class SetEpoch(TrainerCallback):
    """Tells the rows the epoch: accelerate does not if an epoch is resumed or shared by several processes."""

    def __init__(self, rows: TextRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch."""
        self.rows.epoch = int(state.epoch)


class Masking(DataCollatorForLanguageModeling):
    """Transformers' collator, drawing the masks of a batch from the seeds in its rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: MaskingSettings) -> None:
        whole: dict[str, Any] = {}
        if settings.whole_words:
            whole = {"whole_word_mask": True, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
            encoded = tokenizer("one two", add_special_tokens=False, return_offsets_mapping=True)
            # A word ends where the next token does not start: with offsets that hold spaces, a text would be one word.
            if not any(before[1] < after[0] for before, after in pairwise(encoded["offset_mapping"])):
                raise ValueError(
                    "masking.whole_words needs a tokenizer whose offsets leave out the spaces between words, as "
                    f"those of {type(tokenizer).__name__} do not"
                )
        super().__init__(tokenizer, mlm_probability=settings.rate, **whole)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Mask a batch."""
        seeds = "\n".join(example.pop("seed") for example in examples)
        seed = int.from_bytes(blake2b(seeds.encode(), digest_size=7).digest(), "big")
        self.generator = torch.Generator().manual_seed(seed)
        if self.whole_word_mask:
            # The tokenizer does not pad offsets.
            length, left = max(len(one["input_ids"]) for one in examples), self.tokenizer.padding_side == "left"
            for example in examples:
                offsets = example["offset_mapping"]
                padding = [(0, 0)] * (length - len(offsets))
                example["offset_mapping"] = [*padding, *offsets] if left else [*offsets, *padding]
        return super().torch_call(examples)


class MaskedBatches:
    """Makes batches of texts, masked for the encoder; for CoT-MAE with contexts, masked or not, for the decoder."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: PretrainingRecipe) -> None:
        self.tokenizer, self.settings = tokenizer, recipe.decoder
        self.encoder = Masking(tokenizer, recipe.masking)
        self.decoder = Masking(tokenizer, recipe.masking.updated(rate=recipe.decoder.masking_rate))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch: the arguments of `Pretraining.forward`. Each text is followed by its context, if it has one."""
        if "context" not in examples[0]:
            return self.encoder(examples)
        pairs = [(example["text"], example["context"]) for example in examples]
        if self.settings.both_sides:
            pairs = [sides for text, context in pairs for sides in ((text, context), (context, text))]
        batch = self.encoder([{**text} for text, _ in pairs])
        targets = [{**target, "seed": f"{target['seed']} decoder"} for _, target in pairs]
        if self.settings.kind == "bidirectional":
            decoder = self.decoder(targets)
        else:
            unmasked = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in targets]
            decoder = dict(self.tokenizer.pad(unmasked, return_tensors="pt"))
            decoder["labels"] = decoder["input_ids"].masked_fill(decoder["attention_mask"] == 0, -100)
        names = ("input_ids", "attention_mask", "labels")
        return {**batch, **{f"decoder_{name}": decoder[name] for name in names}}
