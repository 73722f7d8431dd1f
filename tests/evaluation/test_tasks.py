"""Local data folders as tasks of mteb: real scores, worked out again without mteb; limits; what is refused."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.rows import read_rows, write_retrieval_dataset, write_rows
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.metrics import average_precision_score

mteb = pytest.importorskip("mteb")

from mote import evaluate, upcycle  # noqa: E402
from mote.evaluation.evaluate import _further_scores  # noqa: E402
from mote.evaluation.tasks import choose_tasks, load_tasks  # noqa: E402

EXAMPLES = ROOT / "examples" / "data"
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
    pytest.mark.filterwarnings("ignore::UserWarning"),  # mteb's, about prompts that are not task types, and sklearn's
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
Rows = list[dict[str, Any]]


class Remembering(SentenceTransformer):
    """Embeds each text once, for mteb and for what is worked out without it."""

    def encode(self, inputs: Sequence[str], *args: Any, **kwargs: Any) -> np.ndarray:
        new = [text for text in dict.fromkeys(inputs) if text not in self.seen]
        self.seen.update(zip(new, super().encode(new, *args, **kwargs), strict=True))
        return np.stack([self.seen[text] for text in inputs])


@pytest.fixture(scope="module")
def encoder() -> SentenceTransformer:
    """The small encoder, whose embeddings are normalised."""
    model = Remembering(str(SMALL_ENCODER), device="cpu")
    model.seen = {}
    return model


def read(path: str) -> Rows:
    return read_rows(EXAMPLES / path)


def score(model: SentenceTransformer, task: Any) -> float:
    (result,) = mteb.evaluate(model, [task], cache=None, show_progress_bar=False).task_results
    return float(result.get_score())


Embed = Callable[[Sequence[str]], np.ndarray]


def pair(embed: Embed) -> float:
    rows = read("pair/sts17_en/test.jsonl.gz")
    one, other = (embed([row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    labels = [row["label"] for row in rows]  # mteb takes the best of several distances; the others rank as the cosine
    return max(average_precision_score(labels, by) for by in (np.sum(one * other, 1), -np.abs(one - other).sum(1)))


def reranking(embed: Embed) -> float:
    precisions = []
    for row in read("reranking/liveqa_med/test.jsonl.gz"):
        relevant = [True] * len(row["positive"]) + [False] * len(row["negative"])
        scores = embed(row["positive"] + row["negative"]) @ embed([row["query"]])[0]
        ranked = [relevant[index] for index in np.argsort(-scores)]
        found = [sum(ranked[: place + 1]) / (place + 1) for place, hit in enumerate(ranked) if hit]
        precisions.append(sum(found) / len(found))
    return float(np.mean(precisions))


def retrieval(embed: Embed, hits: list[list[bool]] | None = None, unit: bool = True) -> float:
    corpus, queries = (read(f"beir/arxiv/{part}.jsonl.gz") for part in ("corpus", "queries"))
    lines = (EXAMPLES / "beir/arxiv/qrels/test.tsv").read_text().splitlines()[1:]
    judged = {tuple(line.split("\t")[:2]): int(line.split("\t")[2]) for line in lines}
    documents, asked_for = embed([row["text"] for row in corpus]), embed([row["text"] for row in queries])
    if not unit:
        documents, asked_for = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (documents, asked_for))
    gains = []
    for query, vector in zip(queries, asked_for, strict=True):
        scores = (documents @ vector).round(5).tolist()  # trec_eval ranks equal ones by their ids, the last one first
        ranking = sorted(range(len(corpus)), key=lambda index: (scores[index], corpus[index]["_id"]), reverse=True)[:10]
        grades = [judged.get((query["_id"], corpus[index]["_id"]), 0) for index in ranking]
        if hits is not None:
            hits.append([grade > 0 for grade in grades])
        best = sorted((grade for (asked, _), grade in judged.items() if asked == query["_id"]), reverse=True)[:10]
        gains.append(discounted(grades) / discounted(best))
    return float(np.mean(gains))


def discounted(grades: Sequence[int]) -> float:
    return sum(grade / log2(place + 2) for place, grade in enumerate(grades))


def summarization(embed: Embed) -> float:
    correlations = []
    for row in read("summarization/arxiv/test.jsonl.gz"):
        similarity = (embed(row["machine_summaries"]) @ embed(row["human_summaries"]).T).max(axis=1)
        correlations.append(spearmanr(row["relevance"], similarity).statistic)
    return float(np.mean(correlations))


WITHOUT_MTEB = {
    "pair/sts17_en": pair,
    "reranking/liveqa_med": reranking,
    "beir/arxiv": retrieval,
    "summarization/arxiv": summarization,
}


@pytest.mark.long
@pytest.mark.parametrize("path", WITHOUT_MTEB)
def test_scores_are_those_worked_out_without_mteb(path: str, encoder: SentenceTransformer) -> None:
    (task,) = load_tasks(EXAMPLES, [path])
    assert score(encoder, task) == pytest.approx(WITHOUT_MTEB[path](encoder.encode), abs=1e-5)


QUANTISED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda vectors: vectors,
    " binary": lambda vectors: np.where(vectors > 0, 1.0, 0.0),
    " int8": lambda vectors: np.floor((vectors - vectors.min(0)) / (np.ptp(vectors, axis=0) / 255)) - 128,
}


@pytest.mark.long
def test_truncated_and_quantised_vectors_score_as_worked_out(encoder: SentenceTransformer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": EXAMPLES, "tasks": ["beir/arxiv"], "out": tmp_path}
    scores = evaluate({"m": str(SMALL_ENCODER)}, dimensions=[48], precisions=["float32", "int8", "binary"], **settings)
    assert set(scores.models) == {"m 48", "m 48 int8", "m 48 binary"}
    for name, quantise in QUANTISED.items():
        hits: list[list[bool]] = []
        ours = retrieval(lambda texts, quantise=quantise: quantise(encoder.encode(texts)[:, :48]), hits, unit=False)
        first = [1 / (row.index(True) + 1) if True in row else 0 for row in hits]
        expected = 100 * np.array([ours, np.mean(first)])
        further = scores.further[f"m 48{name}"]["beir-arxiv"]
        assert [scores.scores[f"m 48{name}"]["beir-arxiv"], further["mrr_at_10"]] == pytest.approx(expected, abs=0.02)
        assert further["recall_at_10"] == pytest.approx(100 * np.mean(hits, axis=1).sum() * 10 / len(hits), abs=0.02)
    assert "recall_at_100" in (tmp_path / "scores.md").read_text()
    whole, short = (evaluate({"m": str(SMALL_ENCODER)}, max_length=length, **settings) for length in (None, 8))
    assert len({*whole.scores["m"].values(), *short.scores["m"].values(), *scores.scores["m 48"].values()}) == 3


def test_each_language_has_its_score() -> None:
    task = mteb.get_task("STS17", hf_subsets=["en-de", "ko-ko"])
    scores = {"test": {name: {"main_score": score} for name, score in (("en-de", 0.5), ("ko-ko", 0.7))}}
    result = mteb.TaskResult.from_task_results(task, scores, evaluation_time=1)
    assert _further_scores(result, task) == {"en-de": 50.0, "ko-ko": 70.0}


def test_benchmarks_by_the_names_that_people_say() -> None:
    names = {"MIRACL": "MIRACLRetrieval", "beir": "TRECCOVID", "BRIGHT": "BrightRetrieval", "MTEB(eng, v2)": "BIOSSES"}
    for name, expected in names.items():
        assert expected in {task.metadata.name for task in choose_tasks(name, None)}
    with pytest.raises(ValueError, match=r"Unknown benchmark of MTEB: 'BEIRR'\. Did you mean 'BEIR'\?"):
        choose_tasks("BEIRR", None)


EXPERTS = {"Clustering": {"clustering"}, "Retrieval": {"search_query", "search_document"}}
EXPERTS["Reranking"] = EXPERTS["Retrieval"]


@pytest.mark.long
@pytest.mark.parametrize("path", TYPES)
def test_each_type_and_role_reaches_its_expert_with_its_instruction(path: str, trained_folder: Path) -> None:
    model = SentenceTransformer(str(trained_folder), trust_remote_code=True, device="cpu")
    (task,) = load_tasks(EXAMPLES, [path], limit=4)
    assert (task.metadata.name, task.metadata.type, task.metadata.main_score) == TYPES[path]
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
        name, column = ("queries", "text") if path == "beir/arxiv" else ("test", "query")
        tokens = {tuple(words(model, row[column])) for row in read(f"{path}/{name}.jsonl.gz")}
        for expert, of_queries in (("search_query", True), ("search_document", False)):
            instruction = model[0].config.instruction_of(expert)
            front = len(words(model, instruction))
            seen_tokens = {tuple(words(model, text)[front:]) for text in used[expert]}
            assert seen_tokens
            assert (seen_tokens <= tokens) is of_queries


def words(model: SentenceTransformer, text: str) -> list[str]:
    return model.tokenizer.tokenize(text)


def names(*patterns: str) -> list[str]:
    return [task.metadata.name for task in load_tasks(EXAMPLES, patterns)]


def test_patterns_match_paths_names_and_mtebs_names() -> None:
    assert names("sts/*", "beir/arxiv") == ["beir-arxiv", "STS17"]
    assert names("sts17_en") == ["pair-sts17_en", "STS17"]
    assert names("STS17") == ["STS17"]
    assert names("pair-*") == ["pair-sts17_en"]
    with pytest.raises(ValueError, match="No dataset matches 'sts/sts18'") as refused:
        names("sts/sts17_en", "sts/sts18")
    assert "Did you mean 'sts/sts17_en'?" in str(refused.value)


def test_a_name_that_looks_like_a_pattern_matches_itself(tmp_path: Path) -> None:
    for name in ("br[1]", "br1", "br2"):
        write_rows(tmp_path / "sts" / name / "test.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "score": 1}])
    found = [[task.source.name for task in load_tasks(tmp_path, [name])] for name in ("sts/br[1]", "br[2]")]
    assert found == [["br1", "br[1]"], ["br2"]]


def test_only_a_complete_official_dataset_has_the_official_name(tmp_path: Path) -> None:
    rows = read("sts/sts17_en/test.jsonl.gz")
    write_rows(tmp_path / "sts/sts17_en/test.jsonl.gz", rows)
    (official,) = load_tasks(tmp_path)
    assert official.metadata.name == "STS17"
    assert isinstance(official, type(mteb.get_task("STS17")))
    assert official.hf_subsets == ["en-en"]
    write_rows(tmp_path / "sts/sts17_en/test.jsonl.gz", rows[1:])
    assert load_tasks(tmp_path)[0].metadata.name == "sts-sts17_en"


def test_the_revision_tells_data_and_limit(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "copy")

    def revisions(folder: Path, limit: int | None = None) -> list[str]:
        return [task.metadata.revision for task in load_tasks(folder, limit=limit)]

    before = revisions(EXAMPLES)
    assert revisions(tmp_path / "copy") == before
    assert not set(revisions(EXAMPLES, 5)) & set(before)
    write_rows(tmp_path / "copy" / "classification/banking77/train.jsonl.gz", [{"text": "a", "label": "b"}])
    with (tmp_path / "copy/beir/arxiv/qrels/test.tsv").open("a") as qrels:
        qrels.write("\n")
    changed = [path for path, old, new in zip(TYPES, before, revisions(tmp_path / "copy"), strict=True) if old != new]
    assert changed == ["classification/banking77", "beir/arxiv"]


def test_clusters_come_in_two_sets_with_half_of_each_label() -> None:
    (task,) = load_tasks(EXAMPLES, ["clustering/arxiv_titles"])
    task.load_data()
    sets = task.dataset["default"]["test"]
    assert [set(Counter(part["labels"]).values()) for part in sets] == [{20}, {20}]
    label_of = {row["text"]: row["label"] for row in read("clustering/arxiv_titles/test.jsonl.gz")}
    found = {text: label for part in sets for text, label in zip(part["sentences"], part["labels"], strict=True)}
    labels = sorted(set(label_of.values()))
    assert {text: labels[index] for text, index in found.items()} == label_of


def test_a_few_rows_with_labels_of_their_own_count_as_missed(tmp_path: Path, encoder: SentenceTransformer) -> None:
    texts = {"question": "what is it, number {}?", "price": "{} dollars"}
    rows = [{"text": text.format(number), "label": label} for label, text in texts.items() for number in range(10)]
    write_rows(tmp_path / "classification/rare/train.jsonl.gz", rows)
    write_rows(tmp_path / "classification/rare/test.jsonl.gz", [*rows, {"text": "hello", "label": "rare"}])
    assert score(encoder, load_tasks(tmp_path)[0]) == pytest.approx(20 / 21)


def test_texts_stand_in_for_human_summaries(tmp_path: Path, encoder: SentenceTransformer) -> None:
    rows = read("summarization/arxiv/test.jsonl.gz")
    for row in rows:
        del row["human_summaries"]
    write_rows(tmp_path / "summarization/bare/test.jsonl.gz", rows)
    expected = []
    for row in rows:
        vectors = encoder.encode([row["text"], *row["machine_summaries"]])
        expected.append(spearmanr(row["relevance"], vectors[1:] @ vectors[0]).statistic)
    assert score(encoder, load_tasks(tmp_path)[0]) == pytest.approx(np.mean(expected), abs=1e-5)


def test_one_summary_per_text_is_correlated_over_texts(tmp_path: Path, encoder: SentenceTransformer) -> None:
    rows = [
        {"text": row["text"], "machine_summaries": row["machine_summaries"][:1], "fluency": row["relevance"][:1]}
        for row in read("summarization/arxiv/test.jsonl.gz")
    ]
    write_rows(tmp_path / "summarization/single/test.jsonl.gz", rows)
    texts, summaries = [row["text"] for row in rows], [row["machine_summaries"][0] for row in rows]
    one, other = (encoder.encode(side) for side in (texts, summaries))
    expected = spearmanr([row["fluency"][0] for row in rows], np.sum(one * other, axis=1))
    (task,) = load_tasks(tmp_path)
    assert task.metadata.type == "Summarization"
    assert score(encoder, task) == pytest.approx(expected.statistic, abs=1e-5)


@pytest.mark.parametrize(("own_text", "left_out"), [(True, True), (False, False)])
def test_a_query_is_not_its_own_answer(own_text: bool, left_out: bool, tmp_path: Path) -> None:
    corpus = {str(number): f"text number {number} of {number}" for number in range(4)}
    queries = corpus if own_text else dict.fromkeys(corpus, "something else")
    write_retrieval_dataset(tmp_path / "beir/made", corpus, queries, "0 1 1", "2 3 1")
    (task,) = load_tasks(tmp_path)
    task.load_data()
    assert task.ignore_identical_ids is left_out


def test_a_document_with_the_id_of_its_query_is_found(tmp_path: Path, encoder: SentenceTransformer) -> None:
    topics = {"0": "a red fox", "1": "two ships at sea", "2": "the price of bread"}
    write_retrieval_dataset(tmp_path / "beir/made", topics, topics, "0 0 1", "1 1 1", "2 2 1")
    titled = [{"_id": name, "title": topic, "text": "see above"} for name, topic in topics.items()]
    write_rows(tmp_path / "beir/made/corpus.jsonl", titled)
    assert score(encoder, load_tasks(tmp_path)[0]) == 1


def scores(path: Path, data: Path, sets: list[str]) -> dict[str, float]:
    """Score a model on sets of the shared data, in percent with two decimals as published."""
    model = SentenceTransformer(str(path), trust_remote_code=True)
    results = mteb.evaluate(model, load_tasks(data, sets), cache=None, show_progress_bar=False)
    return {result.task_name: round(100 * result.get_score(), 2) for result in results.task_results}


@pytest.mark.slow
def test_two_fast_official_sets_score_what_is_published(shared: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    published = {"STS12": 72.37, "STS17": 87.59}
    assert scores(source, shared / "data", ["STS12", "STS17"]) == pytest.approx(published, abs=0.011)


@pytest.mark.slow
def test_without_instructions_the_scores_are_the_published_ones_of_the_source(shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    experts = ["classification", "clustering", "search_query", "search_document"]
    folder = upcycle(
        str(source), tmp_path / "mote", instructions=dict.fromkeys(experts, ""), default_task="classification"
    )
    published = {"NFCorpus": 31.59, "STSBenchmark": 82.03}
    for path in (source, folder):
        assert scores(path, shared / "data", list(published)) == pytest.approx(published, abs=0.011)
