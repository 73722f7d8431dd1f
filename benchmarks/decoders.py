"""Decoders as embedders: bidirectional and latent attention, NV-Embed's Table 2 (arXiv:2405.17428), small.

    python -m benchmarks.decoders --data DATA --out RUNS [--seeds 42 43]
    python -m benchmarks.decoders --data DATA --out RUNS --quick          # minutes: only checks that it runs

A small Mistral is pre-trained on the texts of DATA with the causal language-modelling objective, then trained for
retrieval with the recipe `nv-stage1` and BM25 negatives: with causal or bidirectional attention, and with mean or
latent-attention pooling, all else equal. Existing results are reused, and an interrupted command resumes; several
commands can share the work. Prints the table; writes `scores.json`.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import mote
from benchmarks.locking import alone, share
from benchmarks.paper.runs import Scores
from benchmarks.paper.tables import cell, datasets_of
from benchmarks.trained import trained
from mote.corpora import MiningSettings, Teacher
from mote.data.columns import check_row, find_columns
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSettings
from mote.evaluation.statistics import compare_scores
from mote.reporting import console_logging, markdown_table
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import step_of

logger = logging.getLogger("mote.benchmarks")

FOLDERS = ("retrieval/*", "classification/*", "clustering/*")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
VOCABULARY, END = 8192, "</s>"
PRETRAINING: dict[str, Any] = {
    "max_steps": 1200,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-3,
    "warmup_steps": 60,
}
BLOCK = 128  # tokens of concatenated texts
DIRECTIONS = {"causal": False, "bidirectional": True}
POOLINGS = {"mean": (), "latent attention": ("model.pooling_latents=64", "model.pooling_head_dim=64")}
PAPER = {
    ("causal", "mean"): (62.32, 57.55),
    ("causal", "latent attention"): (63.39, 57.65),
    ("bidirectional", "mean"): (64.00, 58.42),
    ("bidirectional", "latent attention"): (64.18, 59.00),
}
"""Variant → mean over MTEB's 56 datasets, and over its retrieval datasets, after the first stage."""
DATASETS = (
    "medquad",
    "stackexchange_qa",
    "stackexchange_title_body",
    "scitldr",
    "gsm8k",
    "conference_papers",
    "debian",
    "python_docs",
    "reddit",
)
ROWS = 5000  # maximum per dataset
ONE_EXPERT = "{search_query: all, search_document: all, classification: all, clustering: all}"
LENGTHS = "{anchor: 32, positive: 48, negative: 48}"
TRAINING = (
    "model.kind=mote",  # dense models do not pool by attention; a MoTE with one expert is equivalent
    "model.experts=[all]",
    f"model.tasks={ONE_EXPERT}",
    "model.max_length=128",
    "model.end_token=eos",  # so that even an empty text has a token
    f"tasks.retrieval.datasets=[{{path: retrieval/*, negatives: 1, max_length: {LENGTHS}}}]",
    "training.peft=null",  # such a small decoder learns too little with LoRA
    "training.gradient_checkpointing=false",
    "training.mini_batch_size=null",
    "training.batch_size=64",
    "training.max_steps=300",
    "training.warmup_steps=30",
    "training.learning_rate=5e-4",
    "validation.limit=40",
)
LIMITS = {
    ("beir/*", "reranking/*"): 100,
    ("classification/*", "clustering/*", "pair/*", "sts/*", "summarization/*"): 200,
}
QUICK = ("training.max_steps=2", "training.batch_size=8")


@dataclass(frozen=True)
class Comparison:
    """Models of the comparison, and their scores.

    Attributes:
        data: Data folder.
        out: Folder for the decoder, negatives, models and scores.
        seeds: Seeds of the contrastive training.
        quick: Whether to use only a few texts and steps.
    """

    data: Path
    out: Path
    seeds: list[int]
    quick: bool

    def decoder(self) -> Path:
        """Return the folder of the pre-trained decoder as an encoder; train it first if it does not exist."""
        folder = self.out / "decoder"
        with alone(folder):
            if not (folder / "model").exists():
                self._pretrain(folder)
        return folder / "model"

    def _pretrain(self, folder: Path) -> None:
        """Pre-train a decoder by causal language modelling with transformers' trainer; resume if interrupted."""
        if not (folder / "tokenizer").exists():
            _tokenizer(self._texts()).save_pretrained(folder / "tokenizer")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        set_seed(42)
        end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
        ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": end, "pad_token_id": padding}
        model = MistralForCausalLM(MistralConfig(**ids, **SIZES))
        settings = PRETRAINING | ({"max_steps": 2, "warmup_steps": 0} if self.quick else {})
        arguments = TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=300,
            save_steps=200,
            save_total_limit=2,
            report_to="none",
            **settings,
        )
        blocks = Dataset.from_dict({"input_ids": _blocks(tokenizer, self._texts())}).train_test_split(200, seed=42)
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(
            model, arguments, train_dataset=blocks["train"], eval_dataset=blocks["test"], data_collator=collator
        )
        complete = [file.parent for file in (folder / "checkpoints").glob("*/trainer_state.json")]  # written last
        last = max(complete, key=step_of, default=None)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        logger.info("loss on held-out texts: %.3f", trainer.evaluate()["eval_loss"])
        model.model.save_pretrained(folder / "backbone")
        tokenizer.save_pretrained(folder / "backbone")
        backbone = Transformer(str(folder / "backbone"), max_seq_length=128)
        embedder = SentenceTransformer(modules=[backbone, Pooling(SIZES["hidden_size"], "mean")])
        embedder.save(str(folder / "unfinished"))
        (folder / "unfinished").replace(folder / "model")

    def _texts(self) -> Iterator[str]:
        """Yield the texts of the training splits, row by row."""
        for pattern in FOLDERS:
            for location in find_datasets(DatasetSettings(path=pattern), self.data):
                rows = [row.content for row in read_rows(location)][: 30 if self.quick else None]
                columns = find_columns(location.settings, rows[0], location.name)
                for content in rows:
                    example = check_row(content, columns)
                    yield from (example.anchor, *example.positives)

    def mined(self) -> Path:
        """Return the folder of the pairs with one BM25 negative each; mine them first if they do not exist."""
        datasets = [f"retrieval/{name}" for name in DATASETS]
        settings = MiningSettings(negatives=1, depth=30, sampling="random", relative_margin=None)
        with alone(self.out / "mined"):
            return mote.mine_negatives(datasets, self.out / "mined", Teacher(model="bm25"), settings, data=self.data)

    def model(self, direction: str, pooling: str, seed: int) -> Path:
        """Return a trained model; train it first if it does not exist."""
        folder = self.out / _name(direction, pooling, seed)
        own = [f"model.source={self.decoder()}", f"model.bidirectional={DIRECTIONS[direction]}"]
        own += [f"model.pooling={pooling.replace(' ', '_')}", *POOLINGS[pooling]]
        own += [f"data.folder={self.mined()}", f"data.limit={ROWS}", f"output={folder}", f"training.seed={seed}"]
        return trained(load_recipe("nv-stage1", [*TRAINING, *own, *(QUICK if self.quick else ())]))

    def runs(self) -> list[tuple[str, str, int]]:
        """Return variants and seeds; the first seed of every variant comes first."""
        return [(*variant, seed) for seed in self.seeds for variant in product(DIRECTIONS, POOLINGS)]

    def evaluations(self, run: tuple[str, str, int], timeout: float = -1) -> list[mote.Evaluation]:
        """Score a model on the seven task types."""
        label = _name(*run)
        with alone(self.out / "scores" / label, timeout):
            path = str(self.model(*run))
            return [
                mote.evaluate(
                    {label: path},
                    data=self.data,
                    tasks=list(patterns),
                    limit=5 if self.quick else limit,
                    dtype="bfloat16",
                    out=self.out / "scores" / label / f"limit-{limit}",
                    trust_remote_code=True,
                )
                for patterns, limit in LIMITS.items()
            ]

    def scores(self) -> Scores:
        """Score all models, starting with those that no other command is working on."""
        share(partial(self.evaluations, run) for run in self.runs())
        every: dict[str, dict[str, list[float]]] = {}
        types: dict[str, str] = {}
        for direction, pooling, seed in self.runs():
            for evaluation in self.evaluations((direction, pooling, seed)):
                if evaluation.failed():
                    raise RuntimeError("; ".join(evaluation.failed()))
                types |= evaluation.types
                for dataset, score in evaluation.scores[_name(direction, pooling, seed)].items():
                    every.setdefault(f"{direction}, {pooling}", {}).setdefault(dataset, []).append(score)
        return Scores(every, types)


def report(scores: Scores) -> str:
    """Format our scores next to the paper's, with paired tests over the datasets."""
    everything, retrieval = (datasets_of(scores, types, tuple(scores.every)) for types in ((), ("Retrieval",)))
    rows = []
    for (direction, pooling), paper in PAPER.items():
        name = f"{direction}, {pooling}"
        cells = [str(cell(scores, name, datasets)) for datasets in (everything, retrieval)]
        rows.append([name, *cells, *(f"{score:.2f}" for score in paper)])
    columns = [
        "",
        f"all ({len(everything)})",
        f"retrieval ({len(retrieval)})",
        "paper: all (56)",
        "paper: retrieval (15)",
    ]
    lines = [markdown_table(columns, rows), ""]
    for better, other in (
        ("bidirectional, mean", "causal, mean"),
        ("bidirectional, latent attention", "causal, latent attention"),
        ("causal, latent attention", "causal, mean"),
        ("bidirectional, latent attention", "bidirectional, mean"),
    ):
        means = [[mean(scores.every[name][dataset]) for dataset in everything] for name in (better, other)]
        lines.append(f"- {compare_scores(better, other, *means)}")
    return "\n".join(lines)


def _tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END, "<pad>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>")


def _blocks(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> list[list[int]]:
    """Concatenate texts, each followed by an end token, and cut them into blocks."""
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    tokens = list(chain.from_iterable([*text, tokenizer.eos_token_id] for text in encoded))
    return [tokens[start : start + BLOCK] for start in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def _name(direction: str, pooling: str, seed: int) -> str:
    return f"{direction}-{pooling.replace(' ', '-')}-seed{seed}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    console_logging()
    out = given.out / "quick" if given.quick else given.out
    scores = Comparison(given.data, out, given.seeds, given.quick).scores()
    (out / "scores.json").write_text(json.dumps(asdict(scores), indent=1) + "\n", encoding="utf-8")
    print(report(scores))


if __name__ == "__main__":
    main()
