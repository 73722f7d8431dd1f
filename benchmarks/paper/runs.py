"""Train and evaluate the variants; existing models and scores are reused, scores also without their models."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import mote
from benchmarks.locking import alone, share
from benchmarks.paper.data import digest_of, digest_of_tests, prepare, with_mined_negatives
from benchmarks.paper.experiments import SCALES, START, SWEPT, VARIANTS, Scale, Variant, base_of, recipe_of
from benchmarks.paper.improvements import variant_of
from benchmarks.paper.kept import (
    SEED,
    VARIANT,
    Hashes,
    KeptScores,
    Means,
    ScoresOfTypes,
    digest_of_recipe,
    means_of,
    read_hashes,
)
from benchmarks.paper.starts import distilled, pretrained, taught
from benchmarks.trained import hash_of_weights, trained
from mote import Evaluation
from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.reading import open_checkpoint
from mote.training.model import native_folder
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import fixed_settings

FoundScores = dict[str, dict[int, ScoresOfTypes]]
"""Variant → seed → scores."""

TRIAL_LIMIT = "data.limit=1000"  # rows per dataset: about a quarter of the pairs
VALIDATION_LIMIT = 200  # texts or queries per validation set
EXPERT_WEIGHTS = r"\.experts\."
DENSE_COUNTERPART = r"\.encoder\.layer\.\d+\.(?!attention\.(self|output\.dense)\.)"
"""Weights of a BERT that a MoTE has once per expert: the feed-forward networks and both norms of each block."""


@dataclass(frozen=True)
class Runs:
    """Models and scores of one scale.

    Attributes:
        scale: Amount of training and evaluation.
        source: Dense checkpoint that all variants start from.
        data: Data folder.
        out: Folder for models and scores.
        changes: `key=value` overrides of every run.
        report: Function called with each line of progress.
        teacher: Model that is distilled and that mines negatives.
        pretrained: Folder of `benchmarks.cot`, with models pre-trained with CoT-MAE.
        trial_rate: Learning rate of trials, which use one seed and part of the pairs. Default: the runs are not trials.
        kept: Folder of the stored scores of single models, which need no model. Default: `out`.
        only_stored: Whether what has no stored scores is left out, not trained. For `best`.
    """

    scale: Scale
    source: str
    data: str
    out: Path
    changes: tuple[str, ...] = ()
    report: Callable[[str], None] = print
    teacher: str = "sentence-transformers/all-MiniLM-L6-v2"
    pretrained: Path | None = None
    trial_rate: float | None = None
    kept: Path | None = None
    only_stored: bool = False

    @property
    def kind(self) -> str:
        """Name of the folder of the models: `models`, or that of the trials at a learning rate."""
        return "models" if self.trial_rate is None else f"trials-{self.trial_rate:g}"

    @cached_property
    def choosing(self) -> "Runs":
        """The runs whose trials choose the rate, the data and the improvements: those of another scale, or these."""
        return self._of_scale(self.scale.chosen_by)

    def _of_scale(self, other: str | None) -> "Runs":
        """Return the runs of another scale beside these; None: these."""
        if other is None:
            return self
        kept = None if self.kept is None else self.kept.with_name(other)
        return replace(self, scale=SCALES[other], out=self.out.with_name(other), kept=kept)

    @property
    def trials(self) -> "Runs":
        """The same as trials, at the learning rate of all variants."""
        return replace(self, trial_rate=best_rate(self.sweep))

    def model(self, name: str, seed: int) -> Path:
        """Return the folder of a model, in Transformers' format; train or make it first if it does not exist.

        Raises:
            ValueError: If the folder holds a model trained with other settings.
        """
        name = self.trained_as(name)
        variant = variant_of(name)
        if not variant.trained:
            return self._start(variant)
        folder = self.out / self.kind / f"{name}-seed{seed}"
        if variant.made_of is not None and variant.made_by is not None:
            trained = self.model(variant.made_of, seed)
            # A retrained source gives another folder. No longer name: transformers' cache for code needs short ones.
            made_of = folder_hash(trained)[:8]
            folder = folder.with_name(f"{name.rpartition('+')[2]}-seed{seed}-{made_of}")
            with alone(folder):
                made = folder if folder.exists() else variant.made_by(trained, folder, self._start(variant))
            if variant.last_stage is None:
                return made
            stage = replace(variant, changes=(*variant.changes, *variant.last_stage))
            folder, changes = folder.with_name(f"{folder.name}-trained"), taught(stage, self.teacher)
            return self._trained_from(str(made), name, stage, folder, seed, changes)
        return self._trained_variant(name, variant, folder, seed)

    def _start(self, variant: Variant) -> Path:
        if variant.start != "given":
            return Path(self.source_of(variant))
        folder = self.out / "models" / f"{START}-{hash_of_weights(self.source)[:8]}"
        with alone(folder):
            return native_folder(open_checkpoint(self.source), folder)

    def _trained_variant(self, name: str, variant: Variant, folder: Path, seed: int) -> Path:
        source = self._half_trained(name, variant, folder, seed) if variant.late else self.source_of(variant)
        return self._trained_from(source, name, variant, folder, seed)

    def _trained_from(
        self, source: str, name: str, variant: Variant, folder: Path, seed: int, changes: Iterable[str] = ()
    ) -> Path:
        changes = [*self.settings_of(variant), *changes, f"output={folder}"]
        data = self.training_data(variant)
        recipe = recipe_of(variant, self.scale, source, data, seed, changes, name)
        return trained(recipe, self.report, self.digest_of_data(variant))

    def _half_trained(self, name: str, variant: Variant, folder: Path, seed: int) -> str:
        changes = (*variant.changes, "model.kind=dense", "training.peft=null")
        factor = variant.rate_factor / VARIANTS[base_of(name)].rate_factor  # the base's own is that of adapters
        dense = replace(variant, late=False, rate_factor=factor, expert_rate_factor=None, changes=changes)
        other_seed = seed + 1000  # for another half of the rows
        return str(self._trained_variant(name, dense, folder.with_name(f"{folder.name}-dense"), other_seed))

    def settings_of(self, variant: Variant) -> list[str]:
        """Return a variant's settings that its scale lacks: learning rates, if there is a sweep, and `changes`."""
        rate = self.rate(variant)
        settings = [] if self.trial_rate is None else [TRIAL_LIMIT, *variant.trial_changes]
        settings += [] if rate is None else [f"training.learning_rate={rate * variant.rate_factor:g}"]
        if variant.expert_rate_factor is not None and rate is not None:
            own_rate = rate * variant.rate_factor * variant.expert_rate_factor
            dense = load_recipe(variant.recipe, variant.changes).model.kind == "dense"
            weights = DENSE_COUNTERPART if dense else EXPERT_WEIGHTS
            settings.append(f"training.learning_rate_mapping={{'{weights}': {own_rate:g}}}")
        return [*settings, *self.changes]

    def source_of(self, variant: Variant) -> str:
        """Return the model that a variant starts from; make it first if it does not exist.

        Raises:
            ValueError: If it is a pre-trained model, and no pre-trained models are given.
        """
        if variant.start == "given":
            return self.source
        if variant.start == "distilled":
            return str(distilled(self._of_scale(self.scale.distilled_by), variant.trained_on))
        if self.pretrained is None:
            raise ValueError("Variants that start from CoT-MAE need --pretrained, the folder of benchmarks.cot")
        return str(pretrained(self.pretrained, self.out / "models", load_recipe(variant.recipe, variant.changes)))

    def prepared(self) -> Path:
        """Return the folder of `benchmarks.paper.data`; make it first if it does not exist."""
        with alone(self.out / "data"):
            return prepare(Path(self.data), self.out / "data", self.scale.times)

    def training_data(self, variant: Variant) -> str:
        """Return the folder of a variant's training data; make it first if needed."""
        kind = variant.trained_on or self.scale.trained_on
        folder = Path(self.data) if kind == "folder" else self.prepared() / kind
        if not variant.mined:
            return str(folder)
        out = self.out / "mined" / "-".join([kind, *self.digest_of_data(variant).values()])
        with alone(out):
            return str(with_mined_negatives(folder, out, self.teacher))

    def digest_of_data(self, variant: Variant) -> Hashes:
        """Return the hash of a variant's training data as `data`; empty if that is the data folder as it is."""
        return self._digest_of_kind(variant.trained_on or self.scale.trained_on)

    def _digest_of_kind(self, kind: str) -> Hashes:
        return {} if kind == "folder" else {"data": digest_of(self.prepared())}

    def rate(self, variant: Variant) -> float | None:
        """Return a variant's learning rate: the best for all on validation sets, or its own best; None: the scale's."""
        if self.trial_rate is not None:
            return self.trial_rate
        if self.scale.learning_rates or not self.scale.sweep:
            return None
        return best_rate(self.sweep, variant.recipe if variant.own_rate else None)

    def trained_as(self, name: str) -> str:
        """Return the variant that is trained for this one: its recipe if it has the shared rate, otherwise itself."""
        variant = variant_of(name)
        shared = variant.own_rate and self.rate(variant) == self.rate(variant_of(variant.recipe))
        return variant.recipe if shared else name

    @cached_property
    def sweep(self) -> dict[str, dict[float, float]]:
        """Scores of trials at all rates on validation sets: variant → rate → mean over the task types."""
        if self.scale.chosen_by is not None:
            return self.choosing.sweep
        trials = {rate: replace(self, trial_rate=rate) for rate in self.scale.sweep}
        share(partial(trial.validated, name) for trial in trials.values() for name in SWEPT)
        return {name: {rate: mean(trial.validated(name).values()) for rate, trial in trials.items()} for name in SWEPT}

    def validated(self, name: str, timeout: float = -1) -> Means:
        """Score the first seed of a variant on the validation sets.

        Raises:
            RuntimeError: If it failed on one of them, as means over the others could not be compared.
            filelock.Timeout: If another command works on it for longer than `timeout`.
        """
        label, seed = self.trained_as(name), self.scale.few_seeds[0]

        def evaluate() -> Iterator[Evaluation]:
            folder, out = self.prepared() / "validation", self.out / f"validation-{self.kind}" / label
            present = [pattern for pattern in variant_of(name).datasets if (folder / pattern).parent.is_dir()]
            with alone(out):
                evaluation = self._evaluate(label, self.model(name, seed), folder, present, VALIDATION_LIMIT, out)
            if failed := evaluation.failed():
                raise RuntimeError(f"No choice can be made without all validation sets: {'; '.join(failed)}")
            yield evaluation

        settings, hashes = self.settings_of_scores(name, seed), partial(self.weights_before, name)
        common = {**self.common_settings, "limit": VALIDATION_LIMIT}
        return means_of(self.kept_scores.get(self._validation_label(name), settings, hashes, evaluate, timeout, common))

    def can_validate(self, name: str) -> bool:
        """Return whether a variant has stored scores on the validation sets, or can be made."""
        if self.kept_scores.file(self._validation_label(name)).is_file():
            return True
        return not self.only_stored and (self.pretrained is not None or variant_of(name).start != "pretrained")

    def can_score(self, name: str) -> bool:
        """Return whether a variant has stored scores on the test sets with each of its seeds, or can be made."""
        return not self.only_stored or self._is_stored(name)

    def stored(self) -> list[str]:
        """Return the variants that have stored scores on the test sets with each of their seeds."""
        folder = self.kept_scores.file(self._test_label(START, self.scale.seeds[0])).parent
        names = {path.stem.rpartition("-seed")[0] for path in folder.glob("*-seed*.json")}
        return sorted(filter(self._is_stored, names))

    def _is_stored(self, name: str) -> bool:
        return all(self.kept_scores.file(self._test_label(name, seed)).is_file() for seed in self.seeds_of(name))

    def _validation_label(self, name: str) -> str:
        return f"validation-{self.kind}/{self.trained_as(name)}"

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds of a variant."""
        variant = variant_of(name)
        if not variant.trained:
            return self.scale.seeds[:1]  # other seeds may have another start
        if self.trial_rate is not None:
            return self.scale.few_seeds[:1]
        few = variant.few_seeds or name in self.scale.few_seeds_of
        return self.scale.few_seeds if few else self.scale.seeds

    def scores(self, names: Iterable[str]) -> "Scores":
        """Evaluate variants with their own seeds.

        A dataset on which a variant failed with any seed is dropped from its scores and reported.
        """
        found = scores_of_models([(name, seed) for name in names for seed in self.seeds_of(name)], self.tested)
        return gathered(with_seeds_of_starts(found, self._hashes_of_test))

    def _hashes_of_test(self, name: str, seed: int) -> Hashes:
        file = self.kept_scores.file(self._test_label(name, seed))
        return read_hashes(file) if file.is_file() else self.weights_before(name)  # not stored if a dataset failed

    def tested(self, name: str, seed: int, timeout: float = -1) -> ScoresOfTypes:
        """Score a variant with one seed on the test sets.

        Raises:
            ValueError: If the stored scores are those of another start than this one.
            filelock.Timeout: If another command works on it for longer than `timeout`.
        """
        label = self._test_label(name, seed)
        out = self.out / label.replace("test", "scores", 1)

        def evaluate() -> Iterator[Evaluation]:
            path = self.model(name, seed)
            for patterns, limit in self.scale.limits.items():
                chosen = [pattern for pattern in patterns if pattern in variant_of(name).datasets]
                with alone(out):
                    if chosen:
                        yield self._evaluate(out.name, path, Path(self.data), chosen, limit, out / f"limit-{limit}")

        def hashes() -> Hashes:
            return {
                **self.weights_before(name),
                "tests": digest_of_tests(Path(self.data), [*chain(*self.scale.limits)]),
            }

        file = self.kept_scores.file(label)
        if name == START and file.is_file() and Path(self.source).is_dir():
            theirs, here = read_hashes(file)["start"], hash_of_weights(self.source)
            if theirs != here:
                raise ValueError(
                    f"{file} has the scores of another start ({theirs}, here {here}): use another seed (--seeds)"
                )
        limits = {f"limit of {' '.join(patterns)}": limit for patterns, limit in self.scale.limits.items()}
        settings, common = self.settings_of_scores(name, seed), self.common_settings | limits
        return self.kept_scores.get(label, settings, hashes, evaluate, timeout, common)

    def _test_label(self, name: str, seed: int) -> str:
        kind = "" if self.trial_rate is None else f"-{self.kind}"
        return f"test{kind}/{self.trained_as(name)}-seed{seed}"

    def _evaluate(
        self, label: str, path: Path, data: Path, patterns: list[str], limit: int | None, out: Path
    ) -> Evaluation:
        """Evaluate one model; cached scores are reused."""
        return mote.evaluate(
            {label: str(path)},
            data=data,
            tasks=patterns,
            limit=limit,
            dtype=self.scale.dtype,
            out=out,
            trust_remote_code=True,
        )

    @property
    def kept_scores(self) -> KeptScores:
        """Stored scores of single models."""
        return KeptScores((self.kept or self.out) / "runs", self.out / "runs", self.report)

    @cached_property
    def common_settings(self) -> dict[str, Any]:
        """Settings that the scale gives all its models, without paths."""
        changes = ["model.source=SOURCE", "data.folder=DATA", *self.scale.changes]
        given, before = (fixed_settings(load_recipe("mote", one), given_only=True) for one in (changes, []))
        return {"dtype": self.scale.dtype, **self._digest_of_kind(self.scale.trained_on), **_changed(given, before)}

    def settings_of_scores(self, name: str, seed: int) -> dict[str, Any]:
        """Return what the scores of a model depend on, without paths, other than hashes and `common_settings`."""
        if name == START:
            return {} if seed == load_recipe("mote").training.seed else {SEED: seed}
        variant, common = variant_of(name), self.common_settings
        recipe = recipe_of(variant, self.scale, "SOURCE", "DATA", seed, self.settings_of(variant), name)
        shipped = load_recipe(variant.recipe)
        own = _changed(fixed_settings(recipe, given_only=True), {**fixed_settings(shipped), **common})
        data = _changed(self.digest_of_data(variant), common)
        teacher = {"teacher": Path(self.teacher).name} if variant.has_teacher else {}
        names = {VARIANT: self.trained_as(name), "recipe": f"{variant.recipe} {digest_of_recipe(shipped)}"}
        after = {"after training": [*variant.after_training]} if variant.after_training else {}
        return {**data, **teacher, **names, **own, **after}

    def weights_before(self, name: str) -> Hashes:
        """Return the hashes of the weights that a variant is trained from.

        Raises:
            ValueError: If they are those of a pre-trained model, and no pre-trained models are given.
        """
        hashes = {"start": hash_of_weights(self.source)}
        variant = variant_of(name)
        if variant.has_teacher:
            hashes["teacher"] = hash_of_weights(self.teacher)
        if variant.start == "given":
            return hashes
        made = self.source_of(variant)
        of_made = folder_hash(Path(made))[:16] if variant.start == "pretrained" else hash_of_weights(made)
        return {**hashes, variant.start: of_made}


def _changed(settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those before."""
    return {key: one for key, one in settings.items() if before.get(key) != one}


def best_rate(sweep: dict[str, dict[float, float]], variant: str | None = None) -> float:
    """Choose the best rate of a variant; without a variant, the rate with the best mean over all variants."""
    of_variants = list(sweep.values()) if variant is None else [sweep[variant]]
    return max(of_variants[0], key=lambda rate: mean(scores[rate] for scores in of_variants))


@dataclass(frozen=True)
class Scores:
    """Scores of several variants.

    Attributes:
        every: Variant → dataset → score with each seed, x 100.
        types: Dataset → task type.
        seeds: Variant → its seeds, in ascending order. A variant without an entry has seeds 0, 1 …
    """

    every: dict[str, dict[str, list[float]]]
    types: dict[str, str]
    seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds of a variant, in ascending order, as those of its scores."""
        return self.seeds.get(name) or tuple(range(len(next(iter(self.every[name].values())))))

    def common_seeds(self, *names: str) -> tuple[int, ...]:
        """Return the seeds that all of these variants have."""
        return tuple(sorted(set.intersection(*({*self.seeds_of(name)} for name in names))))

    def with_common_seeds(self, *names: str) -> "Scores":
        """Return the scores of some variants with the seeds that all of them have: others cannot be compared.

        Raises:
            ValueError: If they have no seed in common.
        """
        common = self.common_seeds(*names)
        if not common:
            raise ValueError(f"There is no seed that all have: { {name: self.seeds_of(name) for name in names} }")
        every = {}
        for name in names:
            places = [self.seeds_of(name).index(seed) for seed in common]
            every[name] = {one: [scores[place] for place in places] for one, scores in self.every[name].items()}
        return Scores(every, self.types, dict.fromkeys(names, common))

    def joined(self, name: str, parts: Iterable[str]) -> "Scores":
        """Combine models that each serve one task into one column."""
        parts = list(parts)
        common = self.with_common_seeds(*parts)
        whole = {dataset: values for part in parts for dataset, values in common.every[part].items()}
        rest = {other: values for other, values in self.every.items() if other not in parts}
        return Scores({**rest, name: whole}, self.types, {**self.seeds, name: common.seeds[parts[0]]})


def scores_of_models(models: Iterable[tuple[str, int]], scores_of: Callable[..., ScoresOfTypes]) -> FoundScores:
    """Return the scores of models, those first that no other command is working on, seed by seed.

    Args:
        models: Variant and seed of each model.
        scores_of: Function of a variant, a seed and, optionally, a timeout.

    Returns:
        Variant → seed → scores.
    """
    models = list(models)
    by_seed = sorted(models, key=itemgetter(1))
    done = dict(zip(by_seed, share(partial(scores_of, *model) for model in by_seed), strict=True))
    found: FoundScores = {}
    for name, seed in models:
        found.setdefault(name, {})[seed] = done[name, seed] or scores_of(name, seed)
    return found


def with_seeds_of_starts(found: FoundScores, hashes_of: Callable[[str, int], Hashes]) -> FoundScores:
    """Give what models start from, which is scored once, the seeds of all models that start from it.

    Args:
        found: Variant → seed → scores.
        hashes_of: Function of a variant and a seed.
    """
    hashes = {name: {seed: hashes_of(name, seed) for seed in of_seeds} for name, of_seeds in found.items()}

    def starts_from(name: str, seed: int, start: Hashes) -> bool:
        return all(hashes[name][seed].get(of, one) == one for of, one in start.items())

    every = {}
    for name, of_seeds in found.items():
        every[name] = {**of_seeds}
        for own, scores in of_seeds.items() if base_of(name) == START else ():
            for other in found:
                same = [seed for seed in found[other] if starts_from(other, seed, hashes[name][own])]
                every[name] |= {seed: scores for seed in same if seed not in of_seeds}
        every[name] = dict(sorted(every[name].items()))
    return every


def gathered(found: FoundScores) -> Scores:
    """Gather the scores of models: variant → seed → scores. Datasets that a variant lacks with one seed are dropped."""
    every: dict[str, dict[str, list[float]]] = {}
    types: dict[str, str] = {}
    for name, of_seeds in found.items():
        for of_types in of_seeds.values():
            types |= {dataset: kind for kind, of_type in of_types.items() for dataset in of_type}
        seeds = [{one: score for of in kinds.values() for one, score in of.items()} for kinds in of_seeds.values()]
        shared = [one for one in seeds[0] if all(one in scores for scores in seeds)]
        every[name] = {one: [scores[one] for scores in seeds] for one in shared}
    return Scores(every, types, {name: tuple(of_seeds) for name, of_seeds in found.items()})
