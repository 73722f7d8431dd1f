"""Train the paper's models and their rivals at one scale, score them, and print how they compare.

    python -m research.run em ic mote --scale small --data DATA --out RUNS
    python -m research.run mote ic sem --scale best --data DATA --out RUNS --seeds 42
    python -m research.run mote --scale medium-bf16 --data DATA --out RUNS --on validation
    python -m research.run mote tlr --scale smoke --out RUNS training.max_steps=2

DATA is a data folder with the datasets that `research.data` names. `sem` stands for three dense models, one per task.
An interrupted command resumes: models and scores that exist are reused. Scores are written to RUNS/SCALE/scores.jsonl,
which `python -m research.pages --add` stores with all others.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import mote
from mote.checkpoints.reading import open_checkpoint
from mote.reporting import console_logging
from mote.training.model import native_folder
from mote.training.run_folder import fixed_settings
from research.claims import TABLES, Claim
from research.data import digest_of, digest_of_tests, prepare
from research.experiments import SCALES, Scale, Variant, recipe_of
from research.scores import SEPARATE, START, ScoredModel, ScoresOfTypes, Store, found_scores, parts_of, read, scores_of
from research.tables import claims_of, models_table

DECIMALS = 4  # of scores x 100
VALIDATION_LIMIT = 200  # texts or queries per validation set
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Experiment:
    """Models and scores of one scale.

    Attributes:
        name: Name of the scale.
        scale: Amount of training and evaluation.
        data: Data folder.
        out: Folder for models and scores.
        changes: `key=value` overrides of every run.
        teacher: Model whose embeddings a distilled start learns.
        command: Command line, which is stored with the scores.
    """

    name: str
    scale: Scale
    data: Path
    out: Path
    changes: tuple[str, ...] = ()
    teacher: str = "sentence-transformers/all-MiniLM-L6-v2"
    command: str = ""

    @property
    def file(self) -> Path:
        """File of the scores."""
        return self.out / "scores.jsonl"

    def training_data(self) -> Path:
        """Return the folder of the training data; write it first if it does not exist."""
        if self.scale.trained_on == "folder":
            return self.data
        return prepare(self.data, self.out / "data") / self.scale.trained_on

    def start(self) -> Path:
        """Return the dense model that all variants start from, in Transformers' format; make it if missing."""
        if self.scale.distilled:
            tasks = ("retrieval", "classification", "clustering", "paraphrases")
            distilled = Variant("distill", tuple(f"tasks.{task}.teacher.source={self.teacher}" for task in tasks))
            return self._trained(distilled, self.scale.source, self.out / "distilled", self.scale.seeds[0])
        return native_folder(open_checkpoint(self.scale.source), self.out / START)

    def model(self, name: str, seed: int) -> Path:
        """Return the folder of a model; train or make it first if it does not exist."""
        variant, folder = self.scale.variants[name], self.out / f"{name}-seed{seed}"
        if name == START:
            return self.start()
        if variant.average_of is None:
            return self._trained(variant, str(self.start()), folder, seed)
        if not folder.exists():
            mote.transform(self.model(variant.average_of, seed), folder, mote.experts.average)
        return folder

    def _trained(self, variant: Variant, source: str, folder: Path, seed: int) -> Path:
        if not (folder / "model").exists():
            changes = (*self.changes, f"output={folder}")
            mote.train(recipe_of(self.scale, variant, source, str(self.training_data()), seed, changes))
        return folder / "model"

    def scored(self, name: str, seed: int, on: str = "test") -> ScoredModel:
        """Score one model on the test or validation sets; make it first if it does not exist."""
        variant, model = self.scale.variants[name], self.model(name, seed)
        validation = on == "validation"
        data = prepare(self.data, self.out / "data") / "validation" if validation else self.data
        limits = {tuple(chain(*self.scale.limits)): VALIDATION_LIMIT} if validation else self.scale.limits
        own = {tuple(one for one in patterns if one in variant.datasets): limit for patterns, limit in limits.items()}
        scores = evaluate(model, data, own, self.out / on / f"{name}-seed{seed}", self.scale.dtype)
        recipe = recipe_of(self.scale, variant, "SOURCE", "DATA", seed, self.changes)
        settings = {"variant": name, "dtype": self.scale.dtype, **fixed_settings(recipe, given_only=True)}
        if self.scale.trained_on != "folder":
            settings["data"] = digest_of(self.out / "data")
        settings |= {f"limit of {' '.join(patterns)}": limit for patterns, limit in limits.items()}
        hashes = {"start": hash_of_weights(self.start()), "tests": digest_of_tests(data, chain(*limits))}
        source = f"research.run@{commit()}"
        return ScoredModel(
            self.name, name, seed, scores, on, settings=settings, hashes=hashes, source=source, command=self.command
        )

    def run(self, names: Sequence[str], seeds: Sequence[int], on: str = "test") -> Store:
        """Score variants with all seeds, and store each at once; the start has one."""
        store = read(self.file) if self.file.is_file() else Store(())
        done = {one.key for one in store.models}
        models = [(name, seed) for seed in seeds for name in names if name != START or seed == seeds[0]]
        for name, seed in models:
            if ScoredModel(self.name, name, seed, {}, on).key in done:
                continue
            print(f"== {name}, seed {seed}", flush=True)
            scored = self.scored(name, seed, on)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": "scores", **asdict(scored)}) + "\n")
            store = store.with_models([scored])
        return store


def evaluate(
    model: Path, data: Path, limits: Mapping[tuple[str, ...], int | None], out: Path, dtype: str | None = None
) -> ScoresOfTypes:
    """Score a model; scores that exist are reused.

    Args:
        model: Folder of the model.
        data: Data folder.
        limits: Patterns of datasets → number of rows or queries of each; None: all.
        out: Folder for mteb's results.
        dtype: Dtype of the model.

    Raises:
        RuntimeError: If a dataset failed, as means over the others could not be compared.
    """
    scores: ScoresOfTypes = {}
    for patterns, limit in limits.items():
        tasks = [one for one in patterns if (data / one).parent.is_dir()]
        if tasks:
            found = mote.evaluate(
                {"model": str(model)},
                data=data,
                tasks=tasks,
                limit=limit,
                dtype=dtype,
                out=out / f"limit-{limit}",
                trust_remote_code=True,
            )
            if failed := found.failed():
                raise RuntimeError("; ".join(failed))
            for dataset, score in found.scores["model"].items():
                scores.setdefault(found.types[dataset], {})[dataset] = round(score, DECIMALS)
    return scores


def report(store: Store, scale: str, on: str = "test") -> str:
    """Format all models of a scale, and the paper's claims that can be tested on them."""
    models = store.of_scale(scale, on)
    found, scores = found_scores(models), scores_of(models)
    parts = [models_table(found)]
    for name, table in TABLES.items():
        claims = [one for one in table.claims if _testable(one, scores.every)]
        if claims and on == "test":
            parts.append(f"{name}: {table.title}\n\n{claims_of(replace(table, claims=tuple(claims)), scores)}")
    return "\n\n".join(parts)


def _testable(claim: Claim, names: Collection[str]) -> bool:
    return all(name in names for name in (claim.better, claim.other, claim.relative_to) if name is not None)


def hash_of_weights(model: Path) -> str:
    """Return the first 16 digits of the SHA-256 of each file with weights."""
    return " ".join(one[:16] for one in open_checkpoint(str(model)).sha256_of_weights().values())


def commit() -> str:
    """Return the commit that is checked out."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `--source`, `--data` and `--seeds` default to the scale's."""
    parser = argparse.ArgumentParser(
        prog="python -m research.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="VARIANT or KEY=VALUE")
    parser.add_argument("--scale", choices=list(SCALES), required=True)
    parser.add_argument("--source", help="dense checkpoint that all variants start from (default: the scale's)")
    parser.add_argument("--data", help="data folder (default: the scale's, if it has one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and scores")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds (default: the scale's)")
    parser.add_argument("--on", choices=("test", "validation"), default="test")
    parser.add_argument("--teacher", default=Experiment.teacher, help="model that a distilled start learns from")
    given = parser.parse_intermixed_args(words)
    scale = SCALES[given.scale]
    given.variants = [part for name in given.names if "=" not in name for part in parts_of(name)]
    given.changes = tuple(name for name in given.names if "=" in name)
    given.seeds = given.seeds or scale.seeds
    given.data = given.data or scale.data
    if given.data is None:
        parser.error(f"--scale {given.scale} needs --data")
    if unknown := [name for name in given.variants if name not in scale.variants]:
        parser.error(f"unknown variant {unknown[0]!r}; known: {', '.join((*scale.variants, SEPARATE))}")
    return given


def main(words: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    words = sys.argv[1:] if words is None else words
    given = parse(words)
    console_logging()
    scale = replace(SCALES[given.scale], source=given.source or SCALES[given.scale].source)
    out = given.out / given.scale
    out.mkdir(parents=True, exist_ok=True)
    command = f"python -m research.run {shlex.join(words)}"
    experiment = Experiment(given.scale, scale, Path(given.data), out, given.changes, given.teacher, command)
    store = experiment.run(given.variants, given.seeds, given.on)
    print(f"\n{report(store, given.scale, given.on)}", flush=True)


if __name__ == "__main__":
    main()
