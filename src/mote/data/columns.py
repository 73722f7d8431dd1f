"""What the columns of a dataset mean, and what its rows must hold."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from mote.data.rows import Location, read_rows
from mote.data.settings import DatasetSource
from mote.settings import alternatives

RowType = Literal["pairs", "scored", "labelled", "texts"]

# Usual names of columns.
ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_1", "text1", "premise")
POSITIVES = ("positive", "document", "answer", "passage", "sentence2", "sentence_2", "text2", "hypothesis")
NEGATIVES = re.compile(r"negatives?|negative_?(\d+)")
TEXTS = ("text", "sentence")
SCORES = ("score", "similarity", "similarity_score", "label")

SHOWN_ERRORS = 5

# What a value must be. A string may be empty, a text is more than white space. With any constraint, pydantic also
# refuses half of a surrogate pair, of an emoji that another program has cut.
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
STRING = TypeAdapter[Any](Annotated[str, StringConstraints(min_length=0)])
TEXT = TypeAdapter[Any](_Text)
TEXT_LIST = TypeAdapter[Any](Annotated[list[_Text], Field(min_length=1)])
LABEL = TypeAdapter[Any](_Text | int)
NUMBER = TypeAdapter[Any](FiniteFloat)


@dataclass(frozen=True)
class Columns:
    """What the rows of a dataset hold, and in which columns.

    Attributes:
        row_type: `pairs` (with or without hard negatives), `scored` pairs, `labelled` texts, or single `texts`.
        names: `anchor`, `positive`, `negative` and `label` → the dataset's columns. A single text is an anchor.
    """

    row_type: RowType
    names: dict[str, tuple[str, ...]]


class Example(NamedTuple):
    """A valid row: its texts, and its label or score."""

    anchor: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    label: str | float | None = None


def find_columns(settings: DatasetSource, present: Iterable[str], name: str) -> Columns:
    """Determine what the columns of a dataset mean, by their usual names or those that its settings give them.

    Args:
        settings: The dataset's settings.
        present: The dataset's columns.
        name: The dataset's name, for errors.

    Raises:
        ValueError: If a column is missing, or the names are ambiguous.
    """
    present = sorted(present)
    given: dict[str, list[str]] = {column: [column] for column in present}
    if settings.columns:
        given = {key: [names] if isinstance(names, str) else names for key, names in settings.columns.items()}
    for column in chain.from_iterable(given.values()):
        if column not in present:
            raise ValueError(f"{name}: there is no column {column!r}." + alternatives(column, present))
    columns = _by_usual_names(given, name)
    if not columns or (settings.columns and len(columns.names) < len(given)):
        raise ValueError(
            f"{name}: its columns {', '.join(map(repr, given)) or '(none)'} are neither pairs (anchor, positive) nor "
            "labelled texts (text, label) nor scored pairs (sentence1, sentence2, score): rename them, or name them "
            "with `columns` in a recipe"
        )
    return columns


def _by_usual_names(given: dict[str, list[str]], name: str) -> Columns | None:
    """Interpret column names, each of which stands for one column of the dataset, or for several with negatives."""

    def one_of(usual: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(column for key in usual for column in given.get(key, ()))
        if len(found) > 1:
            raise ValueError(
                f"{name}: {' and '.join(map(repr, found))} mean the same: rename all but one, or choose one with "
                "`columns` in a recipe"
            )
        return found

    anchor, positive = one_of(ANCHORS), one_of(POSITIVES)
    if anchor and positive:
        matches = sorted(filter(None, map(NEGATIVES.fullmatch, given)), key=lambda match: int(match[1] or 0))
        negatives = tuple(column for match in matches for column in given[match[0]])
        if negatives:
            return Columns("pairs", {"anchor": anchor, "positive": positive, "negative": negatives})
        if label := one_of(SCORES):
            return Columns("scored", {"anchor": anchor, "positive": positive, "label": label})
        return Columns("pairs", {"anchor": anchor, "positive": positive})
    if text := one_of(TEXTS):
        label = one_of(("label",))
        return Columns("labelled", {"anchor": text, "label": label}) if label else Columns("texts", {"anchor": text})
    return Columns("texts", {"anchor": anchor}) if anchor else None


class Examples(NamedTuple):
    """The valid rows of a dataset, what its columns mean, the number of all rows, and the errors of invalid ones."""

    rows: list[Example]
    columns: Columns
    read: int
    errors: list[str]


def read_examples(location: Location[Any], max_invalid_fraction: float = 0.0) -> Examples:
    """Read the rows of a dataset.

    Raises:
        ValueError: If a column is missing, too many rows are invalid, or none is valid.
    """
    rows = list(read_rows(location))
    columns = find_columns(location.settings, {column for row in rows for column in row.content}, location.name)
    examples, errors = [], []
    for row in rows:
        try:
            examples.append(check_row(row.content, columns))
        except ValueError as error:
            # A row that could not be read has no columns.
            errors.append(f"{row.where}: {row.fault or error}")
    if len(errors) > max_invalid_fraction * len(rows) or not examples:
        first = "\n  ".join(errors[:SHOWN_ERRORS])
        raise ValueError(
            f"{location.name}: {len(errors):,} of {len(rows):,} rows are invalid; the allowed fraction is "
            f"{max_invalid_fraction:g} (data.max_invalid_fraction). The first ones:\n  {first}"
        )
    return Examples(examples, columns, len(rows), errors)


def check_row(row: dict[str, Any], columns: Columns) -> Example:
    """Take the texts and the label of a row.

    Raises:
        ValueError: If the row is invalid; the message says why.
    """
    names = {meaning: columns[0] for meaning, columns in columns.names.items()}
    anchor = check_value(row, names["anchor"], TEXT)
    if columns.row_type == "texts":
        return Example(anchor)
    if columns.row_type == "labelled":
        return Example(anchor, label=str(check_value(row, names["label"], LABEL)).strip())
    if columns.row_type == "scored":
        score = float(check_value(row, names["label"], NUMBER))
        return Example(anchor, (check_value(row, names["positive"], TEXT),), label=score)
    # A row may have fewer negatives than others.
    negatives = [_texts(row, name) for name in columns.names.get("negative", ()) if row.get(name) not in (None, [])]
    return Example(anchor, _texts(row, names["positive"]), tuple(chain.from_iterable(negatives)))


def _texts(row: dict[str, Any], column: str) -> tuple[str, ...]:
    """Take the text or the texts of a column."""
    if column in row and not isinstance(row[column], list):
        row = {column: [row[column]]}
    return tuple(check_value(row, column, TEXT_LIST))


def check_value(row: dict[str, Any], column: str, kind: TypeAdapter[Any]) -> Any:
    """Return a value of a row.

    Raises:
        ValueError: If there is none, or it is of another kind.
    """
    if column not in row:
        raise ValueError(f"there is no column {column!r}." + alternatives(column, row))
    try:
        kind.validate_python(row[column], strict=True)
    except ValidationError as error:
        raise ValueError(f"{column!r}: {error.errors()[0]['msg']}, got {row[column]!r:.80}") from None
    return row[column]
