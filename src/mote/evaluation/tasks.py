"""Tasks of mteb to evaluate on: those of a benchmark, those with given names, or the datasets of a data folder.

A dataset of a folder becomes a task of mteb's own classes, filled from files. Classes, main scores and settings are
those of `MTEB(eng, v1)`, which the MoTE paper reports. An official dataset has its official class, name and settings.
The revision of a task is a hash of the files and the limit, which distinguishes cached results.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
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

from mote.data import test_sets
from mote.data.test_sets import EvaluationDataset
from mote.remote.configuration_mote import alternatives, require_known

TEXTS_PER_LABEL = 20
"""Minimum number of texts per label, on average, in a clustering set when a dataset is divided into several sets."""
CLUSTERING_SETS = 10
"""Maximum number of sets that a clustering dataset is divided into, as in MTEB's TwentyNewsgroupsClustering."""


class Official(NamedTuple):
    """What a dataset is called in MTEB, and how many rows (of `beir`: qrels) it has there.

    The number of rows distinguishes the official dataset from a sample of it under the same name.
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


def choose_tasks(
    benchmark: str | None, data: str | Path | None, names: Sequence[str] = (), limit: int | None = None
) -> list[AbsTask]:
    """Choose tasks; the arguments are those of `evaluate`."""
    if (data and benchmark) or not (data or benchmark or names):
        raise ValueError("Choose what to evaluate on: --data FOLDER, --benchmark NAME, or only --task with MTEB names")
    if data is not None:
        return load_tasks(Path(data), names, limit)
    if limit is not None:
        raise ValueError(
            "--limit only cuts datasets of --data: scores on parts of MTEB's own datasets would not be MTEB scores. "
            "Choose some of them with --task instead"
        )
    if benchmark is None:
        try:
            return [mteb.get_task(name) for name in dict.fromkeys(names)]
        except KeyError as error:
            raise ValueError(f"MTEB has no such task: {error.args[0].removeprefix('KeyError: ')}") from None
    tasks = _of_benchmark(benchmark)
    return [tasks[index] for index in matching([[task.metadata.name] for task in tasks], names)]


def _of_benchmark(name: str) -> list[AbsTask]:
    """Return the tasks of a benchmark, whatever the case of its name, or the set for retrieval of this name."""
    known = {alias: each for each in mteb.get_benchmarks() for alias in (each.name, *(each.aliases or ()))}
    for alias, each in known.items():
        if alias.casefold() == name.casefold():
            return list(each.tasks)
    with suppress(KeyError):
        return [mteb.get_task(f"{name}Retrieval")]
    require_known(name, known, "benchmark of MTEB:")
    return []


def load_tasks(folder: str | Path, names: Sequence[str] = (), limit: int | None = None) -> list[AbsTask]:
    """Turn the datasets of a data folder that have a test split into tasks, in the order of MTEB's types.

    Names are patterns such as `beir/*`, `sts/sts12`, `sts12`, or mteb's `STS12`. A limit cuts each dataset to a fixed
    sample of its test rows or queries. Files are read when mteb loads a task, so that a broken dataset does not affect
    the others.
    """
    datasets = [(dataset, _official(dataset)) for dataset in test_sets.find_evaluation_datasets(Path(folder), limit)]
    known = [[dataset.path, dataset.name, _name(dataset, official)] for dataset, official in datasets]
    return [_task(*datasets[index]) for index in matching(known, names)]


def matching(names: Sequence[Sequence[str]], patterns: Sequence[str]) -> list[int]:
    """Choose the datasets of which a name matches any of the patterns; all if there are no patterns."""
    chosen = set() if patterns else set(range(len(names)))
    for pattern in patterns:
        found = {index for index, known in enumerate(names) if any(fnmatchcase(one, pattern) for one in known)}
        found |= {index for index, known in enumerate(names) if pattern in known}  # a name with brackets
        if not found:
            raise ValueError(f"No dataset matches {pattern!r}." + alternatives(pattern, [known[0] for known in names]))
        chosen |= found
    return sorted(chosen)


def _name(dataset: EvaluationDataset, official: Official | None) -> str:
    """Name a dataset for mteb: its official name, or task and name, as datasets of two tasks may share a name."""
    return official.name if official else dataset.name if dataset.flat else f"{dataset.task}-{dataset.name}"


def _official(dataset: EvaluationDataset) -> Official | None:
    official = OFFICIAL.get(dataset.path)
    return official if official and len(dataset.unchecked_rows()) == official.rows else None


def _fill_classification(task: "_FromFolder") -> DatasetDict:
    splits = test_sets.read_classification(task.source)
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def _fill_clustering(task: "_FromFolder") -> DatasetDict:
    """Divide a dataset into clustering sets with the same share of each label.

    The mean over several sets is what MTEB's own clustering tasks report, and stabilises the score of a single k-means.
    """
    rows = test_sets.read_clustering(task.source)
    labels = sorted({row["label"] for row in rows})
    count = max(1, min(CLUSTERING_SETS, len(rows) // (TEXTS_PER_LABEL * len(labels))))
    random.Random(0).shuffle(rows)
    rows.sort(key=lambda row: row["label"])
    sets = [rows[start::count] for start in range(count)]
    return _test(
        {"sentences": [row["text"] for row in part], "labels": [labels.index(row["label"]) for row in part]}
        for part in sets
    )


def _fill_rows(read: Callable[[EvaluationDataset], test_sets.Rows]) -> "Callable[[_FromFolder], DatasetDict]":
    return lambda task: _test(read(task.source))


def _test(rows: Iterable[dict[str, Any]]) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_list(list(rows))})


def _fill_retrieval(task: "_FromFolder") -> dict[str, Any]:
    retrieval = test_sets.read_retrieval(task.source)
    task.ignore_identical_ids = retrieval.queries_are_documents()
    return _searchable(retrieval)


def _fill_reranking(task: "_FromFolder") -> dict[str, Any]:
    """Give each query its own documents, as mteb does with the old format of reranking tasks."""
    queries, corpus = [], []
    qrels: test_sets.Qrels = defaultdict(dict)
    for number, row in enumerate(test_sets.read_test_rows(task.source)):
        query = f"query{number}"
        queries.append({"id": query, "text": row["query"]})
        # The names are mteb's own. They break ties: trec_eval ranks the last name, a negative, first.
        for relevant, name in ((1, "apositive"), (0, "negative")):
            for index, text in enumerate(row[name.removeprefix("a")]):
                document = f"{name}_{query}_{index:05}"
                corpus.append({"id": document, "title": "", "text": text})
                qrels[query][document] = relevant
    return _searchable(test_sets.RetrievalDataset(corpus, queries, dict(qrels)), candidates=True)


def _searchable(retrieval: test_sets.RetrievalDataset, candidates: bool = False) -> dict[str, Any]:
    split = {
        "corpus": Dataset.from_list(retrieval.corpus),
        "queries": Dataset.from_list(retrieval.queries),
        "relevant_docs": retrieval.qrels,
        "top_ranked": {query: list(grades) for query, grades in retrieval.qrels.items()} if candidates else None,
    }
    return {"test": split}


class Summaries(AbsTaskSummarization):
    """Summarization with scores on any scale: mteb maps the range to 0 to 1, which leaves correlations unchanged."""

    min_score = 0
    max_score = 1


class Template(NamedTuple):
    """How datasets of a task become tasks of mteb: type, class, main score, and how it is filled."""

    task_type: TaskType
    task_class: type[AbsTask]
    main_score: str
    fill: "Callable[[_FromFolder], Any]"


TEMPLATES = {
    "classification": Template("Classification", AbsTaskClassification, "accuracy", _fill_classification),
    # All clustering in MTEB(eng, v1) uses the legacy class: k-means on whole sets, not on samples of one set.
    "clustering": Template("Clustering", AbsTaskClusteringLegacy, "v_measure", _fill_clustering),
    "pair": Template("PairClassification", AbsTaskPairClassification, "max_ap", _fill_rows(test_sets.read_pairs)),
    # mteb 2 has no class for reranking: it is retrieval among candidates.
    "reranking": Template("Reranking", AbsTaskRetrieval, "map_at_1000", _fill_reranking),
    "beir": Template("Retrieval", AbsTaskRetrieval, "ndcg_at_10", _fill_retrieval),
    "sts": Template("STS", AbsTaskSTS, "cosine_spearman", _fill_rows(test_sets.read_test_rows)),
    "summarization": Template("Summarization", Summaries, "cosine_spearman", _fill_rows(test_sets.read_summaries)),
}

# The class for summarization correlates scores among the summaries of one text. If each text has only one summary, the
# correlation has to be over all texts, which the class for STS computes for pairs of text and summary.
SUMMARY_PAIRS = Template("Summarization", AbsTaskSTS, "cosine_spearman", _fill_rows(test_sets.read_summary_pairs))


class _FromFolder(AbsTask):
    """A task that is filled from a folder instead of the Hub; base of a class of mteb."""

    source: EvaluationDataset
    template: Template
    ignore_identical_ids: bool  # of retrieval

    def load_data(self, *_: Any, **__: Any) -> None:
        """Read the files; errors of a dataset are raised here."""
        if not self.data_loaded:
            self.dataset = {self.hf_subsets[0]: self.template.fill(self)}
            self.data_loaded = True


def _task(source: EvaluationDataset, official: Official | None) -> AbsTask:
    template = TEMPLATES[source.task]
    if source.task == "summarization":
        summaries = (source.unchecked_rows() or [{}])[0].get("machine_summaries")
        template = SUMMARY_PAIRS if isinstance(summaries, list) and len(summaries) == 1 else template
    dataset = MetadataDatasetDict(path=source.path, revision=source.revision())
    if official:
        parent = type(mteb.get_task(official.name))
        # Superseded by versions that MTEB(eng, v1) does not have; mteb would warn at each evaluation.
        metadata = parent.metadata.model_copy(update={"dataset": dataset, "superseded_by": None})
    else:
        parent = template.task_class
        metadata = TaskMetadata(
            name=_name(source, official),
            description=f"The dataset {source.path} of a data folder.",
            dataset=dataset,
            type=template.task_type,
            category="t2c" if template.task_type == "Classification" else "t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score=template.main_score,
        )
    # mteb takes a task's metadata from its class, also when restoring results, so each task has a class of its own.
    attributes = {"metadata": metadata, "source": source, "template": template}
    task: AbsTask = type(parent.__name__, (_FromFolder, parent), attributes)()
    task.hf_subsets = [official.subset if official else "default"]
    return task.filter_eval_splits(["test"])
