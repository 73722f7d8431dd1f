"""What the columns of a dataset mean, and what its rows must hold."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from mote.data.rows import Location, read_rows
from mote.data.settings import DatasetSource

RowType = Literal["pairs", "scored", "labelled", "texts"]
ROW_TYPES: dict[RowType, str] = {
    "pairs": "pairs (anchor, positive)",
    "scored": "scored pairs (sentence1, sentence2, score)",
    "labelled": "labelled texts (text, label)",
    "texts": "texts (text)",
}

# Usual names of columns.
ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_1", "text1", "premise")
POSITIVES = ("positive", "document", "answer", "passage", "sentence2", "sentence_2", "text2", "hypothesis", "pos")
ALIKE = ("sentence1", "sentence_1", "text1", "premise")
NEGATIVES = re.compile(r"neg|negatives?|negative_?(\d+)")
TEXTS = ("text", "sentence")
OF_TEACHER = (("scores",), ("pos_scores", "neg_scores"))
SCORES = ("score", "similarity", "similarity_score", "label")

SHOWN_ERRORS = 5

# What a value must be. A string may be empty, a text is more than white space. With any constraint, pydantic also
# refuses half of a surrogate pair, of an emoji that another program has cut.
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
STRING = TypeAdapter[Any](Annotated[str, StringConstraints(min_length=0)])
TEXT = TypeAdapter[Any](_Text)
TEXT_LIST = TypeAdapter[Any](Annotated[list[_Text], Field(min_length=1)])
LABEL = TypeAdapter[Any](_Text | int)
LABELS = TypeAdapter[Any](Annotated[list[_Text | int], Field(min_length=1)])
NUMBER = TypeAdapter[Any](FiniteFloat)
NUMBERS = TypeAdapter[Any](list[FiniteFloat])


@dataclass(frozen=True)
class Columns:
    """What the rows of a dataset hold, and in which columns."""

    row_type: RowType
    names: dict[str, tuple[str, ...]]  # anchor (or a single text), positive, negative, scores, label → columns

    @property
    def teaches(self) -> Literal["search", "labels", "similarity"]:
        """What the rows say of texts: which document answers a query, their labels, or how alike two are.

        Pairs are for search unless their columns have names of two texts of one kind, such as `sentence1`.
        """
        if self.row_type == "labelled":
            return "labels"
        alike = self.row_type == "scored" or self.names["anchor"][0] in ALIKE
        return "similarity" if alike else "search"


class Example(NamedTuple):
    """A valid row: its texts, and its label or score, or a teacher's scores of the positives and negatives."""

    anchor: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    label: str | float | None = None
    further_labels: tuple[str, ...] = ()  # of a text with several, of which `label` is the first
    scores: Mapping[str, float] = {}


def find_columns(
    settings: DatasetSource, present: Iterable[str], name: str, expected: Iterable[RowType] = tuple(ROW_TYPES)
) -> Columns:
    """Determine what the columns of a dataset mean, by their usual names or those that its settings give them.

    The name of the dataset is for the error if its rows are not of an expected type, or the names are ambiguous.
    """
    given: dict[str, list[str]] = {column: [column] for column in sorted(present)}
    listed, known = ", ".join(map(repr, given)) or "(none)", set(given)
    if settings.columns:
        listed += f" with `columns` {settings.columns}"
        given = {key: [names] if isinstance(names, str) else names for key, names in settings.columns.items()}
    columns = _by_usual_names(given)
    all_used = not settings.columns or (columns and len(columns.names) == len(given))
    if not columns or columns.row_type not in expected or not all_used or not known.issuperset(chain(*given.values())):
        raise ValueError(
            f"{name}: its columns {listed} are not {' or '.join(ROW_TYPES[each] for each in expected)}, each with one "
            "name: rename them, or choose them with `columns` in a recipe"
        )
    return columns


def _by_usual_names(given: dict[str, list[str]]) -> Columns | None:
    """Interpret names, each of one column or, of negatives, of several; None if they are unknown or ambiguous."""

    def found(usual: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(column for key in usual for column in given.get(key, ()))

    matches = sorted(filter(None, map(NEGATIVES.fullmatch, given)), key=lambda match: int(match[1] or 0))
    anchor, positive, text = found(ANCHORS), found(POSITIVES), found(TEXTS)
    pair, negative = {"anchor": anchor, "positive": positive}, found(tuple(match[0] for match in matches))
    scores = next(filter(None, map(found, OF_TEACHER)), ())
    layouts: list[tuple[RowType, dict[str, tuple[str, ...]]]] = [
        ("pairs", {**pair, "negative": negative, "scores": scores}),
        ("pairs", {**pair, "negative": negative}),
        ("scored", {**pair, "label": found(SCORES)}),
        ("pairs", pair),
        ("labelled", {"anchor": text, "label": found(("label",))}),
        ("texts", {"anchor": text}),
        ("texts", {"anchor": anchor}),
    ]
    for row_type, names in layouts:
        if all(names.values()):
            single = (anchor, positive, names["anchor"], names.get("label", ()))
            return Columns(row_type, names) if max(map(len, single)) == 1 else None
    return None


class Examples(NamedTuple):
    """The valid rows of a dataset, what its columns mean, the number of all rows, and the errors of invalid ones."""

    rows: list[Example]
    columns: Columns
    read: int
    errors: list[str]


def read_examples(
    location: Location[Any], max_invalid_fraction: float = 0.0, expected: Iterable[RowType] = tuple(ROW_TYPES)
) -> Examples:
    """Read the rows of a dataset; too many invalid ones are an error."""
    rows = list(read_rows(location))
    present = {column for row in rows for column in row.content}
    columns = find_columns(location.settings, present, location.name, expected)
    examples, errors = [], []
    for row in rows:
        try:
            examples.append(row.take(partial(check_row, columns=columns)))
        except ValueError as error:
            errors.append(str(error))
    if len(errors) > max_invalid_fraction * len(rows) or not examples:
        first = "\n  ".join(errors[:SHOWN_ERRORS])
        raise ValueError(
            f"{location.name}: {len(errors):,} of {len(rows):,} rows are invalid; the allowed fraction is "
            f"{max_invalid_fraction:g} (data.max_invalid_fraction). The first ones:\n  {first}"
        )
    return Examples(examples, columns, len(rows), errors)


def check_row(row: dict[str, Any], columns: Columns) -> Example:
    """Take the texts and the label of a row."""
    names = {meaning: columns[0] for meaning, columns in columns.names.items()}
    anchor = check_value(row, names["anchor"], TEXT)
    if columns.row_type == "texts":
        return Example(anchor)
    if columns.row_type == "labelled":
        several = isinstance(row.get(names["label"]), list)
        found = check_value(row, names["label"], LABELS if several else LABEL)
        label, *further = (str(one).strip() for one in (found if several else [found]))
        return Example(anchor, label=label, further_labels=tuple(further))
    if columns.row_type == "scored":
        as_text = isinstance(row.get(names["label"]), str)  # as in CSV
        score = float(check_value(row, names["label"], NUMBER, strict=not as_text))
        return Example(anchor, (check_value(row, names["positive"], TEXT),), label=score)
    # A row may have fewer negatives than others.
    negatives = [_texts(row, name) for name in columns.names.get("negative", ()) if row.get(name) not in (None, [])]
    texts = (positives := _texts(row, names["positive"])) + tuple(chain.from_iterable(negatives))
    scores = [score for name in columns.names.get("scores", ()) for score in check_value(row, name, NUMBERS)]
    if scores and len(scores) != len(texts):
        raise ValueError(f"there are {len(scores)} scores for {len(texts)} positives and negatives")
    return Example(anchor, positives, texts[len(positives) :], scores=dict(zip(texts, scores, strict=False)))


def _texts(row: dict[str, Any], column: str) -> tuple[str, ...]:
    """Take the text or the texts of a column."""
    if column in row and not isinstance(row[column], list):
        row = {column: [row[column]]}
    return tuple(check_value(row, column, TEXT_LIST))


def check_value(row: dict[str, Any], column: str, kind: TypeAdapter[Any], strict: bool = True) -> Any:
    """Return a value of a row, which must be of a kind."""
    value = row.get(column)
    try:
        kind.validate_python(value, strict=strict)
    except ValidationError as error:
        without = "" if column in row else f" (there is no such column, only {', '.join(map(repr, row)) or 'none'})"
        raise ValueError(f"{column!r}: {error.errors()[0]['msg']}, got {value!r:.80}{without}") from None
    return value
