"""The sets of a data folder as tasks of mteb: its own task classes, filled from files.

Classes, main scores and settings are those of `MTEB(eng, v1)`, which is what the MoTE paper reports. A set that is an
official one has its official class, name and settings. The revision of a task's dataset is a hash of the files and of
the limit, by which cached results of other data are told apart.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks import (
    AbsTask,
    AbsTaskClassification,
    AbsTaskClusteringLegacy,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
    AbsTaskSummarization,
)
from mteb.abstasks.task_metadata import MetadataDatasetDict, TaskMetadata, TaskType

from mote.data import test_sets as files
from mote.data.test_sets import EvaluationSet

__all__ = ["load_tasks"]

TEXTS_PER_LABEL = 20
"""Texts per label that a clustering set has at least, on average, when a file is dealt out into several."""
CLUSTERING_SETS = 10
"""Clustering sets that a file is dealt out into at most, as in MTEB's TwentyNewsgroupsClustering."""


class Official(NamedTuple):
    """What a set is called in MTEB, and how many rows (of `beir`: judgements) it has there.

    The number of rows is what tells the official set from a sample of it under the same name.
    """

    name: str
    rows: int
    subset: str = "default"


OFFICIAL = {
    "beir/nfcorpus": Official("NFCorpus", 12334),
    "classification/amazon_counterfactual": Official("AmazonCounterfactualClassification", 670, "en"),
    "classification/banking77": Official("Banking77Classification", 3080),
    "sts/biosses": Official("BIOSSES", 100),
    "sts/sts12": Official("STS12", 3108),
    "sts/sts13": Official("STS13", 1500),
    "sts/sts14": Official("STS14", 3750),
    "sts/sts15": Official("STS15", 3000),
    "sts/sts16": Official("STS16", 1186),
    "sts/sts17_en": Official("STS17", 250, "en-en"),
    "sts/stsbenchmark": Official("STSBenchmark", 1379),
    "summarization/summeval": Official("SummEval", 100),
}


def load_tasks(folder: str | Path, names: Sequence[str] = (), limit: int | None = None) -> list[AbsTask]:
    """Make tasks of the sets of a data folder that have a test part.

    Files are read when mteb loads a task, so that a broken set fails by itself.

    Args:
        folder: Laid out as `mote.data.test_sets` says.
        names: Which sets: patterns such as `beir/*`, `sts/sts12`, `sts12`, or mteb's `STS12`. Default: all.
        limit: Test rows, or queries, per set at most: a seeded sample, in proportion to the labels where there are any.
            Retrieval keeps all documents that are judged for its queries, and others up to ten for each query.

    Returns:
        Tasks in the order of MTEB's types, then by the name of the set.

    Raises:
        FileNotFoundError: If there is no such folder, or no set in it.
        ValueError: If a name fits nothing, or the limit is not positive.
    """
    sets = files.find_sets(Path(folder), limit)
    official = {found.path: _official(found) for found in sets}
    known = {found.path: [found.path, found.name, _name(found, official[found.path])] for found in sets}
    chosen = files.select(known, names)
    return [_task(found, official[found.path]) for found in sets if found.path in chosen]


def _name(source: EvaluationSet, official: Official | None) -> str:
    """What mteb calls a set. Kind and name if it has no official name, because sets of two kinds may have one name."""
    return official.name if official else f"{source.kind}-{source.name}"


def _official(source: EvaluationSet) -> Official | None:
    official = OFFICIAL.get(source.path)
    return official if official and source.count() == official.rows else None


# What mteb's classes want of each kind ------------------------------------------------------------------------------


def _classification(task: "_FromFolder") -> DatasetDict:
    parts = files.read_classification(task.source)
    return DatasetDict({part: Dataset.from_list(rows) for part, rows in parts.items()})


def _clustering(task: "_FromFolder") -> DatasetDict:
    """Deal a file out into clustering sets with the same share of each label.

    The mean over several sets is what MTEB's own clustering tasks report, and steadies the score of a single k-means.
    """
    rows = files.read_clustering(task.source)
    labels = sorted({row["label"] for row in rows})
    count = max(1, min(CLUSTERING_SETS, len(rows) // (TEXTS_PER_LABEL * len(labels))))
    random.Random(0).shuffle(rows)
    rows.sort(key=lambda row: row["label"])
    sets = [rows[start::count] for start in range(count)]
    return _test(
        {
            "sentences": [row["text"] for row in part],
            "labels": [labels.index(row["label"]) for row in part],
        }
        for part in sets
    )


def _rows_of(read: Callable[[EvaluationSet], list[files.Row]]) -> "Callable[[_FromFolder], DatasetDict]":
    return lambda task: _test(read(task.source))


def _test(rows: Iterable[files.Row]) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_list(list(rows))})


def _retrieval(task: "_FromFolder") -> dict[str, Any]:
    retrieval = files.read_retrieval(task.source)
    task.ignore_identical_ids = files.asks_for_others(retrieval)
    return _searchable(retrieval)


def _reranking(task: "_FromFolder") -> dict[str, Any]:
    """Give each query documents of its own, as mteb does with the old format of reranking tasks."""
    queries, corpus = [], []
    judgements: files.Judgements = defaultdict(dict)
    for number, row in enumerate(files.read_reranking(task.source)):
        query = f"query{number}"
        queries.append({"id": query, "text": row["query"]})
        # The names are mteb's own. They decide on ties, in which trec_eval puts the last name, a negative one, first.
        for relevant, name in ((1, "apositive"), (0, "negative")):
            for index, text in enumerate(row[name.removeprefix("a")]):
                document = f"{name}_{query}_{index:05}"
                corpus.append({"id": document, "title": "", "text": text})
                judgements[query][document] = relevant
    return _searchable(files.Retrieval(corpus, queries, dict(judgements)), candidates=True)


def _searchable(retrieval: files.Retrieval, candidates: bool = False) -> dict[str, Any]:
    judgements = retrieval.judgements
    split = {
        "corpus": Dataset.from_list(retrieval.corpus),
        "queries": Dataset.from_list(retrieval.queries),
        "relevant_docs": judgements,
        "top_ranked": {query: list(judgements[query]) for query in judgements} if candidates else None,
    }
    return {"test": split}


# The kinds ----------------------------------------------------------------------------------------------------------


class Summaries(AbsTaskSummarization):
    """Scores of summaries on any scale: the range is mteb's for bringing them to 0 to 1, and changes no correlation."""

    min_score = 0
    max_score = 1


class Kind(NamedTuple):
    """How a kind of set becomes a task: mteb's name of the type, its class, its main score, and how it is filled."""

    task_type: TaskType
    task_class: type[AbsTask]
    main_score: str
    fill: "Callable[[_FromFolder], Any]"


KINDS = {
    "classification": Kind("Classification", AbsTaskClassification, "accuracy", _classification),
    # All clustering of MTEB(eng, v1) is of the legacy class: k-means on whole sets, not on samples of one set.
    "clustering": Kind("Clustering", AbsTaskClusteringLegacy, "v_measure", _clustering),
    "pair": Kind("PairClassification", AbsTaskPairClassification, "max_ap", _rows_of(files.read_pairs)),
    # mteb 2 has no class of its own for it: reranking is retrieval among candidates.
    "reranking": Kind("Reranking", AbsTaskRetrieval, "map_at_1000", _reranking),
    "beir": Kind("Retrieval", AbsTaskRetrieval, "ndcg_at_10", _retrieval),
    "sts": Kind("STS", AbsTaskSTS, "cosine_spearman", _rows_of(files.read_sts)),
    "summarization": Kind("Summarization", Summaries, "cosine_spearman", _rows_of(files.read_summaries)),
}

# The class for summarization correlates scores among the summaries of one text. Where a text has one summary, the
# correlation is that over all texts, which is what the class for STS does with pairs of text and summary.
SUMMARY_PAIRS = Kind("Summarization", AbsTaskSTS, "cosine_spearman", _rows_of(files.read_summary_pairs))


class _FromFolder:
    """Mixed into a class of mteb, has it filled from a folder where it would be filled from the Hub."""

    source: EvaluationSet
    kind: Kind
    hf_subsets: list[str]
    dataset: dict[str, Any] | None
    data_loaded: bool
    ignore_identical_ids: bool

    def load_data(self, *_: Any, **__: Any) -> None:
        """Read the files; what is wrong with a set is raised here."""
        if not self.data_loaded:
            self.dataset = {self.hf_subsets[0]: self.kind.fill(self)}
            self.data_loaded = True


def _task(source: EvaluationSet, official: Official | None) -> AbsTask:
    one_each = source.kind == "summarization" and files.has_one_summary_per_text(source)
    kind = SUMMARY_PAIRS if one_each else KINDS[source.kind]
    dataset = MetadataDatasetDict(path=source.path, revision=source.revision())
    if official:
        parent = type(mteb.get_task(official.name))
        # Superseded by versions that MTEB(eng, v1) does not have; mteb would warn of it at each evaluation.
        metadata = parent.metadata.model_copy(update={"dataset": dataset, "superseded_by": None})
    else:
        parent = kind.task_class
        metadata = TaskMetadata(
            name=_name(source, official),
            description=f"The set {source.path} of a data folder.",
            dataset=dataset,
            type=kind.task_type,
            category="t2c" if kind.task_type == "Classification" else "t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score=kind.main_score,
        )
    # mteb takes a task's metadata from its class, also to restore it, so each task has a class of its own.
    attributes = {"metadata": metadata, "source": source, "kind": kind}
    task: AbsTask = type(parent.__name__, (_FromFolder, parent), attributes)()
    task.hf_subsets = [official.subset if official else "default"]
    return task.filter_eval_splits(["test"])
