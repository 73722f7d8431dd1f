"""Train a MoTE on two tasks with the plain trainer of Sentence-Transformers.

    pip install -e ".[train]"
    python examples/03_upcycle_and_train.py [--src FOLDER_OR_HUB_ID] [--out FOLDER] [--steps N]

Compared with a dense model, a MoTE needs two more arguments: `prompts` puts a column's instruction in front of its
texts, and `router_mapping` names the column's task, which picks the expert. Takes about a minute on a CPU. For the
paper's recipe, with its batches, losses and data cleaning, use `mote train mote` (docs/training.md).
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import set_seed
from transformers.utils import logging

import mote

HERE = Path(__file__).parent


def read(path: str) -> Dataset:
    return load_dataset("json", data_files=str(HERE / "data" / path), split="train")


def pairs_of_one_label(dataset: Dataset) -> Dataset:
    """Pair each text with another text of the same label."""
    texts: dict[str, list[str]] = {}
    for row in dataset.shuffle(seed=42):
        texts.setdefault(row["label"], []).append(row["text"])
    pairs = [(a, b) for group in texts.values() for a, b in zip(group, group[1:] + group[:1], strict=True)]
    return Dataset.from_list([{"text": a, "same_label": b} for a, b in random.sample(pairs, len(pairs))])


def train(model: SentenceTransformer, tldr: Dataset, banking: Dataset, output: Path, steps: int) -> None:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=2e-4,
        warmup_steps=0.1,
        # dataset → column → instruction, and dataset → column → task
        prompts={
            "tldr": {"query": "search_query: ", "positive": "search_document: "},
            "banking": {"text": "classification: ", "same_label": "classification: "},
        },
        router_mapping={
            "tldr": {"query": "search_query", "positive": "search_document"},
            "banking": {"text": "classification", "same_label": "classification"},
        },
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset={"tldr": tldr, "banking": pairs_of_one_label(banking)},
        loss=MultipleNegativesRankingLoss(model),
    ).train()


def search_accuracy(model: SentenceTransformer, held_out: Dataset) -> float:
    """Return the share of descriptions whose own command is ranked first."""
    queries = model.encode_query(held_out["query"], convert_to_tensor=True)
    commands = model.encode_document(held_out["positive"], convert_to_tensor=True)
    best = model.similarity(queries, commands).argmax(dim=1).tolist()
    return sum(place == found for place, found in enumerate(best)) / len(best)


def classification_accuracy(model: SentenceTransformer, known: Dataset, held_out: Dataset) -> float:
    """Return the share of texts for which the mean embedding of their label is the nearest."""
    embedded, test = (model.encode(part["text"], prompt_name="classification") for part in (known, held_out))
    labels = sorted(set(known["label"]))
    centres = [embedded[[label == other for other in known["label"]]].mean(axis=0) for label in labels]
    nearest = model.similarity(test, np.stack(centres)).argmax(dim=1).tolist()
    return sum(labels[i] == label for i, label in zip(nearest, held_out["label"], strict=True)) / len(nearest)


def weight_change(model: SentenceTransformer, start: dict[str, torch.Tensor], expert: str) -> float:
    weights = model[0].auto_model.named_parameters()
    return max((w.cpu() - start[name]).abs().max().item() for name, w in weights if f".experts.{expert}." in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(HERE / "small-encoder"), help="dense encoder")
    parser.add_argument("--out", help="folder for the trained model (default: it is not kept)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    set_seed(42)
    tldr = read("retrieval/tldr_pages/train.jsonl.gz").train_test_split(100, seed=42)
    banking, banking_test = (read(f"classification/banking77/{split}.jsonl.gz") for split in ("train", "test"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = mote.upcycle(options.src, Path(temporary) / "encoder-mote")
        model = SentenceTransformer(str(folder), trust_remote_code=True)
        start = {name: weight.detach().cpu().clone() for name, weight in model[0].auto_model.named_parameters()}
        searched = search_accuracy(model, tldr["test"])
        classified = classification_accuracy(model, banking, banking_test)
        train(model, tldr["train"], banking, Path(temporary) / "training", options.steps)
        print(f"\nsearch, right command first:  {searched:.3f} → {search_accuracy(model, tldr['test']):.3f}")
        after = classification_accuracy(model, banking, banking_test)
        print(f"classification, accuracy:     {classified:.3f} → {after:.3f}")
        print("largest change of a weight, by expert (there was no data for clustering):")
        for expert in model[0].auto_model.config.experts:
            print(f"  {expert:<16}{weight_change(model, start, expert):.1e}")
        if options.out:
            model.save(options.out)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
