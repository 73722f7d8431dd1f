"""Test sets of a data folder: finds, reads and checks them, and cuts them to a limit.

docs/evaluation.md describes the folder. Nothing here depends on mteb.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, TypeAdapter

from mote.data.columns import LABEL, NUMBER, STRING, check_value
from mote.data.rows import read_files, read_text_lines, require_valid, split_files
from mote.remote.configuration_mote import alternatives

Rows = list[dict[str, Any]]
Qrels = dict[str, dict[str, int]]  # query → document → grade

BINARY = TypeAdapter[Any](Literal[0, 1])
STRINGS = TypeAdapter[Any](Annotated[list[str], Field(min_length=1)])
NUMBERS = TypeAdapter[Any](Annotated[list[FiniteFloat], Field(min_length=1)])

# Folder of a task → split → columns that are read; in MTEB's order of task types.
SPLITS: dict[str, dict[str, dict[str, TypeAdapter[Any]]]] = {
    "classification": {split: {"text": STRING, "label": LABEL} for split in ("train", "test")},
    "clustering": {"test": {"text": STRING, "label": LABEL}},
    "pair": {"test": {"sentence1": STRING, "sentence2": STRING, "label": BINARY}},
    "reranking": {"test": {"query": STRING, "positive": STRINGS, "negative": STRINGS}},
    "beir": {"corpus": {"_id": STRING, "title": STRING, "text": STRING}, "queries": {"_id": STRING, "text": STRING}},
    "sts": {"test": {"sentence1": STRING, "sentence2": STRING, "score": NUMBER}},
    "summarization": {"test": {"text": STRING, "machine_summaries": STRINGS}},
}
QRELS = "qrels/test.tsv"
QRELS_HEADER = "query-id\tcorpus-id\tscore"
SUMMARY_SCORES = ("relevance", "informativeness", "litepyramid_recall", "consistency", "coherence", "fluency")
"""Columns with human scores of summaries; the first that a dataset has is used. MTEB takes SummEval's `relevance`."""

CORPUS_PER_QUERY = 10
"""Number of documents per query to which a limited corpus is filled up."""
SHOTS = 8
"""Texts per label that MTEB draws (AmazonCounterfactual: 32); a limited train split keeps at least twice as many."""
MAX_UNSEEN = 0.05
"""Fraction of test rows whose labels may be missing in the train split: real datasets (ATIS) have some such rows; more
of them suggest that the labels are spelt differently."""
TEXTS_PER_CLUSTER = 8
"""Texts per label that a limited clustering dataset keeps on average, at the cost of labels."""

# Version of the reader: increase it when scores of the same files change.
_VERSION = 2


@dataclass(frozen=True)
class EvaluationDataset:
    """A dataset of a data folder with a test split.

    Attributes:
        task: Folder of its task, one of `SPLITS`.
        name: Name of its own folder.
        folder: The data folder.
        limit: Maximum number of test rows (`beir`, `reranking`: queries) to use. Default: all.
    """

    task: str
    name: str
    folder: Path
    limit: int | None = None

    @property
    def path(self) -> str:
        """Path in the data folder, which names it in errors."""
        return f"{self.task}/{self.name}"

    def files(self, split: str) -> tuple[Path, ...]:
        """The files of a split; there may be none."""
        return split_files(self.folder / self.path, split)

    # The next three are called for all datasets before any is loaded: what they cannot read fails only its own dataset.

    def revision(self) -> str:
        """Hash the files and the limit, to distinguish results on different data."""
        digest = blake2b(f"{_VERSION} {self.limit}".encode(), digest_size=8)
        files = [self.folder / self.path / QRELS] if self.task == "beir" else []
        for split in SPLITS[self.task]:
            try:
                files += self.files(split)
            except ValueError:
                continue
        for file in filter(Path.is_file, files):
            digest.update(f"\0{file.relative_to(self.folder)}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def count(self) -> int:
        """Number of test rows, before any limit; of `beir` the number of qrels. 0 if they cannot be read."""
        try:
            if self.task == "beir":
                return sum(len(documents) for documents in self.qrels().values())
            return sum(1 for _ in read_files(self.files("test")))
        except (OSError, ValueError):
            return 0

    def first_row(self) -> dict[str, Any]:
        """The first test row, whatever it holds; empty if it cannot be read."""
        try:
            return next((row.content for row in read_files(self.files("test"))), {})
        except (OSError, ValueError):
            return {}

    def rows(self, split: str = "test", further: Mapping[str, TypeAdapter[Any]] | None = None) -> Rows:
        """Read all rows of a split, with only the columns of its task and `further` ones (`_id` is renamed to `id`).

        Raises:
            ValueError: If a row is invalid, or there are none.
        """
        columns = {**SPLITS[self.task][split], **(further or {})}
        rows = []
        for where, content, _ in require_valid(read_files(self.files(split))):
            try:
                values = {name: check_value(content, name, kind) for name, kind in columns.items()}
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            rows.append({name.removeprefix("_"): value for name, value in values.items()})
        if not rows:
            raise ValueError(f"{self.path}: no {split!r} split, or one without rows")
        return rows

    def qrels(self) -> Qrels:
        """Read which documents are relevant to which queries.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If a line is invalid.
        """
        qrels: Qrels = defaultdict(dict)
        lines = read_text_lines(self.folder / self.path / QRELS)
        where, header = next(lines, ("", ""))
        if header != QRELS_HEADER:
            raise ValueError(f"{where or self.path}: expected the header {QRELS_HEADER!r}, got {header!r}")
        for where, line in lines:
            try:
                query, document, grade = line.split("\t")
                qrels[query][document] = int(grade)
            except ValueError:
                raise ValueError(f"{where}: expected query, document and an integer, got {line!r}") from None
        return dict(qrels)

    def require_two(self, values: set[Any], what: str) -> None:
        """Raise `ValueError` if rows all have one value, which has no score, even if only because of the limit."""
        if len(values) < 2:
            within_limit = f" within the limit of {self.limit}" if self.limit is not None else ""
            raise ValueError(f"{self.path}: all {what}{within_limit} are {next(iter(values))!r}, expected two or more")


def find_evaluation_datasets(folder: Path, limit: int | None = None) -> list[EvaluationDataset]:
    """Find all datasets with a test split, in the order of `SPLITS` and by name.

    Raises:
        FileNotFoundError: If there is no dataset in the folder.
    """
    found = [
        EvaluationDataset(task, place.name, folder, limit)
        for task in SPLITS
        for place in sorted((folder / task).glob("*"))
        if place.is_dir() and (task == "beir" or any(place.glob("test*")))
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no datasets with a test split: expected TASK/NAME/test.jsonl.gz, where TASK is one of "
            f"{', '.join(task for task in SPLITS if task != 'beir')}, or beir/NAME/{QRELS}"
        )
    return found


# Samples: hashes of the rows decide, so that their order in a file does not -------------------------------------------


def ranks(rows: Rows, label: str | None = None) -> list[tuple[int, int]]:
    """Return for each row its rank by hash, among all rows or those of its label, and the number of such rows."""
    groups: dict[Any, list[tuple[bytes, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row[label] if label else None].append((_hash(row), index))
    found = {index: (rank, len(group)) for group in groups.values() for rank, (_, index) in enumerate(sorted(group))}
    return [found[index] for index in range(len(rows))]


def sample(rows: Rows, limit: int | None, label: str | None = None) -> Rows:
    """Take at most `limit` rows, in their order; with a label, in proportion to the sizes of the labels."""
    if limit is None or len(rows) <= limit:
        return rows
    # The row of rank r among n is at (r + ½) / n: the first rows in this order are a fair share of each label.
    places = [((rank + 0.5) / size, _hash(rows[index]), index) for index, (rank, size) in enumerate(ranks(rows, label))]
    return [rows[index] for index in sorted(index for *_, index in sorted(places)[:limit])]


def _hash(row: dict[str, Any]) -> bytes:
    return blake2b(b"limit\0" + json.dumps(row, sort_keys=True, default=str).encode(), digest_size=8).digest()


# Tasks ---------------------------------------------------------------------------------------------------------------


def read_classification(dataset: EvaluationDataset) -> dict[str, Rows]:
    """Read `train` and `test`: `text`, and as `label` a number.

    A limit also shortens the train split, but leaves at least 16 texts of each label, or all if there are fewer. If
    only a few test rows have labels that the train split lacks, they count as wrong, as in mteb; more are an error.
    """
    splits = {split: _with_labels(dataset, split) for split in SPLITS["classification"]}
    labels = sorted({row["label"] for row in splits["train"]})
    unseen = [row["label"] for row in splits["test"] if row["label"] not in labels]
    if len(unseen) > MAX_UNSEEN * len(splits["test"]):
        raise ValueError(
            f"{dataset.path}: {len(unseen)} test rows have labels that the train split lacks, for instance "
            f"{unseen[0]!r}." + alternatives(unseen[0], labels)
        )
    dataset.require_two(set(labels), "labels of the train split")
    if dataset.limit is not None:
        splits["test"] = sample(splits["test"], dataset.limit, "label")
        each = max(2 * SHOTS, dataset.limit // len(labels))
        ranked = zip(splits["train"], ranks(splits["train"], "label"), strict=True)
        splits["train"] = [row for row, (rank, _) in ranked if rank < each]
    # Labels of the test split first: if it has two, mteb treats them as 0 and 1, though others may be predicted.
    tested = {row["label"] for row in splits["test"]}
    ordered = sorted({*labels, *tested}, key=lambda label: (label not in tested, label))
    numbers = {label: number for number, label in enumerate(ordered)}
    return {
        split: [{"text": row["text"], "label": numbers[row["label"]]} for row in rows] for split, rows in splits.items()
    }


def read_clustering(dataset: EvaluationDataset) -> Rows:
    """Read `text` and `label`. A limit drops the smallest labels, so that 8 texts are left for each."""
    rows = _with_labels(dataset, "test")
    sizes = Counter(row["label"] for row in rows)
    if dataset.limit is not None and len(rows) > dataset.limit:
        kept = sorted(sizes, key=lambda label: (-sizes[label], label))
        kept = kept[: max(2, dataset.limit // TEXTS_PER_CLUSTER)]
        rows = sample([row for row in rows if row["label"] in kept], dataset.limit, "label")
    labels = {row["label"] for row in rows}
    dataset.require_two(labels, "labels")
    if len(labels) == len(rows):
        raise ValueError(f"{dataset.path}: no label has two texts, so any clustering would be perfect")
    return rows


def _with_labels(dataset: EvaluationDataset, split: str) -> Rows:
    return [{"text": row["text"], "label": str(row["label"])} for row in dataset.rows(split)]


def read_pairs(dataset: EvaluationDataset) -> Rows:
    """Read `sentence1`, `sentence2`, `labels`."""
    rows = sample(dataset.rows(), dataset.limit, "label")
    dataset.require_two({row["label"] for row in rows}, "labels")
    return [{**row, "labels": int(row.pop("label"))} for row in rows]


def read_test_rows(dataset: EvaluationDataset) -> Rows:
    """Read the test rows of `sts` and `reranking`: the columns as they are."""
    return sample(dataset.rows(), dataset.limit)


def read_summaries(dataset: EvaluationDataset) -> Rows:
    """Read `text`, `machine_summaries`, `human_summaries`, and the human scores as `relevance`.

    If there are no human summaries, machine summaries are compared with the text itself.
    """
    first = dataset.first_row()
    scores = next((name for name in SUMMARY_SCORES if name in first), SUMMARY_SCORES[0])
    references = {"human_summaries": STRINGS} if "human_summaries" in first else {}
    rows = dataset.rows("test", references | {scores: NUMBERS})
    for number, row in enumerate(rows, start=1):
        row["relevance"] = row.pop(scores)
        row.setdefault("human_summaries", [row["text"]])
        if len(row["machine_summaries"]) != len(row["relevance"]):
            raise ValueError(f"{dataset.path}: row {number} has not one score for each machine summary ({scores!r})")
    return sample(rows, dataset.limit)


def read_summary_pairs(dataset: EvaluationDataset) -> Rows:
    """Read one machine summary per text as scored pairs: `sentence1` (reference), `sentence2`, `score`."""
    rows = read_summaries(dataset)
    if any(len(row["machine_summaries"]) > 1 or len(row["human_summaries"]) > 1 for row in rows):
        raise ValueError(f"{dataset.path}: the first text has one machine summary, others have several")
    return [
        {"sentence1": row["human_summaries"][0], "sentence2": row["machine_summaries"][0], "score": row["relevance"][0]}
        for row in rows
    ]


class RetrievalDataset(NamedTuple):
    """A retrieval dataset: documents (`id`, `title`, `text`), queries with qrels (`id`, `text`), and their qrels."""

    corpus: Rows
    queries: Rows
    qrels: Qrels

    def queries_are_documents(self) -> bool:
        """Whether the queries are themselves documents (as in ArguAna); a query is then not its own answer.

        Equal ids are not enough, as many collections number both from 1: the texts must be equal as well. If a document
        is relevant to the query with its id, it is an answer, as where titles are the queries for their documents.
        """
        if any(documents.get(query, 0) > 0 for query, documents in self.qrels.items()):
            return False
        texts = {row["id"]: set(f"{row['title']} {row['text']}".lower().split()) for row in self.corpus}
        own = [(set(row["text"].lower().split()), texts[row["id"]]) for row in self.queries if row["id"] in texts]
        same = sum(len(query & document) > 0.8 * len(query) for query, document in own)
        return same > 0.5 * len(own)


def read_retrieval(dataset: EvaluationDataset) -> RetrievalDataset:
    """Read a retrieval dataset, with only the queries that have a relevant document.

    With a limit, the corpus consists of all documents in the qrels of the queries, and others, up to ten per query.
    """
    corpus, queries, qrels = dataset.rows("corpus"), dataset.rows("queries"), dataset.qrels()
    _check_ids(dataset, "query", queries, set(qrels))
    _check_ids(dataset, "document", corpus, _documents(qrels))
    queries = [query for query in queries if any(grade > 0 for grade in qrels.get(query["id"], {}).values())]
    if not queries:
        raise ValueError(f"{dataset.path}: in {QRELS} no document is relevant to any query")
    queries = sample(queries, dataset.limit)
    qrels = {query["id"]: qrels[query["id"]] for query in queries}
    if dataset.limit is not None:
        kept = _documents(qrels)
        others = [row for row in corpus if row["id"] not in kept]
        size = max(0, CORPUS_PER_QUERY * dataset.limit - len(kept))
        kept |= {row["id"] for row in (sample(others, size) if size else [])}
        corpus = [row for row in corpus if row["id"] in kept]
    return RetrievalDataset(corpus, queries, qrels)


def _documents(qrels: Qrels) -> set[str]:
    return {document for documents in qrels.values() for document in documents}


def _check_ids(dataset: EvaluationDataset, noun: str, rows: Rows, judged: set[str]) -> None:
    """Refuse repeated ids, and qrels of rows that are missing: scores would be wrong."""
    ids = [row["id"] for row in rows]
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    unknown = sorted(judged - set(ids))
    if repeated or unknown:
        problem = f"names {len(unknown)} unknown" if unknown else f"cannot tell apart {len(repeated)} repeated"
        example = (unknown or repeated)[0]
        raise ValueError(
            f"{dataset.path}: {QRELS} {problem} {noun} ids, for instance {example!r}; there are {len(set(ids))}, for "
            f"instance {ids[0]!r}"
        )
