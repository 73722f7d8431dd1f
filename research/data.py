"""Training pairs like the paper's, and validation sets of six task types, cut from training splits.

The paper trains only on pairs of texts: its `classification` data is paraphrases, duplicate questions, and headline and
story; its `clustering` data is title and abstract, and title and body. Here, the datasets of the data folder are
assigned to tasks in the same way. Validation sets have the layout of test sets, so that `mote.evaluate` can score them.

Rows that share a text with any test split are left out of everything, and rows that share one with a validation set are
left out of the training data. Nothing then remains of STS-B's training pairs: most are in the test splits of STS12 to
STS16.
"""

import gzip
import json
import shutil
from collections.abc import Iterable
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

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
"""Task → dataset → maximum number of rows: about 70,000 in total. Of `pair/*`, only pairs with the same meaning."""
LABELLED = {"classification": 950, "clustering": 1900}
"""Task → maximum number of rows of each of its labelled datasets, so that there are as many rows as pairs."""
IN_FIVE_TASKS = {"classification": 500, "clustering": 1600, "paraphrases": 3000}
"""Maximum number of rows of each dataset in `five_tasks`: about as many rows in all."""
HELD_OUT = {"retrieval": 0.05, "pair": 0.2, "classification": 0.5, "clustering": 0.5}
"""Kind of dataset → share of its rows that are a validation set, by a hash of the first text."""
CORPUS = 1000  # documents of a retrieval validation set
CLASSIFICATION = ("banking77", "ag_news_small", "sst2", "tweet_emotion4", "amazon_counterfactual", "trec6")
CLUSTERING = ("bbc_news", "arxiv_titles", "twenty_newsgroups_subjects", "open_trivia")
STS = {"stsbenchmark": "dev", "sts12": "train"}
RERANKING = ("trecqa", "wikiqa")
PAIR = ("pair/mrpc", "pair/rte")
DIGEST = "digest.txt"
SOURCE = "source.txt"

Rows = list[dict[str, Any]]


def prepare(data: Path, out: Path) -> Path:
    """Write training data and validation sets, if they do not exist yet.

    Args:
        data: Data folder, with the datasets above.
        out: Folder for `pairs`, `labels` (the same retrieval, with labelled texts for the other tasks), `five_tasks`
            (labelled texts, and the pairs of classification as paraphrases) and `validation`, each a data folder.

    Returns:
        `out`.

    Raises:
        ValueError: If `out` was made from other data.
    """
    source = _listing(data)
    if not out.exists():
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        tests = _texts_in(data)
        _write_validation(data, unfinished / "validation", tests)
        left_out = tests | _texts_in(unfinished / "validation")
        _write_pairs(data, unfinished / "pairs", left_out)
        shutil.copytree(unfinished / "pairs" / "retrieval", unfinished / "labels" / "retrieval")
        _write_labelled(data, unfinished / "labels", LABELLED, left_out)
        _write_five_tasks(data, unfinished, left_out)
        (unfinished / DIGEST).write_text(digest_of_rows(unfinished) + "\n", encoding="utf-8")
        (unfinished / SOURCE).write_text(f"{source}\n", encoding="utf-8")
        unfinished.replace(out)
    elif not (out / SOURCE).is_file() or (out / SOURCE).read_text(encoding="utf-8").strip() != source:
        raise ValueError(f"{out} was made from other data than {data}: remove it, or choose another folder")
    return out


def copy_without_tests(data: Path, datasets: Iterable[str], out: Path) -> Path:
    """Copy the training splits of datasets, without rows that share a text with any test split, unless that is done.

    Returns:
        `out`.
    """
    if not out.exists():
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # it may hold other datasets
        tests = _texts_in(data)
        for name in datasets:
            _write(unfinished / name / "train", (row for row in _read(data / name) if tests.isdisjoint(_texts(row))))
        unfinished.replace(out)
    return out


def digest_of(folder: Path) -> str:
    """Return a hash of all rows that `prepare` wrote."""
    return (folder / DIGEST).read_text(encoding="utf-8").strip()


def _listing(data: Path) -> str:
    """Return a hash of the names and sizes of all files of a data folder, much faster than that of their rows."""
    files = sorted(file for file in data.glob("*/*/**/*") if file.is_file())
    listed = [(file.relative_to(data).as_posix(), file.stat().st_size) for file in files]
    return blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def digest_of_rows(folder: Path) -> str:
    """Return a hash of all rows in a data folder."""
    return _digest_of_files(folder.rglob("*.jsonl.gz"), folder)


def digest_of_tests(data: Path, patterns: Iterable[str]) -> str:
    """Return a hash of all files of the datasets that match some patterns."""
    matching = chain.from_iterable(data.glob(f"{pattern}/**/*") for pattern in patterns)
    return _digest_of_files((file for file in matching if file.is_file()), data)


def _digest_of_files(files: Iterable[Path], folder: Path) -> str:
    """Hash the names and the content of files in a folder, compressed or not."""
    digest = blake2b(digest_size=8)
    for file in sorted(files):
        content = file.read_bytes()
        name = file.relative_to(folder).as_posix().encode()
        digest.update(name + (gzip.decompress(content) if file.suffix == ".gz" else content))
    return digest.hexdigest()


def _write_pairs(data: Path, out: Path, left_out: set[str]) -> None:
    for task, datasets in PAIRS.items():
        for name, limit in datasets.items():
            kept = (row for row in _read(data / name) if left_out.isdisjoint(_texts(row)) and row.get("label", 1) == 1)
            pairs = ({key: value for key, value in row.items() if key != "label"} for row in islice(kept, limit))
            _write(out / task / Path(name).name / "train", pairs)


def _write_validation(data: Path, out: Path, tests: set[str]) -> None:
    def rows(name: str, split: str = "train") -> Rows:
        return [row for row in _read(data / name, split) if tests.isdisjoint(_texts(row))]

    for name in PAIRS["retrieval"]:
        _write_retrieval(out / "beir" / Path(name).name, [row for row in rows(name) if _is_held_out(name, row)])
    nfcorpus = out / "beir" / "nfcorpus"
    (nfcorpus / "qrels").mkdir(parents=True)
    for file in ("corpus.jsonl.gz", "queries.jsonl.gz"):
        shutil.copyfile(data / "beir" / "nfcorpus" / file, nfcorpus / file)
    shutil.copyfile(data / "beir" / "nfcorpus" / "qrels" / "dev.tsv", nfcorpus / "qrels" / "test.tsv")
    for name, split in STS.items():
        _write(out / "sts" / name / "test", rows(f"sts/{name}", split))
    for name in RERANKING:
        _write(out / "reranking" / name / "test", rows(f"reranking/{name}"))
    for name in (*PAIR, *(f"clustering/{name}" for name in CLUSTERING)):
        _write(out / name / "test", [row for row in rows(name) if _is_held_out(name, row)])
    for name in (f"classification/{name}" for name in CLASSIFICATION):
        for split, held_out in (("train", False), ("test", True)):
            _write(out / name / split, [row for row in rows(name) if _is_held_out(name, row) == held_out])


def _write_labelled(data: Path, out: Path, limits: dict[str, int], left_out: set[str]) -> None:
    for task in LABELLED:
        for folder in sorted((data / task).iterdir()):
            rows = sorted(_read(folder), key=_place)  # files may be sorted by label
            kept = [row for row in rows if left_out.isdisjoint(_texts(row))]
            _write(out / task / folder.name / "train", kept[: limits[task]])


def _write_five_tasks(data: Path, out: Path, left_out: set[str]) -> None:
    """Combine labelled texts and pairs: the tasks of jina-embeddings-v3 (arXiv:2409.10173, section 4)."""
    _write_labelled(data, out / "five_tasks", IN_FIVE_TASKS, left_out)
    shutil.copytree(out / "pairs" / "retrieval", out / "five_tasks" / "retrieval")
    for folder in (out / "pairs" / "classification").iterdir():
        pairs = _read(folder)[: IN_FIVE_TASKS["paraphrases"]]
        _write(out / "five_tasks" / "paraphrases" / folder.name / "train", pairs)


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


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path.with_name(f"{path.name}.jsonl.gz"), rows)


def _texts(row: dict[str, Any]) -> list[str]:
    values = [value for key, value in row.items() if key not in ("label", "_id")]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _texts_in(folder: Path) -> set[str]:
    """Return the texts of all test splits of a data folder, with the documents that are searched."""
    files = [file for name in ("test", "queries", "corpus") for file in folder.glob(f"*/*/{name}.jsonl.gz")]
    return {text for row in read_files(sorted(files)) for text in _texts(row.content)}


def _place(row: dict[str, Any]) -> float:
    """Return a position from 0 to 1, by a hash of the first text."""
    return (text_id(_texts(row)[0]) + 2**63) / 2**64


def _is_held_out(name: str, row: dict[str, Any]) -> bool:
    return _place(row) < HELD_OUT[name.split("/")[0]]
