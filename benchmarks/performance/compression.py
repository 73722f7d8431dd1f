"""Compressed experts: rank against memory, speed and quality, with 8 bits, Expert Averaging and the dense source."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options
from mote import evaluate, experts, train, transform
from mote.analysis.similarity import cosines, embed
from mote.analysis.weight_change import find_start
from mote.checkpoints.models import load_mote
from mote.checkpoints.reading import open_checkpoint, open_mote
from mote.data.test_sets import find_evaluation_datasets
from mote.data.texts import find_texts
from mote.evaluation.scores import Evaluation
from mote.experts.compression import expert_bytes
from mote.inference.loading import load_encoder

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
SETS = ("beir/cranfield", "classification/tweet_emotion4", "clustering/twenty_newsgroups", "sts/stsbenchmark")
LIMIT = 500  # texts or queries per dataset
WHOLE, AVERAGE, DENSE = "uncompressed", "Expert Averaging", "the dense source"


def measure(options: Options) -> Benchmark:
    """Measure a trained MoTE; from a dense checkpoint, one is first trained on the data for a few steps."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        mote = _trained(options, folder)
        models = {WHOLE: str(mote), **dict(_made_of(mote, folder, options.quick))}
        with suppress(ValueError, FileNotFoundError):  # the source is not recorded, or not available
            models[DENSE] = find_start(str(mote))[0]
        there = {dataset.path for dataset in find_evaluation_datasets(options.data)}
        sets = sorted(there.intersection(SETS) or there)
        limit = 40 if options.quick else LIMIT
        scores = evaluate(
            models,
            data=options.data,
            tasks=sets,
            limit=limit,
            device=options.device,
            out=folder / "scores",
            trust_remote_code=True,
        )
        if scores.failed():
            raise ValueError(f"not all could be scored: {'; '.join(scores.failed())}")
        types = list(scores.means(WHOLE))
        rows = list(_rows(models, scores, options))
        trained = mote == options.checkpoint
    return Benchmark(
        "compression",
        "Compressed experts: memory, speed and quality",
        ["experts", "experts, MB", "of whole", "model, MB", "encode / whole", "cosine", *types, "mean"],
        rows,
        notes=[
            "MoTE: "
            + ("the checkpoint." if trained else "trained from the checkpoint for a few steps, for this benchmark."),
            f"Quality: MTEB's main scores on {', '.join(sets)}, at most about {limit} texts of each; mean over types.",
            "Cosine: with the embeddings of the uncompressed model, mean over the 128 bundled texts and all experts.",
            "Encode / whole: 64 of these texts for one task, median ratio of paired runs.",
        ],
    )


def _trained(options: Options, folder: Path) -> Path:
    """Return the checkpoint if it is a MoTE; otherwise train one from it."""
    if open_checkpoint(str(options.checkpoint)).format == "mote":
        return options.checkpoint
    settings = [f"model.source={options.checkpoint}", f"data.folder={options.data}", f"output={folder / 'run'}"]
    settings += ["training.max_steps=3", "validation.share=0", "training.eval_steps=null"] if options.quick else []
    train("smoke", settings)
    return folder / "run" / "model"


def _made_of(mote: Path, folder: Path, quick: bool) -> Iterator[tuple[str, str]]:
    """Write all models that are compared: name in the table → folder."""
    whole = load_mote(open_mote(str(mote)))
    linears = [module for module in whole.blocks[0].experts.modules() if isinstance(module, torch.nn.Linear)]
    full = max(min(linear.weight.shape) for linear in linears)
    for rank in (*((1,) if quick else (rank for rank in RANKS if rank < full)), full):
        name = f"rank {rank}" + (" (full)" if rank == full else "")
        yield name, str(transform(mote, folder / f"rank-{rank}", experts.compress, rank=rank))
    yield "8 bits", str(transform(mote, folder / "8-bits", experts.compress, bits=8))
    yield AVERAGE, str(transform(mote, folder / "average", experts.average))


def _rows(models: dict[str, str], scores: Evaluation, options: Options) -> Iterator[list[str]]:
    texts = find_texts().texts
    mote = load_mote(open_mote(models[WHOLE]))
    whole = load_encoder(models[WHOLE], device=options.device, trust_remote_code=True)
    names = mote.config.experts
    expected = {task: embed(whole, texts, task) for task in names}
    of_whole = expert_bytes(mote)
    for name, path in models.items():
        model = load_encoder(path, device=options.device, trust_remote_code=True)
        is_dense = name in (AVERAGE, DENSE)
        size = of_whole // len(names) if is_dense else expert_bytes(load_mote(open_mote(path)))
        found = [] if name == DENSE else [cosines(embed(model, texts, task), expected[task]) for task in names]
        ratio = compare(
            partial(_encode, whole, texts, names[0]),
            partial(_encode, model, texts, names[0]),
            seconds=0 if options.quick else options.seconds,
        ).ratio
        yield [
            name,
            f"{size / 1e6:.1f}",
            f"{size / of_whole:.0%}",
            f"{sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 1e6:.1f}",
            f"{ratio:.2f}",
            f"{np.mean(found):.5f}" if found else "",
            *(f"{score:.2f}" for score in scores.means(name).values()),
            f"{scores.mean_over_types(name):.2f}",
        ]


def _encode(model: SentenceTransformer, texts: tuple[str, ...], task: str) -> None:
    has_prompts = task in model.prompts
    model.encode(list(texts[:64]), batch_size=32, show_progress_bar=False, prompt_name=task if has_prompts else None)
