"""A query through two experts that disagree, both right, and the source, unchanged; then the same over 1,291 requests.

    python examples/00_quickstart.py [--model FOLDER_OR_HUB_ID] [--dense FOLDER_OR_HUB_ID] [--out PICTURE]

Runs in under 90 seconds on two cores, without a network: the MoTE, the dense encoder that it was made from, and all
texts are in this repository. One expert was trained to find requests on the same topic, one to find those that want the
same done, on the training rows of `data/requests`; its test rows are scored here. Draws `quickstart.png`, if matplotlib
is installed: some of the requests as each expert sees them.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sklearn.manifold import TSNE
from transformers.utils import logging

REQUESTS = Path(__file__).parent / "data/requests"
QUERY = "Cancel my dentist appointment on Friday."
TEXTS = [
    "What appointments do I have on Friday?",
    "Take milk off my shopping list.",
    "Book a table for two on Friday.",
    "Wake me up at seven on Friday.",
    "Is the pharmacy open on Friday?",
]
KINDS = ("topic", "intent")
DRAWN = {"topic": ("alarms", "calendar", "lists"), "intent": ("ask", "add", "remove")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--model", default=str(here / "small-mote"), help="MoTE")
    parser.add_argument("--dense", default=str(here / "small-encoder"), help="dense encoder that it was made from")
    parser.add_argument("--out", type=Path, default=Path("quickstart.png"), help="picture to draw")
    options = parser.parse_args()
    model = SentenceTransformer(options.model, trust_remote_code=True)
    dense = SentenceTransformer(options.dense)

    print(f"{QUERY}\n\n{'expert':<10}nearest of {len(TEXTS)} texts")
    for expert in model[0].config.experts:
        cosines = model.similarity(model.encode(QUERY, task=expert), model.encode(TEXTS, task=expert))[0]
        print(f"{expert:<10}{TEXTS[cosines.argmax()]:<45}{cosines.max():.2f}")
    change = abs(model.encode(TEXTS, task="general") - dense.encode(TEXTS)).max()
    print(f"`general` is the dense source, and where texts without a task go: largest difference {change:.1f}")

    rows = read_requests("test")
    texts = [row["text"] for row in rows]
    seen = {f"expert {expert}": model.encode(texts, task=expert) for expert in model[0].config.experts}
    print(f"\n{f'nearest of {len(texts):,} requests, % with':<40}{'the same topic':>16}{'the same intent':>17}")
    for name, embeddings in seen.items():
        topic, intent = (share_of_nearest(embeddings, rows, kind) for kind in KINDS)
        print(f"{name:<40}{topic:>16.1f}{intent:>17.1f}")
    print("Requests that share both are left out: the nearest has the same topic, the same intent, or neither.")
    print("One dense model with the same training has 56.7 and 35.1 (examples/small-mote/README.md).")
    draw(seen, rows, options.out)


def share_of_nearest(embeddings: np.ndarray, rows: list[dict[str, Any]], kind: str) -> float:
    """Return for how many percent of the rows the nearest other one has the same topic or intent, but not both."""
    labels = {name: np.array([row[name] for row in rows]) for name in KINDS}
    same = {name: of[:, None] == of[None, :] for name, of in labels.items()}
    nearest = np.where(same["topic"] & same["intent"], -np.inf, embeddings @ embeddings.T).argmax(axis=1)
    return float(100 * same[kind][np.arange(len(rows)), nearest].mean())


def draw(seen: dict[str, np.ndarray], rows: list[dict[str, Any]], out: Path) -> None:
    """Draw a map of some requests by each expert (columns), coloured by topic and by intent (rows)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nNo picture: matplotlib is not installed.")
        return
    chosen = [number for number, row in enumerate(rows) if all(row[kind] in DRAWN[kind] for kind in KINDS)]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(len(KINDS), len(seen), squeeze=False)
    for column, (name, embeddings) in enumerate(seen.items()):
        places = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(embeddings[chosen])
        for axes, kind in zip(grid[:, column], KINDS, strict=True):
            for label in DRAWN[kind]:
                axes.scatter(*places[[rows[number][kind] == label for number in chosen]].T, s=14, label=label)
            axes.set(title=f"{name}, colour: {kind}", xticks=[], yticks=[])
    for axes in grid[:, -1]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(out, dpi=110)
    print(f"\nRequests about alarms, a calendar and lists, as each expert sees them: {out}")


def read_requests(split: str) -> list[dict[str, str]]:
    """Return rows of `text`, `topic` and `intent`: one file holds each label of the same texts, in one order."""
    columns = []
    for kind in KINDS:
        with gzip.open(REQUESTS / f"by_{kind}/{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            columns.append([json.loads(line) for line in lines])
    return [
        {"text": topic["text"], "topic": topic["label"], "intent": intent["label"]}
        for topic, intent in zip(*columns, strict=True)
    ]


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
