"""One dataset of a recipe on its way into a training set: every row is kept, or counted under the reason why not."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from transformers import PreTrainedTokenizerBase

from configuration_mote import alternatives
from mote.data.columns import KNOWN, OURS, Example, RowType, check_row, find_columns
from mote.data.rows import Location, read_rows
from mote.training.recipe import DatasetSettings, TaskSettings, ValidationSettings

BINARY_LOSSES = ("ContrastiveLoss", "OnlineContrastiveLoss")
SCORED_LOSSES = ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss", *BINARY_LOSSES)
LABELLED_LOSSES = (
    "BatchAllTripletLoss",
    "BatchHardTripletLoss",
    "BatchSemiHardTripletLoss",
    "BatchHardSoftMarginTripletLoss",
)
TEACHER_LOSSES = ("EmbedDistillLoss", "MSELoss")

MOST_NEGATIVES = 4  # of a row, where the recipe does not say how many
SHOWN_FAULTS = 5


@dataclass
class DatasetReport:
    """What became of a dataset's rows.

    Attributes:
        name: Of the dataset.
        task: The recipe's.
        read: Rows.
        bad: Of these, rows with a fault.
        used: Rows trained on, before the weight.
        held_out: Rows of the validation part.
        left_out: Reason → number of rows.
        faults: The first, as `file:line: what`.
        notes: What else was done.
    """

    name: str
    task: str
    read: int = 0
    bad: int = 0
    used: int = 0
    held_out: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, rows: int) -> None:
        """Count rows that are not trained on."""
        if rows:
            self.left_out[reason] = self.left_out.get(reason, 0) + rows

    def remarks(self) -> list[str]:
        """What people should know beside the numbers, a line each."""
        left_out = [f"{self.name}: left out {rows:,}: {reason}" for reason, rows in self.left_out.items()]
        notes = [f"{self.name}: {note}" for note in self.notes]
        return [*left_out, *notes, *(f"{self.name}: bad row {fault}" for fault in self.faults)]


def identity(text: str) -> int:
    """The number by which a text is known: equal texts have the same one."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest(), "big", signed=True)


def label_form(task: TaskSettings) -> str:
    """What a task's loss wants as labels: `pairs`, `scored`, `labelled` or `texts` (see `TrainingSet.form`)."""
    for losses, form in ((SCORED_LOSSES, "scored"), (LABELLED_LOSSES, "labelled"), (TEACHER_LOSSES, "texts")):
        if task.loss in losses:
            return form
    return "pairs"


class Part:
    """The rows of one dataset.

    The methods are called in their order here; each leaves `rows` and `report` consistent.

    Attributes:
        name: Of the dataset.
        row_type: What its rows hold.
        rows: Examples with one positive each; labelled texts and texts alone have none.
        held_out: The validation part.
        report: What became of the rows.
    """

    def __init__(self, location: Location[DatasetSettings], task_name: str, task: TaskSettings) -> None:
        """Of the dataset at a place, for a task of the recipe."""
        self.name = location.name
        self.location = location
        self.settings = location.settings
        self.task_name = task_name
        self.task = task.of(self.settings)
        self.form = label_form(self.task)
        self.row_type: RowType = "texts"
        self.rows: list[Example] = []
        self.held_out: list[Example] = []
        self.report = DatasetReport(location.name, task_name)

    @property
    def tasks(self) -> tuple[str, str]:
        """Tasks of the model, for anchors and for positives."""
        return self.settings.anchor or self.task.anchor, self.settings.positive or self.task.positive

    def read(self, max_bad_share: float) -> None:
        """Read and check all rows.

        Raises:
            ValueError: If a column is missing, more than the share of the rows have a fault, or none is left.
        """
        lines = list(read_rows(self.location))
        if not lines:
            raise ValueError(f"{self.name} has no rows")
        present = sorted({column for line in lines for column in line.content})
        columns = find_columns(self.settings, present, self.name) if present else None
        faults = []
        for line in lines:
            try:
                if columns is None or line.fault:
                    raise ValueError(line.fault or "it has no columns")
                self.rows.append(check_row(line.content, columns))
            except ValueError as fault:
                faults.append(f"{line.where}: {fault}")
        self.row_type = columns.row_type if columns is not None else "texts"
        self.report.read, self.report.bad, self.report.faults = len(lines), len(faults), faults[:SHOWN_FAULTS]
        if len(faults) > max_bad_share * len(lines) or not self.rows:
            raise ValueError(
                f"{self.name}: {len(faults):,} of {len(lines):,} rows have a fault, allowed is a share of "
                f"{max_bad_share:g} (data.max_bad_share). The first ones:\n  " + "\n  ".join(self.report.faults)
            )

    def fit_to_loss(self) -> None:
        """Bring the rows to what the task's loss takes.

        Raises:
            ValueError: If there is no way to.
        """
        if self.row_type == "scored":
            self._fit_scores()
        elif self.form == "scored":
            raise ValueError(f"{self.name} has no scores, which {self.task.loss} needs; InfoNCE goes without")
        elif self.form == "labelled" and self.row_type != "labelled":
            raise ValueError(f"{self.name} has no labels, which {self.task.loss} needs; InfoNCE goes without")
        elif self.form == "pairs" and self.row_type == "texts":
            raise ValueError(
                f"{self.name} has single texts, {self.task.loss} takes pairs or texts with labels. Name columns that "
                "were not found with `columns`"
            )
        elif self.row_type == "pairs":
            self._make_pairs()

    def _fit_scores(self) -> None:
        scores = [float(row.label or 0) for row in self.rows]
        graded = not set(scores) <= {0.0, 1.0}
        if self.form == "labelled":
            raise ValueError(f"{self.name} has pairs with scores, {self.task.loss} takes texts with labels")
        if graded and (self.form == "pairs" or self.task.loss in BINARY_LOSSES):
            wanted = "0 and 1" if self.task.loss in BINARY_LOSSES else "pairs that belong together"
            raise ValueError(f"{self.name} has graded scores, {self.task.loss} takes {wanted}: try the loss CoSENTLoss")
        most = max(scores)
        if self.form == "scored" and most > 1:
            self.report.notes.append(f"scores divided by their maximum, {most:g}")
            self.rows = [row._replace(label=score / most) for row, score in zip(self.rows, scores, strict=True)]

    def _make_pairs(self) -> None:
        """Make a pair of each positive, all with the same number of hard negatives."""
        rows = [_without_known(row) for row in self.rows]
        known = sum(len(row.negatives) for row in self.rows) - sum(len(row.negatives) for row in rows)
        if known:
            self.report.notes.append(f"{known:,} hard negatives taken out that equal the anchor or a positive")
        wanted = self._negatives_per_row(rows)
        self.rows = []
        for row in rows:
            if wanted and not row.negatives:
                self.report.leave_out("no hard negative", len(row.positives))
                continue
            for number, positive in enumerate(row.positives):
                taken = range(number * wanted, (number + 1) * wanted)  # each positive goes on where the last one ended
                hard = tuple(row.negatives[i % len(row.negatives)] for i in taken)
                self.rows.append(Example(row.anchor, (positive,), hard))

    def _negatives_per_row(self, rows: Sequence[Example]) -> int:
        counts = [len(row.negatives) for row in rows if row.negatives]
        if not counts or self.form == "texts":
            return 0
        if self.settings.negatives is not None:
            return min(self.settings.negatives, max(counts))
        return min(*counts, MOST_NEGATIVES)

    def drop_repeats(self) -> None:
        """Leave out rows that equal an earlier one, and texts with several labels, which are in nobody's group."""
        unlike: dict[tuple[str, ...], Example] = {}
        for row in self.rows:
            label = str(row.label) if self.row_type == "labelled" else ""
            texts = (row.anchor, *row.positives, *row.negatives)
            unlike.setdefault((label, *(text.strip() for text in texts)), row)
        self.report.leave_out("repeated", len(self.rows) - len(unlike))
        self.rows = list(unlike.values())
        if self.row_type == "labelled" and self.form != "texts":
            labels = Counter(row.anchor.strip() for row in self.rows)
            self.rows = [row for row in self.rows if labels[row.anchor.strip()] == 1]
            self.report.leave_out("text has several labels", len(unlike) - len(self.rows))

    def hold_out(self, settings: ValidationSettings) -> None:
        """Cut off the validation part, by a hash of the anchor: it is the same for every recipe and seed."""
        if self.row_type == "texts":  # nothing could be measured on them
            return
        places = [(identity(row.anchor) + 2**63) / 2**64 for row in self.rows]
        inside = sorted((place, number) for number, place in enumerate(places) if place < settings.share)
        if len(inside) < 2:
            return
        chosen = {number for _, number in inside[: settings.limit]}
        self.held_out = [self.rows[number] for _, number in inside[: settings.limit]]
        self.rows = [row for number, row in enumerate(self.rows) if number not in chosen]
        self.report.held_out = len(self.held_out)
        self.drop_texts((row.anchor for row in self.held_out), "has a text that is held out")

    def drop_texts(self, texts: Iterable[str], reason: str) -> None:
        """Leave out rows that have one of the texts as anchor or positive."""
        dropped = {text.strip() for text in texts}
        kept = [row for row in self.rows if not any(text.strip() in dropped for text in (row.anchor, *row.positives))]
        self.report.leave_out(reason, len(self.rows) - len(kept))
        self.rows = kept

    def drop_unlike_pairs(self) -> None:
        """Of pairs with 0 or 1, keep those that belong together, where the loss takes nothing else."""
        if self.row_type == "scored" and self.form == "pairs":
            kept = [row for row in self.rows if row.label == 1]
            self.report.leave_out("label is 0", len(self.rows) - len(kept))
            self.rows = kept

    def take_sample(self, limit: int | None, seed: int) -> None:
        """Take a sample that depends on nothing but the seed and the dataset."""
        if limit is not None and len(self.rows) > limit:
            self.report.leave_out("over the limit", len(self.rows) - limit)
            sample = random.Random(f"{seed} limit {self.name}").sample(range(len(self.rows)), limit)
            self.rows = [self.rows[number] for number in sorted(sample)]

    def drop_lonely(self) -> None:
        """Leave out texts whose label no other text has."""
        if self.row_type != "labelled" or self.form == "texts":
            return
        counts = Counter(str(row.label) for row in self.rows)
        lonely = sorted(label for label, count in counts.items() if count == 1)
        if lonely:
            self.report.leave_out("label with one example", len(lonely))
            named = ", ".join(map(repr, lonely[:SHOWN_FAULTS])) + (" …" if len(lonely) > SHOWN_FAULTS else "")
            self.report.notes.append(f"labels with one example: {named}")
            self.rows = [row for row in self.rows if counts[str(row.label)] > 1]

    def cut_texts(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Cut texts to the dataset's `max_length` in tokens; instructions are not counted.

        Raises:
            ValueError: If the tokenizer cannot tell where its tokens end.
        """
        lengths = _max_lengths(self.settings, self.name)
        if not lengths:
            return
        if tokenizer is None or not tokenizer.is_fast:
            raise ValueError(f"{self.name}: `max_length` needs a fast tokenizer, which tells where its tokens end")
        anchors = _cut(tokenizer, [row.anchor for row in self.rows], lengths.get("anchor"))
        positives = iter(
            _cut(tokenizer, [text for row in self.rows for text in row.positives], lengths.get("positive"))
        )
        negatives = iter(
            _cut(tokenizer, [text for row in self.rows for text in row.negatives], lengths.get("negative"))
        )
        self.rows = [
            row._replace(
                anchor=anchor,
                positives=tuple(islice(positives, len(row.positives))),
                negatives=tuple(islice(negatives, len(row.negatives))),
            )
            for row, anchor in zip(self.rows, anchors, strict=True)
        ]


def _without_known(row: Example) -> Example:
    """Take out negatives that are known to be none."""
    known = {text.strip() for text in (row.anchor, *row.positives)}
    return row._replace(negatives=tuple(text for text in row.negatives if text.strip() not in known))


def _max_lengths(settings: DatasetSettings, name: str) -> dict[str, int]:
    """Tokens at most of anchors, positives and negatives, as far as there is a limit."""
    if settings.max_length is None:
        return {}
    if isinstance(settings.max_length, int):
        return dict.fromkeys(("anchor", "positive", "negative"), settings.max_length)
    ours = {column: OURS.get(column, column) for column in KNOWN if OURS.get(column, column) != "label"}
    for column in settings.max_length:
        if column not in ours:
            raise ValueError(f"{name}: unknown column {column!r} in `max_length`." + alternatives(column, ours))
    lengths = {ours[column]: length for column, length in settings.max_length.items()}
    if "positive" in lengths:
        lengths.setdefault("negative", lengths["positive"])
    return lengths


def _cut(tokenizer: PreTrainedTokenizerBase, texts: list[str], tokens: int | None) -> list[str]:
    if tokens is None or not texts:
        return texts
    encoded = tokenizer(
        texts, add_special_tokens=False, truncation=True, max_length=tokens, return_offsets_mapping=True
    )
    return [
        text[: offsets[-1][1]] if len(offsets) == tokens else text
        for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
    ]
