"""Training pairs like the paper's, and validation sets of six task types, cut from training splits.

The paper trains only on pairs of texts: its `classification` data is paraphrases, duplicate questions, and headline and
story; its `clustering` data is title and abstract, and title and body. Here, the datasets of the data folder are
assigned to tasks in the same way. Validation sets have the layout of test sets, so that `mote.evaluate` can score them;
no variant trains on their texts, except on those of classification and clustering in `labels`.
"""

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mote
from mote.corpora import MiningSettings, Teacher
from mote.corpora.pairs import write_rows
from mote.data.rows import read_files, split_files
from mote.training.cleaning import text_id

PAIRS = {
    "retrieval": {
        "retrieval/medquad": 6000,
        "retrieval/stackexchange_qa": 4000,
        "retrieval/gsm8k": 4000,
        "retrieval/advisories": 1400,
        "retrieval/python_docs": 5000,
        "retrieval/debian": 4000,
        "retrieval/tldr_pages": 4000,
        "retrieval/arguana_counter": 3000,
    },
    "classification": {
        "retrieval/quora_duplicates": 10000,
        "retrieval/foldoc": 3000,
        "retrieval/wordnet": 4000,
        "pair/mrpc": 4000,
        "pair/rte": 1000,
    },
    "clustering": {
        "retrieval/arxiv": 5000,
        "retrieval/conference_papers": 4000,
        "retrieval/scitldr": 2600,
        "retrieval/reddit": 5000,
        "retrieval/stackexchange_title_body": 4500,
    },
}
"""Task → dataset → maximum number of rows: about 65,000 in total. Of `pair/*`, only pairs with the same meaning."""
LABELLED = {"classification": 950, "clustering": 1900}
"""Task → maximum number of rows of each of its labelled datasets, so that there are as many rows as pairs."""
IN_FIVE_TASKS = {"classification": 500, "clustering": 1600, "paraphrases": 3000}
"""The same where both labelled texts and pairs are trained on: about as many rows in all."""
HELD_OUT = 0.05  # share of the rows of each dataset of pairs, by a hash of the first text
HELD_OUT_OF_PAIRS = 0.2  # of `pair/*`, which are also validation sets of pair classification
CORPUS = 1000  # documents of a retrieval validation set
CLASSIFICATION = ("banking77", "ag_news_small", "sst2", "tweet_emotion4", "amazon_counterfactual", "trec6")
CLUSTERING = ("bbc_news", "arxiv_titles", "twenty_newsgroups_subjects", "open_trivia")
STS = {"stsbenchmark": "dev", "sts12": "train"}
SCORED = ("stsbenchmark",)  # their training splits are not used for validation
RERANKING = ("trecqa", "wikiqa")

Rows = list[dict[str, Any]]


def prepare(data: Path, out: Path) -> Path:
    """Write training data and validation sets, if they do not exist.

    Args:
        data: Data folder, with the datasets above.
        out: Folder for `pairs`, `labels` (the same retrieval, with labelled texts for the other tasks), `five_tasks`
            (both: labelled texts, other than those of the validation sets, and the pairs of classification as
            paraphrases) and `validation`, each a data folder. `pairs` and `five_tasks` also have scored pairs, which
            few variants use.

    Returns:
        `out`.
    """
    if not out.exists():
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        held_out = _write_pairs(data, unfinished)
        _write_validation(data, unfinished / "validation", held_out)
        shutil.copytree(unfinished / "pairs" / "retrieval", unfinished / "labels" / "retrieval")
        _write_labelled(data, unfinished / "labels", LABELLED)
        _write_five_tasks(data, unfinished)
        unfinished.replace(out)
    return out


def with_mined_negatives(folder: Path, out: Path, teacher: str) -> Path:
    """Copy a data folder, adding to each pair of `retrieval` a negative that a teacher finds; resumes if interrupted.

    Returns:
        `out`.
    """
    mote.mine_negatives(["retrieval/*"], out, Teacher(model=teacher), MiningSettings(negatives=1), data=folder)
    for other in folder.iterdir():
        if not (out / other.name).exists():
            unfinished = out / f"{other.name}.unfinished"
            shutil.copytree(other, unfinished, dirs_exist_ok=True)
            unfinished.replace(out / other.name)
    return out


def _write_pairs(data: Path, out: Path) -> dict[str, Rows]:
    """Write the training pairs; return the rows that are held out, by dataset."""
    rows = {name: _read(data / name) for datasets in PAIRS.values() for name in datasets}
    held_out = {name: [row for row in of_set if _place(row) < _share(name)] for name, of_set in rows.items()}
    unseen = {text for of_set in held_out.values() for row in of_set for text in _texts(row)}
    unseen |= {text for name, split in STS.items() for row in _read(data / "sts" / name, split) for text in _texts(row)}
    for task, datasets in PAIRS.items():
        for name, limit in datasets.items():
            kept = (row for row in rows[name] if unseen.isdisjoint(_texts(row)) and row.get("label", 1) == 1)
            pairs = ({key: value for key, value in row.items() if key != "label"} for row in islice(kept, limit))
            _write(out / "pairs" / task / Path(name).name / "train", pairs)
    for name in SCORED:
        scored = (row for row in _read(data / "sts" / name) if unseen.isdisjoint(_texts(row)))
        _write(out / "pairs" / "text_matching" / name / "train", scored)
    return held_out


def _write_validation(data: Path, out: Path, held_out: dict[str, Rows]) -> None:
    for name, rows in held_out.items():
        if name.startswith("pair/"):
            _write(out / name / "test", rows)
        elif name in PAIRS["retrieval"]:
            _write_retrieval(out / "beir" / Path(name).name, rows)
    nfcorpus = out / "beir" / "nfcorpus"
    (nfcorpus / "qrels").mkdir(parents=True)
    for file in ("corpus.jsonl.gz", "queries.jsonl.gz"):
        shutil.copyfile(data / "beir" / "nfcorpus" / file, nfcorpus / file)
    shutil.copyfile(data / "beir" / "nfcorpus" / "qrels" / "dev.tsv", nfcorpus / "qrels" / "test.tsv")
    for name, split in STS.items():
        _write(out / "sts" / name / "test", _read(data / "sts" / name, split))
    for name in RERANKING:
        _write(out / "reranking" / name / "test", _read(data / "reranking" / name))
    for name in CLUSTERING:
        _write(out / "clustering" / name / "test", _read(data / "clustering" / name))
    for name in CLASSIFICATION:
        rows = _read(data / "classification" / name)
        for split, inside in (("train", False), ("test", True)):
            part = [row for row in rows if (_place(row) < 0.5) == inside]
            _write(out / "classification" / name / split, part)


def _write_labelled(data: Path, out: Path, limits: dict[str, int], left_out: frozenset[str] = frozenset()) -> None:
    for task in LABELLED:
        for folder in sorted((data / task).iterdir()):
            rows = sorted(_read(folder), key=_place)  # files may be sorted by label
            kept = [row for row in rows if left_out.isdisjoint(_texts(row))][: limits[task]]
            if kept:
                _write(out / task / folder.name / "train", kept)


def _write_five_tasks(data: Path, out: Path) -> None:
    """Combine labelled texts and pairs: the tasks of jina-embeddings-v3 (arXiv:2409.10173, section 4)."""
    tests = [folder for task in LABELLED for folder in (out / "validation" / task).iterdir()]
    validated = frozenset(text for folder in tests for row in _read(folder, "test") for text in _texts(row))
    _write_labelled(data, out / "five_tasks", IN_FIVE_TASKS, validated)
    for task in ("retrieval", "text_matching"):
        shutil.copytree(out / "pairs" / task, out / "five_tasks" / task)
    for folder in (out / "pairs" / "classification").iterdir():
        pairs = [row for row in _read(folder) if validated.isdisjoint(_texts(row))]
        _write(out / "five_tasks" / "paraphrases" / folder.name / "train", pairs[: IN_FIVE_TASKS["paraphrases"]])


def _write_retrieval(folder: Path, rows: Rows) -> None:
    """Write pairs as a retrieval dataset: the first texts are the queries, the second texts the documents."""
    rows = rows[:CORPUS]
    documents = list(dict.fromkeys(row["positive"] for row in rows))
    number = {text: f"d{index}" for index, text in enumerate(documents)}
    queries = list(dict.fromkeys(row["query"] for row in rows))
    _write(folder / "corpus", ({"_id": number[text], "title": "", "text": text} for text in documents))
    _write(folder / "queries", ({"_id": f"q{index}", "text": text} for index, text in enumerate(queries)))
    (folder / "qrels").mkdir()
    asked = {text: f"q{index}" for index, text in enumerate(queries)}
    judged = dict.fromkeys((asked[row["query"]], number[row["positive"]]) for row in rows)
    lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{document}\t1" for query, document in judged)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read(folder: Path, split: str = "train") -> Rows:
    files = split_files(folder, split)
    if not files:
        raise FileNotFoundError(f"{folder} has no {split!r} split")
    return [row.content for row in read_files(files)]


def _write(path: Path, rows: Iterator[dict[str, Any]] | Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path.with_name(f"{path.name}.jsonl.gz"), rows)


def _texts(row: dict[str, Any]) -> list[str]:
    return [value.strip() for key, value in row.items() if key != "label" and isinstance(value, str)]


def _place(row: dict[str, Any]) -> float:
    """Return a position from 0 to 1, by a hash of the first text."""
    return (text_id(_texts(row)[0]) + 2**63) / 2**64


def _share(name: str) -> float:
    return HELD_OUT_OF_PAIRS if name.startswith("pair/") else HELD_OUT
