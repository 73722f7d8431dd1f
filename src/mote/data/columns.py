"""What the columns of a dataset mean, and what its rows must hold."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from mote.data.settings import DatasetSource
from mote.remote.configuration_mote import alternatives

RowType = Literal["pairs", "scored", "labelled", "texts"]

# Usual names of columns.
ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_1", "text1", "premise")
POSITIVES = ("positive", "document", "answer", "passage", "sentence2", "sentence_2", "text2", "hypothesis")
NEGATIVES = re.compile(r"negatives?|negative_?(\d+)")
TEXTS = ("text", "sentence")
SCORES = ("score", "similarity", "similarity_score", "label")

# Names that settings use for columns → what the column holds.
MEANINGS = {
    "anchor": "anchor",
    "positive": "positive",
    "negative": "negative",
    "text": "anchor",
    "label": "label",
    "sentence1": "anchor",
    "sentence2": "positive",
    "score": "label",
}

_ROW_TYPES: dict[frozenset[str], RowType] = {
    frozenset({"anchor", "positive"}): "pairs",
    frozenset({"anchor", "positive", "negative"}): "pairs",
    frozenset({"anchor", "positive", "label"}): "scored",
    frozenset({"anchor", "label"}): "labelled",
    frozenset({"anchor"}): "texts",
}


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
    """Determine what the columns of a dataset mean: from its settings, or else by their usual names.

    Args:
        settings: The dataset's settings.
        present: The dataset's columns.
        name: The dataset's name, for errors.

    Raises:
        ValueError: If a column is missing, or the names are ambiguous.
    """
    present = list(present)
    names = _from_settings(settings.columns, present, name) if settings.columns else _by_usual_names(present, name)
    row_type = _ROW_TYPES.get(frozenset(names))
    if row_type is None:
        raise ValueError(
            f"{name}: its columns {', '.join(map(repr, sorted(present)))} are neither pairs (anchor, positive) nor "
            "labelled texts (text, label) nor scored pairs (sentence1, sentence2, score): rename them, or name them "
            "with `columns` in a recipe"
        )
    return Columns(row_type, names)


def _from_settings(columns: dict[str, str | list[str]], present: list[str], name: str) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for key, given in columns.items():
        if key not in MEANINGS:
            raise ValueError(f"{name}: unknown column {key!r} in `columns`." + alternatives(key, MEANINGS))
        meaning, found = MEANINGS[key], (given,) if isinstance(given, str) else tuple(given)
        for column in found:
            if column not in present:
                raise ValueError(f"{name}: there is no column {column!r}." + alternatives(column, sorted(present)))
        if meaning in names or (len(found) != 1 and meaning != "negative"):
            all_found = [*names.get(meaning, ()), *found]
            raise ValueError(f"{name}: `columns` must name one column for the {meaning}, got {all_found}")
        names[meaning] = found
    return names


def _by_usual_names(present: list[str], name: str) -> dict[str, tuple[str, ...]]:
    def one_of(usual: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(column for column in usual if column in present)
        if len(found) > 1:
            raise ValueError(
                f"{name}: {' and '.join(map(repr, found))} mean the same: rename all but one, or choose one with "
                "`columns` in a recipe"
            )
        return found

    anchor, positive = one_of(ANCHORS), one_of(POSITIVES)
    names = {"anchor": anchor, "positive": positive}
    if anchor and positive:
        matches = [match for match in map(NEGATIVES.fullmatch, present) if match]
        matches.sort(key=lambda match: int(match[1] or 0))
        names["negative"] = tuple(match[0] for match in matches)
        names["label"] = () if matches else one_of(SCORES)
    elif text := one_of(TEXTS):
        names = {"anchor": text, "label": one_of(("label",))}
    return {meaning: columns for meaning, columns in names.items() if columns}


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
