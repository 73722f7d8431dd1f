"""Scores of single models, stored without the models: many runs can be spread over machines, and over months."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.locking import alone
from mote import Evaluation
from mote.corpora.folder import write_whole
from mote.training.recipe import Recipe
from mote.training.run_folder import differences, fixed_settings

DECIMALS = 4  # of scores x 100

VARIANT = "variant"
SEED = "training.seed"  # a setting that `benchmarks.paper` omits for the seed of the shipped recipes
OWN = (VARIANT, SEED)
"""Settings in the file of the scores itself. Models of other variants and seeds often have all other settings, too."""

Hashes = dict[str, str]
"""What scores depend on besides settings (the weights of the start or of a teacher, the test sets) → its hash."""

ScoresOfTypes = dict[str, dict[str, float]]
"""Task type → dataset → score, x 100."""
Means = dict[str, float]
"""Task type → mean over its datasets."""

COMMON = "common.json"


@dataclass(frozen=True)
class Common:
    """What the scores in a folder have in common. It is stored once, as `COMMON`, and their own files leave it out.

    Attributes:
        settings: Settings of all scores.
        datasets: Task type → names of its datasets, in the order of the scores.
        trainings: Hash → further settings of the scores whose files name it.
    """

    settings: dict[str, Any]
    datasets: dict[str, list[str]]
    trainings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def beside(cls, file: Path) -> "Common | None":
        """Read what the scores in a file have in common with those beside it; None: nothing is stored yet."""
        common = file.with_name(COMMON)
        return cls(**_read(common)) if common.is_file() else None

    def digest(self, kinds: Iterable[str]) -> str:
        """Return a hash of what a file with scores of these task types leaves out."""
        return _digest([self.settings, [self.datasets[kind] for kind in kinds]])


@dataclass(frozen=True)
class KeptScores:
    """A folder with a small file for each model and part of the data, and `COMMON` beside them.

    Attributes:
        folder: The folder.
        locks: Folder for locks.
        report: Function called with each dataset that failed.
    """

    folder: Path
    locks: Path
    report: Callable[[str], None] = print

    def file(self, label: str) -> Path:
        """Return the file of some scores, whether it exists or not."""
        return self.folder / f"{label}.json"

    def get(
        self,
        label: str,
        settings: dict[str, Any],
        hashes: Callable[[], Hashes],
        evaluate: Callable[[], Iterable[Evaluation]],
        timeout: float = -1,
        common: dict[str, Any] | None = None,
    ) -> ScoresOfTypes:
        """Return the scores of a model; if they are not stored, evaluate it, and store them unless a dataset failed.

        Stored scores need no weights, not even those that the model was trained from: another machine may be unable to
        make the same ones again. A new model must start from the same weights as the models it is compared with.

        Args:
            label: Path of the file. The scores in one folder with the same seed are compared.
            settings: All that the scores depend on except `hashes` and `common`, JSON.
            hashes: Finds what else the scores depend on. Called only if they are not stored.
            evaluate: Makes this one model, and evaluates it, if needed in several parts.
            timeout: Seconds to wait for another command that is working on the same scores; -1: no limit.
            common: Settings that all scores in one folder have, JSON.

        Raises:
            ValueError: If the stored scores are those of other settings, or were stored beside another `COMMON`; or if
                new scores cannot be compared with those in the folder: other common settings, other datasets of a task
                type, or the same seed and other hashes.
            filelock.Timeout: If the other command takes longer.
        """
        file, common = self.file(label), _short(common or {})
        with alone(self.locks / label, timeout):
            if not file.is_file():
                _check_common(file, common)
                found = hashes()
                _check_hashes(file.parent, settings.get(SEED), found)
                return self._evaluated(file, label, settings, found, evaluate, common)
        scores = read_scores(file)
        if differing := differences(read_settings(file), {**common, **_short(settings)}):
            raise ValueError(
                f"{file} has the scores of other settings; they differ in {', '.join(differing)}. Remove the file, or "
                "choose another folder"
            )
        return scores

    def _evaluated(
        self,
        file: Path,
        label: str,
        settings: dict[str, Any],
        hashes: Hashes,
        evaluate: Callable[[], Iterable[Evaluation]],
        common: dict[str, Any],
    ) -> ScoresOfTypes:
        scores: ScoresOfTypes = {}
        failures = []
        for evaluation in evaluate():
            (of_model,) = evaluation.scores.values()
            for dataset, score in of_model.items():
                scores.setdefault(evaluation.types[dataset], {})[dataset] = round(score, DECIMALS)
            failures += evaluation.failed()
        for failure in failures:
            self.report(f"FAILED, excluded from all means of {label}: {failure}")
        if not failures:
            file.parent.mkdir(parents=True, exist_ok=True)
            with alone(self.locks / Path(label).with_name(COMMON)):
                _check_common(file, common)  # others may have been stored since
                _check_hashes(file.parent, settings.get(SEED), hashes)
                _store(file, settings, hashes, scores, common)
        return scores


def score_files(folder: Path) -> list[Path]:
    """Return the files of a folder of `KeptScores` that hold scores."""
    return sorted({*folder.glob("*.json")} - {folder / COMMON})


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of the scores in a file of `KeptScores`, without those of their fields that are empty.

    Raises:
        ValueError: If the `COMMON` beside it lacks some of them.
    """
    stored, common = _read(file), Common.beside(file)
    own = _short(stored["settings"])
    if "training" in stored:  # earlier versions stored all in the file
        training = common.trainings.get(stored["training"]) if common else None
        if training is None or _digest(training) != stored["training"]:
            raise ValueError(
                f"{file.with_name(COMMON)} lacks the settings of {file.name}, or has others: restore it from the "
                "folder that this file comes from"
            )
        own |= training
    return {**(common.settings if common else {}), **own}


def read_hashes(file: Path) -> Hashes:
    """Return the hashes of what the scores in a file of `KeptScores` depend on."""
    return _read(file)["hashes"]


def read_scores(file: Path) -> ScoresOfTypes:
    """Return the scores in a file of `KeptScores`.

    Raises:
        ValueError: If they were stored beside another `COMMON`.
    """
    stored, common = _read(file), Common.beside(file)
    scores: dict[str, list[float]] = stored["scores"]
    if lacking := [kind for kind in scores if common is None or kind not in common.datasets]:
        raise ValueError(
            f"{file.with_name(COMMON)}, which names the datasets of {file.name}, lacks {', '.join(lacking)}: add them "
            "from the folder that this file comes from"
        )
    if common is None or stored["common"] != common.digest(scores):
        raise ValueError(
            f"{file} was stored beside another {COMMON}, with other settings or other datasets: restore that file, or "
            "remove these scores"
        )
    return {kind: dict(zip(common.datasets[kind], of_type, strict=True)) for kind, of_type in scores.items()}


def means_of(scores: ScoresOfTypes) -> Means:
    """Average scores over the datasets of each task type."""
    return {kind: mean(of_type.values()) for kind, of_type in scores.items()}


def digest_of_recipe(recipe: Recipe) -> str:
    """Return a hash of the settings that a recipe gives."""
    given = json.dumps(fixed_settings(recipe, given_only=True), sort_keys=True)
    return blake2b(given.encode(), digest_size=8).hexdigest()


def _check_hashes(folder: Path, seed: int | None, hashes: Hashes) -> None:
    """Raise an error if models of the same seed have other weights or test sets, and could not be compared."""
    for file in score_files(folder):
        if _read(file)["settings"].get(SEED) != seed:
            continue
        theirs = read_hashes(file)
        if differing := [of for of in hashes if of in theirs and theirs[of] != hashes[of]]:
            raise ValueError(
                f"{file} has scores with the same seed from other weights or test sets "
                f"({', '.join(f'{of}: {theirs[of]}, here {hashes[of]}' for of in differing)}), so they could not be "
                "compared. Give those, or train other seeds from these weights (--seeds)"
            )


def _check_common(file: Path, settings: dict[str, Any]) -> None:
    """Raise an error if the scores beside a new file have other common settings."""
    common = Common.beside(file)
    if common and (differing := differences(common.settings, settings)):
        raise ValueError(
            f"The scores in {file.parent} have other settings; they differ in {', '.join(differing)}. Choose another "
            "folder"
        )


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _store(
    file: Path, settings: dict[str, Any], hashes: Hashes, scores: ScoresOfTypes, common_settings: dict[str, Any]
) -> None:
    """Write scores, and before them what `COMMON` lacks of what they leave out.

    Raises:
        ValueError: If they are not of the same datasets of a task type as those beside the file.
    """
    before = Common.beside(file)
    names = {kind: [*of_type] for kind, of_type in scores.items()}
    settings = _short(settings)
    own = {key: settings.pop(key) for key in OWN if key in settings}
    training = _digest(settings)
    common = before or Common(common_settings, names)
    common = Common(common.settings, {**names, **common.datasets}, {**common.trainings, training: settings})
    for kind, of_type in names.items():
        if differing := {*of_type} ^ {*common.datasets[kind]}:
            raise ValueError(
                f"The scores in {file.parent} are of other {kind} datasets than {file.name}; only one of them has "
                f"{', '.join(sorted(differing))}. Use the same data, or choose another folder"
            )
    if common != before:
        _write(file.with_name(COMMON), asdict(common))
    listed = {kind: [of_type[name] for name in common.datasets[kind]] for kind, of_type in scores.items()}
    parts = {"settings": own, "training": training, "hashes": hashes, "scores": listed}
    _write(file, {**parts, "common": common.digest(listed)})


def _write(file: Path, parts: dict[str, Any]) -> None:
    """Write JSON with one line per setting and per task type: small files, and still readable differences."""

    def formatted(part: Any) -> str:
        if not isinstance(part, dict) or not part:
            return json.dumps(part)
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(one)}" for key, one in part.items()) + "\n}"

    content = "{" + ", ".join(f"{json.dumps(name)}: {formatted(part)}" for name, part in parts.items()) + "}\n"
    write_whole(file, lambda unfinished: unfinished.write_text(content, encoding="utf-8"))


def _digest(settings: Any) -> str:
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()


def _short(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is unset or empty within a setting, as most fields of a dataset are: files stay small."""
    return {key: _without_empty(value) for key, value in settings.items()}


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one not in (None, {}, [])}
    return value
