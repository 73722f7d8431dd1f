"""Local data folders as tasks of mteb: real scores, worked out again without mteb; limits; what is refused."""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import SMALL_ENCODER
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, v_measure_score

mteb = pytest.importorskip("mteb")

from mote.data.test_sets import EvaluationSet, read_retrieval  # noqa: E402
from mote.evaluation.tasks import load_tasks  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
TYPES = {  # set of the examples → its name and type in mteb, and its main score
    "classification/banking77": ("classification-banking77", "Classification", "accuracy"),
    "clustering/arxiv_titles": ("clustering-arxiv_titles", "Clustering", "v_measure"),
    "pair/sts17_en": ("pair-sts17_en", "PairClassification", "max_ap"),
    "reranking/liveqa_med": ("reranking-liveqa_med", "Reranking", "map_at_1000"),
    "beir/arxiv": ("beir-arxiv", "Retrieval", "ndcg_at_10"),
    "sts/sts17_en": ("STS17", "STS", "cosine_spearman"),
    "summarization/arxiv": ("summarization-arxiv", "Summarization", "cosine_spearman"),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # mteb's own, of prompts that are no task types, and sklearn's
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def encoder() -> SentenceTransformer:
    return SentenceTransformer(str(SMALL_ENCODER), device="cpu")


def read(path: str, folder: Path = EXAMPLES) -> Rows:
    with gzip.open(folder / path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(folder: Path, path: str, rows: Sequence[Any]) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def score(model: SentenceTransformer, task: Any) -> float:
    (result,) = mteb.evaluate(model, [task], cache=None, show_progress_bar=False).task_results
    return float(result.get_score())


# The seven types, each scored by mteb and without it ------------------------------------------------------------------


class Embedded:
    """Normalised embeddings of texts, each worked out once."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self.model.encode(list(texts), show_progress_bar=False)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def cosines(embed: Embedded, rows: Rows, one: str = "sentence1", other: str = "sentence2") -> np.ndarray:
    return np.sum(embed([row[one] for row in rows]) * embed([row[other] for row in rows]), axis=1)


def classification(embed: Embedded) -> float:
    train, test = (read(f"classification/banking77/{part}.jsonl.gz") for part in ("train", "test"))
    train_vectors, test_vectors = embed([row["text"] for row in train]), embed([row["text"] for row in test])
    order, accuracies = list(range(len(train))), []
    for _ in range(10):  # mteb shuffles on, with the same seed, and takes the first eight of each label
        np.random.RandomState(42).shuffle(order)
        seen: Counter[str] = Counter()
        chosen = []
        for index in order:
            if seen[train[index]["label"]] < 8:
                seen[train[index]["label"]] += 1
                chosen.append(index)
        model = LogisticRegression(max_iter=100, random_state=42)
        model.fit(train_vectors[chosen], [train[index]["label"] for index in chosen])
        accuracies.append(np.mean(model.predict(test_vectors) == np.array([row["label"] for row in test])))
    return float(np.mean(accuracies))


def clustering(embed: Embedded) -> float:
    (task,) = load_tasks(EXAMPLES, ["clustering/arxiv_titles"])
    task.load_data()
    sets = task.dataset["default"]["test"]
    labels_of = {row["text"]: row["label"] for row in read("clustering/arxiv_titles/test.jsonl.gz")}
    assert sorted(text for part in sets for text in part["sentences"]) == sorted(labels_of)
    scores = []
    for part in sets:
        labels = [labels_of[text] for text in part["sentences"]]
        assert set(Counter(labels).values()) == {20}, "each of the two sets has half of each label"
        means = MiniBatchKMeans(n_clusters=10, batch_size=500, n_init="auto", random_state=42)
        scores.append(v_measure_score(labels, means.fit_predict(embed(part["sentences"]))))
    assert len(scores) == 2
    return float(np.mean(scores))


def pair(embed: Embedded) -> float:
    rows = read("pair/sts17_en/test.jsonl.gz")
    one, other = (embed([row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    labels = [row["label"] for row in rows]  # mteb takes the best of several distances; the others rank as the cosine
    return max(average_precision_score(labels, by) for by in (np.sum(one * other, 1), -np.abs(one - other).sum(1)))


def reranking(embed: Embedded) -> float:
    precisions = []
    for row in read("reranking/liveqa_med/test.jsonl.gz"):
        relevant = [True] * len(row["positive"]) + [False] * len(row["negative"])
        scores = embed(row["positive"] + row["negative"]) @ embed([row["query"]])[0]
        ranked = [relevant[index] for index in np.argsort(-scores)]
        found = [sum(ranked[: place + 1]) / (place + 1) for place, hit in enumerate(ranked) if hit]
        precisions.append(sum(found) / len(found))
    return float(np.mean(precisions))


def retrieval(embed: Embedded) -> float:
    corpus, queries = (read(f"beir/arxiv/{part}.jsonl.gz") for part in ("corpus", "queries"))
    lines = (EXAMPLES / "beir/arxiv/qrels/test.tsv").read_text().splitlines()[1:]
    judged = {tuple(line.split("\t")[:2]): int(line.split("\t")[2]) for line in lines}
    documents = embed([row["text"] for row in corpus])
    gains = []
    for query in queries:
        ranking = np.argsort(-(documents @ embed([query["text"]])[0]))[:10]
        grades = [judged.get((query["_id"], corpus[index]["_id"]), 0) for index in ranking]
        best = sorted((grade for (asked, _), grade in judged.items() if asked == query["_id"]), reverse=True)[:10]
        gains.append(discounted(grades) / discounted(best))
    return float(np.mean(gains))


def discounted(grades: Sequence[int]) -> float:
    return sum(grade / log2(place + 2) for place, grade in enumerate(grades))


def sts(embed: Embedded) -> float:
    rows = read("sts/sts17_en/test.jsonl.gz")
    return float(spearmanr([row["score"] for row in rows], cosines(embed, rows)).statistic)


def summarization(embed: Embedded) -> float:
    correlations = []
    for row in read("summarization/arxiv/test.jsonl.gz"):
        similarity = (embed(row["machine_summaries"]) @ embed(row["human_summaries"]).T).max(axis=1)
        correlations.append(spearmanr(row["relevance"], similarity).statistic)
    return float(np.mean(correlations))


WITHOUT_MTEB = {
    "classification/banking77": classification,
    "clustering/arxiv_titles": clustering,
    "pair/sts17_en": pair,
    "reranking/liveqa_med": reranking,
    "beir/arxiv": retrieval,
    "sts/sts17_en": sts,
    "summarization/arxiv": summarization,
}


@pytest.mark.parametrize("path", TYPES)
def test_each_type_scores_what_is_worked_out_without_mteb(path: str, encoder: SentenceTransformer) -> None:
    (task,) = load_tasks(EXAMPLES, [path])
    assert (task.metadata.name, task.metadata.type, task.metadata.main_score) == TYPES[path]
    assert score(encoder, task) == pytest.approx(WITHOUT_MTEB[path](Embedded(encoder)), abs=1e-5)


def test_the_examples_have_one_task_of_each_type_in_the_order_of_types() -> None:
    tasks = load_tasks(EXAMPLES)
    assert [(task.metadata.name, task.metadata.type, task.metadata.main_score) for task in tasks] == [*TYPES.values()]


# The right expert ----------------------------------------------------------------------------------------------------

EXPERTS = {"Clustering": {"clustering"}, "Retrieval": {"search_query", "search_document"}}
EXPERTS["Reranking"] = EXPERTS["Retrieval"]


@pytest.mark.parametrize("path", TYPES)
def test_each_type_and_role_reaches_its_expert_with_its_instruction(path: str, trained_folder: Path) -> None:
    model = SentenceTransformer(str(trained_folder), trust_remote_code=True, device="cpu")
    (task,) = load_tasks(EXAMPLES, [path], limit=4)
    used: dict[str, set[str]] = {}  # expert → the texts that it saw
    texts: list[str] = []
    for expert, layer in model[0].model.backbone.encoder.layer[0].experts.items():
        layer.register_forward_hook(lambda *_, expert=expert: used.setdefault(expert, set()).update(texts))

    def remember(_: Any, arguments: Any) -> None:
        texts[:] = model.tokenizer.batch_decode(arguments[0]["input_ids"], skip_special_tokens=True)

    model[0].register_forward_pre_hook(remember)
    score(model, task)
    assert set(used) == EXPERTS.get(task.metadata.type, {"classification"})
    for expert, seen in used.items():
        instruction = "".join(model[0].config.instruction_of(expert).split())
        assert all("".join(text.split()).startswith(instruction) for text in seen)
    if path in ("beir/arxiv", "reranking/liveqa_med"):
        rows = read("beir/arxiv/queries.jsonl.gz") if path == "beir/arxiv" else read(f"{path}/test.jsonl.gz")
        queries = [row["text"] if path == "beir/arxiv" else row["query"] for row in rows]
        tokens = {tuple(words(model, query)) for query in queries}
        for expert, of_queries in (("search_query", True), ("search_document", False)):
            instruction = model[0].config.instruction_of(expert)
            front = len(words(model, instruction))
            seen_tokens = {tuple(words(model, text)[front:]) for text in used[expert]}
            assert seen_tokens
            assert (seen_tokens <= tokens) is of_queries


def words(model: SentenceTransformer, text: str) -> list[str]:
    return model.tokenizer.tokenize(text)


# Which sets, under which names ---------------------------------------------------------------------------------------


def names(*patterns: str) -> list[str]:
    return [task.metadata.name for task in load_tasks(EXAMPLES, patterns)]


def test_patterns_stand_for_kinds_names_and_mtebs_names() -> None:
    assert names("sts/*", "beir/arxiv") == ["beir-arxiv", "STS17"]
    assert names("sts17_en") == ["pair-sts17_en", "STS17"]
    assert names("STS17") == ["STS17"]
    assert names("pair-*") == ["pair-sts17_en"]
    with pytest.raises(ValueError, match="no set 'sts/sts18'") as refused:
        names("sts/sts17_en", "sts/sts18")
    assert "Did you mean 'sts/sts17_en'?" in str(refused.value)


def test_folders_without_test_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no data folder"):
        load_tasks(tmp_path / "absent")
    write(tmp_path, "classification/alone/train.jsonl.gz", [{"text": "a", "label": "b"}])
    with pytest.raises(FileNotFoundError, match=r"no set with a test part: expected KIND/NAME/test\.jsonl\.gz"):
        load_tasks(tmp_path)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_tasks(EXAMPLES, limit=0)


def test_only_a_whole_official_set_has_the_official_name(tmp_path: Path) -> None:
    rows = read("sts/sts17_en/test.jsonl.gz")
    write(tmp_path, "sts/sts17_en/test.jsonl.gz", rows)
    (official,) = load_tasks(tmp_path)
    assert official.metadata.name == "STS17"
    assert isinstance(official, type(mteb.get_task("STS17")))
    assert official.hf_subsets == ["en-en"]
    write(tmp_path, "sts/sts17_en/test.jsonl.gz", rows[1:])
    assert load_tasks(tmp_path)[0].metadata.name == "sts-sts17_en"


def test_the_revision_tells_data_and_limit(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "copy")

    def revisions(folder: Path, limit: int | None = None) -> list[str]:
        return [task.metadata.revision for task in load_tasks(folder, limit=limit)]

    before = revisions(EXAMPLES)
    assert revisions(tmp_path / "copy") == before
    assert not set(revisions(EXAMPLES, 5)) & set(before)
    write(tmp_path / "copy", "classification/banking77/train.jsonl.gz", [{"text": "a", "label": "b"}])
    with (tmp_path / "copy/beir/arxiv/qrels/test.tsv").open("a") as judgements:
        judgements.write("\n")
    changed = [path for path, old, new in zip(TYPES, before, revisions(tmp_path / "copy"), strict=True) if old != new]
    assert changed == ["classification/banking77", "beir/arxiv"]


# Limits --------------------------------------------------------------------------------------------------------------


def content(path: str, limit: int | None = None, folder: Path = EXAMPLES) -> Any:
    (task,) = load_tasks(folder, [path], limit)
    task.load_data()
    return task.dataset[task.hf_subsets[0]]


def shuffled_copy(folder: Path) -> Path:
    """The examples with the rows of each file in another order."""
    shutil.copytree(EXAMPLES, folder)
    for file in folder.glob("*/*/*.jsonl.gz"):
        write(folder, str(file.relative_to(folder)), read(str(file.relative_to(folder)))[::-1])
    return folder


def test_limits_are_seeded_samples_of_the_set_and_not_of_the_order_of_its_rows(tmp_path: Path) -> None:
    other = shuffled_copy(tmp_path / "other")
    for path in ("pair/sts17_en", "sts/sts17_en", "summarization/arxiv"):
        first, again, reversed_rows = (
            content(path, 10, folder)["test"].to_list() for folder in (EXAMPLES,) * 2 + (other,)
        )
        assert len(first) == 10
        assert first == again
        assert [row for row in content(path)["test"].to_list() if row in first] == first, "rows stay in order"
        assert reversed_rows == first[::-1]


def test_a_limit_keeps_the_shares_of_labels() -> None:
    limited = Counter(content("pair/sts17_en", 61)["test"]["labels"])
    whole = Counter(content("pair/sts17_en")["test"]["labels"])
    assert limited[1] / 61 == pytest.approx(whole[1] / 183, abs=0.01)
    rows = content("classification/banking77", 40)
    assert len(rows["test"]) == 40
    assert set(Counter(rows["test"]["label"]).values()) == {1}
    train = Counter(row["label"] for row in read("classification/banking77/train.jsonl.gz"))
    kept = Counter(rows["train"]["label"])
    assert sorted(kept.values()) == sorted(min(count, 16) for count in train.values())


def test_a_limited_pair_set_has_both_labels(tmp_path: Path, encoder: SentenceTransformer) -> None:
    (task,) = load_tasks(EXAMPLES, ["pair/*"], 1)
    assert np.isfinite(score(encoder, task))
    assert sorted(content("pair/sts17_en", 1)["test"]["labels"]) == [0, 1]
    uneven = [{"sentence1": str(number), "sentence2": "b", "label": int(number == 0)} for number in range(100)]
    write(tmp_path, "pair/uneven/test.jsonl.gz", uneven)
    assert sorted(content("uneven", 1, tmp_path)["test"]["labels"]) == [0, 1]
    with pytest.raises(ValueError, match=r"all pairs that a limit of 5 leaves have the label 0, .* raise the limit"):
        content("uneven", 5, tmp_path)


def test_two_labels_of_many_in_a_limited_test_part_can_be_scored(encoder: SentenceTransformer) -> None:
    (task,) = load_tasks(EXAMPLES, ["banking77"], limit=2)
    assert 0 <= score(encoder, task) <= 1


def test_a_limited_clustering_set_has_few_labels_but_enough_texts_of_each() -> None:
    (rows,) = content("clustering/arxiv_titles", 40)["test"].to_list()
    assert Counter(rows["labels"]) == dict.fromkeys(range(5), 8)


def test_a_limited_corpus_holds_what_is_judged_and_others() -> None:
    limited = content("beir/arxiv", 5)["test"]
    assert len(limited["queries"]) == 5
    assert set(limited["relevant_docs"]) == set(limited["queries"]["id"])
    corpus = limited["corpus"]["id"]
    assert len(corpus) == 50
    assert {document for judged in limited["relevant_docs"].values() for document in judged} <= set(corpus)
    assert len(content("beir/arxiv", 30)["test"]["corpus"]) == 200, "more than there are"
    reranked = content("reranking/liveqa_med", 3)["test"]
    assert len(reranked["queries"]) == 3
    candidates = [document for documents in reranked["top_ranked"].values() for document in documents]
    assert sorted(candidates) == sorted(reranked["corpus"]["id"])


# Special forms -------------------------------------------------------------------------------------------------------


def test_texts_stand_in_for_human_summaries(tmp_path: Path, encoder: SentenceTransformer) -> None:
    rows = read("summarization/arxiv/test.jsonl.gz")
    for row in rows:
        del row["human_summaries"]
    write(tmp_path, "summarization/bare/test.jsonl.gz", rows)
    expected = []
    for row in rows:
        vectors = encoder.encode([row["text"], *row["machine_summaries"]], normalize_embeddings=True)
        expected.append(spearmanr(row["relevance"], vectors[1:] @ vectors[0]).statistic)
    assert score(encoder, load_tasks(tmp_path)[0]) == pytest.approx(np.mean(expected), abs=1e-5)


def test_one_summary_per_text_is_correlated_over_texts(tmp_path: Path, encoder: SentenceTransformer) -> None:
    rows = [
        {"text": row["text"], "machine_summaries": row["machine_summaries"][:1], "fluency": row["relevance"][:1]}
        for row in read("summarization/arxiv/test.jsonl.gz")
    ]
    write(tmp_path, "summarization/single/test.jsonl.gz", rows)
    pairs = [{"one": row["text"], "other": row["machine_summaries"][0]} for row in rows]
    expected = spearmanr([row["fluency"][0] for row in rows], cosines(Embedded(encoder), pairs, "one", "other"))
    (task,) = load_tasks(tmp_path)
    assert task.metadata.type == "Summarization"
    assert score(encoder, task) == pytest.approx(expected.statistic, abs=1e-5)


def test_relevance_goes_before_other_scores(tmp_path: Path) -> None:
    row = {"text": "t", "machine_summaries": ["a", "b"], "fluency": [1, 2], "relevance": [5, 3]}
    write(tmp_path, "summarization/both/test.jsonl.gz", [row])
    assert content("both", folder=tmp_path)["test"]["relevance"] == [[5, 3]]


@pytest.mark.parametrize(("own_text", "left_out"), [(True, True), (False, False)])
def test_a_query_is_no_answer_to_itself(own_text: bool, left_out: bool, tmp_path: Path) -> None:
    corpus = [{"_id": str(number), "title": "", "text": f"text number {number} of {number}"} for number in range(4)]
    queries = [{"_id": row["_id"], "text": row["text"] if own_text else "something else"} for row in corpus]
    retrieval_set(tmp_path, corpus, queries, [("0", "1", "1"), ("2", "3", "1")])
    (task,) = load_tasks(tmp_path)
    task.load_data()
    assert task.ignore_identical_ids is left_out


# What is refused -----------------------------------------------------------------------------------------------------


def retrieval_set(folder: Path, corpus: Rows, queries: Rows, judgements: Sequence[Sequence[str]]) -> None:
    write(folder, "beir/made/corpus.jsonl.gz", corpus)
    write(folder, "beir/made/queries.jsonl.gz", queries)
    lines = ["\t".join(line) for line in [("query-id", "corpus-id", "score"), *judgements]]
    (folder / "beir/made/qrels").mkdir(parents=True)
    (folder / "beir/made/qrels/test.tsv").write_text("\n".join(lines) + "\n")


def fault(folder: Path, path: str) -> str:
    """What is said of a set when it is loaded, of all sets only this one's."""
    shutil.copytree(EXAMPLES / "sts", folder / "sts", dirs_exist_ok=True)
    tasks = {task.source.path: task for task in load_tasks(folder)}
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        tasks[path].load_data()
    assert not tasks[path].data_loaded
    tasks["sts/sts17_en"].load_data()
    assert len(tasks["sts/sts17_en"].dataset["en-en"]["test"]) == 250
    return str(refused.value)


PAIR = {"sentence1": "a", "sentence2": "b"}
SUMMARY = {"text": "t", "machine_summaries": ["a", "b"], "relevance": [1, 2]}
BAD = {  # kind → rows of the test part, and what the error must say
    "no column": ("sts", [{**PAIR, "score": 1}, PAIR], "test.jsonl.gz:2: no column 'score', expected a number."),
    "no number": ("sts", [{**PAIR, "score": "4"}], """:1: 'score' must be a number, found "4\""""),
    "a NaN": ("sts", [{**PAIR, "score": float("nan")}], "'score' must be a number, found NaN"),
    "no text": ("sts", [{**PAIR, "sentence1": None, "score": 1}], "'sentence1' must be a text, found null"),
    "equal scores": ("sts", [{**PAIR, "score": 1}] * 2, "all scores are 1"),
    "no rows": ("sts", [], "the 'test' part has no rows"),
    "no object": ("sts", [[1, 2]], ":1: expected a JSON object, got list"),
    "another label": ("pair", [{**PAIR, "label": 2}], "'label' must be 1 (the same meaning) or 0 (not), found 2"),
    "no label": ("pair", [PAIR], "no column 'label'"),
    "one label": ("pair", [{**PAIR, "label": 1}] * 2, "all pairs have the label 1, expected 1 and 0"),
    "no clusters": ("clustering", [{"text": "a", "label": "x"}] * 2, "all rows have the label 'x'"),
    "an empty label": ("clustering", [{"text": "a", "label": ""}], "'label' must be a label"),
    "no list": (
        "reranking",
        [{"query": "q", "positive": "a", "negative": ["b"]}],
        "'positive' must be a list of texts",
    ),
    "no positive": (
        "reranking",
        [{"query": "q", "positive": [], "negative": ["b"]}],
        "a list of texts that is not empty",
    ),
    "lengths": (
        "summarization",
        [SUMMARY, {**SUMMARY, "relevance": [1]}],
        "row 2 of the test part has 2 machine summaries, but 1 scores",
    ),
    "no scores": (
        "summarization",
        [{**PAIR, **SUMMARY, "relevance": ["x", 1]}],
        "'relevance' must be a list of numbers",
    ),
    "unknown scores": (
        "summarization",
        [{"text": "t", "machine_summaries": ["a", "b"], "beauty": [1, 2]}],
        "no human scores",
    ),
    "equal scores of summaries": (
        "summarization",
        [{**SUMMARY, "relevance": [2, 2]}] * 2,
        "all scores are equal within",
    ),
    "several summaries": (
        "summarization",
        [{"text": "t", "machine_summaries": ["a"], "relevance": [1]}, SUMMARY],
        "another has 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_used_are_refused(case: str, tmp_path: Path) -> None:
    kind, rows, message = BAD[case]
    write(tmp_path, f"{kind}/bad/test.jsonl.gz", rows)
    assert message in fault(tmp_path, f"{kind}/bad")


def damaged(folder: Path) -> str:
    write(folder, "sts/bad/test.jsonl.gz", [{**PAIR, "score": score} for score in range(100)])
    file = folder / "sts/bad/test.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    return "test.jsonl.gz is truncated or damaged"


def no_json(folder: Path) -> str:
    (folder / "sts/bad").mkdir(parents=True)
    (folder / "sts/bad/test.jsonl").write_text(json.dumps({**PAIR, "score": 1}) + "\n{half a li\n")
    return "test.jsonl:2: invalid JSON"


@pytest.mark.parametrize("damage", [damaged, no_json])
def test_damaged_files_are_refused(damage: Callable[[Path], str], tmp_path: Path) -> None:
    message = damage(tmp_path)
    assert message in fault(tmp_path, "sts/bad")


def test_labels_of_test_must_be_trained_on(tmp_path: Path) -> None:
    write(
        tmp_path,
        "classification/bad/test.jsonl.gz",
        [{"text": "a", "label": "old"}] + [{"text": "b", "label": "new"}] * 2,
    )
    assert "no 'train' split" in fault(tmp_path, "classification/bad")
    write(
        tmp_path, "classification/bad/train.jsonl.gz", [{"text": "a", "label": "old"}, {"text": "b", "label": "news"}]
    )
    message = fault(tmp_path, "classification/bad")
    assert "2 test rows have one of 1 labels" in message
    assert "'new'. Did you mean 'news'?" in message


def test_a_few_rows_with_labels_of_their_own_count_as_missed(tmp_path: Path, encoder: SentenceTransformer) -> None:
    texts = {"question": "what is it, number {}?", "price": "{} dollars"}
    rows = [{"text": text.format(number), "label": label} for label, text in texts.items() for number in range(10)]
    write(tmp_path, "classification/rare/train.jsonl.gz", rows)
    write(tmp_path, "classification/rare/test.jsonl.gz", [*rows, {"text": "hello", "label": "rare"}])
    assert score(encoder, load_tasks(tmp_path)[0]) == pytest.approx(20 / 21)


DOCUMENTS = [{"_id": f"d{number}", "title": "", "text": "a text"} for number in range(3)]
QUERIES = [{"_id": f"q{number}", "text": "a query"} for number in range(2)]
JUDGED = [("q0", "d0", "1"), ("q1", "d1", "2")]
BAD_RETRIEVAL = {
    "no corpus": (([], QUERIES, JUDGED), "the 'corpus' part has no rows"),
    "no judgements": ((DOCUMENTS, QUERIES, []), "no judgements"),
    "nothing relevant": ((DOCUMENTS, QUERIES, [("q0", "d0", "0")]), "calls no document relevant to any query"),
    "unknown queries": (
        (DOCUMENTS, QUERIES, [*JUDGED, ("q7", "d0", "1"), ("q8", "d0", "1")]),
        "judges 2 query ids that are not there, for instance 'q7'; there are 2, for instance 'q0'",
    ),
    "unknown documents": (
        (DOCUMENTS, QUERIES, [*JUDGED, ("q1", "d9", "1")]),
        "judges 1 document ids that are not there",
    ),
    "repeated ids": ((DOCUMENTS * 2, QUERIES, JUDGED), "2 rows have the document id 'd0'"),
    "no title": (([{"_id": "d0", "text": "a"}], QUERIES, JUDGED), "corpus.jsonl.gz:1: no column 'title'"),
    "no grade": (
        (DOCUMENTS, QUERIES, [("q0", "d0", "much")]),
        "test.tsv:2: expected query, document and a whole number",
    ),
    "no columns": ((DOCUMENTS, QUERIES, [("q0 d0 1",)]), "test.tsv:2: expected query, document and a whole number"),
}


@pytest.mark.parametrize("case", BAD_RETRIEVAL)
def test_retrieval_sets_that_cannot_be_used_are_refused(case: str, tmp_path: Path) -> None:
    parts, message = BAD_RETRIEVAL[case]
    retrieval_set(tmp_path, *parts)
    assert message in fault(tmp_path, "beir/made")


@pytest.mark.parametrize("missing", ["corpus.jsonl.gz", "queries.jsonl.gz", "qrels/test.tsv"])
def test_missing_files_are_named(missing: str, tmp_path: Path) -> None:
    retrieval_set(tmp_path, DOCUMENTS, QUERIES, JUDGED)
    (tmp_path / "beir/made" / missing).unlink()
    assert missing.removesuffix(".gz") in fault(tmp_path, "beir/made")


def test_a_header_of_judgements_is_required(tmp_path: Path) -> None:
    retrieval_set(tmp_path, DOCUMENTS, QUERIES, JUDGED)
    (tmp_path / "beir/made/qrels/test.tsv").write_text("q0\t0\td0\t1\n")
    assert "test.tsv:1: expected the header query-id, corpus-id, score, tab-separated" in fault(tmp_path, "beir/made")


def test_judgements_that_are_no_text_are_refused(tmp_path: Path) -> None:
    retrieval_set(tmp_path, DOCUMENTS, QUERIES, [("qé", "d0", "1")])
    file = tmp_path / "beir/made/qrels/test.tsv"
    file.write_bytes(file.read_text(encoding="utf-8").encode("latin-1"))
    assert f"{file} is no text in UTF-8" in fault(tmp_path, "beir/made")


def test_queries_without_relevant_documents_are_left_out(tmp_path: Path) -> None:
    retrieval_set(tmp_path, DOCUMENTS, QUERIES, [("q0", "d0", "1"), ("q1", "d1", "0")])
    read_set = read_retrieval(EvaluationSet("beir", "made", tmp_path))
    assert [query["id"] for query in read_set.queries] == ["q0"]
