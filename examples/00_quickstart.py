"""One question in three tasks of a MoTE; then search, classification and clustering, before and after its training.

    python examples/00_quickstart.py [--model FOLDER_OR_HUB_ID] [--dense FOLDER_OR_HUB_ID] [--out PICTURE]

Runs in about a minute on a CPU, without a network: the MoTE, the dense encoder that it is made from, and all texts are
in this repository. The texts are from test splits. For intents (banking77) and titles (arxiv_titles), the MoTE was
trained on the training splits; its card also has the scores of dense models with the same training. Draws
`quickstart.png`, if matplotlib is installed: the clustered titles in both models.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.metrics import ndcg_score, v_measure_score
from transformers.utils import logging

HERE = Path(__file__).parent
QUESTION = "How do I undo my last git commit?"
TEXTS = {
    "answer": "git reset --soft HEAD~1 moves the branch back by one and keeps the changes.",
    "same question": "What is the way to revert the latest commit in git?",
    "same subject": "Why are branches in git so cheap to create?",
    "same kind of question": "How do I cancel my last bank transfer?",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "small-mote"), help="MoTE")
    parser.add_argument("--dense", default=str(HERE / "small-encoder"), help="dense encoder that it was made from")
    parser.add_argument("--out", type=Path, default=Path("quickstart.png"), help="picture to draw")
    options = parser.parse_args()
    model = SentenceTransformer(options.model, trust_remote_code=True)
    dense = SentenceTransformer(options.dense)
    ask_each_expert(model)
    print(f"\n{'':<40}{'before training':>15}{'MoTE':>15}")
    for name, score in (("search, nDCG@10", search), ("classification, accuracy", classify)):
        print(f"{name:<40}{score(dense):>15.3f}{score(model):>15.3f}")
    titles, categories = texts_and_labels("clustering/arxiv_titles/test")
    embedded = {"before training": dense.encode(titles), "MoTE": model.encode(titles, prompt_name="clustering")}
    before, after = (v_measure(embeddings, categories) for embeddings in embedded.values())
    print(f"{'clustering, V-measure':<40}{before:>15.3f}{after:>15.3f}")
    print("The MoTE was trained on these intents and categories, but not on these texts.")
    draw(embedded, categories, options.out)


def ask_each_expert(model: SentenceTransformer) -> None:
    """Print how similar the question is to each text, in each task."""
    tasks = ("search", "classification", "clustering")
    print(f"{QUESTION}\n\n{'cosine similarity in the task':<40}", *(f"{task:>15}" for task in tasks), sep="")
    rows = []
    for task in tasks:
        if task == "search":  # the question as a query, the texts as documents
            asked, texts = model.encode_query(QUESTION), model.encode_document([*TEXTS.values()])
        else:
            asked, texts = model.encode(QUESTION, prompt_name=task), model.encode([*TEXTS.values()], prompt_name=task)
        rows.append(model.similarity(asked, texts)[0].tolist())
    for number, kind in enumerate(TEXTS):
        print(f"{kind:<40}", *(f"{row[number]:>15.2f}" for row in rows), sep="")


def search(model: SentenceTransformer) -> float:
    """Search 200 abstracts of papers by 40 titles."""
    queries, documents = (read(f"beir/arxiv/{part}") for part in ("queries", "corpus"))
    lines = (HERE / "data/beir/arxiv/qrels/test.tsv").read_text(encoding="utf-8").splitlines()[1:]
    relevant = {tuple(line.split("\t")[:2]) for line in lines}
    found = model.similarity(
        model.encode_query([row["text"] for row in queries]), model.encode_document([row["text"] for row in documents])
    )
    truth = [[(query["_id"], document["_id"]) in relevant for document in documents] for query in queries]
    return float(ndcg_score(truth, found.numpy(), k=10))


def classify(model: SentenceTransformer) -> float:
    """Find the intent of 200 questions to a bank among 40, with a linear classifier trained on 800."""
    prompt = {"prompt_name": "classification"} if "classification" in model.prompts else {}
    (known, intents), (asked, truth) = (
        texts_and_labels(f"classification/banking77/{part}") for part in ("train", "test")
    )
    classifier = LogisticRegression(max_iter=1000).fit(model.encode(known, **prompt), intents)
    return float(classifier.score(model.encode(asked, **prompt), truth))


def v_measure(embeddings: np.ndarray, labels: list[str]) -> float:
    """Cluster the titles of 400 papers from ten fields; the mean over ten runs of k-means."""
    found = (KMeans(10, n_init=1, random_state=seed).fit_predict(embeddings) for seed in range(10))
    return float(np.mean([v_measure_score(labels, clusters) for clusters in found]))


def draw(embedded: dict[str, np.ndarray], labels: list[str], out: Path) -> None:
    """Draw a map of the texts in each model, coloured by their labels."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nNo picture: matplotlib is not installed.")
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (name, embeddings) in zip(figure.subplots(1, 2), embedded.items(), strict=True):
        places = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(embeddings)
        for label in sorted(set(labels)):
            of_label = places[[label == other for other in labels]]
            axes.scatter(*of_label.T, s=14, label=label)
        axes.set(title=name, xticks=[], yticks=[])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(out, dpi=110)
    print(f"\nThe titles in both models, coloured by their field: {out}")


def read(name: str) -> list[dict[str, Any]]:
    with gzip.open(HERE / "data" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def texts_and_labels(name: str) -> tuple[list[str], list[str]]:
    rows = read(name)
    return [row["text"] for row in rows], [row["label"] for row in rows]


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
