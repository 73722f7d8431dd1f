"""Tell what the columns of a dataset are, and check its rows."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from configuration_mote import alternatives
from mote.data.settings import DatasetSettings

Kind = Literal["pairs", "scored", "labelled", "texts"]

ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_1", "text1", "premise")
POSITIVES = ("positive", "document", "answer", "passage", "sentence2", "sentence_2", "text2", "hypothesis")
NEGATIVES = ("negative", "negatives")
TEXTS = ("text", "sentence")
SCORES = ("score", "similarity", "similarity_score", "label")
LABELS = ("label",)

_NUMBERED_NEGATIVE = re.compile(r"negative_?\d+")
OURS = {"sentence1": "anchor", "sentence2": "positive", "text": "anchor", "score": "label"}
KNOWN = ("anchor", "positive", "negative", "text", "label", "sentence1", "sentence2", "score")


@dataclass(frozen=True)
class Columns:
    """What a dataset holds, and in which of its columns.

    Attributes:
        kind: `pairs` (with or without hard negatives), `scored` pairs, `labelled` texts, or just `texts`.
        names: Of `anchor`, `positive`, `negative` and `label`: the dataset's columns. A text alone is an anchor.
    """

    kind: Kind
    names: dict[str, tuple[str, ...]]


class Example(NamedTuple):
    """A checked row: every text of it, and its label or score."""

    anchor: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    label: str | float | None = None


def find_columns(settings: DatasetSettings, present: Iterable[str], name: str) -> Columns:
    """Decide what the columns of a dataset are: what the recipe says, or else by their usual names.

    Args:
        settings: The recipe's.
        present: The dataset's columns.
        name: The dataset's, for messages.

    Raises:
        ValueError: If a column is missing, or the names leave it open.
    """
    present = list(present)
    names = _given(settings.columns, present, name) if settings.columns else _usual(present, name)
    kind = _kind(names)
    if kind is None:
        raise ValueError(
            f"{name}: its columns {', '.join(map(repr, sorted(present)))} are no pairs (anchor, positive), no labelled "
            "texts (text, label) and no scored pairs (sentence1, sentence2, score): say which is which with `columns`"
        )
    return Columns(kind, names)


def _given(columns: dict[str, str | list[str]], present: list[str], name: str) -> dict[str, tuple[str, ...]]:
    names = {}
    for ours, theirs in columns.items():
        if ours not in KNOWN:
            raise ValueError(f"{name}: unknown column {ours!r} in `columns`." + alternatives(ours, KNOWN))
        theirs = [theirs] if isinstance(theirs, str) else theirs
        for column in theirs:
            if column not in present:
                raise ValueError(f"{name}: there is no column {column!r}." + alternatives(column, sorted(present)))
        names[OURS.get(ours, ours)] = tuple(theirs)
    return names


def _usual(present: list[str], name: str) -> dict[str, tuple[str, ...]]:
    anchor, positive = _one_of(ANCHORS, present, name), _one_of(POSITIVES, present, name)
    if anchor and positive:
        numbered = (column for column in present if _NUMBERED_NEGATIVE.fullmatch(column))
        negatives = [column for column in NEGATIVES if column in present]
        negatives += sorted(numbered, key=lambda column: int(re.sub(r"\D", "", column)))
        score = () if negatives else _one_of(SCORES, present, name)
        names = {"anchor": anchor, "positive": positive, "negative": tuple(negatives), "label": score}
    elif text := _one_of(TEXTS, present, name):
        names = {"anchor": text, "label": _one_of(LABELS, present, name)}
    else:
        names = {"anchor": anchor, "positive": positive}
    return {ours: theirs for ours, theirs in names.items() if theirs}


def _one_of(usual: tuple[str, ...], present: list[str], name: str) -> tuple[str, ...]:
    found = tuple(column for column in usual if column in present)
    if len(found) > 1:
        raise ValueError(f"{name}: {' and '.join(map(repr, found))} mean the same: say which to take with `columns`")
    return found


def _kind(names: dict[str, tuple[str, ...]]) -> Kind | None:
    kinds: dict[frozenset[str], Kind] = {
        frozenset({"anchor", "positive"}): "pairs",
        frozenset({"anchor", "positive", "negative"}): "pairs",
        frozenset({"anchor", "positive", "label"}): "scored",
        frozenset({"anchor", "label"}): "labelled",
        frozenset({"anchor"}): "texts",
    }
    return kinds.get(frozenset(names))


def check_row(row: dict[str, Any], columns: Columns) -> Example:
    """Take a row's texts and its label.

    Raises:
        ValueError: That says what is wrong with the row.
    """
    names = columns.names
    anchor = _checked(_value(row, names["anchor"][0]), names["anchor"][0])
    if columns.kind == "texts":
        return Example(anchor)
    if columns.kind == "labelled":
        return Example(anchor, label=_label(_value(row, names["label"][0]), names["label"][0]))
    positive = _value(row, names["positive"][0])
    if columns.kind == "scored":
        score = _score(_value(row, names["label"][0]), names["label"][0])
        return Example(anchor, (_checked(positive, names["positive"][0]),), label=score)
    given = ((row.get(column), column) for column in names.get("negative", ()))  # a row may have fewer than others
    negatives = tuple(text for value, column in given if value is not None for text in _texts(value, column, least=0))
    return Example(anchor, tuple(_texts(positive, names["positive"][0])), negatives)


def _value(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"there is no column {column!r}")
    return row[column]


def _texts(value: Any, column: str, least: int = 1) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if len(texts) < least:
        raise ValueError(f"{column!r} is an empty list")
    return [_checked(text, column) for text in texts]


def _checked(text: Any, column: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{column!r} is no text but {type(text).__name__}")  # noqa: TRY004
    if not text.strip():
        raise ValueError(f"{column!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column!r} is no valid Unicode: it has half of a surrogate pair") from None
    return text


def _label(label: Any, column: str) -> str:
    if not isinstance(label, str | int):
        raise ValueError(f"{column!r} is no text or whole number but {type(label).__name__}")  # noqa: TRY004
    if not str(label).strip():
        raise ValueError(f"{column!r} is empty")
    return str(label).strip()


def _score(score: Any, column: str) -> float:
    if not isinstance(score, int | float):
        raise ValueError(f"{column!r} is no number but {type(score).__name__}")  # noqa: TRY004
    if not math.isfinite(score):
        raise ValueError(f"{column!r} is {score}")
    return float(score)
