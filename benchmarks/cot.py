"""Experts for queries and passages, pre-trained and fine-tuned: CoT-MoTE's Tables 3 to 5 (arXiv:2304.10195), small.

    python -m benchmarks.cot --source MODEL --data DATA --out RUNS [--seeds 42 43]
    python -m benchmarks.cot --source MODEL --data DATA --out RUNS --only siamese mote --kept docs/results/cot.json
    python -m benchmarks.cot --source MODEL --data DATA --out RUNS --quick          # minutes: only checks that it runs

MODEL is a language model with its head, such as one from `mote pretrain mlm-dense`. Each variant is pre-trained with
CoT-MAE, then fine-tuned as a hybrid retriever with the chain `cot` (on BM25 negatives and on negatives mined by the
first-stage model), and scored with its dense, sparse and hybrid vectors. Further seeds repeat the second stage, on the
same mined negatives. Existing results are reused, and an interrupted command resumes; several commands can share the
work, and with `--only` and `--kept`, other machines. Prints the tables; writes `scores.json`.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np

import mote
from benchmarks.locking import alone, share
from mote.chains import chain
from mote.corpora.pairs import write_rows
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSettings
from mote.evaluation.statistics import compare_scores
from mote.reporting import console_logging, markdown_table
from mote.training.recipe_files import load_recipe

KINDS = ("dense", "sparse", "hybrid")
STAGES = ("stage1", "stage2")
ONE_EXPERT = ("train.model.experts=[search]", "train.model.tasks={search_query: search, search_document: search}")


@dataclass(frozen=True)
class Variant:
    """A kind of retriever.

    Attributes:
        recipe: Pre-training recipe.
        pretraining: Settings of the pre-training.
        chain: Settings of the fine-tuning.
        main: Whether the second stage is trained with all seeds, not only the first.
        paper: Stage → MRR@10 on MS MARCO with dense, sparse and hybrid vectors; the paper's Tables 3 to 5. Only these
            stages are scored.
    """

    recipe: str
    pretraining: tuple[str, ...]
    chain: tuple[str, ...]
    main: bool
    paper: dict[str, tuple[float, float, float]]


VARIANTS = {
    "siamese": Variant("cot-mae", ("model.kind=dense",), ONE_EXPERT, True, {"stage2": (39.3, 39.3, 40.9)}),
    "mote": Variant("cot-mae", (), (), True, {"stage1": (37.7, 39.6, 40.5), "stage2": (39.7, 40.5, 42.0)}),
    "separate": Variant("cot-mae", ("model.shared_modules=[]",), (), True, {"stage2": (38.4, 39.4, 40.5)}),
    "mote, switched": Variant("cot-mae-switched", (), (), False, {"stage2": (37.9, 37.7, 40.2)}),
}
ROWS = {
    "stackexchange_qa": 3878,
    "stackexchange_title_body": 4453,
    "arguana_counter": 3097,
    "advisories": 1377,
    "scitldr": 2604,
    "medquad": 7000,
    "gsm8k": 5000,
    "conference_papers": 6000,
    "debian": 6000,
    "python_docs": 6000,
    "tldr_pages": 5000,
}
"""Dataset → maximum number of rows in pre-training: 48,000 in total, without rows that are held out or dropped."""
FINE_TUNING = 1.1  # times as many rows of the larger datasets: about 54,000
FAST = ("model.dropout=0", "model.attention=eager")  # PyTorch's fused attention is slow in bf16 on a CPU
PRETRAINING = (
    "model.max_length=32",
    "training.batch_size=128",
    "training.max_steps=80",
    "training.warmup_steps=0.1",
    "training.bf16=true",
    *FAST,
    "validation.limit=100",
)
LENGTHS = "{anchor: 12, positive: 28, negative: 28}"  # short: most of a step is spent on tokens times vocabulary
CHAIN = (
    "stages.stage1.mining.negatives=4",
    "stages.stage2.mining.negatives=4",
    "stages.stage2.teacher.max_length=32",
    "stages.stage2.teacher.model_dtype=bfloat16",
    "stages.stage2.train.data.limit=1500",  # per dataset: about 16,000 rows
    f"train.tasks.retrieval.datasets=[{{path: retrieval/*, negatives: 1, max_length: {LENGTHS}}}]",
    "train.model.max_length=64",  # in evaluation
    "train.training.num_train_epochs=1",
    "train.training.mini_batch_size=null",  # texts this short fit
    "train.training.learning_rate=2e-4",  # the paper's
    "train.training.warmup_steps=0.1",
    "train.training.bf16=true",
    *(f"train.{setting}" for setting in FAST),
    "train.validation.limit=40",
)
QUICK = ("training.max_steps=2", "training.batch_size=8")
LIMIT = 60  # queries per test dataset, with about ten documents for each


EveryScore = dict[str, dict[str, dict[str, list[float]]]]
"""Variant → stage and kind of vectors, such as `stage1 dense` → dataset → nDCG@10 with each seed, x 100."""


@dataclass(frozen=True)
class Comparison:
    """Models of the comparison, and their scores.

    Attributes:
        source: Language model that all variants start from.
        data: Data folder.
        out: Folder for rows, models and scores.
        seeds: Seeds of the fine-tuning.
        quick: Whether to use only a few rows and steps.
        only: Variants to train and score.
        kept: Scores of earlier runs, whose models are not needed.
    """

    source: str
    data: Path
    out: Path
    seeds: list[int]
    quick: bool
    only: list[str]
    kept: EveryScore

    def rows(self, name: str, factor: float = 1.0) -> Path:
        """Return a folder with the first pairs of each dataset; write it first if it does not exist."""
        folder = self.out / name
        with alone(folder):
            for name, limit in ROWS.items():
                (location,) = find_datasets(DatasetSettings(path=f"retrieval/{name}"), self.data)
                file = folder / "retrieval" / name / "train.jsonl.gz"
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    read = (row.content for row in read_rows(location))
                    first = islice(read, 30 if self.quick else int(factor * limit))
                    write_rows(unfinished := file.with_name("unfinished.gz"), first)
                    unfinished.replace(file)
        return folder

    def pretrained(self, name: str, timeout: float = -1) -> Path:
        """Return a pre-trained model; train it first if it does not exist."""
        variant, folder = VARIANTS[name], self.out / _file(name) / "pretrained"
        with alone(folder, timeout):
            if not (folder / "model").exists():
                own = [f"model.source={self.source}", f"data.folder={self.rows('rows')}", f"output={folder}"]
                mote.pretrain(
                    variant.recipe, [*own, *PRETRAINING, *variant.pretraining, *(QUICK if self.quick else ())]
                )
        return folder / "model"

    def model(self, name: str, seed: int, stage: str) -> Path:
        """Return a model of a variant; if missing, run the chain or, for a further seed, only its second stage."""
        first = self.out / _file(name) / "chain"
        last = first / STAGES[-1] / "train"
        if not (last / "model").exists():
            rows = self.rows("fine-tuning-rows", FINE_TUNING)
            own = [f"train.model.source={self.pretrained(name)}", f"data.folder={rows}", f"output={first}"]
            quick = [f"train.{setting}" for setting in QUICK] if self.quick else []
            chain("cot", [*own, f"train.training.seed={self.seeds[0]}", *CHAIN, *VARIANTS[name].chain, *quick])
        if seed != self.seeds[0]:
            folder = self.out / _file(name) / f"{stage}-seed{seed}"
            if not (folder / "model").exists():
                mote.train(load_recipe(last / "recipe.yaml", [f"training.seed={seed}", f"output={folder}"]))
            return folder / "model"
        return first / stage / "train" / "model"

    def runs(self) -> list[tuple[str, int]]:
        """Return the variants and seeds without kept scores; the first seed of every variant comes first."""
        wanted = [(name, seed) for seed in self.seeds for name in self.only]
        of_main = [(name, seed) for name, seed in wanted if VARIANTS[name].main or seed == self.seeds[0]]
        return [(name, seed) for name, seed in of_main if name not in self.kept]

    def scores(self, name: str, seed: int, timeout: float = -1) -> dict[str, dict[str, float]]:
        """Score the models of a chain: stage and kind of vectors, such as `stage1 dense` → dataset → nDCG@10."""
        scores: dict[str, dict[str, float]] = {}
        with alone(self.out / _file(name) / f"seed{seed}", timeout), alone(self.out / _file(name) / "chain", timeout):
            for stage in VARIANTS[name].paper if seed == self.seeds[0] else STAGES[-1:]:
                found = mote.evaluate(
                    {stage: str(self.model(name, seed, stage))},
                    data=self.data,
                    tasks=["beir/nq_utd" if self.quick else "beir/*"],
                    limit=5 if self.quick else LIMIT,
                    retrieval=KINDS,
                    dtype="bfloat16",
                    out=self.out / _file(name) / f"scores-seed{seed}" / stage,
                    trust_remote_code=True,
                )
                if found.failed():
                    raise RuntimeError("; ".join(found.failed()))
                of_kinds = zip(KINDS, found.scores.values(), strict=True)
                scores |= {f"{stage} {kind}": dict(of_model) for kind, of_model in of_kinds}
        return scores

    def share(self) -> None:
        """Train and score models that no other command is working on."""
        runs = self.runs()
        share(partial(self.pretrained, name) for name in dict.fromkeys(name for name, _ in runs))
        share(partial(self.scores, name, seed) for name, seed in runs)

    def collected(self) -> EveryScore:
        """Collect the scores of all models, in the order of `VARIANTS`."""
        every = dict(self.kept)
        for name, seed in self.runs():
            for which, of_model in self.scores(name, seed).items():
                for dataset, score in of_model.items():
                    every.setdefault(name, {}).setdefault(which, {}).setdefault(dataset, []).append(score)
        return {name: every[name] for name in VARIANTS if name in every}


def report(every: EveryScore) -> str:
    """Format our scores next to the paper's, with paired tests over the datasets, by the seeds that both have."""
    rows = []
    for name, variant in ((name, VARIANTS[name]) for name in every):
        for stage, published in variant.paper.items():
            of_seeds = [np.mean([*every[name][f"{stage} {kind}"].values()], axis=0) for kind in KINDS]
            cells = [f"{of.mean():.2f}" + (f" ± {of.std(ddof=1):.2f}" if len(of) > 1 else "") for of in of_seeds]
            paper = [f"{score:.1f}" for score in published]
            rows.append([name, {"stage1": "BM25", "stage2": "mined"}[stage], *cells, *paper])
    columns = ["", "negatives", *(f"{kind}, nDCG@10" for kind in KINDS), *(f"{kind}, paper: MRR@10" for kind in KINDS)]
    others = [name for name in every if name != "mote"]
    pairs = [(("mote", f"stage2 {kind}"), (other, f"stage2 {kind}")) for other in others for kind in KINDS]
    pairs += [(("mote", f"stage2 {kind}"), ("mote", f"stage1 {kind}")) for kind in KINDS]
    pairs += [(("mote", "stage2 hybrid"), ("mote", f"stage2 {kind}")) for kind in KINDS[:2]]
    pairs = pairs if "mote" in every else []
    lines = [markdown_table(columns, rows), ""]
    for better, other in pairs:
        datasets = [dataset for dataset in every[better[0]][better[1]] if dataset in every[other[0]][other[1]]]
        scores = [[every[name][which][dataset] for dataset in datasets] for name, which in (better, other)]
        common = min(len(of_seeds) for of_model in scores for of_seeds in of_model)  # seeds that both have: the first
        means = [[mean(of_seeds[:common]) for of_seeds in of_model] for of_model in scores]
        lines.append(f"- {compare_scores(', '.join(better), ', '.join(other), *means)}")
    return "\n".join(lines)


def _file(name: str) -> str:
    return name.replace(", ", "-")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--kept", type=Path, help="scores.json of earlier runs, whose variants are not trained again")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    console_logging()
    out = given.out / "quick" if given.quick else given.out
    kept = json.loads(given.kept.read_text(encoding="utf-8")) if given.kept else {}
    if unknown := kept.keys() - VARIANTS:
        parser.error(f"{given.kept} has scores of {', '.join(sorted(unknown))}; known variants: {'; '.join(VARIANTS)}")
    comparison = Comparison(given.source, given.data, out, given.seeds, given.quick, given.only, kept)
    comparison.share()
    every = comparison.collected()
    out.mkdir(parents=True, exist_ok=True)
    (out / "scores.json").write_text(json.dumps(every, indent=1) + "\n")
    print(report(every))


if __name__ == "__main__":
    main()
