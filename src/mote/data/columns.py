"""What the columns of a dataset mean, and what its rows must hold."""

import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mote.data.settings import DatasetSettings
from mote.remote.configuration_mote import alternatives

RowType = Literal["pairs", "scored", "labelled", "texts"]

ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_1", "text1", "premise")
POSITIVES = ("positive", "document", "answer", "passage", "sentence2", "sentence_2", "text2", "hypothesis")
NEGATIVES = ("negative", "negatives")
TEXTS = ("text", "sentence")
SCORES = ("score", "similarity", "similarity_score", "label")
LABELS = ("label",)

OURS = {"sentence1": "anchor", "sentence2": "positive", "text": "anchor", "score": "label"}
KNOWN = ("anchor", "positive", "negative", "text", "label", "sentence1", "sentence2", "score")

_NUMBERED_NEGATIVE = re.compile(r"negative_?\d+")
_ROW_TYPES: dict[frozenset[str], RowType] = {
    frozenset({"anchor", "positive"}): "pairs",
    frozenset({"anchor", "positive", "negative"}): "pairs",
    frozenset({"anchor", "positive", "label"}): "scored",
    frozenset({"anchor", "label"}): "labelled",
    frozenset({"anchor"}): "texts",
}


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


def find_columns(settings: DatasetSettings, present: Iterable[str], name: str, by_recipe: bool = True) -> Columns:
    """Determine what the columns of a dataset mean: from its settings, or else by their usual names.

    Args:
        settings: The dataset's settings.
        present: The dataset's columns.
        name: The dataset's name, for errors.
        by_recipe: Whether the settings are of a recipe, where `columns` can name others, for errors.

    Raises:
        ValueError: If a column is missing, or the names are ambiguous.
    """
    present = list(present)
    names = _from_settings(settings.columns, present, name) if settings.columns else _usual(present, name, by_recipe)
    row_type = _ROW_TYPES.get(frozenset(names))
    if row_type is None:
        raise ValueError(
            f"{name}: its columns {', '.join(map(repr, sorted(present)))} are neither pairs (anchor, positive) nor "
            "labelled texts (text, label) nor scored pairs (sentence1, sentence2, score): "
            + ("name them with `columns`" if by_recipe else "rename them in the files")
        )
    return Columns(row_type, names)


def _from_settings(columns: dict[str, str | list[str]], present: list[str], name: str) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in columns.items():
        if ours not in KNOWN:
            raise ValueError(f"{name}: unknown column {ours!r} in `columns`." + alternatives(ours, KNOWN))
        theirs = [theirs] if isinstance(theirs, str) else theirs
        for column in theirs:
            if column not in present:
                raise ValueError(f"{name}: {no_column(column, sorted(present))}")
        if not theirs or (len(theirs) > 1 and ours != "negative"):
            raise ValueError(f"{name}: {ours!r} in `columns` must name one column, got {theirs}")
        meant = OURS.get(ours, ours)
        if meant in names:
            raise ValueError(
                f"{name}: two entries in `columns` name the {meant}: {names[meant][0]!r} and {theirs[0]!r}"
            )
        names[meant] = tuple(theirs)
    return names


def _usual(present: list[str], name: str, by_recipe: bool) -> dict[str, tuple[str, ...]]:
    def one_of(usual: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(column for column in usual if column in present)
        if len(found) > 1:
            remedy = "choose one with `columns`" if by_recipe else "remove or rename all but one in the files"
            raise ValueError(f"{name}: {' and '.join(map(repr, found))} mean the same: {remedy}")
        return found

    anchor, positive = one_of(ANCHORS), one_of(POSITIVES)
    if anchor and positive:
        numbered = (column for column in present if _NUMBERED_NEGATIVE.fullmatch(column))
        negatives = [column for column in NEGATIVES if column in present]
        negatives += sorted(numbered, key=lambda column: int(re.sub(r"\D", "", column)))
        score = () if negatives else one_of(SCORES)
        names = {"anchor": anchor, "positive": positive, "negative": tuple(negatives), "label": score}
    elif text := one_of(TEXTS):
        names = {"anchor": text, "label": one_of(LABELS)}
    else:
        names = {"anchor": anchor, "positive": positive}
    return {ours: theirs for ours, theirs in names.items() if theirs}


def check_row(row: dict[str, Any], columns: Columns) -> Example:
    """Take the texts and the label of a row.

    Raises:
        ValueError: If the row is invalid; the message says why.
    """
    names = columns.names
    anchor = _text(_value(row, names["anchor"][0]), names["anchor"][0])
    if columns.row_type == "texts":
        return Example(anchor)
    if columns.row_type == "labelled":
        return Example(anchor, label=_label(_value(row, names["label"][0]), names["label"][0]))
    positive = _value(row, names["positive"][0])
    if columns.row_type == "scored":
        score = _score(_value(row, names["label"][0]), names["label"][0])
        return Example(anchor, (_text(positive, names["positive"][0]),), label=score)
    given = ((row.get(column), column) for column in names.get("negative", ()))  # a row may have fewer than others
    negatives = tuple(text for value, column in given if value is not None for text in _texts(value, column))
    positives = tuple(_texts(positive, names["positive"][0]))
    if not positives:
        raise ValueError(f"{names['positive'][0]!r} is an empty list")
    return Example(anchor, positives, negatives)


def no_column(column: str, present: Iterable[str]) -> str:
    """Say that there is no such column, escaped if it looks like one that there is: é can be one character or two."""
    present = list(present)
    looks_like = unicodedata.normalize("NFC", column) in [unicodedata.normalize("NFC", other) for other in present]
    return f"there is no column {ascii(column) if looks_like else repr(column)}." + alternatives(column, present)


def _value(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"there is no column {column!r}")
    return row[column]


def _texts(value: Any, column: str) -> list[str]:
    return [_text(text, column) for text in (value if isinstance(value, list) else [value])]


def _text(text: Any, column: str) -> str:
    if not check_string(text, column).strip():
        raise ValueError(f"{column!r} is empty")
    return text


def check_string(text: Any, column: str) -> str:
    """Return a value of a column that is a string in valid Unicode, and may be empty.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(text, str):
        raise ValueError(f"{column!r} must be a string, got {type(text).__name__}")  # noqa: TRY004
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column!r} is invalid Unicode: it has half of a surrogate pair") from None
    return text


def _label(label: Any, column: str) -> str:
    if not isinstance(label, str | int):
        raise ValueError(f"{column!r} must be a string or an integer, got {type(label).__name__}")  # noqa: TRY004
    text = check_string(str(label), column).strip()
    if not text:
        raise ValueError(f"{column!r} is empty")
    return text


def _score(score: Any, column: str) -> float:
    if not isinstance(score, int | float):
        raise ValueError(f"{column!r} must be a number, got {type(score).__name__}")  # noqa: TRY004
    try:
        number = float(score)
    except OverflowError:  # of an integer; other numbers are infinite then
        digits = len(str(abs(score)))
        raise ValueError(f"{column!r} must be within ±1.8e308, got an integer of {digits} digits") from None
    if not math.isfinite(number):
        raise ValueError(f"{column!r} must be finite, got {score}")
    return number
