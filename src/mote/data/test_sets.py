"""The sets of a data folder that have a test part: found, read, checked, and cut to a limit.

    beir/NAME             corpus.jsonl.gz: _id, title, text; queries.jsonl.gz: _id, text;
                          qrels/test.tsv: query-id, corpus-id, score
    classification/NAME   train.jsonl.gz, test.jsonl.gz: text, label
    clustering/NAME       test.jsonl.gz: text, label
    pair/NAME             test.jsonl.gz: sentence1, sentence2, label (1: the same meaning, 0: not)
    reranking/NAME        test.jsonl.gz: query, positive (list), negative (list)
    sts/NAME              test.jsonl.gz: sentence1, sentence2, score
    summarization/NAME    test.jsonl.gz: text, machine_summaries (list), human_summaries (list, optional), and lists of
                          human scores, one per machine summary, under one of `SCORES_OF_SUMMARIES`

Files may also be `.jsonl`, `.json.gz` or `.parquet`. Nothing here knows of mteb.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from configuration_mote import alternatives
from mote.data.rows import Location, find_datasets, read_rows
from mote.data.settings import DatasetSettings

Row = dict[str, Any]
Judgements = dict[str, dict[str, int]]  # query → document → grade

PARTS = {  # kind → the parts that are read, as `find_datasets` names them; the kinds in MTEB's order of types
    "classification": ("train", "test"),
    "clustering": ("test",),
    "pair": ("test",),
    "reranking": ("test",),
    "beir": ("corpus", "queries"),
    "sts": ("test",),
    "summarization": ("test",),
}
JUDGEMENTS = "qrels/test.tsv"
JUDGEMENT_COLUMNS = ["query-id", "corpus-id", "score"]
SCORES_OF_SUMMARIES = ("relevance", "informativeness", "litepyramid_recall", "consistency", "coherence", "fluency")
"""Which human scores of summaries are used: the first of these that a set has. `relevance` is SummEval's in MTEB."""

CORPUS_PER_QUERY = 10
"""Documents that a limited corpus is filled up to, for each query of the limit."""
SHOTS = 8
"""Texts per label that MTEB draws (AmazonCounterfactual: 32); a limited training part keeps twice as many or more."""
UNSEEN = 0.05
"""Share of test rows up to which labels may be unknown to the training part: real sets (ATIS) have some such rows, but
more of them mean labels that are spelt differently."""
TEXTS_PER_CLUSTER = 8
"""Texts per label that a limited clustering set keeps on average, at the cost of labels."""

_VERSION = 1  # of what is made of the files: part of the revision, to be raised with each change of the result


@dataclass(frozen=True)
class EvaluationSet:
    """One set of a data folder.

    Attributes:
        kind: One of `PARTS`.
        name: Of its folder.
        folder: The data folder.
        limit: Test rows (`beir`, `reranking`: queries) that are used at most, a seeded sample; `None`: all.
    """

    kind: str
    name: str
    folder: Path
    limit: int | None = None

    @property
    def path(self) -> str:
        """Its place in the data folder, which names it in messages."""
        return f"{self.kind}/{self.name}"

    def location(self, part: str) -> Location[DatasetSettings]:
        """Find the file of a part.

        Raises:
            FileNotFoundError: If there is none.
        """
        return find_datasets(DatasetSettings(path=self.path, split=part), self.folder)[0]

    def files(self) -> list[Path]:
        """The files that are read, as far as they are there."""
        found = [self.folder / self.path / JUDGEMENTS] if self.kind == "beir" else []
        for part in PARTS[self.kind]:
            try:
                found += self.location(part).files
            except (FileNotFoundError, ValueError):
                continue  # said when the set is loaded, so that one broken set does not keep others from running
        return [file for file in found if file.is_file()]

    def revision(self) -> str:
        """A short hash of the files and the limit, by which results of other data are told apart."""
        digest = blake2b(f"{_VERSION} {self.limit}".encode(), digest_size=8)
        for file in self.files():
            digest.update(f"\0{file.relative_to(self.folder)}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def count(self) -> int:
        """Rows of the test part, before any limit; of `beir` judgements. 0 if it cannot be read."""
        try:
            if self.kind == "beir":
                return sum(len(documents) for documents in _read_judgements(self).values())
            return sum(1 for _ in read_rows(self.location("test")))
        except (OSError, ValueError):
            return 0


def find_sets(folder: Path, limit: int | None = None) -> list[EvaluationSet]:
    """Find all sets with a test part, in the order of `PARTS` and by name.

    Raises:
        FileNotFoundError: If there is no such folder, or no set in it.
        ValueError: If the limit is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no data folder {folder}")
    found = [
        EvaluationSet(kind, place.name, folder, limit)
        for kind in PARTS
        for place in sorted((folder / kind).glob("*"))
        if place.is_dir() and (kind == "beir" or any(place.glob("test*")))
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no set with a test part: expected KIND/NAME/test.jsonl.gz, where KIND is one of "
            f"{', '.join(kind for kind in PARTS if kind != 'beir')}, or beir/NAME/{JUDGEMENTS}"
        )
    return found


def select(names: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> list[str]:
    """Find what patterns stand for.

    Args:
        names: What there is → all names that it goes by.
        patterns: Names, also with `*`, `?` and `[…]`; none stands for everything.

    Returns:
        The keys of `names` of which a name fits a pattern, in their order.

    Raises:
        ValueError: If nothing fits a pattern.
    """
    chosen = {pattern: {key for key in names if _is_called(names[key], pattern)} for pattern in patterns}
    for pattern, fitting in chosen.items():
        if not fitting:
            known = [names[key][0] for key in names]
            raise ValueError(f"There is no set {pattern!r}." + alternatives(pattern, known))
    return [key for key in names if not patterns or any(key in fitting for fitting in chosen.values())]


def _is_called(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


# Rows, and what their columns must hold ------------------------------------------------------------------------------


class Column(NamedTuple):
    """What a column must hold: in words, and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(fits, value))


TEXT = Column("a text", _is_text)
LABEL = Column("a label: a text or a whole number", lambda value: isinstance(value, str | int) and value != "")
NUMBER = Column("a number", _is_number)
SAME_OR_NOT = Column("1 (the same meaning) or 0 (not)", lambda value: _is_number(value) and value in (0, 1))
TEXTS = Column("a list of texts that is not empty", _is_list_of(_is_text))
NUMBERS = Column("a list of numbers that is not empty", _is_list_of(_is_number))


def _read(evaluation_set: EvaluationSet, part: str, **columns: Column) -> list[Row]:
    """Read one part: all rows with these columns (`id` stands for `_id`), or an error that names file and line."""
    rows = []
    for line in read_rows(evaluation_set.location(part)):
        if line.fault:
            raise ValueError(f"{line.where}: {line.fault}")
        row = {name.removeprefix("_"): _checked(line.where, line.content, name, columns[name]) for name in columns}
        rows.append(row)
    if not rows:
        raise ValueError(f"{evaluation_set.path}: the {part!r} part has no rows")
    return rows


def _checked(where: str, content: Row, name: str, column: Column) -> Any:
    if name not in content:
        raise ValueError(f"{where}: no column {name!r}, expected {column.expected}." + alternatives(name, content))
    if not column.fits(content[name]):
        found = json.dumps(content[name], ensure_ascii=False, default=str)
        raise ValueError(f"{where}: {name!r} must be {column.expected}, found {found[:80]}")
    return content[name]


# Samples ------------------------------------------------------------------------------------------------------------


def _hash(row: Any) -> bytes:
    return blake2b(b"limit\0" + json.dumps(row, sort_keys=True, default=str).encode(), digest_size=8).digest()


def _ranks(rows: list[Row], label: str | None = None) -> list[tuple[int, int]]:
    """For each row its rank by hash among those of its label, and how many these are."""
    groups: dict[Any, list[tuple[bytes, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row[label] if label else None].append((_hash(row), index))
    ranks = {index: (rank, len(group)) for group in groups.values() for rank, (_, index) in enumerate(sorted(group))}
    return [ranks[index] for index in range(len(rows))]


def _sample(rows: list[Row], limit: int | None, label: str | None = None) -> list[Row]:
    """Take at most `limit` rows, in their order; with a label, in proportion to the labels' sizes.

    Hashes decide, so that the same rows come out whatever their order was.
    """
    if limit is None or len(rows) <= limit:
        return rows
    # The row of rank r among n stands at (r + ½) / n: the first rows by that are a fair share of each label.
    places = [
        ((rank + 0.5) / size, _hash(rows[index]), index) for index, (rank, size) in enumerate(_ranks(rows, label))
    ]
    return [rows[index] for index in sorted(index for *_, index in sorted(places)[:limit])]


# The kinds ----------------------------------------------------------------------------------------------------------


def read_classification(evaluation_set: EvaluationSet) -> dict[str, list[Row]]:
    """Read `train` and `test`: `text`, and as `label` a number.

    A limit also shortens the training part, but leaves 16 texts of each label at least (as far as there are any).
    Test rows with labels that are never trained on count as missed, as in mteb, if they are few.
    """
    parts = {part: _read(evaluation_set, part, text=TEXT, label=LABEL) for part in ("train", "test")}
    for row in (row for rows in parts.values() for row in rows):
        row["label"] = str(row["label"])
    labels = sorted({row["label"] for row in parts["train"]})
    unseen = Counter(row["label"] for row in parts["test"] if row["label"] not in labels)
    if sum(unseen.values()) > UNSEEN * len(parts["test"]):
        example = next(iter(unseen))
        raise ValueError(
            f"{evaluation_set.path}: {sum(unseen.values())} test rows have one of {len(unseen)} labels that no row of "
            f"the training part has, for instance {example!r}." + alternatives(example, labels)
        )
    if len(labels) < 2:
        raise ValueError(f"{evaluation_set.path}: the training part has the label {labels[0]!r} alone, expected two")
    if evaluation_set.limit is not None:
        parts["test"] = _sample(parts["test"], evaluation_set.limit, "label")
        each = max(2 * SHOTS, evaluation_set.limit // len(labels))
        ranks = _ranks(parts["train"], "label")
        parts["train"] = [row for row, (rank, _) in zip(parts["train"], ranks, strict=True) if rank < each]
    # Labels of the test part first: where it has two, mteb takes them for 0 and 1, though others may be predicted.
    tested = {row["label"] for row in parts["test"]}
    numbers = {
        label: number
        for number, label in enumerate(sorted({*labels, *tested}, key=lambda label: (label not in tested, label)))
    }
    return {
        part: [{"text": row["text"], "label": numbers[row["label"]]} for row in rows] for part, rows in parts.items()
    }


def read_clustering(evaluation_set: EvaluationSet) -> list[Row]:
    """Read `text` and `label`. A limit leaves out the smallest labels, so that 8 texts are left for each."""
    rows = _read(evaluation_set, "test", text=TEXT, label=LABEL)
    rows = [{"text": row["text"], "label": str(row["label"])} for row in rows]
    sizes = Counter(row["label"] for row in rows)
    if len(sizes) < 2:
        raise ValueError(f"{evaluation_set.path}: all rows have the label {next(iter(sizes))!r}, expected two or more")
    if evaluation_set.limit is not None and len(rows) > evaluation_set.limit:
        kept = sorted(sizes, key=lambda label: (-sizes[label], label))
        kept = kept[: max(2, evaluation_set.limit // TEXTS_PER_CLUSTER)]
        rows = _sample([row for row in rows if row["label"] in kept], evaluation_set.limit, "label")
    return rows


def read_pairs(evaluation_set: EvaluationSet) -> list[Row]:
    """Read `sentence1`, `sentence2`, `labels`. A limit of 1 leaves one pair of each label."""
    rows = _read(evaluation_set, "test", sentence1=TEXT, sentence2=TEXT, label=SAME_OR_NOT)
    if len({row["label"] for row in rows}) < 2:
        raise ValueError(f"{evaluation_set.path}: all pairs have the label {rows[0]['label']}, expected 1 and 0")
    if evaluation_set.limit == 1:
        rows = [row for row, (rank, _) in zip(rows, _ranks(rows, "label"), strict=True) if rank == 0]
    else:
        rows = _sample(rows, evaluation_set.limit, "label")
    if len({row["label"] for row in rows}) < 2:
        raise ValueError(
            f"{evaluation_set.path}: all pairs{_left(evaluation_set)} have the label {rows[0]['label']}, expected 1 "
            "and 0: raise the limit"
        )
    return [{**row, "labels": int(row.pop("label"))} for row in rows]


def read_sts(evaluation_set: EvaluationSet) -> list[Row]:
    """Read `sentence1`, `sentence2`, `score`."""
    rows = _read(evaluation_set, "test", sentence1=TEXT, sentence2=TEXT, score=NUMBER)
    return _different(evaluation_set, _sample(rows, evaluation_set.limit))


def _different(evaluation_set: EvaluationSet, rows: list[Row]) -> list[Row]:
    if len({row["score"] for row in rows}) < 2:
        raise ValueError(
            f"{evaluation_set.path}: all scores{_left(evaluation_set)} are {rows[0]['score']}, which correlates with "
            "nothing"
        )
    return rows


def _left(evaluation_set: EvaluationSet) -> str:
    """Words for errors that may be the limit's fault."""
    return "" if evaluation_set.limit is None else f" that a limit of {evaluation_set.limit} leaves"


def read_reranking(evaluation_set: EvaluationSet) -> list[Row]:
    """Read `query`, `positive`, `negative`."""
    rows = _read(evaluation_set, "test", query=TEXT, positive=TEXTS, negative=TEXTS)
    return _sample(rows, evaluation_set.limit)


def scores_of_summaries(evaluation_set: EvaluationSet, row: Row) -> str:
    """The column with the human scores of summaries: the first of `SCORES_OF_SUMMARIES` that the row has.

    Raises:
        ValueError: If it has none.
    """
    for name in SCORES_OF_SUMMARIES:
        if name in row:
            return name
    raise ValueError(
        f"{evaluation_set.path}: no human scores, expected a column of one of these names: "
        f"{', '.join(SCORES_OF_SUMMARIES)}. Found: {', '.join(row) or 'none'}"
    )


def read_summaries(evaluation_set: EvaluationSet) -> list[Row]:
    """Read `text`, `machine_summaries`, `human_summaries`, and the human scores as `relevance`.

    Where there are no human summaries, the text itself is what machine summaries are compared with.

    Raises:
        ValueError: Beside what is wrong with rows: if each text has equal scores only, which tell no order.
    """
    rows = _read_summaries(evaluation_set)
    if all(len(set(row["relevance"])) == 1 for row in rows):
        raise ValueError(
            f"{evaluation_set.path}: all scores{_left(evaluation_set)} are equal within their text, which correlates "
            "with nothing"
        )
    return rows


def _read_summaries(evaluation_set: EvaluationSet) -> list[Row]:
    first = next(iter(read_rows(evaluation_set.location("test"))), None)
    scores = scores_of_summaries(evaluation_set, first.content if first and not first.fault else {"relevance": []})
    has_references = first is not None and "human_summaries" in first.content
    columns = {"human_summaries": TEXTS} if has_references else {}
    rows = _read(evaluation_set, "test", text=TEXT, machine_summaries=TEXTS, **columns, **{scores: NUMBERS})
    for number, row in enumerate(rows, start=1):
        if len(row["machine_summaries"]) != len(row[scores]):
            raise ValueError(
                f"{evaluation_set.path}: row {number} of the test part has {len(row['machine_summaries'])} machine "
                f"summaries, but {len(row[scores])} scores under {scores!r}; expected one score for each"
            )
        row["relevance"] = row.pop(scores)
        row.setdefault("human_summaries", [row["text"]])
    return _sample(rows, evaluation_set.limit)


def has_one_summary_per_text(evaluation_set: EvaluationSet) -> bool:
    """Whether the first row has one machine summary, so that no order of summaries can be told within a text."""
    try:
        first = next(iter(read_rows(evaluation_set.location("test"))))
    except (OSError, ValueError, StopIteration):
        return False  # said when the set is loaded
    summaries = first.content.get("machine_summaries")
    return isinstance(summaries, list) and len(summaries) == 1


def read_summary_pairs(evaluation_set: EvaluationSet) -> list[Row]:
    """Read a set with one machine summary per text as scored pairs: `sentence1` (reference), `sentence2`, `score`.

    Raises:
        ValueError: If a row has several machine summaries or references.
    """
    rows = _read_summaries(evaluation_set)
    for row in rows:
        if len(row["machine_summaries"]) > 1 or len(row["human_summaries"]) > 1:
            raise ValueError(
                f"{evaluation_set.path}: the first text has one machine summary, another has "
                f"{len(row['machine_summaries'])} ({len(row['human_summaries'])} human ones): expected one for all"
            )
    pairs = [
        {"sentence1": row["human_summaries"][0], "sentence2": row["machine_summaries"][0], "score": row["relevance"][0]}
        for row in rows
    ]
    return _different(evaluation_set, pairs)


class Retrieval(NamedTuple):
    """A retrieval set: documents (`id`, `title`, `text`), judged queries (`id`, `text`), and judgements."""

    corpus: list[Row]
    queries: list[Row]
    judgements: Judgements


def read_retrieval(evaluation_set: EvaluationSet) -> Retrieval:
    """Read a retrieval set, its judged queries alone.

    With a limit the corpus is all documents that are judged for the queries, and others up to ten for each query.
    """
    corpus = _read(evaluation_set, "corpus", _id=TEXT, title=TEXT, text=TEXT)
    queries = _read(evaluation_set, "queries", _id=TEXT, text=TEXT)
    judgements = _read_judgements(evaluation_set)
    for noun, rows, judged in (
        ("query", queries, set(judgements)),
        ("document", corpus, {document for documents in judgements.values() for document in documents}),
    ):
        _check_ids(evaluation_set, noun, [row["id"] for row in rows], judged)
    relevant = {query for query, documents in judgements.items() if any(grade > 0 for grade in documents.values())}
    queries = [query for query in queries if query["id"] in relevant]
    if not queries:
        raise ValueError(f"{evaluation_set.path}: {JUDGEMENTS} calls no document relevant to any query")
    queries = _sample(queries, evaluation_set.limit)
    judgements = {query["id"]: judgements[query["id"]] for query in queries}
    if evaluation_set.limit is not None:
        judged = {document for documents in judgements.values() for document in documents}
        others = [row for row in corpus if row["id"] not in judged]
        size = max(0, CORPUS_PER_QUERY * evaluation_set.limit - len(judged))
        kept = judged | {row["id"] for row in (_sample(others, size) if size else [])}
        corpus = [row for row in corpus if row["id"] in kept]
    return Retrieval(corpus, queries, judgements)


def _check_ids(evaluation_set: EvaluationSet, noun: str, ids: list[str], judged: set[str]) -> None:
    if len(set(ids)) < len(ids):
        identity, count = Counter(ids).most_common(1)[0]
        raise ValueError(f"{evaluation_set.path}: {count} rows have the {noun} id {identity!r}, expected one")
    unknown = sorted(judged - set(ids))
    if unknown:
        raise ValueError(
            f"{evaluation_set.path}: {JUDGEMENTS} judges {len(unknown)} {noun} ids that are not there, for instance "
            f"{unknown[0]!r}; there are {len(ids)}, for instance {ids[0]!r}"
        )


def _read_judgements(evaluation_set: EvaluationSet) -> Judgements:
    file = evaluation_set.folder / evaluation_set.path / JUDGEMENTS
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: expected lines of {', '.join(JUDGEMENT_COLUMNS)}, tab-separated")
    try:
        header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from error
    if header.split("\t") != JUDGEMENT_COLUMNS:
        raise ValueError(
            f"{file}:1: expected the header {', '.join(JUDGEMENT_COLUMNS)}, tab-separated; found {header!r}"
        )
    judgements: Judgements = defaultdict(dict)
    for number, line in enumerate(lines, start=2):
        if line.strip():
            fields = line.split("\t")
            if len(fields) != len(JUDGEMENT_COLUMNS) or not fields[2].strip().lstrip("-").isdecimal():
                raise ValueError(f"{file}:{number}: expected query, document and a whole number, found {line[:80]!r}")
            judgements[fields[0]][fields[1]] = int(fields[2])
    if not judgements:
        raise ValueError(f"{file}: no judgements, so that no query could be scored")
    return dict(judgements)


def asks_for_others(retrieval: Retrieval) -> bool:
    """Whether queries are documents themselves (as in ArguAna), which then are no answers to themselves.

    Equal ids alone say little, as many collections number both from 1: the texts must agree as well.
    """
    texts = {row["id"]: set(f"{row['title']} {row['text']}".lower().split()) for row in retrieval.corpus}
    own = [query for query in retrieval.queries if query["id"] in texts]
    words = [set(query["text"].lower().split()) for query in own]
    same = [len(asked & texts[query["id"]]) > 0.8 * len(asked) for query, asked in zip(own, words, strict=True)]
    return bool(same) and sum(same) > 0.5 * len(same)
