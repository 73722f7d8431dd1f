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
import gzip
import hashlib
import json
import logging
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer

from scripts.text_sets import ENCODER_SETS

logger = logging.getLogger("distill_small_encoder")

# 3 layers of width 256 with feed-forward 512 and 8,192 pieces are 3.7 M parameters: 7.5 MB in fp16, 7.7 MB with the
# tokenizer. Two layers with feed-forward 1024 would be as large; three let a word see its neighbours once more.
VOCABULARY_SIZE = 8192
DIMENSIONS = 256
LAYERS = 3
HEADS = 4
FEED_FORWARD = 512
# The student's positions end here, so training goes as far: an untrained position would be noise in long texts.
MAX_TOKENS = 256
MAX_FOLDER_BYTES = 7_800_000

TEACHER_CHUNK = 50_000  # texts a cached file of teacher embeddings holds
LENGTH_GROUPS = (("short", 100), ("medium", 400), ("long", 10**9))  # name, characters up to which a text belongs
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])")


TEXT_COLUMNS = ("query", "positive", "text")


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a gzip-packed JSON lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def crops(text: str, generator: random.Random, count: int = 3) -> Iterator[str]:
    """Yield a few runs of one to three sentences of a long text.

    Documents outnumber sentences in the sets, whereas people search sentences.
    """
    sentences = SENTENCE_END.split(text)
    if len(text) <= 300 or len(sentences) < 3:
        return
    for _ in range(count):
        length = generator.choice((1, 1, 2, 3))
        start = generator.randrange(len(sentences) - length + 1)
        yield " ".join(sentences[start : start + length])


def usable(text: str) -> bool:
    """Whether a text has enough letters for its embedding to mean something."""
    return sum(map(str.isalpha, text[:200])) >= 3


def collect_texts(data: Path, limit: int | None, seed: int) -> tuple[list[str], dict[str, int]]:
    """Gather the distinct training texts, in an order that only the seed decides.

    Args:
        data: folder of the data sets.
        limit: how many texts to keep, or None for all.
        seed: of the crops and of the order.

    Returns:
        The texts, and how many of all of them came from which set.
    """
    generator = random.Random(seed)
    texts: dict[str, None] = {}
    counts = {}
    for text_set in ENCODER_SETS:
        before = len(texts)
        for row in read_rows(data / text_set.path / "train.jsonl.gz"):
            for text in (row[column] for column in TEXT_COLUMNS if column in row):
                texts.update(dict.fromkeys(filter(usable, (text, *crops(text, generator)))))
        counts[text_set.path] = len(texts) - before
    shuffled = list(texts)
    generator.shuffle(shuffled)
    return shuffled[:limit], counts


# ---------------------------------------------------------------------------------------------------------------------
# Vocabulary


def document_frequencies(tokenizer: BertTokenizer, texts: Sequence[str]) -> Counter[int]:
    """Count in how many texts each piece of the teacher's vocabulary occurs."""
    frequencies: Counter[int] = Counter()
    for start in range(0, len(texts), 5000):
        for encoding in tokenizer.backend_tokenizer.encode_batch(
            list(texts[start : start + 5000]), add_special_tokens=False
        ):
            frequencies.update(set(encoding.ids))
    return frequencies


def choose_pieces(tokenizer: BertTokenizer, texts: Sequence[str], size: int) -> list[str]:
    """Choose the pieces of the teacher's vocabulary that the student keeps.

    Kept rather than trained again, for two reasons. Each piece's embedding can start as the teacher's. And a WordPiece
    vocabulary trained on these texts splits more words of texts that it was not trained on: 20% of the words of the
    STS benchmark's dev part, against 11% with this choice (and 4% with the teacher's whole vocabulary).

    Always kept: special tokens, ASCII characters and the other characters that occur five times, each at the start of
    a word and inside one, so that any word can be spelt. Then the pieces with the smallest sum of two ranks: by the
    number of texts here that have it, and by its id in the teacher, since BERT's ids go by frequency in books and
    encyclopaedia. The second keeps everyday words that manuals and forums have little use for.
    """
    ids = tokenizer.get_vocab()
    frequencies = document_frequencies(tokenizer, texts)
    by_frequency = sorted(ids, key=lambda piece: (-frequencies[ids[piece]], ids[piece]))
    ranks = {piece: rank for rank, piece in enumerate(by_frequency)}

    def is_kept(piece: str) -> bool:
        character = piece.removeprefix("##")
        return len(character) == 1 and (character.isascii() or frequencies[ids[piece]] >= 5)

    kept = [*tokenizer.all_special_tokens, *filter(is_kept, ids)]
    others = ids.keys() - set(kept) - {piece for piece in ids if piece.startswith("[unused")}
    kept += sorted(others, key=lambda piece: (ranks[piece] + ids[piece], ids[piece]))[: size - len(kept)]
    return sorted(kept, key=ids.__getitem__)


# ---------------------------------------------------------------------------------------------------------------------
# Targets


def teacher_fingerprint(folder: Path) -> str:
    """Hash what decides the teacher's embeddings, apart from the texts."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes() + str(MAX_TOKENS).encode()).hexdigest()


def embed_with_teacher(
    teacher: SentenceTransformer, fingerprint: str, texts: Sequence[str], cache: Path
) -> np.ndarray:  # (texts, teacher dimensions), float16
    """Embed the texts with the teacher, a chunk at a time, each kept in a file that a later run finds."""
    cache.mkdir(parents=True, exist_ok=True)
    embeddings = []
    for start in range(0, len(texts), TEACHER_CHUNK):
        chunk = list(texts[start : start + TEACHER_CHUNK])
        key = hashlib.sha256(json.dumps([fingerprint, chunk]).encode()).hexdigest()[:20]
        path = cache / f"teacher-{key}.npy"
        if not path.exists():
            logger.info("teacher: texts %d to %d of %d", start, start + len(chunk), len(texts))
            unfinished = path.with_suffix(".part.npy")
            np.save(unfinished, teacher.encode(chunk, batch_size=encode_batch_size()).astype(np.float16))
            unfinished.replace(path)
        embeddings.append(np.load(path))
    return np.concatenate(embeddings)


def principal_directions(rows: np.ndarray, dimensions: int) -> tuple[np.ndarray, float]:
    """Find the directions that keep most of the rows' length (PCA without centring, since a cosine has no centre).

    Args:
        rows: (count, width).
        dimensions: how many directions to keep.

    Returns:
        The directions, orthonormal rows of shape (dimensions, width), and the kept share of the squared length.
    """
    moment = np.zeros((rows.shape[1], rows.shape[1]))
    for start in range(0, len(rows), TEACHER_CHUNK):
        chunk = rows[start : start + TEACHER_CHUNK].astype(np.float32)
        moment += chunk.T @ chunk
    values, vectors = np.linalg.eigh(moment)
    return vectors[:, ::-1][:, :dimensions].T.astype(np.float32), float(values[-dimensions:].sum() / values.sum())


def reduce_rows(embeddings: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Project embeddings on the directions and give them length 1 again: (texts, dimensions), float32."""
    reduced = np.empty((len(embeddings), len(directions)), dtype=np.float32)
    for start in range(0, len(embeddings), TEACHER_CHUNK):
        rows = embeddings[start : start + TEACHER_CHUNK].astype(np.float32) @ directions.T
        reduced[start : start + len(rows)] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return reduced


def reduced_teacher(teacher: SentenceTransformer, directions: np.ndarray) -> SentenceTransformer:
    """Build the teacher with the projection as its last module: what a perfect student would be."""
    dense = Dense(directions.shape[1], directions.shape[0], bias=False, activation_function=torch.nn.Identity())
    dense.linear.weight = torch.nn.Parameter(torch.from_numpy(directions.copy()))
    return SentenceTransformer(modules=[*teacher.children(), dense, Normalize()], device=str(teacher.device))


# ---------------------------------------------------------------------------------------------------------------------
# Student


def copy_embeddings(student: BertModel, teacher: BertModel, teacher_ids: Sequence[int]) -> None:
    """Start the student's word, position and segment embeddings as the teacher's, projected by one PCA.

    Args:
        student: whose embeddings are overwritten.
        teacher: whose embeddings are read.
        teacher_ids: the teacher's id of each of the student's pieces.
    """
    words = teacher.embeddings.word_embeddings.weight.detach()[list(teacher_ids)]
    projection = torch.from_numpy(principal_directions(words.numpy(), student.config.hidden_size)[0]).T
    with torch.no_grad():
        student.embeddings.word_embeddings.weight.copy_(words @ projection)
        for name in ("position_embeddings", "token_type_embeddings"):
            target = getattr(student.embeddings, name).weight
            target.copy_(getattr(teacher.embeddings, name).weight[: len(target)] @ projection)


def build_student(teacher_folder: Path, texts: Sequence[str], folder: Path) -> SentenceTransformer:
    """Build the untrained student, through a folder from which sentence-transformers loads its first module."""
    teacher_tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    if not isinstance(teacher_tokenizer, BertTokenizer):
        raise TypeError(f"The teacher's tokenizer is a {type(teacher_tokenizer).__name__}; expected a BertTokenizer.")
    pieces = choose_pieces(teacher_tokenizer, texts, VOCABULARY_SIZE)
    tokenizer = BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        do_lower_case=True,
        model_max_length=MAX_TOKENS,
    )
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=DIMENSIONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        # So small a student does not learn its texts by heart: dropout would only take capacity away.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config, add_pooling_layer=False)
    copy_embeddings(model, AutoModel.from_pretrained(teacher_folder), teacher_tokenizer.convert_tokens_to_ids(pieces))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = Transformer(str(folder), model_kwargs={"add_pooling_layer": False}, max_seq_length=MAX_TOKENS)
    return SentenceTransformer(modules=[transformer, Pooling(DIMENSIONS, "mean"), Normalize()])


# ---------------------------------------------------------------------------------------------------------------------
# Training


def length_groups(texts: Sequence[str], targets: np.ndarray) -> datasets.DatasetDict:
    """Make one data set for each range of lengths.

    The trainer fills a batch from one data set, so short texts are not padded to the length of long ones.
    """
    lengths = np.array([len(text) for text in texts])
    groups = {}
    shortest = 0
    for name, longest in LENGTH_GROUPS:
        rows = np.flatnonzero((lengths > shortest) & (lengths <= longest))
        if len(rows):
            groups[name] = datasets.Dataset.from_dict({"text": [texts[row] for row in rows], "label": targets[rows]})
        shortest = longest
    return datasets.DatasetDict(groups)


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


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def encode_batch_size() -> int:
    """How many texts to embed at once."""
    return 512 if torch.cuda.is_available() else 32


def sts_evaluator(data: Path, part: str) -> EmbeddingSimilarityEvaluator:
    """Make the evaluator of a part ("dev" or "test") of the STS benchmark."""
    rows = list(read_rows(data / "sts/stsbenchmark" / f"{part}.jsonl.gz"))
    return EmbeddingSimilarityEvaluator(
        [row["sentence1"] for row in rows],
        [row["sentence2"] for row in rows],
        [row["score"] for row in rows],
        batch_size=encode_batch_size(),
        name=f"sts-{part}",
        write_csv=False,
    )


def retrieval_evaluator(data: Path) -> InformationRetrievalEvaluator:
    """Make the evaluator of NFCorpus's test queries. The library's judgements are binary."""
    folder = data / "beir/nfcorpus"
    relevant: dict[str, set[str]] = {}
    for line in (folder / "qrels/test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, score = line.split("\t")
        if float(score) > 0:
            relevant.setdefault(query, set()).add(document)
    return InformationRetrievalEvaluator(
        {row["_id"]: row["text"] for row in read_rows(folder / "queries.jsonl.gz") if row["_id"] in relevant},
        {row["_id"]: f"{row['title']} {row['text']}".strip() for row in read_rows(folder / "corpus.jsonl.gz")},
        relevant,
        batch_size=encode_batch_size(),
        name="nfcorpus",
        write_csv=False,
    )


def evaluate(model: SentenceTransformer, data: Path) -> dict[str, float]:
    """Measure a model on held-out data: figure's name to its value times 100."""
    figures = {
        f"STS benchmark {part}, Spearman": sts_evaluator(data, part)(model)[f"sts-{part}_spearman_cosine"]
        for part in ("dev", "test")
    }
    retrieval = retrieval_evaluator(data)(model)
    figures["NFCorpus test, nDCG@10"] = retrieval["nfcorpus_cosine_ndcg@10"]
    figures["NFCorpus test, MRR@10"] = retrieval["nfcorpus_cosine_mrr@10"]
    return {name: 100 * value for name, value in figures.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def save_student(student: SentenceTransformer, untrained: Path, folder: Path) -> None:
    """Write the student's folder.

    The weights are stored in fp16, while the config says float32, so that they load into fp32. The tokenizer's files
    are those of the untrained student: one that has been used stores its last truncation and padding.
    """
    student.save_pretrained(str(folder), create_model_card=False)
    weights = folder / "model.safetensors"
    halved = {name: tensor.half().contiguous() for name, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(untrained / name, folder / name)


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_folder(folder: Path, student: SentenceTransformer, texts: Sequence[str]) -> SentenceTransformer:
    """Load the folder as its users will, and compare it with the student that it was written from.

    Raises:
        RuntimeError: weights are missing, or left over, or the embeddings differ by more than fp16 explains.
    """
    _, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    missing = set(loading["missing_keys"]) - {"pooler.dense.weight", "pooler.dense.bias"}
    if missing or loading["unexpected_keys"]:
        raise RuntimeError(f"{folder}: missing {sorted(missing)}, unexpected {sorted(loading['unexpected_keys'])}")
    if (length := AutoTokenizer.from_pretrained(folder)("A TEST", return_length=True)["length"]) != [4]:
        raise RuntimeError(f"{folder}: the tokenizer should give 'A TEST' four tokens, got {length}")
    loaded = SentenceTransformer(str(folder))
    cosines = (loaded.encode(list(texts)) * student.encode(list(texts))).sum(axis=1)
    if cosines.min() < 0.9999:
        raise RuntimeError(f"{folder}: loaded and trained student differ: smallest cosine {cosines.min():.6f}")
    return loaded


CARD = """\
---
license: apache-2.0
language: en
library_name: sentence-transformers
pipeline_tag: sentence-similarity
base_model: sentence-transformers/all-MiniLM-L6-v2
tags:
- sentence-transformers
- sentence-similarity
- feature-extraction
- distillation
---

# A small sentence encoder

A dense English sentence encoder of {megabytes:.1f} MB, small enough to ship with the repository's code:
{parameters:.2f} M parameters, {layers} BERT layers of width {dimensions} ({heads} heads, feed-forward {feed_forward}),
{vocabulary:,} word pieces, texts up to {tokens} tokens. It is distilled from `all-MiniLM-L6-v2` and meant for trying
things out: when quality matters, use the teacher.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("examples/small-encoder")
documents = ["The cat sleeps on the sofa.", "Interest rates rose again.", "Boil the pasta for ten minutes."]
print(model.similarity(model.encode("how do I cook noodles"), model.encode(documents)))
```

## Figures

| x 100 | this model | teacher | teacher, {dimensions} dimensions |
| --- | --- | --- | --- |
{figures}

Measured with the evaluators of sentence-transformers on the fp16 file in this folder. Relevance in NFCorpus is treated
as binary, so its figures cannot be compared with published ones. The last column is the upper bound for distillation
into {dimensions} dimensions. Neither dataset was trained on, and nothing was chosen on a test split.

## How it was made

```
{command}
```

- **Texts**: {texts:,} distinct texts{limited}: all columns of the datasets below, train splits only, and runs of one to
  three sentences from the long texts. No labels were used.
- **Targets**: the teacher's embeddings projected onto their {dimensions} principal directions, which hold {kept:.1%} of
  the squared length, and scaled to length 1 again.
- **Student**: word, position and segment embeddings are initialised with the teacher's, projected by a PCA; the layers
  are initialised at random. The word pieces are the teacher's most useful {vocabulary:,}; the model is uncased.
- **Training**: `EmbedDistillLoss` (cosine), AdamW, {epochs} epochs, batches of {batch_size} texts of similar length,
  learning rate {learning_rate} with 5% warm-up and cosine decay, weight decay 0.01, no dropout, seed {seed}.
  {minutes:.1f} minutes on {device}, including the teacher's embeddings. transformers {transformers},
  sentence-transformers {sentence_transformers}, torch {torch}.
- **Format**: weights in fp16, loaded into fp32 (set in the config). BERT's pooler is not in the file, and not used.

## Texts and their licences

The texts themselves are not in this folder.

| set | from | licence | texts |
| --- | --- | --- | --- |
{sets}

## Licence

Apache-2.0, as is the teacher, [all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) by
the sentence-transformers authors.
"""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as the body of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown_command(options: argparse.Namespace) -> str:
    """Write down the command, with the last part of each path only."""
    shown = [f"--teacher {options.teacher.name} --data {options.data.name} --out {options.out.name}"]
    shown += [f"--epochs {options.epochs} --batch-size {options.batch_size} --learning-rate {options.learning_rate}"]
    shown += [f"--seed {options.seed}" + (f" --limit {options.limit}" if options.limit else "")]
    return "python -m scripts.distill_small_encoder " + " \\\n    ".join(shown)


@dataclass(frozen=True)
class Facts:
    """What a run found out that its card tells."""

    texts: int
    kept: float  # share of the teacher's squared length
    minutes: float
    parameters: float  # millions


def write_card(
    options: argparse.Namespace, measured: Sequence[dict[str, float]], counts: dict[str, int], facts: Facts
) -> None:
    """Write the model card.

    Args:
        options: the command line.
        measured: the figures of student, teacher and reduced teacher.
        counts: how many texts came from which set.
        facts: the other numbers.
    """
    figures = [[name, *(f"{figures[name]:.2f}" for figures in measured)] for name in measured[0]]
    sets = [
        [text_set.path, text_set.source, text_set.licence, f"{counts[text_set.path]:,}"] for text_set in ENCODER_SETS
    ]
    card = CARD.format(
        megabytes=folder_bytes(options.out) / 1e6,
        layers=LAYERS,
        dimensions=DIMENSIONS,
        heads=HEADS,
        feed_forward=FEED_FORWARD,
        vocabulary=VOCABULARY_SIZE,
        tokens=MAX_TOKENS,
        figures=table(figures),
        sets=table(sets),
        command=shown_command(options),
        limited=f" (a trial: of {sum(counts.values()):,})" if options.limit else "",
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
        transformers=transformers.__version__,
        sentence_transformers=sentence_transformers.__version__,
        torch=torch.__version__,
        **asdict(facts),
    )
    (options.out / "README.md").write_text(card, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------


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


def load_teacher(folder: Path) -> SentenceTransformer:
    """Load the teacher, set to cut texts where the student does."""
    teacher = SentenceTransformer(str(folder))
    teacher.max_seq_length = MAX_TOKENS
    return teacher.half() if torch.cuda.is_available() else teacher


def measure(models: dict[str, SentenceTransformer], data: Path) -> list[dict[str, float]]:
    """Measure the models one after another, and log what comes out."""
    measured = []
    for name, model in models.items():
        measured.append(evaluate(model.float(), data))
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

    teacher = load_teacher(options.teacher)
    embeddings = embed_with_teacher(teacher, teacher_fingerprint(options.teacher), texts, options.work_dir)
    directions, kept = principal_directions(embeddings, DIMENSIONS)
    logger.info("%d dimensions keep %.1f%% of the teacher's squared length", DIMENSIONS, 100 * kept)

    train_dataset = length_groups(texts, reduce_rows(embeddings, directions))
    train(student, train_dataset, sts_evaluator(options.data, "dev"), options)
    save_student(student, untrained, options.out)
    student = check_folder(options.out, student, texts[:200])
    minutes = (time.monotonic() - start) / 60

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
