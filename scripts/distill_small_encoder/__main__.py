"""Distil a sentence encoder that is small enough to live in a git repository.

The student learns to give every text the teacher's embedding, reduced to fewer dimensions. This is the recipe of
sentence-transformers' own distillation examples (https://sbert.net/examples/sentence_transformer/training/distillation):

1. texts: distinct texts, and sentences of the long ones, of data sets whose licence lets derived weights be passed on;
2. vocabulary: the 8,192 most useful of the teacher's 30,522 word pieces;
3. targets: the teacher's embeddings, their 256 principal directions kept, of length 1 again;
4. student: a BERT of 3 layers and width 256 whose embeddings start as the teacher's, projected;
5. training: `SentenceTransformerTrainer` with `EmbedDistillLoss`;
6. the folder: fp16 weights, tokenizer, sentence-transformers files, a card with the figures; read back and measured.

Run it (a few minutes on a GPU; for a trial on a CPU add `--limit 2000 --epochs 1 --batch-size 32`, ten minutes of
which nine measure the teacher)::

    python -m scripts.distill_small_encoder --teacher checkpoints/all-MiniLM-L6-v2 --data data \
        --out examples/small-encoder --work-dir /tmp/distill-small-encoder

`--teacher` is a sentence-transformers folder with a BERT model, `--data` holds `<set>/train.jsonl.gz` for every set in
`ENCODER_SETS`, and `sts/stsbenchmark` and `beir/nfcorpus` for the figures. A second run with the same `--work-dir`,
texts and teacher finds the teacher's embeddings there.

Needs: mote[train] (`datasets` besides `sentence-transformers`).
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss

from mote.training.recipe import TeacherSettings
from mote.training.teachers import TeacherEmbeddings
from scripts.distill_small_encoder.card import Facts, write_card
from scripts.distill_small_encoder.figures import encode_batch_size, evaluate, sts_evaluator
from scripts.distill_small_encoder.student import DIMENSIONS, build_student, check_folder, folder_bytes, save_student
from scripts.distill_small_encoder.targets import principal_directions, reduce_rows, reduced_teacher
from scripts.distill_small_encoder.texts import collect_texts, length_groups

logger = logging.getLogger("distill_small_encoder")

MAX_FOLDER_BYTES = 7_800_000


def train(
    student: SentenceTransformer,
    train_dataset: datasets.DatasetDict,
    evaluator: EmbeddingSimilarityEvaluator,
    options: argparse.Namespace,
) -> None:
    """Train the student to give each text the label's embedding."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the loader's processes are the parallel ones here
    workers = max(0, min(14, (os.cpu_count() or 1) - 2))
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(options.work_dir / "trainer"),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.01,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_prefetch_factor=4 if workers else None,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=100,
        report_to="none",
        seed=options.seed,
    )
    SentenceTransformerTrainer(
        model=student,
        args=arguments,
        train_dataset=train_dataset,
        # On vectors of length 1 this is the mean squared error, except for a factor (two over the number of
        # dimensions) that would make the loss too small to read.
        loss=EmbedDistillLoss(student, distance_metric="cosine"),
        evaluator=evaluator,
    ).train()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="sentence-transformers folder with a BERT model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, help="train on so many texts only, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "distill-small-encoder")
    return parser.parse_args()


def measure(models: dict[str, SentenceTransformer], data: Path) -> list[dict[str, float]]:
    """Measure the models one after another, and log what comes out."""
    measured = []
    for name, model in models.items():
        measured.append(evaluate(model, data))
        logger.info("%s: %s", name, {figure: round(value, 2) for figure, value in measured[-1].items()})
    return measured


def main() -> None:
    """Distil the student and write its folder."""
    options = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logger.setLevel(logging.INFO)
    transformers.set_seed(options.seed)
    start = time.monotonic()

    texts, counts = collect_texts(options.data, options.limit, options.seed)
    logger.info("%d texts of %d", len(texts), sum(counts.values()))
    untrained = options.work_dir / "untrained"
    student = build_student(options.teacher, texts, untrained)

    settings = TeacherSettings(source=str(options.teacher), batch_size=encode_batch_size())
    chunks = TeacherEmbeddings(settings, options.work_dir / "teacher").embed({"text": texts})
    embeddings = np.concatenate(chunks)[:, 0]
    directions, kept = principal_directions(embeddings, DIMENSIONS)
    logger.info("%d dimensions keep %.1f%% of the teacher's squared length", DIMENSIONS, 100 * kept)

    train_dataset = length_groups(texts, reduce_rows(embeddings, directions))
    train(student, train_dataset, sts_evaluator(options.data, "dev"), options)
    save_student(student, untrained, options.out)
    student = check_folder(options.out, student, texts[:200])
    minutes = (time.monotonic() - start) / 60

    teacher = SentenceTransformer(str(options.teacher))
    models = {"student": student, "teacher": teacher, "reduced teacher": reduced_teacher(teacher, directions)}
    measured = measure(models, options.data)
    parameters = sum(tensor.numel() for tensor in load_file(options.out / "model.safetensors").values()) / 1e6
    write_card(options, measured, counts, Facts(len(texts), kept, minutes, parameters))

    size = folder_bytes(options.out)
    logger.info("wrote %s: %d bytes, %.1f minutes", options.out, size, (time.monotonic() - start) / 60)
    if size > MAX_FOLDER_BYTES:
        raise RuntimeError(f"{options.out} has {size} bytes; the repository takes {MAX_FOLDER_BYTES}.")


if __name__ == "__main__":
    main()
