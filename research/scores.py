"""Stored scores of all models, `scores.jsonl.gz`, and how they are gathered into columns of tables.

Each line is a JSON object with its `source` and `command`. The `kind` says what it is: `scores` of one model
(`ScoredModel`), a `table` of chosen models with claims, a `sweep` of learning rates, an `analysis` (Figures 1 and 3),
or the `recipes` that were compared first.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("scores.jsonl.gz")

START = "start"
"""The dense checkpoint, before any training; `start+distilled`: after it has learned from a teacher."""
TASKS = ("retrieval", "classification", "clustering")
SEPARATE = "sem"
"""Three dense models, one for each of `TASKS`, which tables show as one variant."""
FIVE_TASKS = "five-tasks"
"""In a variant's name: trained on class labels and pairs of texts."""

ScoresOfTypes = dict[str, dict[str, float]]
"""Task type → dataset → score, x 100."""
FoundScores = dict[str, dict[int, ScoresOfTypes]]
"""Variant → seed → scores."""
Hashes = dict[str, str]
"""What scores depend on besides settings, such as the weights of the start → its hash."""


@dataclass(frozen=True)
class ScoredModel:
    """Scores of one model.

    Attributes:
        scale: Scale of the experiment.
        variant: Name of the variant.
        seed: Seed of the training.
        scores: Task type → dataset → score, x 100.
        on: `test` or `validation` sets.
        rate: Learning rate of a trial, which is trained on part of the pairs. Default: not a trial.
        vectors: Stage of training and kind of vectors, for scale `cot`.
        settings: Recipe and evaluation settings, without paths.
        hashes: Hashes of the weights that it was trained from, and of the test sets.
        source: File and commit, or program and commit, that the scores come from.
        command: Command that trains and scores it, at that commit.
    """

    scale: str
    variant: str
    seed: int
    scores: ScoresOfTypes
    on: str = "test"
    rate: float | None = None
    vectors: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    hashes: Hashes = field(default_factory=dict)
    source: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Key that tells a model apart from all others."""
        return self.scale, self.variant, self.seed, self.on, self.rate, self.vectors


@dataclass(frozen=True)
class Store:
    """All that is stored.

    Attributes:
        models: Scores of single models.
        others: Lines of other kinds.
    """

    models: tuple[ScoredModel, ...]
    others: tuple[dict[str, Any], ...] = ()

    def of_scale(self, scale: str, on: str = "test", trials: bool = False) -> list[ScoredModel]:
        """Return the models of a scale that are scored on these sets: trials, or all others."""
        return [one for one in self.models if (one.scale, one.on, one.rate is not None) == (scale, on, trials)]

    def contents(self, kind: str, scale: str) -> dict[str, dict[str, Any]]:
        """Return the lines of another kind: name → content."""
        return {one["name"]: one for one in self.others if (one["kind"], one["scale"]) == (kind, scale)}

    def with_models(self, models: Iterable[ScoredModel]) -> "Store":
        """Return a store with further models, which replace those with the same key."""
        every = {one.key: one for one in (*self.models, *models)}
        return Store(tuple(every.values()), self.others)


def read(file: Path = FILE) -> Store:
    """Read a file of scores, compressed or not."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        contents = [json.loads(line) for line in lines]
    models = ({name: value for name, value in one.items() if name != "kind"} for one in contents if _is_scores(one))
    return Store(tuple(ScoredModel(**one) for one in models), tuple(one for one in contents if not _is_scores(one)))


def _is_scores(content: Mapping[str, Any]) -> bool:
    return content["kind"] == "scores"


def write(store: Store, file: Path = FILE) -> None:
    """Write a compressed file of scores; the same scores give the same bytes."""
    models = [{"kind": "scores", **asdict(one)} for one in store.models]
    lines = "".join(f"{json.dumps(one)}\n" for one in (*models, *store.others))
    file.write_bytes(gzip.compress(lines.encode(), mtime=0))


def base_of(name: str) -> str:
    """Return a variant's name without its improvements: `mote` of `mote+mined`."""
    return name.partition("+")[0]


def parts_of(name: str) -> list[str]:
    """Return the names of a variant's models: one, or for `sem` and its improvements one per task."""
    base, *improvements = name.split("+")
    return ["+".join([f"{SEPARATE}-{task}", *improvements]) for task in TASKS] if base == SEPARATE else [name]


def found_scores(models: Iterable[ScoredModel]) -> FoundScores:
    """Collect scores by variant and seed: the start first, then by base and length of the name.

    Three separate models, with the seeds that all of them have, are one variant.
    """
    found: FoundScores = {}
    for one in models:
        found.setdefault(one.variant, {})[one.seed] = one.scores
    found = _with_separate({name: dict(sorted(of_seeds.items())) for name, of_seeds in found.items()})

    def place(name: str) -> tuple[bool, str, int]:
        base, *improvements = name.split("+")
        return base != START, base, len(improvements)

    return {name: found[name] for name in sorted(found, key=place)}


def _with_separate(found: FoundScores) -> FoundScores:
    first = f"{SEPARATE}-{TASKS[0]}"
    for whole in [SEPARATE + name.removeprefix(first) for name in found if base_of(name) == first]:
        parts = [found.get(part, {}) for part in parts_of(whole)]
        if seeds := sorted(set.intersection(*map(set, parts))):
            found[whole] = {seed: {kind: one for part in parts for kind, one in part[seed].items()} for seed in seeds}
            found = {name: of_seeds for name, of_seeds in found.items() if name not in parts_of(whole)}
    return found


def scores_of(models: Iterable[ScoredModel]) -> "Scores":
    """Gather the scores of models, with the start, which is scored once, for each seed of those trained from it."""
    models = list(models)
    found = found_scores(models)
    for start in (one for one in models if base_of(one.variant) == START):
        same = {one.seed for one in models if all(one.hashes.get(of, it) == it for of, it in start.hashes.items())}
        found[start.variant] = dict.fromkeys(sorted(same), start.scores)
    return gathered(found)


@dataclass(frozen=True)
class Scores:
    """Scores of several variants.

    Attributes:
        every: Variant → dataset → score with each seed, x 100.
        types: Dataset → task type.
        seeds: Variant → its seeds, in ascending order.
    """

    every: dict[str, dict[str, list[float]]]
    types: dict[str, str]
    seeds: dict[str, tuple[int, ...]]

    def common_seeds(self, *names: str) -> tuple[int, ...]:
        """Return the seeds that all of these variants have."""
        return tuple(sorted(set.intersection(*({*self.seeds[name]} for name in names))))

    def with_common_seeds(self, *names: str) -> "Scores":
        """Return the scores of some variants with the seeds that all of them have: others cannot be compared.

        Raises:
            ValueError: If they have no seed in common.
        """
        common = self.common_seeds(*names)
        if not common:
            raise ValueError(f"There is no seed that all have: { {name: self.seeds[name] for name in names} }")
        every = {}
        for name in names:
            places = [self.seeds[name].index(seed) for seed in common]
            every[name] = {one: [scores[place] for place in places] for one, scores in self.every[name].items()}
        return Scores(every, self.types, dict.fromkeys(names, common))


def gathered(found: Mapping[str, Mapping[int, ScoresOfTypes]]) -> Scores:
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
