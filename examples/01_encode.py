"""Turn a dense encoder into a MoTE and embed texts under several tasks.

    python examples/01_encode.py [--src FOLDER_OR_HUB_ID]

Runs in seconds on a CPU, without a network: the default source is the small encoder of this repository.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import mote

SMALL_ENCODER = Path(__file__).parent / "small-encoder"
TEXTS = [
    "Whales are mammals: they breathe air through a blowhole.",
    "To undo the last commit but keep your changes, run git reset --soft HEAD~1.",
    "Inflation means that prices rise and money buys less than before.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", default=str(SMALL_ENCODER), help="dense encoder")
    source = parser.parse_args().src
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(mote.upcycle(source, Path(temporary) / "encoder-mote"))
        with_sentence_transformers(source, folder)
        with_transformers(folder)


def with_sentence_transformers(source: str, folder: str) -> None:
    model = SentenceTransformer(folder, trust_remote_code=True)
    print("task → expert (instruction)")
    config = model[0].auto_model.config
    for task, expert in config.tasks.items():
        print(f"  {task:<20}→ {expert:<16}({config.instruction_of(task)!r})")

    embeddings = model.encode(TEXTS, prompt_name="clustering")  # adds the instruction and picks its expert
    print("\nencode(texts, prompt_name='clustering'):", embeddings.shape)
    print("encode_query(texts):                    ", model.encode_query(TEXTS).shape)
    print("encode_document(texts):                 ", model.encode_document(TEXTS).shape)
    print("encode(texts, task='sts'):              ", model.encode(TEXTS, task="sts").shape)

    # Without an instruction, every expert of a fresh MoTE embeds exactly like the dense model.
    dense = SentenceTransformer(source).encode(TEXTS)
    difference = abs(model.encode(TEXTS, task="clustering") - dense).max()
    print(f"largest difference from the dense model: {difference:.1e} (experts become different in training)")


def with_transformers(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model(**batch, task=["search_query", "classification", "clustering"])  # one task per row
    print("\nAutoModel, a batch of three tasks:", list(output.pooler_output.shape))
    # A single expert needs no more memory than the dense model.
    alone = AutoModel.from_pretrained(folder, trust_remote_code=True, experts=["search_query"])
    print(f"all experts: {model.num_parameters() / 1e6:.1f} M parameters, one: {alone.num_parameters() / 1e6:.1f} M")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
