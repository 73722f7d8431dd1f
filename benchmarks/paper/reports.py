"""Tables and figures of one scale, from the paper and beyond it: for each a Markdown section, and its scores."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import mean

import mote
from benchmarks.locking import share
from benchmarks.paper.best import (
    BASES,
    best_data,
    best_of,
    best_table,
    data_of,
    rivals,
    scored,
    try_improvements,
    validation_tables,
)
from benchmarks.paper.beyond import INTERPOLATED, TRAINED, validation_scores, validation_table
from benchmarks.paper.claims import OWN_RATES, RATES, TABLES, Claim, Table
from benchmarks.paper.experiments import START, TASKS, ablations, base_of
from benchmarks.paper.figures import TITLES, ablation_table, analysis_tables, draw_ablations, kept_analysis
from benchmarks.paper.improvements import SEPARATE, parts_of, variant_of
from benchmarks.paper.runs import Runs, Scores, best_rate, scores_of_models
from benchmarks.paper.tables import means_table, models_table, report, sweep_table
from benchmarks.paper.unseen import best_way, ways, ways_table
from mote.analysis.analyze import CHARTS

NAMES = ("sweep", *TABLES, "figure1", "figure3", "figures4to7", "rates", "beyond", "unseen", "best")
SCORED_ON = ("tests", "validation")
"""Parts of the data that `score` scores variants on."""


def make(name: str, runs: Runs) -> str:
    """Train and score the models for one of `NAMES`, write what it shows to `runs.out`, and format it as a section."""
    if name in TABLES:
        return _table(name, TABLES[name], runs)
    makers: dict[str, Callable[[Runs], str]] = {
        "sweep": _sweep,
        "figure1": lambda runs: _similarity("figure1", ("ic",), runs),
        "figure3": _figure3,
        "figures4to7": _figures4to7,
        "rates": _rates,
        "beyond": _beyond,
        "unseen": _unseen,
        "best": _best,
    }
    return makers[name](runs)


def score(names: Sequence[str], on: str, seeds: Sequence[int] | None, runs: Runs) -> str:
    """Score variants by name, also those that no table asks for, and format their means.

    Args:
        names: Variants.
        on: One of `SCORED_ON`.
        seeds: Seeds on the test sets. Default: each variant's own.
        runs: Full runs or trials of their scale.
    """
    parts = [part for name in names for part in parts_of(name)]
    variants = {name: variant_of(name) for name in parts}  # all are known before the first is trained
    if on == "validation":
        share(partial(runs.validated, name) for name in parts)
        return means_table({name: runs.validated(name) for name in parts})
    models = [
        (name, seed) for name in parts for seed in (seeds if seeds and variants[name].trained else runs.seeds_of(name))
    ]
    return models_table(scores_of_models(models, runs.tested))


def _table(name: str, table: Table, runs: Runs) -> str:
    return f"### {name}: {table.title}\n\n{_kept(name, table, _scores(table.variants, runs), runs)}"


def _scores(names: Sequence[str], runs: Runs) -> Scores:
    """Score variants; three separate models are one column."""
    scores = runs.scores(part for name in names for part in parts_of(name))
    for whole in (name for name in names if base_of(name) == SEPARATE):
        scores = scores.joined(whole, parts_of(whole))
    return scores


def _kept(name: str, table: Table, scores: Scores, runs: Runs, **others: object) -> str:
    """Format a table, and store what `benchmarks.results` needs for it besides the scores of the models.

    The paper's tables need nothing else.
    """
    if name not in TABLES:
        _write(name, {"table": asdict(table), **others}, runs)
    return report(table, scores)


def _write(name: str, kept: object, runs: Runs) -> None:
    (runs.out / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def _similarity(name: str, variants: tuple[str, ...], runs: Runs) -> str:
    models = {variant: str(runs.model(variant, runs.scale.seeds[0])) for variant in variants}
    found = mote.analyze(models, out=runs.out / name, data=runs.data, start=runs.source, trust_remote_code=True)
    kept = kept_analysis(found)
    _write(name, kept, runs)
    tables = re.sub(r"^#", "##", analysis_tables(kept), flags=re.MULTILINE)
    charts = [f"![{chart}]({name}/{chart})" for chart in CHARTS if (runs.out / name / chart).is_file()]
    return "\n\n".join([f"### {name}: {TITLES[name]}", tables, *charts])


def _sweep(runs: Runs) -> str:
    if not runs.scale.sweep:
        return "### sweep: the learning rates of this scale are given"
    found = runs.sweep
    _write("sweep", found, runs)
    return f"### sweep: {TITLES['sweep']}\n\n{sweep_table(found)}\n\nOne rate for all: {best_rate(found):g}."


def _figure3(runs: Runs) -> str:
    others = ("mote-high-rate", "ic-high-rate") if _several_rates(runs) else ()
    return _similarity("figure3", ("mote", "ic", *others), runs)


def _figures4to7(runs: Runs) -> str:
    trained = runs.trials if runs.scale.sweep else runs
    scores = trained.scores(name for task in TASKS for name in ablations(task))
    draw_ablations(scores, runs.scores([START]), runs.out / "figures4to7.png")
    title = TITLES["figures4to7"]
    return f"### figures4to7: {title}\n\n{ablation_table(scores)}\n\n![{title}](figures4to7.png)"


def _several_rates(runs: Runs) -> bool:
    return len(set(runs.scale.learning_rates.values())) > 1


def _rates(runs: Runs) -> str:
    if runs.scale.sweep:
        return _table("rates", _as_trained(OWN_RATES, runs), runs)
    if not _several_rates(runs):
        return "### rates: this scale has only one learning rate"
    return _table("rates", RATES, runs)


def _as_trained(table: Table, runs: Runs) -> Table:
    """Name the variants that are trained in place of these: with its own rate, if that is the shared one, none is."""
    name = runs.trained_as
    claims = dict.fromkeys(replace(one, better=name(one.better), other=name(one.other)) for one in table.claims)
    return replace(
        table,
        variants=tuple(dict.fromkeys(map(name, table.variants))),
        claims=tuple(one for one in claims if one.better != one.other),
    )


def _beyond(runs: Runs) -> str:
    if runs.scale.sweep:
        return "### beyond: at this scale `unseen` and `best` try these variants"
    on_validation = {name: validation_scores(runs, name) for name in INTERPOLATED}
    chosen = max(on_validation, key=lambda name: on_validation[name]["validation_mean"])
    on_validation |= {name: validation_scores(runs, name) for name in ("mote-average", *TRAINED)}
    others = tuple(dict.fromkeys((chosen, *TRAINED)))
    claims = tuple(Claim(name, "mote") for name in others if name != "mote")
    table = Table("Beyond the paper", tuple(dict.fromkeys(("ic", "mote", *others))), "mote", claims=claims)
    lines = [
        "### beyond: experts interpolated towards their mean, one expert for two tasks, learning rates per expert",
        validation_table(on_validation),
        f"Of the interpolations, {chosen} is best on validation texts. On the test splits:",
        _kept("beyond", table, runs.scores(table.variants), runs, validation=on_validation),
    ]
    return "\n\n".join(lines)


def _unseen(runs: Runs) -> str:
    title = "### unseen: which expert serves tasks that no expert is trained on"
    if not runs.scale.sweep:
        return f"{title}: this scale has no validation sets"
    on_validation = ways(runs.trials)
    chosen = best_way(on_validation)
    claims = (Claim(chosen, "mote"), Claim(chosen, "mote", "STS")) if chosen != "mote" else ()
    table = Table("Unseen tasks", tuple(dict.fromkeys(("em", "ic", "mote", chosen))), "mote", claims=claims)
    kept = _kept("unseen", table, runs.scores(table.variants), runs, validation=on_validation)
    return "\n\n".join([title, ways_table(on_validation), "On the test splits:", kept])


def _best(runs: Runs) -> str:
    title = "### best: the best recipe with experts, and the best dense ones"
    if not runs.scale.sweep:
        return f"{title}: this scale has no validation sets"
    if runs.scale.candidates:
        return _best_candidate(title, runs)
    repeats = runs.scale.repeats
    if repeats and not runs.choosing.stored():
        raise ValueError(f"There are no stored scores of scale {runs.scale.chosen_by}, which chooses: give --kept")
    found = try_improvements(replace(runs.choosing, only_stored=True) if repeats else runs)
    best = {base: best_of(steps)["name"] for base, steps in found["in_full"].items()}
    names = scored(best) if "mote" in best else ()
    if left_out := [name for name in names if not all(map(runs.can_score, parts_of(name)))]:
        runs.report(f"no scores with each seed: {', '.join(left_out)}")
    names = tuple(name for name in names if name not in left_out)
    names = tuple(dict.fromkeys((*names, *rivals(runs.stored(), best_data(found["data"])))))
    if missing := sorted({*BASES} - {*map(base_of, names)}):
        raise ValueError(f"There are no stored scores of {', '.join(missing)}: run `best` without --only-stored")
    validation = {} if repeats else {"validation": found}
    kept = _kept_best(names, best_data(found["data"]), runs, **validation)
    return "\n\n".join([title, *map(validation_tables, validation.values()), "On the test splits:", kept])


def _best_candidate(title: str, runs: Runs) -> str:
    """Compare the candidate that validation sets choose with all stored models without experts."""
    share(partial(runs.validated, name) for name in runs.scale.candidates)
    validated = {name: runs.validated(name) for name in runs.scale.candidates}
    best = max(validated, key=lambda name: mean(validated[name].values()))
    data = data_of(best)
    kept = _kept_best((best, *rivals(runs.stored(), data)), data, runs)
    return "\n\n".join([title, means_table(validated), "On the test splits:", kept])


def _kept_best(names: tuple[str, ...], data: str, runs: Runs, **validation: object) -> str:
    """Compare the first of some variants with the others; `benchmarks.results` makes the table of the goal."""
    taught = [f"{START}{data}+distilled"] if any("+distilled" in name for name in names) else []
    starts = tuple(filter(runs.can_score, (START, *taught)))
    scores = _scores((*starts, *names), runs)
    return _kept("best", best_table(names, starts), scores, runs, **validation)
