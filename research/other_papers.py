"""Tables of what was tried from other papers: mined negatives, decoders, CoT-MoTE, task LoRAs.

The programs that trained these models are in `benchmarks/` at 1aa28e4: mining, decoders, cot and task_loras.
"""

from collections.abc import Iterable, Mapping
from statistics import mean

import numpy as np

from mote.reporting import table as markdown_table
from mote.statistics import compare_scores
from research.claims import Claim, Table
from research.scores import START, ScoredModel, Scores
from research.tables import cell, claims_of, datasets_of, sweep_table, table_of

MINING = {START: None, "no negatives": None, "mined": 52.87, "mined below 0.95": 55.20}
"""Variant → the mean over FiQA, HotpotQA and NQ in Nomic Embed v2's Table 8 (arXiv:2502.07972)."""
DECODERS = {
    "causal, mean": (62.32, 57.55),
    "causal, latent attention": (63.39, 57.65),
    "bidirectional, mean": (64.00, 58.42),
    "bidirectional, latent attention": (64.18, 59.00),
}
"""Variant → means over MTEB's 56 datasets and its retrieval datasets, in NV-Embed's Table 2 (arXiv:2405.17428)."""
TASK_LORAS = Table(
    "Dense with instructions, MoTE, task LoRAs",
    (START, "ic", "mote", "task-lora"),
    "ic",
    claims=(Claim("mote", "ic"), Claim("task-lora", "ic"), Claim("mote", "task-lora")),
)
VECTORS = ("dense", "sparse", "hybrid")
COT = {
    ("siamese", "stage2"): (39.3, 39.3, 40.9),
    ("mote", "stage1"): (37.7, 39.6, 40.5),
    ("mote", "stage2"): (39.7, 40.5, 42.0),
    ("separate", "stage2"): (38.4, 39.4, 40.5),
    ("mote, switched", "stage2"): (37.9, 37.7, 40.2),
}
"""Variant and stage → MRR@10 on MS MARCO with dense, sparse and hybrid vectors in CoT-MoTE (arXiv:2304.10195)."""
NEGATIVES = {"stage1": "BM25", "stage2": "mined"}


def _comparisons(scores: Scores, pairs: Iterable[tuple[str, str]], datasets: list[str]) -> str:
    lines = []
    for better, other in pairs:
        means = [[mean(scores.every[name][dataset]) for dataset in datasets] for name in (better, other)]
        lines.append(f"- {compare_scores(better, other, *means)}")
    return "\n".join(lines)


def mining_report(scores: Scores) -> str:
    """Format the effect of mined negatives next to the paper's."""
    datasets = list(scores.types)
    rows = [
        [variant, cell(scores, variant, datasets), "" if of_paper is None else f"{of_paper:.2f}"]
        for variant, of_paper in MINING.items()
    ]
    plain, mined, below = list(MINING)[1:]
    comparisons = _comparisons(scores, ((mined, plain), (below, plain), (below, mined)), datasets)
    return f"{markdown_table(['', 'nDCG@10 here', 'paper'], rows)}\n\n{comparisons}"


def decoders_report(scores: Scores) -> str:
    """Format the scores of decoders made embedders next to the paper's."""
    everything, retrieval = (datasets_of(scores, types, tuple(scores.every)) for types in ((), ("Retrieval",)))
    rows = []
    for name, paper in DECODERS.items():
        cells = [str(cell(scores, name, datasets)) for datasets in (everything, retrieval)]
        rows.append([name, *cells, *(f"{score:.2f}" for score in paper)])
    here = [f"all ({len(everything)})", f"retrieval ({len(retrieval)})"]
    causal, causal_latent, both, both_latent = DECODERS
    pairs = ((both, causal), (both_latent, causal_latent), (causal_latent, causal), (both_latent, both))
    table = markdown_table(["", *here, "paper: all (56)", "paper: retrieval (15)"], rows)
    return f"{table}\n\n{_comparisons(scores, pairs, everything)}"


def task_loras_report(sweep: Mapping[str, Mapping[str, float]], scores: Scores) -> str:
    """Format the scores on held-out training texts at each rate, and on the test datasets at the best rate."""
    of_rates = {name: {float(rate): score for rate, score in of.items()} for name, of in sweep.items()}
    return "\n\n".join([sweep_table(of_rates), table_of(TASK_LORAS, scores), claims_of(TASK_LORAS, scores)])


def cot_report(models: Iterable[ScoredModel]) -> str:
    """Format the scores of retrievers next to the paper's, with paired tests by the seeds that both have."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for one in models:
        found.setdefault((one.variant, str(one.vectors)), []).append(one.scores["Retrieval"])
    rows = []
    for (name, stage), paper in COT.items():
        of_seeds = [[mean(seed.values()) for seed in found[name, f"{stage} {kind}"]] for kind in VECTORS]
        cells = [f"{mean(of):.2f}" + (f" ± {np.std(of, ddof=1):.2f}" if len(of) > 1 else "") for of in of_seeds]
        rows.append([name, NEGATIVES[stage], *cells, *(f"{score:.1f}" for score in paper)])
    here = [f"{kind}, nDCG@10" for kind in VECTORS]
    table = markdown_table(["", "negatives", *here, *(f"{kind}, paper: MRR@10" for kind in VECTORS)], rows)
    best, others = "mote", ("siamese", "separate", "mote, switched")
    pairs = [((best, f"stage2 {kind}"), (other, f"stage2 {kind}")) for other in others for kind in VECTORS]
    pairs += [((best, f"stage2 {kind}"), (best, f"stage1 {kind}")) for kind in VECTORS]
    pairs += [((best, "stage2 hybrid"), (best, f"stage2 {kind}")) for kind in VECTORS[:2]]
    lines = []
    for better, other in pairs:
        common = min(len(found[better]), len(found[other]))  # seeds that both have: the first
        means = [
            [mean(seed[dataset] for seed in found[one][:common]) for dataset in found[better][0]]
            for one in (better, other)
        ]
        lines.append(f"- {compare_scores(', '.join(better), ', '.join(other), *means)}")
    return "\n".join([table, "", *lines])
