"""Train and evaluate the variants; existing models and scores are reused."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

import mote
from benchmarks.locking import alone
from benchmarks.paper.experiments import ALL_DATASETS, VARIANTS, Scale, recipe_of
from mote import Evaluation
from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.reading import open_checkpoint
from mote.training.model import native_folder
from mote.training.recipe_files import parse_recipe
from mote.training.run_folder import differences, fixed_settings

START = "start"  # the dense checkpoint, before any training


@dataclass(frozen=True)
class Runs:
    """Models and scores of one scale.

    Attributes:
        scale: Scale.
        source: Dense checkpoint that all variants start from.
        data: Data folder.
        out: Folder for models and scores.
        changes: `key=value` overrides of every run.
        report: Called with each line of progress.
    """

    scale: Scale
    source: str
    data: str
    out: Path
    changes: tuple[str, ...] = ()
    report: Callable[[str], None] = print

    def model(self, name: str, seed: int) -> Path:
        """Return the folder of a model; train or make it first if it does not exist.

        Raises:
            ValueError: If the folder holds a model trained with other settings.
        """
        variant = VARIANTS[name]
        folder = self.out / "models" / f"{name}-seed{seed}"
        if variant.weight is not None and variant.made_of is not None:
            trained = self.model(variant.made_of, seed)
            made_of = folder_hash(trained)[:8]  # a retrained source gives another folder
            folder = folder.with_name(f"{folder.name}-{made_of}")
            with alone(folder):
                if not folder.exists() and variant.weight == 1:
                    mote.transform(trained, folder, mote.experts.average)
                elif not folder.exists():
                    mote.transform(trained, folder, mote.experts.interpolate, variant.weight)
            return folder
        recipe = recipe_of(name, self.scale, self.source, self.data, seed, [*self.changes, f"output={folder}"])
        with alone(folder):
            if (folder / "model").exists():
                saved = parse_recipe(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")))
                differing = differences(fixed_settings(saved), fixed_settings(recipe))
                if differing:
                    raise ValueError(
                        f"{folder} was trained with other settings; it differs in {', '.join(differing)}. Choose "
                        "another --out, or remove it"
                    )
            else:
                self.report(f"== training {folder.name}")
                mote.train(recipe)
        return folder / "model"

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Seeds of a variant."""
        if name == START:
            return self.scale.seeds[:1]
        return self.scale.few_seeds if VARIANTS[name].few_seeds else self.scale.seeds

    def start(self) -> Path:
        """Return the dense checkpoint that all variants start from, in Transformers' format."""
        folder = self.out / "models" / START
        with alone(folder):
            return native_folder(open_checkpoint(self.source), folder)

    def scores(self, names: Iterable[str]) -> "Scores":
        """Evaluate variants with all their seeds; `start` is the dense checkpoint before training.

        A dataset on which a variant failed with any seed is dropped from its scores and reported.
        """
        every: dict[str, dict[str, list[float]]] = {}
        types: dict[str, str] = {}
        for name in names:
            of_seeds = [self._score(name, seed, types) for seed in self.seeds_of(name)]
            complete = [dataset for dataset in of_seeds[0] if all(dataset in scores for scores in of_seeds)]
            every[name] = {dataset: [scores[dataset] for scores in of_seeds] for dataset in complete}
        return Scores(every, types)

    def _score(self, name: str, seed: int, types: dict[str, str]) -> dict[str, float]:
        """Return the score on each dataset; add the task types to `types`."""
        label = name if name == START else f"{name}-seed{seed}"
        path = self.start() if name == START else self.model(name, seed)
        scores: dict[str, float] = {}
        for evaluation in self._evaluations(
            label, str(path), ALL_DATASETS if name == START else VARIANTS[name].datasets
        ):
            types |= evaluation.types
            scores |= evaluation.scores[label]
            for failure in evaluation.failed():
                self.report(f"FAILED, excluded from all means of {name}: {failure}")
        return scores

    def _evaluations(self, label: str, path: str, datasets: tuple[str, ...]) -> Iterator[Evaluation]:
        """Evaluate one model; cached scores are reused."""
        for patterns, limit in self.scale.limits.items():
            chosen = [pattern for pattern in patterns if pattern in datasets]
            with alone(self.out / "scores" / label):
                if chosen:
                    yield mote.evaluate(
                        {label: path},
                        data=self.data,
                        tasks=chosen,
                        limit=limit,
                        dtype=self.scale.dtype,
                        out=self.out / "scores" / label / f"limit-{limit}",
                        trust_remote_code=True,
                    )


@dataclass(frozen=True)
class Scores:
    """Scores of several variants.

    Attributes:
        every: Variant → dataset → score with each seed, x 100.
        types: Dataset → task type.
    """

    every: dict[str, dict[str, list[float]]]
    types: dict[str, str]

    def joined(self, name: str, parts: Iterable[str]) -> "Scores":
        """Combine models of one task each into one column."""
        parts = list(parts)
        whole = {dataset: values for part in parts for dataset, values in self.every[part].items()}
        rest = {other: values for other, values in self.every.items() if other not in parts}
        return Scores({**rest, name: whole}, self.types)
