"""Train a MoTE on two tasks with the plain trainer of Sentence-Transformers.

    pip install -e ".[train]"
    python examples/03_upcycle_and_train.py [--src FOLDER_OR_HUB_ID] [--out FOLDER] [--steps N]

What a MoTE needs beyond a dense model are two arguments: `prompts` puts the instruction of each column in front of its
texts, `router_mapping` names the column's task, which picks the expert. About a minute on a CPU. The paper's recipe,
with its batches, losses and data cleaning, is `mote train mote` (docs/training.md).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import BatchSemiHardTripletLoss, MultipleNegativesRankingLoss
from transformers import set_seed

import mote

HERE = Path(__file__).parent
DATA = HERE / "data"


def read(path: str) -> Dataset:
    return load_dataset("json", data_files=str(DATA / path), split="train")


def train(model: SentenceTransformer, output: Path, steps: int) -> None:
    banking = read("classification/banking77/train.jsonl.gz").class_encode_column("label")
    datasets = {"arxiv": read("retrieval/arxiv/train.jsonl.gz"), "banking77": banking}
    losses = {
        "arxiv": MultipleNegativesRankingLoss(model, scale=30.0),
        "banking77": BatchSemiHardTripletLoss(model, margin=0.3),
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=2e-4,
        warmup_steps=0.1,
        # dataset → column → instruction, and dataset → column → task, which picks the expert
        prompts={
            "arxiv": {"query": "search_query: ", "positive": "search_document: "},
            "banking77": {"text": "classification: "},
        },
        router_mapping={
            "arxiv": {"query": "search_query", "positive": "search_document"},
            "banking77": {"text": "classification"},
        },
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=datasets, loss=losses).train()


def accuracy(model: SentenceTransformer) -> float:
    """Classify each test text of banking77 by the nearest mean of a label's training texts."""
    parts = [read(f"classification/banking77/{split}.jsonl.gz") for split in ("train", "test")]
    train, test = (model.encode(part["text"], prompt_name="classification", convert_to_tensor=True) for part in parts)
    labels = sorted(set(parts[0]["label"]))
    centres = torch.stack([train[[label == other for other in parts[0]["label"]]].mean(0) for label in labels])
    nearest = model.similarity(test, centres).argmax(dim=1).tolist()
    return sum(labels[i] == label for i, label in zip(nearest, parts[1]["label"], strict=True)) / len(nearest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(HERE / "small-encoder"), help="dense encoder")
    parser.add_argument("--out", help="where the trained model goes (default: it is not kept)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    set_seed(42)
    with tempfile.TemporaryDirectory() as temporary:
        folder = mote.upcycle(options.src, Path(temporary) / "encoder-mote")
        model = SentenceTransformer(str(folder), trust_remote_code=True)
        start = {name: weight.clone() for name, weight in model[0].auto_model.named_parameters()}
        before = accuracy(model)
        train(model, Path(temporary) / "training", options.steps)
        print(f"\naccuracy on banking77: {before:.3f} → {accuracy(model):.3f}")
        print("how far each expert moved:")
        for expert in model[0].auto_model.config.experts:
            moved = max(
                (weight.detach().cpu() - start[name]).abs().max().item()
                for name, weight in model[0].auto_model.named_parameters()
                if f".experts.{expert}." in name
            )
            print(f"  {expert:<16}{moved:.1e}" + ("  (no data for it: bit for bit as before)" if moved == 0 else ""))
        if options.out:
            model.save(options.out)


if __name__ == "__main__":
    main()
