"""Test sets of a data folder: finds, reads and checks them, and cuts them to a limit.

docs/evaluation.md describes the folder. Nothing here depends on mteb.
"""

import csv
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, TypeAdapter

from mote.data.columns import LABEL, NUMBER, STRING, Example, RowType, check_value, read_examples
from mote.data.ranking import normalized
from mote.data.rows import ENDINGS, Location, Row, read_files, split_files
from mote.data.settings import DatasetSource

logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]
Qrels = dict[str, dict[str, int]]  # query → document → grade
Kinds = dict[str, TypeAdapter[Any]]  # column → what its values must be

BINARY = TypeAdapter[Any](Literal[0, 1])
STRINGS = TypeAdapter[Any](Annotated[list[str], Field(min_length=1)])
ONE_STRING = TypeAdapter[Any](Annotated[list[str], Field(min_length=1, max_length=1)])
NUMBERS = TypeAdapter[Any](Annotated[list[FiniteFloat], Field(min_length=1)])

# Folder of a task → split → columns that are read; in MTEB's order of task types.
SPLITS: dict[str, dict[str, Kinds]] = {
    "classification": {split: {"text": STRING, "label": LABEL} for split in ("train", "test")},
    "clustering": {"test": {"text": STRING, "label": LABEL}},
    "pair": {"test": {"sentence1": STRING, "sentence2": STRING, "label": BINARY}},
    "reranking": {"test": {"query": STRING, "positive": STRINGS, "negative": STRINGS}},
    "beir": {"corpus": {"_id": STRING, "title": STRING, "text": STRING}, "queries": {"_id": STRING, "text": STRING}},
    "sts": {"test": {"sentence1": STRING, "sentence2": STRING, "score": NUMBER}},
    "summarization": {"test": {"text": STRING, "machine_summaries": STRINGS}},
}
QRELS = "qrels/test.tsv"
TESTED: tuple[RowType, ...] = ("pairs", "scored", "labelled")  # rows of `NAME.test.csv`
# Human scores of summaries; the first column that a dataset has is used. MTEB takes SummEval's `relevance`.
SUMMARY_SCORES = ("relevance", "informativeness", "litepyramid_recall", "consistency", "coherence", "fluency")

CORPUS_PER_QUERY = 10  # number of documents per query to which a limited corpus is filled up
TEXTS_PER_CLUSTER = 8  # per label, which a limited clustering dataset keeps on average, at the cost of labels
# Share of test rows whose labels may be missing in the train split: real datasets (ATIS) have some such rows; more of
# them suggest that the labels are spelt differently.
MAX_UNSEEN = 0.05

# Version of the reader: increase it when scores of the same files change.
_VERSION = 3


@dataclass(frozen=True)
class EvaluationDataset:
    """A dataset of a data folder with a test split."""

    task: str  # its folder, one of `SPLITS`
    name: str
    folder: Path  # the data folder
    limit: int | None = None  # of test rows, or of queries
    flat: dict[str, Path] = field(default_factory=dict)  # split → file, if `NAME.test.csv` is beside `NAME.csv`

    @property
    def path(self) -> str:
        """Path in the data folder, which names it in errors."""
        return self.flat["test"].name if self.flat else f"{self.task}/{self.name}"

    def files(self, split: str = "test") -> tuple[Path, ...]:
        """Return the files of a split."""
        if self.flat:
            return (self.flat[split],) if split in self.flat else ()
        return split_files(self.folder / self.path, split)

    # The next two are called for all datasets before any is loaded: what they cannot read fails only its own dataset.

    def revision(self) -> str:
        """Hash the files and the limit, to distinguish results on different data."""
        digest = blake2b(f"{_VERSION} {self.limit}".encode(), digest_size=8)
        for file in sorted(self.flat.values() or filter(Path.is_file, (self.folder / self.path).rglob("*"))):
            digest.update(f"\0{file.relative_to(self.folder)}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def unchecked_rows(self) -> list[Any]:
        """The test rows, before any limit, or those of the qrels; none if they cannot be read."""
        try:
            if self.task == "beir" and not self.flat:
                return [grade for documents in self.qrels().values() for grade in documents.values()]
            return [row.content for row in read_files(self.files())]
        except (OSError, ValueError):
            return []

    def rows(self, split: str = "test", further: Kinds | None = None, same_length: Sequence[str] = ()) -> Rows:
        """Read all rows of a split, with only the columns of its task and `further` ones (`_id` is renamed to `id`)."""
        columns = {**SPLITS[self.task][split], **(further or {})}

        def take(row: dict[str, Any]) -> dict[str, Any]:
            values = {name.removeprefix("_"): check_value(row, name, kind) for name, kind in columns.items()}
            if len({len(values[name]) for name in same_length}) > 1:
                raise ValueError(f"{' and '.join(same_length)} are not of the same length")
            return values

        if self.flat:
            rows = [{name: _of_example(one, name) for name in columns} for one in self.examples(split)]
        else:
            rows = [row.take(take) for row in read_files(self.files(split))]
        return self.require_rows(rows, f"{split!r} split, or one without rows")

    def examples(self, split: str) -> list[Example]:
        """Read the rows of a file, whose columns have usual names; none if there is no such file."""
        location = Location(self.name, DatasetSource(path=self.path), self.files(split))
        return read_examples(location).rows if location.files else []

    def texts(self) -> Iterator[str]:
        """Yield the texts of the test rows; of a search, the queries and the documents that answer them."""
        rows: Iterable[dict[str, Any]]
        if self.task != "beir":
            rows = self.rows()
        elif self.flat:
            rows = [{"texts": [one.anchor, *one.positives]} for one in self.examples("test")]
        else:
            answers = {document for grades in self.qrels().values() for document, grade in grades.items() if grade > 0}
            corpus = (row.take(dict) for row in read_files(self.files("corpus")))  # not all of it in memory
            found = (row for row in corpus if row.get("_id") in answers)
            rows = [
                *self.rows("queries"),
                *({"texts": [row["text"], f"{row.get('title') or ''} {row['text']}"]} for row in found),
            ]
        for row in rows:
            for name, value in row.items():
                if name not in ("id", "label", "score"):
                    yield from [value] if isinstance(value, str) else value

    def require_rows(self, rows: Rows, what: str) -> Rows:
        """Return rows, of which there must be some."""
        if not rows:
            raise ValueError(f"{self.path}: no {what}")
        return rows

    def qrels(self) -> Qrels:
        """Read which documents are relevant to which queries."""
        path, qrels = self.folder / self.path / QRELS, defaultdict[str, dict[str, int]](dict)

        def take(row: dict[str, Any]) -> None:
            query, document = (check_value(row, name, STRING) for name in ("query-id", "corpus-id"))
            qrels[query][document] = int(row.get("score") or "")

        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            for line in lines:
                Row(f"{path}:{lines.line_num}", line).take(take)
        return dict(qrels)

    def require_labels(self, rows: Rows) -> None:
        """Refuse test rows that have no score: their labels are all equal or all different, maybe due to the limit."""
        labels = [row["label"] for row in rows]
        if not 1 < len(set(labels)) < len(labels):
            within = f" within the limit of {self.limit}" if self.limit is not None else ""
            raise ValueError(f"{self.path}: {len(set(labels))} labels in {len(labels)} rows{within} cannot be scored")


def find_evaluation_datasets(folder: Path, limit: int | None = None) -> list[EvaluationDataset]:
    """Find all datasets with a test split, in the order of `SPLITS` and by name."""
    found = [
        EvaluationDataset(task, place.name, folder, limit)
        for task in SPLITS
        for place in sorted((folder / task).glob("*"))
        if place.is_dir() and (task == "beir" or any(place.glob("test*")))
    ]
    flat = [place for place in sorted(folder.glob("*.test.*")) if place.name.endswith(ENDINGS)]
    found += filter(None, (_flat_dataset(place, folder, limit) for place in flat))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no datasets with a test split: expected NAME.test.csv beside NAME.csv, or "
            f"TASK/NAME/test.jsonl.gz, where TASK is one of {', '.join(task for task in SPLITS if task != 'beir')}, or "
            f"beir/NAME/{QRELS}"
        )
    return sorted(found, key=lambda one: list(SPLITS).index(one.task))


def texts_of_tests(folder: Path) -> dict[str, str]:
    """Return the texts of all test sets of a data folder, normalized, each with the path of a set that has it."""
    found = (
        (normalized(text), dataset.path) for dataset in find_evaluation_datasets(folder) for text in dataset.texts()
    )
    return {text: path for text, path in found if text}


def _flat_dataset(test: Path, folder: Path, limit: int | None) -> EvaluationDataset | None:
    """Describe a test file, whose columns say what it tests; rows to compare with are in the file beside it."""
    name = test.name.partition(".test.")[0]
    beside = [file for file in (test.with_name(name + ending) for ending in ENDINGS) if file.exists()]
    dataset = EvaluationDataset("", name, folder, limit, {"test": test, **({"train": beside[0]} if beside else {})})
    try:
        rows = read_examples(Location(name, DatasetSource(path=test.name), (test,)), expected=TESTED)
    except ValueError as error:
        logger.warning("%s is skipped: %s", test, error)
        return None
    if rows.columns.row_type == "pairs":
        return replace(dataset, task="beir")
    graded = {one.label for one in rows.rows} - {0.0, 1.0}
    similarity = "sts" if graded else "pair"
    return replace(dataset, task="classification" if rows.columns.row_type == "labelled" else similarity)


def sample(rows: Rows, limit: int | None, label: str = "") -> Rows:
    """Take at most `limit` rows, in their order; with a label, in proportion to the sizes of the labels.

    Hashes of the rows decide, so that their order in a file does not.
    """
    if limit is None or len(rows) <= limit:
        return rows
    hashes = [blake2b(b"limit\0" + json.dumps(row, sort_keys=True).encode(), digest_size=8).digest() for row in rows]
    order = sorted(range(len(rows)), key=hashes.__getitem__)
    return [rows[index] for index in sorted(in_shares(order, [row.get(label) for row in rows])[:limit])]


def in_shares(order: Iterable[int], labels: Sequence[Any]) -> list[int]:
    """Reorder indices of rows so that, however many of the first ones are taken, each label has its share of them."""
    sizes, ranks, places = Counter(labels), Counter[Any](), {}
    for index in order:
        places[index] = (ranks[labels[index]] + 0.5) / sizes[labels[index]]
        ranks[labels[index]] += 1
    return sorted(places, key=places.__getitem__)


def read_classification(dataset: EvaluationDataset) -> dict[str, Rows]:
    """Read `train` and `test`: `text`, and as `label` a number. The limit is for the test split.

    If only a few test rows have labels that the train split lacks, they count as wrong, as in mteb; more are an error.
    """
    splits = {split: _with_labels(dataset, split) for split in SPLITS["classification"]}
    labels = {row["label"] for row in splits["train"]}
    unseen = [row["label"] for row in splits["test"] if row["label"] not in labels]
    if len(unseen) > MAX_UNSEEN * len(splits["test"]):
        from mote.remote.configuration_mote import alternatives  # imports torch, which `mote mine --help` does not need

        raise ValueError(
            f"{dataset.path}: {len(unseen)} test rows have labels that the train split lacks, for instance "
            f"{unseen[0]!r}." + alternatives(unseen[0], sorted(labels))
        )
    splits["test"] = sample(splits["test"], dataset.limit, "label")
    # Labels of the test split first: if it has two, mteb treats them as 0 and 1, though others may be predicted.
    tested = {row["label"] for row in splits["test"]}
    ordered = sorted(labels | tested, key=lambda label: (label not in tested, label))
    numbers = {label: number for number, label in enumerate(ordered)}
    return {
        split: [{"text": row["text"], "label": numbers[row["label"]]} for row in rows] for split, rows in splits.items()
    }


def read_clustering(dataset: EvaluationDataset) -> Rows:
    """Read `text` and `label`. A limit drops the smallest labels, so that 8 texts are left for each."""
    rows = _with_labels(dataset, "test")
    if dataset.limit is not None and len(rows) > dataset.limit:
        sizes = Counter(row["label"] for row in rows)
        largest = sorted(sizes, key=lambda label: (-sizes[label], label))
        kept = largest[: max(2, dataset.limit // TEXTS_PER_CLUSTER)]
        rows = sample([row for row in rows if row["label"] in kept], dataset.limit, "label")
    dataset.require_labels(rows)
    return rows


def _with_labels(dataset: EvaluationDataset, split: str) -> Rows:
    return [{"text": row["text"], "label": str(row["label"])} for row in dataset.rows(split)]


def read_pairs(dataset: EvaluationDataset) -> Rows:
    """Read `sentence1`, `sentence2`, `labels`."""
    rows = sample(dataset.rows(), dataset.limit, "label")
    dataset.require_labels(rows)
    return [{**row, "labels": int(row.pop("label"))} for row in rows]


def read_test_rows(dataset: EvaluationDataset) -> Rows:
    """Read the test rows of `sts` and `reranking`: the columns as they are."""
    return sample(dataset.rows(), dataset.limit)


def read_summaries(dataset: EvaluationDataset, machine: TypeAdapter[Any] = STRINGS) -> Rows:
    """Read `text`, `machine_summaries`, `human_summaries`, and the human scores as `relevance`.

    If there are no human summaries, machine summaries are compared with the text itself.
    """
    first = (dataset.unchecked_rows() or [{}])[0]
    scores = next((name for name in SUMMARY_SCORES if name in first), SUMMARY_SCORES[0])
    kinds = {"human_summaries": STRINGS} if "human_summaries" in first else {}
    kinds |= {"machine_summaries": machine, scores: NUMBERS}
    rows = dataset.rows("test", kinds, same_length=("machine_summaries", scores))
    for row in rows:
        row["relevance"] = row.pop(scores)
        row.setdefault("human_summaries", [row["text"]])
    return sample(rows, dataset.limit)


def read_summary_pairs(dataset: EvaluationDataset) -> Rows:
    """Read one machine summary per text as scored pairs: `sentence1` (reference), `sentence2`, `score`."""
    return [
        {"sentence1": row["human_summaries"][0], "sentence2": row["machine_summaries"][0], "score": row["relevance"][0]}
        for row in read_summaries(dataset, ONE_STRING)
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
    if dataset.flat:
        return _flat_retrieval(dataset)
    corpus, queries, qrels = dataset.rows("corpus"), dataset.rows("queries"), dataset.qrels()
    _check_ids(dataset, "query", queries, set(qrels))
    _check_ids(dataset, "document", corpus, _documents(qrels))
    queries = [query for query in queries if any(grade > 0 for grade in qrels.get(query["id"], {}).values())]
    queries = sample(dataset.require_rows(queries, f"query with a relevant document in {QRELS}"), dataset.limit)
    qrels = {query["id"]: qrels[query["id"]] for query in queries}
    if dataset.limit is not None:
        kept = _documents(qrels)
        others = [row for row in corpus if row["id"] not in kept]
        kept |= {row["id"] for row in sample(others, max(0, CORPUS_PER_QUERY * dataset.limit - len(kept)))}
        corpus = [row for row in corpus if row["id"] in kept]
    return RetrievalDataset(corpus, queries, qrels)


def _of_example(example: Example, column: str) -> Any:
    """Return the value of a column of a file whose columns have usual names."""
    if column in ("label", "score"):
        return int(float(example.label)) if column == "label" and isinstance(example.label, float) else example.label
    return example.positives[0] if column == "sentence2" else example.anchor


def _flat_retrieval(dataset: EvaluationDataset) -> RetrievalDataset:
    """Read pairs: the documents are all those of the test file and of the one beside it."""
    pairs = dataset.examples("test")
    texts = dict.fromkeys(text for pair in (*pairs, *dataset.examples("train")) for text in pair.positives)
    ids = {text: f"d{number}" for number, text in enumerate(texts)}
    qrels: Qrels = defaultdict(dict)
    for pair in pairs:
        qrels[pair.anchor] |= {ids[text]: 1 for text in pair.positives}
    queries = sample([{"id": text, "text": text} for text in qrels], dataset.limit)
    corpus = [{"id": ids[text], "title": "", "text": text} for text in texts]
    return RetrievalDataset(corpus, queries, {query["id"]: qrels[query["id"]] for query in queries})


def _documents(qrels: Qrels) -> set[str]:
    return {document for documents in qrels.values() for document in documents}


def _check_ids(dataset: EvaluationDataset, noun: str, rows: Rows, judged: set[str]) -> None:
    """Refuse repeated ids, and qrels of rows that are missing: scores would be wrong."""
    ids = Counter(row["id"] for row in rows)
    wrong = sorted(judged - set(ids)) or [name for name, count in ids.items() if count > 1]
    if wrong:
        raise ValueError(
            f"{dataset.path}: {len(wrong)} {noun} ids of {QRELS} are unknown or repeated, for instance {wrong[0]!r}; "
            f"there are {len(ids)}, for instance {next(iter(ids))!r}"
        )
