"""Add a task to a finished MoTE: a new expert, trained on its own and shared as a separate file.

    pip install -e ".[train]"
    python examples/04_add_a_task.py [--src FOLDER_OR_HUB_ID] [--out FOLDER] [--steps N]

The new task groups trivia questions by topic. Everything else in the model stays the same, bit for bit. Takes less than
a minute on a CPU. In a recipe, `training.only_experts: [trivia]` does the same (docs/training.md).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import BatchAllTripletLoss
from transformers import set_seed
from transformers.utils import logging

import mote
import mote.experts

HERE = Path(__file__).parent


def train_expert(model: SentenceTransformer, expert: str, dataset: Dataset, output: Path, steps: int) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad = f".experts.{expert}." in name
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=2e-4,
        warmup_steps=0.1,
        prompts={"text": f"{expert}: "},
        router_mapping={"text": expert},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    loss = BatchAllTripletLoss(model, margin=0.2)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss).train()


def accuracy(model: SentenceTransformer, task: str, known: Dataset, held_out: Dataset) -> float:
    """Return the share of questions for which the mean embedding of their topic is the nearest."""
    embedded, test = (model.encode(part["text"], prompt_name=task) for part in (known, held_out))
    topics = np.array(known["label"])
    centres = np.stack([embedded[topics == topic].mean(axis=0) for topic in np.unique(topics)])
    nearest = model.similarity(test, centres).argmax(dim=1)
    return float(np.mean(np.unique(topics)[nearest.numpy()] == np.array(held_out["label"])))


def megabytes(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(HERE / "small-encoder"), help="dense encoder")
    parser.add_argument("--out", help="folder for the results (default: they are not kept)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    set_seed(42)
    trivia = load_dataset("json", data_files=str(HERE / "data/clustering/open_trivia/train.jsonl.gz"), split="train")
    trivia = trivia.class_encode_column("label").train_test_split(150, seed=42)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(options.out or temporary)
        finished = mote.upcycle(options.src, out / "finished")  # stands in for a trained MoTE

        # The same function adds an expert in memory: mote.experts.add(model, "trivia", …).
        larger = mote.transform(
            finished, out / "with-trivia", mote.experts.add, "trivia", "clustering", instruction="trivia: "
        )
        model = SentenceTransformer(str(larger), trust_remote_code=True)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        print(f"topics, expert clustering: {accuracy(model, 'clustering', trivia['train'], trivia['test']):.3f}")
        train_expert(model, "trivia", trivia["train"], Path(temporary) / "training", options.steps)
        print(f"topics, expert trivia:     {accuracy(model, 'trivia', trivia['train'], trivia['test']):.3f}")

        changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
        elsewhere = [name for name in changed if ".experts.trivia." not in name]
        print(f"weights changed: {len(changed)}, outside the new expert: {len(elsewhere)}")
        model.save(str(out / "trained"))

        # An extracted expert can be added to any MoTE with the same base.
        artefact = mote.experts.extract(str(out / "trained"), "trivia", out / "trivia.safetensors")
        expert, whole = artefact.stat().st_size, sum(file.stat().st_size for file in larger.glob("*.safetensors"))
        print(f"the extracted expert: {expert / 1e6:.1f} MB, the whole model: {whole / 1e6:.1f} MB")
        mote.transform(finished, out / "received", mote.experts.add, "trivia", mote.experts.open_expert(artefact))
        received = SentenceTransformer(str(out / "received"), trust_remote_code=True)
        texts = trivia["test"]["text"][:8]
        ours, theirs = (each.encode(texts, prompt_name="trivia") for each in (model, received))
        print(f"added to the finished model: largest difference {abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
