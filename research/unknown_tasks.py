"""Texts of unknown task: does a small router beat the fixed default?

    python -m research.unknown_tasks accuracy --data DATA --model MODEL             # of the router alone, on real sets
    python -m research.unknown_tasks scores --data DATA --model MOTE --tasks FOLDER # of a trained MoTE, by who routes

The router is a logistic regression over the mean of the model's token embeddings, trained on 1,000 texts of each task.
FOLDER holds NAME.csv and NAME.test.csv for each expert NAME of the MoTE, as the tutorial's `my-tasks` does.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ndcg_score

from research.own_tasks import SETS, read, text_of

TEXTS = 1000  # of each task
KNOWN, ASKED = 400, 150  # rows of a set of which the nearest is looked for, and that ask for theirs
PARTS = ("train", "test")
SURE = 0.9  # probability below which a text gets the default
# The paper's experts, and real sets whose texts they embed.
ROLES = {
    "classification": ["classification/banking77", "classification/trec6", "classification/sst2"],
    "clustering": ["clustering/arxiv_titles", "clustering/reddit_titles", "clustering/open_trivia"],
    "search_query": ["retrieval/tldr_pages", "retrieval/quora_duplicates", "retrieval/reddit"],
    "search_document": ["retrieval/tldr_pages", "retrieval/quora_duplicates", "retrieval/reddit"],
}
# Sets that no expert of the tutorial's MoTE was trained on.
UNSEEN = ["classification/trec6", "classification/tweet_emotion4", "clustering/reddit_titles", "clustering/bbc_news"]


class Router:
    """A linear classifier of texts by task."""

    def __init__(self, model: SentenceTransformer, texts: dict[str, list[str]]) -> None:
        self.tokenizer, network = model.tokenizer, cast(Any, model[0]).model
        self.table = network.get_input_embeddings().weight.detach().cpu().numpy()
        start = time.perf_counter()
        labels = [task for task, found in texts.items() for _ in found]
        vectors = self.vectors([text for found in texts.values() for text in found])
        self.linear = LogisticRegression(max_iter=1000, C=10).fit(vectors, labels)
        self.seconds = time.perf_counter() - start

    def vectors(self, texts: list[str]) -> np.ndarray:
        """Average the embeddings of each text's tokens: [N, H], of length 1."""
        tokens = self.tokenizer(texts, add_special_tokens=False, truncation=True, max_length=256)["input_ids"]
        means = np.stack([self.table[ids or [0]].mean(axis=0) for ids in tokens])
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def tasks(self, texts: list[str], sure: float = 0.0, default: str = "") -> np.ndarray:
        """Return the task of each text; the default, where the router is not sure."""
        shares = self.linear.predict_proba(self.vectors(texts))
        return np.where(shares.max(axis=1) >= sure, self.linear.classes_[shares.argmax(axis=1)], default)


def texts_of(data: Path, task: str, dataset: str) -> list[str]:
    """The texts of a task in a dataset, its documents for the expert of documents, in the order of hashes."""
    rows = read(data, dataset, "train")[: 4 * TEXTS]
    return [row["positive"] if task == "search_document" else text_of(row) for row in rows]


def print_accuracy(name: str, model: SentenceTransformer, texts: dict[str, list[str]]) -> None:
    """Train on one part of the texts of each task, and print the accuracy on another."""
    router = Router(model, {task: found[:TEXTS] for task, found in texts.items()})
    held_out = {task: found[TEXTS : 2 * TEXTS] for task, found in texts.items()}
    start = time.perf_counter()
    found = {task: float((router.tasks(texts) == task).mean()) for task, texts in held_out.items()}
    each = 1e6 * (time.perf_counter() - start) / sum(map(len, held_out.values()))
    shown = ", ".join(f"{task} {100 * right:.1f}" for task, right in found.items())
    mean = 100 * np.mean([*found.values()])
    print(f"{name}: mean {mean:.1f} % ({shown}); {router.seconds:.1f} s, {each:.0f} µs a text", flush=True)


def accuracy(args: argparse.Namespace) -> None:
    """The router alone: by set of own tasks, and between the paper's experts."""
    model = SentenceTransformer(str(args.model), trust_remote_code=True)
    for name, tasks in SETS.items():
        print_accuracy(name, model, {task: texts_of(args.data, task, dataset) for task, dataset in tasks.items()})
    mixed = {task: [texts_of(args.data, task, one) for one in datasets] for task, datasets in ROLES.items()}
    together = {task: [one for row in zip(*found, strict=False) for one in row] for task, found in mixed.items()}
    print_accuracy("paper", model, together)
    for dataset in ROLES["search_query"]:
        roles = {role: texts_of(args.data, role, dataset) for role in ("search_query", "search_document")}
        print_accuracy(f"roles in {dataset}", model, roles)


def read_csv(path: Path) -> list[list[str]]:
    """Read the rows of a file: a text and a label, or a query and a document."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [*csv.reader(file)][1:]


class Encoder:
    """A MoTE that embeds each text by an expert of its own, once."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self.known: dict[tuple[str, str], np.ndarray] = {}  # task and text → vector

    def embed(self, texts: list[str], tasks: np.ndarray) -> np.ndarray:
        """Embed texts, each by the expert of its task."""
        asked = [(str(task), text) for task, text in zip(tasks, texts, strict=True)]
        for task in {*tasks.tolist()}:
            new = [text for own, text in {*asked} - {*self.known} if own == task]
            if new:
                vectors = self.model.encode(new, task=task, normalize_embeddings=True, show_progress_bar=False)
                self.known.update(zip([(task, text) for text in new], vectors, strict=True))
        return np.stack([self.known[one] for one in asked])


def score(similarity: np.ndarray, relevant: np.ndarray, retrieval: bool) -> float:
    """nDCG@10, or the share of rows whose nearest is relevant."""
    if retrieval:
        return 100 * float(ndcg_score(relevant.astype(int), similarity, k=10))
    return 100 * float(relevant[np.arange(len(relevant)), similarity.argmax(axis=1)].mean())


def scores(args: argparse.Namespace) -> None:
    """A trained MoTE on held-out rows of its tasks, and on sets of others, by who chooses the expert."""
    encoder = Encoder(SentenceTransformer(str(args.model), trust_remote_code=True))
    config = cast(Any, encoder.model[0]).config
    own = {name: args.tasks / f"{name}.csv" for name in config.experts if (args.tasks / f"{name}.csv").exists()}
    pairs = {name for name, file in own.items() if file.read_text("utf-8-sig").startswith("query")}
    files = {name: (read_csv(file), read_csv(file.with_suffix(".test.csv"))) for name, file in own.items()}
    router = Router(
        encoder.model,
        {name: [text for row in train for text in row[: 1 + (name in pairs)]] for name, (train, _) in files.items()},
    )
    for dataset in UNSEEN:
        train, test = ([[row["text"], row["label"]] for row in read(args.data, dataset, part)] for part in PARTS)
        files[dataset] = train, test
    for name, (train, test) in files.items():
        known, asked = train[:KNOWN], test[:ASKED]
        left, right = [row[0] for row in asked], [row[0] for row in known]
        if name in pairs:
            right = [*dict.fromkeys(row[1] for row in [*asked, *known])]
        answers = np.array(right if name in pairs else [row[1] for row in known])
        relevant = np.array([row[1] for row in asked])[:, None] == answers
        shares = router.linear.predict_proba(router.vectors(left + right)).mean(axis=0)
        always = {"default": config.default_task, "one for all": router.linear.classes_[shares.argmax()]}
        always |= {"own expert": name} if name in own else {}
        ways = {way: [np.full(len(texts), task) for texts in (left, right)] for way, task in always.items()}
        ways["router"] = [router.tasks(texts) for texts in (left, right)]
        ways["router, if sure"] = [router.tasks(texts, SURE, config.default_task) for texts in (left, right)]
        found = {}
        for way, (of_left, of_right) in ways.items():
            similarity = encoder.embed(left, of_left) @ encoder.embed(right, of_right).T
            found[way] = score(similarity, relevant, name in pairs)
        right_share = f"; right {100 * np.mean(np.concatenate(ways['router']) == name):.1f} %" if name in own else ""
        print(f"{name}: {', '.join(f'{way} {value:.1f}' for way, value in found.items())}{right_share}", flush=True)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["accuracy", "scores"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path)
    args = parser.parse_args()
    {"accuracy": accuracy, "scores": scores}[args.command](args)


if __name__ == "__main__":
    main()
