"""Cleaning of a dataset's rows: every row is kept, or counted under the reason why it was dropped."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import cycle, islice
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mote.data.columns import MEANINGS, Example, RowType, check_row, find_columns
from mote.data.rows import Location, read_rows
from mote.remote.configuration_mote import alternatives
from mote.reporting import table
from mote.training.recipe import Recipe
from mote.training.task_settings import DatasetSettings, TaskSettings, ValidationSettings

BINARY_LOSSES = ("ContrastiveLoss", "OnlineContrastiveLoss")
SPARSE_SCORED_LOSSES = ("SparseCoSENTLoss", "SparseAnglELoss", "SparseCosineSimilarityLoss")
SCORED_LOSSES = ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss", *SPARSE_SCORED_LOSSES, *BINARY_LOSSES)
LABELLED_LOSSES = (
    "BatchAllTripletLoss",
    "BatchHardTripletLoss",
    "BatchSemiHardTripletLoss",
    "BatchHardSoftMarginTripletLoss",
)
TEACHER_LOSSES = ("EmbedDistillLoss", "MSELoss")

MOST_NEGATIVES = 4  # per row, if the recipe sets no number
SHOWN_ERRORS = 5
AMBIGUOUS = {"labelled": "text has several labels", "scored": "pair has several scores"}


LabelType = Literal["pairs", "scored", "labelled", "embeddings"]


@dataclass
class DatasetReport:
    """What became of a dataset's rows.

    Attributes:
        name: Dataset name.
        task: Task of the recipe.
        read: Rows read.
        invalid: Invalid rows among them.
        used: Rows trained on, before the weight.
        held_out: Rows of the validation split.
        dropped: Reason → number of rows.
        errors: The first invalid rows, as `file:line: error`.
        notes: Other remarks.
    """

    name: str
    task: str
    read: int = 0
    invalid: int = 0
    used: int = 0
    held_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: str, rows: int) -> None:
        """Count dropped rows."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def count_invalid(self, errors: list[str], read: int, max_invalid_fraction: float) -> None:
        """Count rows read, and those among them that are invalid.

        Args:
            errors: The invalid rows, as `file:line: error`.
            read: Number of rows.
            max_invalid_fraction: Fraction of invalid rows that is allowed.

        Raises:
            ValueError: If there are more, or no other rows.
        """
        self.read, self.invalid, self.errors = read, len(errors), errors[:SHOWN_ERRORS]
        if len(errors) > max_invalid_fraction * read or len(errors) == read:
            raise ValueError(
                f"{self.name}: {len(errors):,} of {read:,} rows are invalid; the allowed fraction is "
                f"{max_invalid_fraction:g} (data.max_invalid_fraction). The first ones:\n  " + "\n  ".join(self.errors)
            )

    def remarks(self) -> list[str]:
        """List what happened to the rows, one remark per line."""
        dropped = [f"{self.name}: dropped {rows:,}: {reason}" for reason, rows in self.dropped.items()]
        notes = [f"{self.name}: {note}" for note in self.notes]
        return [*dropped, *notes, *(f"{self.name}: invalid row {error}" for error in self.errors)]


def table_of(reports: Sequence[DatasetReport]) -> str:
    """Return a table with a line for each dataset, then the remarks."""
    rows = [
        (
            report.task,
            report.name,
            *map("{:,}".format, (report.read, report.invalid, report.held_out)),
            *map("{:,}".format, (sum(report.dropped.values()), report.used)),
        )
        for report in reports
    ]
    header = ["task", "dataset", "read", "invalid", "held out", "dropped", "used"]
    remarks = (remark for report in reports for remark in report.remarks())
    return "\n".join([table(header, rows, align="llrrrrr"), *remarks])


def text_id(text: str) -> int:
    """Return the number that identifies a text; equal texts have the same number."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest(), "big", signed=True)


def label_type_of(task: TaskSettings) -> LabelType:
    """Return what a task's loss takes as labels (see `TrainingSet.label_type`)."""
    if task.loss in SCORED_LOSSES:
        return "scored"
    if task.loss in LABELLED_LOSSES:
        return "labelled"
    return "embeddings" if task.loss in TEACHER_LOSSES else "pairs"


class DatasetRows:
    """The rows of one dataset.

    `clean` applies the methods below, in this order.

    Args:
        location: Where the dataset is.
        task_name: Task of the recipe.
        task: Its settings.

    Attributes:
        name: Dataset name.
        row_type: What its columns hold.
        label_type: What the loss takes as labels.
        rows: Examples with one positive each; labelled texts and single texts have none.
        held_out: Validation rows.
        report: What became of the rows.
    """

    def __init__(self, location: Location[DatasetSettings], task_name: str, task: TaskSettings) -> None:
        self.name = location.name
        self.location = location
        self.settings = location.settings
        self.task_name = task_name
        self.task = task.of(self.settings)
        self.label_type = label_type_of(self.task)
        self.row_type: RowType = "texts"
        self.rows: list[Example] = []
        self.held_out: list[Example] = []
        self.report = DatasetReport(location.name, task_name)

    @property
    def tasks(self) -> tuple[str, str]:
        """Tasks of the model for anchors and for positives."""
        return self.settings.anchor or self.task.anchor, self.settings.positive or self.task.positive

    def clean(self, recipe: Recipe) -> None:
        """Read, check and sample the rows, and cut off the validation split.

        Raises:
            ValueError: If the dataset is invalid, or does not suit the loss.
        """
        self.read(recipe.data.max_invalid_fraction)
        self.fit_to_loss()
        self.drop_repeats()
        self.hold_out(recipe.validation)
        self.drop_negative_pairs()
        self.make_directed_pairs(recipe.training.seed)
        self.take_sample(self.settings.limit or recipe.data.limit, recipe.training.seed)

    def read(self, max_invalid_fraction: float) -> None:
        """Read and check all rows.

        Raises:
            ValueError: If a column is missing, too many rows are invalid, or none is left.
        """
        lines = list(read_rows(self.location))
        if not lines:
            raise ValueError(f"{self.name} has no rows")
        present = sorted({column for line in lines for column in line.content})
        columns = find_columns(self.settings, present, self.name) if present else None
        errors = []
        for line in lines:
            try:
                if columns is None or line.fault:
                    raise ValueError(line.fault or "it has no columns")
                self.rows.append(check_row(line.content, columns))
            except ValueError as error:
                errors.append(f"{line.where}: {error}")
        self.row_type = columns.row_type if columns is not None else "texts"
        self.report.count_invalid(errors, len(lines), max_invalid_fraction)

    def fit_to_loss(self) -> None:
        """Convert the rows to the form that the task's loss takes.

        Raises:
            ValueError: If the rows cannot be converted.
        """
        if self.row_type == "scored":
            self._fit_scores()
        elif self.label_type == "scored":
            raise ValueError(f"{self.name} has no scores, which {self.task.loss} needs; InfoNCE does not")
        elif self.label_type == "labelled" and self.row_type != "labelled":
            raise ValueError(f"{self.name} has no labels, which {self.task.loss} needs; InfoNCE does not")
        elif self.label_type == "pairs" and self.row_type == "texts":
            raise ValueError(
                f"{self.name} has single texts, but {self.task.loss} takes pairs or texts with labels. If columns were "
                "not found, name them with `columns`"
            )
        elif self.row_type == "pairs":
            self._make_pairs()

    def _fit_scores(self) -> None:
        scores = [float(row.label or 0) for row in self.rows]
        graded = not set(scores) <= {0.0, 1.0}
        if self.label_type == "labelled":
            raise ValueError(f"{self.name} has pairs with scores, but {self.task.loss} takes texts with labels")
        if self.settings.min_score is not None and self.label_type == "pairs":
            return
        if graded and (self.label_type == "pairs" or self.task.loss in BINARY_LOSSES):
            wanted = "0 and 1" if self.task.loss in BINARY_LOSSES else "pairs that belong together"
            raise ValueError(
                f"{self.name} has graded scores, but {self.task.loss} takes {wanted}: try the loss CoSENTLoss"
            )
        most = max(map(abs, scores))
        if self.label_type == "scored" and most > 1:
            self.report.notes.append(f"scores divided by the largest absolute value, {most:g}")
            self.rows = [row._replace(label=score / most) for row, score in zip(self.rows, scores, strict=True)]

    def _make_pairs(self) -> None:
        """Expand each positive into a pair, all with the same number of hard negatives."""
        rows = []
        for row in self.rows:
            texts = {text.strip() for text in (row.anchor, *row.positives)}
            rows.append(row._replace(negatives=tuple(text for text in row.negatives if text.strip() not in texts)))
        known = sum(len(row.negatives) for row in self.rows) - sum(len(row.negatives) for row in rows)
        if known:
            self.report.notes.append(f"{known:,} hard negatives removed that equal the anchor or a positive")
        wanted = self._negatives_per_row(rows)
        self.rows = []
        for row in rows:
            if wanted and not row.negatives:
                self.report.drop("no hard negative", len(row.positives))
                continue
            for number, positive in enumerate(row.positives):
                taken = range(number * wanted, (number + 1) * wanted)  # each positive takes the next ones
                hard = tuple(row.negatives[i % len(row.negatives)] for i in taken)
                self.rows.append(Example(row.anchor, (positive,), hard))

    def _negatives_per_row(self, rows: Sequence[Example]) -> int:
        counts = [len(row.negatives) for row in rows if row.negatives]
        if not counts or self.label_type == "embeddings":
            return 0
        if self.settings.negatives is not None:
            return min(self.settings.negatives, max(counts))
        return min(*counts, MOST_NEGATIVES)

    def drop_repeats(self) -> None:
        """Drop rows that equal an earlier one, texts with ambiguous labels, and pairs with ambiguous scores."""
        taught = self.label_type == "embeddings"
        unlike: dict[tuple[tuple[str, ...], str | float | None], Example] = {}
        for row in self.rows:
            texts = tuple(text.strip() for text in (row.anchor, *row.positives, *row.negatives))
            unlike.setdefault((texts, None if taught and self.row_type == "scored" else row.label), row)
        self.report.drop("repeated", len(self.rows) - len(unlike))
        self.rows = list(unlike.values())
        if self.row_type in AMBIGUOUS and not taught:
            labels = Counter(texts for texts, _ in unlike)
            self.rows = [row for (texts, _), row in unlike.items() if labels[texts] == 1]
            self.report.drop(AMBIGUOUS[self.row_type], len(unlike) - len(self.rows))

    def hold_out(self, settings: ValidationSettings) -> None:
        """Cut off the validation split, by a hash of the anchor, so that it is the same for every recipe and seed."""
        if self.row_type == "texts":  # there is nothing to measure
            return
        places = [(text_id(row.anchor) + 2**63) / 2**64 for row in self.rows]
        inside = sorted((place, number) for number, place in enumerate(places) if place < settings.share)
        if len(inside) < 2:
            return
        chosen = {number for _, number in inside[: settings.limit]}
        self.held_out = [self.rows[number] for _, number in inside[: settings.limit]]
        self.rows = [row for number, row in enumerate(self.rows) if number not in chosen]
        self.report.held_out = len(self.held_out)
        self.drop_texts((row.anchor for row in self.held_out), "has a text that is held out")

    def drop_texts(self, texts: Iterable[str], reason: str) -> None:
        """Drop rows that have one of the texts as anchor, as positive, or as all their hard negatives.

        If only some hard negatives are among the texts, the row's others take their places.
        """
        dropped = {text.strip() for text in texts}
        kept = []
        for row in self.rows:
            others = [text for text in row.negatives if text.strip() not in dropped]
            if any(text.strip() in dropped for text in (row.anchor, *row.positives)) or (row.negatives and not others):
                continue
            kept.append(row._replace(negatives=tuple(islice(cycle(others), len(row.negatives)))))
        self.report.drop(reason, len(self.rows) - len(kept))
        self.rows = kept

    def drop_negative_pairs(self) -> None:
        """Drop pairs with the label 0, if the loss takes only positive pairs."""
        if self.row_type == "scored" and self.label_type == "pairs" and self.settings.min_score is None:
            kept = [row for row in self.rows if row.label == 1]
            self.report.drop("label is 0", len(self.rows) - len(kept))
            self.rows = kept

    def make_directed_pairs(self, seed: int) -> None:
        """Turn each scored pair with at least the dataset's `min_score` into two pairs, one in each direction.

        Hard negatives are texts that score lower with the anchor, then random texts of the dataset.
        """
        least = self.settings.min_score
        if least is None or self.row_type != "scored" or self.label_type != "pairs":
            return
        wanted = MOST_NEGATIVES if self.settings.negatives is None else self.settings.negatives
        alike, unlike = defaultdict(set), defaultdict(list)
        directed = [(row.anchor, row.positives[0], float(row.label or 0)) for row in self.rows]
        directed += [(second, first, score) for first, second, score in directed]
        for first, second, score in directed:
            if score >= least:
                alike[first].add(second)
            else:
                unlike[first].append(second)
        texts = sorted({text for first, second, _ in directed for text in (first, second)})
        draw = random.Random(f"{seed} negatives {self.name}")
        pairs = []
        for first, second, score in directed:
            if score >= least:
                known = {first, second, *alike[first]}
                drawn = draw.sample(texts, min(len(texts), wanted + len(known)))
                others = [text for text in dict.fromkeys([*unlike[first], *drawn]) if text not in known]
                pairs.append(Example(first, (second,), tuple(others[:wanted])))
        self.report.drop(f"score is below {least:g}", sum(score < least for *_, score in directed) // 2)
        self.report.notes.append(f"{len(pairs):,} pairs in both directions from the score {least:g}")
        fewest = min((len(pair.negatives) for pair in pairs), default=0)
        self.rows = [pair._replace(negatives=pair.negatives[:fewest]) for pair in pairs]

    def take_sample(self, limit: int | None, seed: int) -> None:
        """Take a sample that depends only on the seed and the dataset."""
        if limit is not None and len(self.rows) > limit:
            self.report.drop("over the limit", len(self.rows) - limit)
            sample = random.Random(f"{seed} limit {self.name}").sample(range(len(self.rows)), limit)
            self.rows = [self.rows[number] for number in sorted(sample)]

    def drop_singleton_labels(self) -> None:
        """Drop texts whose label occurs only once."""
        if self.row_type != "labelled" or self.label_type == "embeddings" or self.task.pairs == "label_text":
            return
        counts = Counter(str(row.label) for row in self.rows)
        singletons = sorted(label for label, count in counts.items() if count == 1)
        if singletons:
            self.report.drop("label with one example", len(singletons))
            named = ", ".join(map(repr, singletons[:SHOWN_ERRORS])) + (" …" if len(singletons) > SHOWN_ERRORS else "")
            self.report.notes.append(f"labels with one example: {named}")
            self.rows = [row for row in self.rows if counts[str(row.label)] > 1]

    def truncate(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Truncate texts to the dataset's `max_length` in tokens; instructions are not counted.

        Raises:
            ValueError: If the tokenizer does not know the offsets of its tokens.
        """
        lengths = _max_lengths(self.settings, self.name)
        if not lengths:
            return
        if tokenizer is None or not tokenizer.is_fast:
            raise ValueError(f"{self.name}: `max_length` needs a fast tokenizer, which knows the offsets of its tokens")
        anchors = _truncated(tokenizer, [row.anchor for row in self.rows], lengths.get("anchor"))
        positives = iter(
            _truncated(tokenizer, [text for row in self.rows for text in row.positives], lengths.get("positive"))
        )
        negatives = iter(
            _truncated(tokenizer, [text for row in self.rows for text in row.negatives], lengths.get("negative"))
        )
        self.rows = [
            row._replace(
                anchor=anchor,
                positives=tuple(islice(positives, len(row.positives))),
                negatives=tuple(islice(negatives, len(row.negatives))),
            )
            for row, anchor in zip(self.rows, anchors, strict=True)
        ]


def _max_lengths(settings: DatasetSettings, name: str) -> dict[str, int]:
    """Return the limits in tokens of anchors, positives and negatives, if there are any."""
    if settings.max_length is None:
        return {}
    if isinstance(settings.max_length, int):
        return dict.fromkeys(("anchor", "positive", "negative"), settings.max_length)
    ours = {column: meaning for column, meaning in MEANINGS.items() if meaning != "label"}
    for column in settings.max_length:
        if column not in ours:
            raise ValueError(f"{name}: unknown column {column!r} in `max_length`." + alternatives(column, ours))
    lengths = {ours[column]: length for column, length in settings.max_length.items()}
    if "positive" in lengths:
        lengths.setdefault("negative", lengths["positive"])
    return lengths


def _truncated(tokenizer: PreTrainedTokenizerBase, texts: list[str], tokens: int | None) -> list[str]:
    if tokens is None or not texts:
        return texts
    encoded = tokenizer(
        texts, add_special_tokens=False, truncation=True, max_length=tokens, return_offsets_mapping=True
    )
    return [
        text[offsets[0][0] : offsets[-1][1]] if len(offsets) == tokens else text  # some tokenizers keep the end
        for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
    ]
