"""Cleaning of a dataset's rows: every row is kept, or counted under the reason why it was dropped."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np

from mote.checkpoints.definitions import instruction_with
from mote.data.columns import SHOWN_ERRORS, Example, Examples, RowType, read_examples
from mote.data.ranking import best, bm25_ranker, normalized
from mote.data.rows import Location
from mote.data.test_sets import in_shares
from mote.reporting import table
from mote.training.recipe import DatasetSettings, Recipe, ValidationSettings

LabelType = Literal["pairs", "scored", "embeddings", "scores"]

INFO_NCE = "InfoNCE"

# What each loss takes as labels. Missing are the losses of Sentence-Transformers that need classes of texts or pairs,
# corrupted texts, a guide or another loss: the labels of a recipe's data would be wrong for them.
LABEL_TYPES: dict[str, LabelType] = {
    INFO_NCE: "pairs",
    "MultipleNegativesRankingLoss": "pairs",
    "CachedMultipleNegativesRankingLoss": "pairs",
    "TripletLoss": "pairs",
    "CoSENTLoss": "scored",
    "AnglELoss": "scored",
    "CosineSimilarityLoss": "scored",
    "EmbedDistillLoss": "embeddings",
    "MSELoss": "embeddings",
    "MarginMSELoss": "scores",
    "DistillKLDivLoss": "scores",
}

# Which rows can be turned into these labels.
ROW_TYPES: dict[LabelType, tuple[RowType, ...]] = {
    "pairs": ("pairs", "labelled", "scored"),
    "scored": ("scored",),
    "embeddings": ("pairs", "labelled", "scored", "texts"),
    "scores": ("pairs",),
}

DEFAULT_NEGATIVES = 4  # hard negatives of a row, at most, unless the recipe sets a number
AMBIGUOUS = {"labelled": "text has several labels", "scored": "pair has several scores"}


def text_id(text: str) -> int:
    """Return the number that identifies a text; equal texts have the same number."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest(), "big", signed=True)


def share_of(text: str) -> float:
    """Return a number from 0 to 1 that depends only on the text, for the choice of a share of texts."""
    return (text_id(text) + 2**63) / 2**64


def content_hash(texts: Iterable[object]) -> str:
    """Hash all texts, or labels, in their order."""
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()


@dataclass
class DatasetReport:
    """What became of a dataset's rows: their numbers, and remarks, the first invalid ones among them."""

    name: str
    task: str  # of the recipe
    read: int = 0
    invalid: int = 0
    used: int = 0  # before the weight
    held_out: int = 0
    in_tests: int | None = None  # used rows with a text of a test set; None if there was no test set
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    notes: list[str] = field(default_factory=list)

    def read_rows(self, location: Location[Any], max_invalid_fraction: float) -> Examples:
        """Read the rows of the dataset, count them, and note the first invalid ones."""
        examples = read_examples(location, max_invalid_fraction)
        self.read, self.invalid = examples.read, len(examples.errors)
        self.notes += [f"invalid row {error}" for error in examples.errors[:SHOWN_ERRORS]]
        return examples

    def drop(self, reason: str, rows: int) -> None:
        """Count dropped rows."""
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def sample(self, rows: list[Any], limit: int | None, seed: int, labels: Sequence[Any] = ()) -> list[Any]:
        """Take a sample that depends only on the seed and the dataset, and count the other rows as dropped.

        Labels, if the rows have some, keep their shares, unless fewer than two rows would be left for each.
        """
        if limit is None or len(rows) <= limit:
            return rows
        self.drop("over the limit", len(rows) - limit)
        rng, numbers = random.Random(f"{seed} limit {self.name}"), range(len(rows))
        if 0 < 2 * len({*labels}) <= limit:
            chosen = in_shares(rng.sample(numbers, len(rows)), labels)[:limit]
        else:
            chosen = rng.sample(numbers, limit)
        return [rows[number] for number in sorted(chosen)]

    def repeat(self, rows: int, weight: float, seed: int) -> list[int]:
        """Return the numbers of rows that are seen `weight` times each: whole copies, then a sample for the rest."""
        sample = random.Random(f"{seed} weight {self.name}").sample(range(rows), round((weight - int(weight)) * rows))
        return [*range(rows)] * int(weight) + sorted(sample)

    def compare(self, rows: Iterable[Example], tests: Mapping[str, str]) -> None:
        """Count the rows with a text of a test set, given normalized texts, each with the name of its set."""
        texts = (map(normalized, (row.anchor, *row.positives, *row.negatives)) for row in rows)
        found = [sets for own in texts if (sets := {tests[text] for text in own if text in tests})]
        self.in_tests = len(found)
        if found:
            names = ", ".join(sorted(set[str]().union(*found)))
            self.notes.append(f"{len(found):,} rows have a text of the test sets {names} (see `mote filter --against`)")

    def remarks(self) -> list[str]:
        """List what happened to the rows."""
        dropped = [f"dropped {rows:,}: {reason}" for reason, rows in self.dropped.items()]
        return [f"{self.name}: {remark}" for remark in (*dropped, *self.notes)]


def table_of(reports: Sequence[DatasetReport]) -> str:
    """Return a table with a line for each dataset, then the remarks."""
    rows = []
    for report in reports:
        counts = (report.read, report.invalid, report.held_out, sum(report.dropped.values()), report.used)
        rows.append((report.task, report.name, *map("{:,}".format, counts)))
    header = ["task", "dataset", "read", "invalid", "held out", "dropped", "used"]
    remarks = (remark for report in reports for remark in report.remarks())
    return "\n".join([table(header, rows, align="llrrrrr"), *remarks])


def require_rows(count: float, name: str, reports: Sequence[DatasetReport]) -> None:
    """Raise `ValueError`, with what became of the rows, if none is left."""
    if not count:
        remarks = [remark for report in reports for remark in report.remarks()]
        raise ValueError("\n  ".join([f"{name}: nothing is left to train on", *remarks]))


class DatasetRows:
    """The rows of one dataset: those to train on, with at most one positive each, and those held out for validation."""

    def __init__(self, location: Location[DatasetSettings], task_name: str, recipe: Recipe) -> None:
        self.location, self.name, self.settings = location, location.name, location.settings
        self.task_name, self.task = task_name, recipe.tasks[task_name]
        self.instruction = location.settings.instruction  # of the anchors, in place of the task's
        if location.settings.definition is not None:
            self.instruction = instruction_with(location.settings.definition, recipe.model.template)
        self.label_type = LABEL_TYPES[self.task.loss]
        self.tasks = (self.task.anchor, self.task.positive)  # of the model, for anchors and for positives
        self.row_type: RowType = "texts"
        self.rows: list[Example] = []
        self.held_out: list[Example] = []
        self.report = DatasetReport(location.name, task_name)

    def clean(self, recipe: Recipe) -> None:
        """Read, check and sample the rows, and split off the validation rows."""
        read = self.report.read_rows(self.location, recipe.data.max_invalid_fraction)
        self.rows, self.row_type = read.rows, read.columns.row_type
        if self.row_type not in ROW_TYPES[self.label_type]:
            raise ValueError(
                f"{self.name}: {self.task.loss} takes rows of the type {' or '.join(ROW_TYPES[self.label_type])}, got "
                f"{self.row_type}. If columns were not found, name them with `columns`"
            )
        if self.label_type == "scores" and "scores" not in read.columns.names:
            raise ValueError(
                f"{self.name}: {self.task.loss} takes pairs with hard negatives and a teacher's `scores`: `mote mine "
                "--scores` writes them"
            )
        if self.row_type == "scored":
            self._fit_scores(read.columns.names["label"][0])
        if self.row_type == "pairs":
            self._make_pairs()
        self._drop_repeated()
        self._hold_out(recipe.validation)
        if self.row_type == "scored" and self.label_type == "pairs":
            self._pair_by_score(recipe.training.seed)
        labels = [row.label for row in self.rows] if self.row_type == "labelled" else []
        limit = self.settings.limit or recipe.data.limit
        self.rows = self.report.sample(self.rows, limit, recipe.training.seed, labels)

    def _keep(self, rows: list[Example], reason: str) -> None:
        """Keep only some rows, and count the others as dropped."""
        self.report.drop(reason, len(self.rows) - len(rows))
        self.rows = rows

    def _fit_scores(self, column: str) -> None:
        """Check that the loss takes the scores, and scale them to at most 1."""
        scores = [float(row.label or 0) for row in self.rows]
        known = "score" in self.settings.columns or self.settings.min_score is not None
        if column == "label" and not known and self.label_type != "embeddings" and all(map(float.is_integer, scores)):
            if not set(scores) <= {0.0, 1.0}:
                raise ValueError(f"{self.name}: integers in `label` may be classes: keep matches, or map it to `score`")
            self.report.notes.append("label 1 is read as a match; if it is a class, it may mean the opposite")
        if self.label_type == "pairs" and self.settings.min_score is None and not set(scores) <= {0.0, 1.0}:
            raise ValueError(
                f"{self.name} has graded scores, but {self.task.loss} takes 0 and 1: set the loss CoSENTLoss, or "
                "`min_score` for InfoNCE"
            )
        largest = max(map(abs, scores))
        if self.label_type == "scored" and largest > 1:
            self.report.notes.append(f"scores divided by the largest absolute value, {largest:g}")
            self.rows = [row._replace(label=score / largest) for row, score in zip(self.rows, scores, strict=True)]

    def _make_pairs(self) -> None:
        """Expand each positive into a pair, all with the same number of hard negatives."""
        rows = []
        for row in self.rows:
            known = {text.strip() for text in (row.anchor, *row.positives)}
            rows.append(row._replace(negatives=tuple(text for text in row.negatives if text.strip() not in known)))
        removed = sum(len(row.negatives) for row in self.rows) - sum(len(row.negatives) for row in rows)
        if removed:
            self.report.notes.append(f"{removed:,} hard negatives removed that equal the anchor or a positive")
        counts = [len(row.negatives) for row in rows]
        count = min([DEFAULT_NEGATIVES, *filter(None, counts)])
        if self.settings.negatives is not None:
            count = self.settings.negatives
        count = min(count, max(counts))
        if self.label_type == "embeddings":
            count = 0
        self.rows = []
        for row in rows:
            if count and not row.negatives:
                self.report.drop("no hard negative", len(row.positives))
                continue
            # Each positive takes the negatives after those of the one before.
            negatives = cycle(row.negatives)
            for text in row.positives:
                self.rows.append(row._replace(positives=(text,), negatives=tuple(islice(negatives, count))))

    def _drop_repeated(self) -> None:
        """Drop rows that equal an earlier one, texts with ambiguous labels, and pairs with ambiguous scores."""
        distilled = self.label_type == "embeddings"
        unique: dict[tuple[tuple[str, ...], str | float | None], Example] = {}
        for row in self.rows:
            texts = tuple(text.strip() for text in (row.anchor, *row.positives, *row.negatives))
            unique.setdefault((texts, None if distilled and self.row_type == "scored" else row.label), row)
        self._keep([*unique.values()], "repeated")
        if self.row_type in AMBIGUOUS and not distilled:
            labels = Counter(texts for texts, _ in unique)
            self._keep([row for (texts, _), row in unique.items() if labels[texts] == 1], AMBIGUOUS[self.row_type])

    def _hold_out(self, settings: ValidationSettings) -> None:
        """Split off the validation rows, by a hash of the anchor: they are the same for every recipe and seed."""
        shares = [share_of(row.anchor) for row in self.rows]
        lowest = sorted((share, number) for number, share in enumerate(shares) if share < settings.share)
        chosen = dict.fromkeys(number for _, number in lowest[: settings.limit])
        # Single texts have nothing to measure.
        if len(chosen) < 2 or self.row_type == "texts":
            return
        self.held_out = [self.rows[number] for number in chosen]
        self.report.held_out = len(chosen)
        self.rows = [row for number, row in enumerate(self.rows) if number not in chosen]
        self.drop_texts((row.anchor for row in self.held_out), "has a text that is held out")

    def drop_texts(self, texts: Iterable[str], reason: str) -> None:
        """Drop rows that have one of the texts; among hard negatives, the row's others take their places, if any."""
        dropped = {text.strip() for text in texts}
        kept = []
        for row in self.rows:
            negatives = [text for text in row.negatives if text.strip() not in dropped]
            in_pair = any(text.strip() in dropped for text in (row.anchor, *row.positives))
            if not in_pair and (negatives or not row.negatives):
                kept.append(row._replace(negatives=tuple(islice(cycle(negatives), len(row.negatives)))))
        self._keep(kept, reason)

    def _pair_by_score(self, seed: int) -> None:
        """Keep scored pairs with the label 1, or those with at least `min_score`, in both directions.

        With `min_score`, hard negatives are texts that score lower with the anchor, then random texts of the dataset;
        with `max_negative_score`, those that BM25 ranks highest, without the first, which mostly is the anchor itself,
        and without scores above it (NV-Embed, arXiv:2405.17428v1, section 4.2).
        """
        min_score, most = self.settings.min_score, self.settings.max_negative_score
        if min_score is None:
            self._keep([row for row in self.rows if row.label == 1], "label is 0")
            return
        count = DEFAULT_NEGATIVES if self.settings.negatives is None else self.settings.negatives
        positives, negatives = defaultdict(set), defaultdict(list)
        directed = [(row.anchor, row.positives[0], float(row.label or 0)) for row in self.rows]
        directed += [(second, first, score) for first, second, score in directed]
        for first, second, score in directed:
            if score >= min_score or (most is not None and score > most):
                positives[first].add(second)
            elif most is None:
                negatives[first].append(second)
        texts = sorted({first for first, _, _ in directed})
        if most is not None:
            ranker = bm25_ranker(texts, texts)
            for place, first in enumerate(texts):
                scores, depth = ranker.scores(np.array([place]))[0], 2 + count + len(positives[first])
                negatives[first] = [texts[found] for found in best(scores, depth)[1:] if scores[found] > ranker.floor]
        rng = random.Random(f"{seed} negatives {self.name}")
        pairs = []
        for first, second, score in directed:
            if score < min_score:
                continue
            known = {first, second, *positives[first]}
            drawn = rng.sample(texts, min(len(texts), count + len(known)))
            hard = [text for text in dict.fromkeys([*negatives[first], *drawn]) if text not in known]
            pairs.append(Example(first, (second,), tuple(hard[:count])))
        self.report.drop(f"score is below {min_score:g}", (len(directed) - len(pairs)) // 2)
        fewest = min((len(pair.negatives) for pair in pairs), default=0)
        self.rows = [pair._replace(negatives=pair.negatives[:fewest]) for pair in pairs]

    def drop_singleton_labels(self) -> None:
        """Drop texts whose label occurs only once, if they are paired by their label."""
        if self.row_type == "labelled" and self.label_type != "embeddings" and self.task.pairs == "same_label":
            counts = Counter(row.label for row in self.rows)
            self._keep([row for row in self.rows if counts[row.label] > 1], "label with one example")
