"""The effect of mined negatives and of their margin: Nomic Embed v2's Table 8 (arXiv:2502.07972) at a small scale.

    python -m benchmarks.mining --source MODEL --teacher MODEL --data DATA --out RUNS [--backend openvino]

Mines negatives with and without the margin, fine-tunes the dense model without negatives and with either kind, on the
same rows in the same number of steps, and scores all models on the retrieval datasets. Existing results are reused, and
an interrupted command resumes; several commands can share the work. Prints the table; writes `scores.json`.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from filelock import Timeout

import mote
from benchmarks.locking import alone
from benchmarks.paper.runs import Scores
from benchmarks.paper.tables import cell
from mote.corpora import MiningSettings, Teacher
from mote.corpora.pairs import write_rows
from mote.data.rows import read_file
from mote.evaluation.statistics import compare_scores
from mote.reporting import console_logging, markdown_table
from mote.training.recipe_files import load_recipe

START = "start"
PAPER = {START: None, "no negatives": None, "mined": 52.87, "mined below 0.95": 55.20}
"""Variant → the paper's mean over FiQA, HotpotQA and NQ, with Arctic-embed-L as the teacher."""
BELOW = "mined below 0.95"
MARGINS = {"mined": None, BELOW: 0.05}
ROWS = {
    "medquad": 5500,
    "stackexchange_qa": 5500,
    "stackexchange_title_body": 5500,
    "scitldr": 5500,
    "arguana_counter": 5500,
    "gsm8k": 5500,
    "conference_papers": 6500,
}
"""Dataset → maximum number of rows: about 30,000 in total."""
SETTINGS = [
    "tasks.classification=null",
    "tasks.clustering=null",
    "training.batch_size=128",
    "training.mini_batch_size=null",  # texts this short fit; a second forward pass would cost a third of the time
    "training.bf16=true",
    "training.learning_rate=1.5e-4",
    "validation.limit=40",
]
NEGATIVES = 1
MAX_LENGTH = 32  # tokens per text in training
LIMIT = 100  # queries per test dataset, with about ten documents for each


@dataclass(frozen=True)
class Comparison:
    """Models of the comparison, and their scores.

    Attributes:
        source: Dense model that is fine-tuned.
        teacher: Model that mines.
        data: Data folder.
        out: Folder for negatives, models and scores.
        seeds: Seeds of each variant.
    """

    source: str
    teacher: Teacher
    data: str
    out: Path
    seeds: list[int]

    def mined(self, variant: str, timeout: float = -1) -> Path:
        """Return the folder with the negatives of a variant; mine them first if they do not exist."""
        chosen = MiningSettings(negatives=4, depth=50, relative_margin=MARGINS[variant])
        datasets, folder = [f"retrieval/{name}" for name in ROWS], self.out / _file(variant)
        with alone(self.out / "embeddings", timeout):  # shared by both
            return mote.mine_negatives(datasets, folder, self.teacher, chosen, data=self.data)

    def rows(self, variant: str) -> Path:
        """Return the folder with the rows of a variant: always the rows that have a negative below the margin."""
        folder = self.out / "rows" / _file(variant)
        chosen, below = (self.mined(name) for name in (variant if variant in MARGINS else BELOW, BELOW))
        for name in ROWS:
            file = Path("retrieval", name, "train.jsonl.gz")
            pairs = zip(read_file(chosen / file), read_file(below / file), strict=True)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            write_rows(folder / file, (row.content for row, other in pairs if "negative_1" in other.content))
        return folder

    def model(self, variant: str, seed: int) -> Path:
        """Return a fine-tuned model; train it first if it does not exist."""
        if variant == START:
            return Path(self.source)
        folder = self.out / f"{_file(variant)}-seed{seed}"
        if not (folder / "model").exists():
            data = self.rows(variant)
            negatives = NEGATIVES if variant in MARGINS else 0
            common = {"negatives": negatives, "max_length": MAX_LENGTH}
            rows = [{"path": f"retrieval/{name}", "limit": limit, **common} for name, limit in ROWS.items()]
            own = [f"tasks.retrieval.datasets={json.dumps(rows)}", f"training.seed={seed}", f"output={folder}"]
            mote.train(load_recipe("em", [f"model.source={self.source}", f"data.folder={data}", *SETTINGS, *own]))
        return folder / "model"

    def score(self, variant: str, seed: int) -> mote.Evaluation:
        """Score a model on the retrieval datasets."""
        label = f"{_file(variant)}-seed{seed}"
        return mote.evaluate(
            {label: str(self.model(variant, seed))},
            data=self.data,
            tasks=["beir/*"],
            limit=LIMIT,
            dtype="bfloat16",
            out=self.out / "scores" / label,
        )

    def share(self) -> None:
        """Train and score models that no other command is working on."""
        for variant in MARGINS:
            with suppress(Timeout):
                self.mined(variant, timeout=0)
        for seed in self.seeds:
            for variant in PAPER if seed == self.seeds[0] else list(PAPER)[1:]:  # the start has no seed
                with suppress(Timeout), alone(self.out / f"{_file(variant)}-seed{seed}", timeout=0):
                    self.score(variant, seed)

    def scores(self) -> Scores:
        """Collect the scores of all models; wait for other commands."""
        every: dict[str, dict[str, list[float]]] = {}
        types: dict[str, str] = {}
        for variant in PAPER:
            of_variant = every.setdefault(variant, {})
            for seed in self.seeds[:1] if variant == START else self.seeds:
                with alone(self.out / f"{_file(variant)}-seed{seed}"):
                    evaluation = self.score(variant, seed)
                types |= evaluation.types
                for dataset, score in next(iter(evaluation.scores.values())).items():
                    of_variant.setdefault(dataset, []).append(score)
        return Scores(every, types)


def report(scores: Scores) -> str:
    """Format our scores next to the paper's."""
    datasets = list(scores.types)
    rows = [
        [variant, cell(scores, variant, datasets), "" if of_paper is None else f"{of_paper:.2f}"]
        for variant, of_paper in PAPER.items()
    ]
    lines = [markdown_table(["", "nDCG@10 here", "paper"], rows), ""]
    mined = tuple(MARGINS)
    for name, reference in ((mined[0], "no negatives"), (mined[1], "no negatives"), mined[::-1]):
        means = [[mean(scores.every[one][dataset]) for dataset in datasets] for one in (name, reference)]
        lines.append(f"- {compare_scores(name, reference, *means)}")
    return "\n".join(lines)


def _file(variant: str) -> str:
    return variant.replace(" ", "-")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    given = parser.parse_args()
    console_logging()
    teacher = Teacher(model=given.teacher, backend=given.backend, batch_size=64, embeddings=given.out / "embeddings")
    comparison = Comparison(given.source, teacher, given.data, given.out, given.seeds)
    comparison.share()
    scores = comparison.scores()
    (given.out / "scores.json").write_text(json.dumps(asdict(scores), indent=1) + "\n")
    print(report(scores))


if __name__ == "__main__":
    main()
