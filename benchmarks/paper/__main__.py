"""Reproduce the tables and figures of the MoTE paper.

    python -m benchmarks.paper all --scale smoke --out RUNS                                  # minutes, no downloads
    python -m benchmarks.paper table2 --scale small --data DATA --out RUNS [--source MODEL]  # hours on a CPU
    python -m benchmarks.paper all --scale full --data DATA --out RUNS                       # one GPU, all data

Models and scores that exist are reused, and an interrupted command resumes when it is run again. Several commands may
share RUNS: each model is trained by one of them. RUNS/SCALE holds `NAME.md` for each table or figure, `NAME.json` with
the scores of each table, the plots, and, after `all`, `results.md`.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import mote
from benchmarks.paper.best import BASES, best_of, improve, steps_table
from benchmarks.paper.beyond import INTERPOLATED, TRAINED, validation_scores, validation_table
from benchmarks.paper.claims import OWN_RATES, RATES, TABLES, Claim, Table
from benchmarks.paper.experiments import SCALES, TASKS, ablations
from benchmarks.paper.figures import TITLES, ablation_table, analysis_tables, draw_ablations, kept_analysis
from benchmarks.paper.improvements import SEPARATE, parts_of
from benchmarks.paper.runs import START, Runs, Scores, best_rate
from benchmarks.paper.tables import report, sweep_table
from benchmarks.paper.unseen import best_way, ways, ways_table
from mote.analysis.analyze import CHARTS
from mote.reporting import console_logging

NAMES = ("sweep", *TABLES, "figure1", "figure3", "figures4to7", "rates", "beyond", "unseen", "best")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--scale", choices=list(SCALES), required=True)
    parser.add_argument("--source", help="dense checkpoint that all variants start from (default: the scale's)")
    parser.add_argument("--data", help="data folder (default: the scale's, if it has one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and scores")
    parser.add_argument("--teacher", default=Runs.teacher, help="model that is distilled, and mines negatives")
    parser.add_argument("--pretrained", type=Path, help="folder of benchmarks.cot, with models pre-trained by CoT-MAE")
    arguments = parser.parse_intermixed_args()
    console_logging()
    scale = SCALES[arguments.scale]
    data = arguments.data or scale.data
    if data is None:
        parser.error(f"--scale {arguments.scale} needs --data")
    out = arguments.out / arguments.scale
    out.mkdir(parents=True, exist_ok=True)
    source = arguments.source or scale.source
    runs = Runs(scale, source, data, out, tuple(arguments.changes), _say, arguments.teacher, arguments.pretrained)
    parts = []
    for name in NAMES if arguments.name == "all" else (arguments.name,):
        begin = time.monotonic()
        part = _make(name, runs)
        (out / f"{name}.md").write_text(part + "\n", encoding="utf-8")
        parts.append(part)
        _say(f"\n{part}\n\n{name}: {time.monotonic() - begin:.0f} s")
    if arguments.name == "all":
        (out / "results.md").write_text("\n\n".join([_heading(arguments.scale, runs), *parts]) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


def _make(name: str, runs: Runs) -> str:
    if name in TABLES:
        return _table(name, TABLES[name], runs)
    makers: dict[str, Callable[[Runs], str]] = {
        "sweep": _sweep,
        "figure1": _figure1,
        "figure3": _figure3,
        "figures4to7": _figures4to7,
        "rates": _rates,
        "beyond": _beyond,
        "unseen": _unseen,
        "best": _best,
    }
    return makers[name](runs)


def _table(name: str, table: Table, runs: Runs) -> str:
    models_of_tasks = [f"sem-{task}" for task in TASKS]
    names = [part for name in table.variants for part in (models_of_tasks if name == "sem" else [name])]
    scores = runs.scores(names)
    if "sem" in table.variants:
        scores = scores.joined("sem", models_of_tasks)
    return f"### {name}: {table.title}\n\n{_kept(name, table, scores, runs)}"


def _kept(name: str, table: Table, scores: Scores, runs: Runs, **others: object) -> str:
    """Keep a table with its scores, from which `benchmarks.results` lays it out again; lay it out."""
    _write(name, {"table": asdict(table), **others, **asdict(scores)}, runs)
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


def _figure1(runs: Runs) -> str:
    return _similarity("figure1", ("ic",), runs)


def _figure3(runs: Runs) -> str:
    others = ("mote-high-rate", "ic-high-rate") if _several_rates(runs) else ()
    return _similarity("figure3", ("mote", "ic", *others), runs)


def _figures4to7(runs: Runs) -> str:
    scores = runs.scores(name for task in TASKS for name in ablations(task))
    _write("figures4to7", asdict(scores), runs)
    draw_ablations(scores, runs.scores([START]), runs.out / "figures4to7.png")
    title = TITLES["figures4to7"]
    return f"### figures4to7: {title}\n\n{ablation_table(scores)}\n\n![{title}](figures4to7.png)"


def _several_rates(runs: Runs) -> bool:
    return len(set(runs.scale.learning_rates.values())) > 1


def _rates(runs: Runs) -> str:
    if runs.scale.sweep:
        return _table("rates", OWN_RATES, runs)
    if not _several_rates(runs):
        return "### rates: this scale has only one learning rate"
    return _table("rates", RATES, runs)


def _beyond(runs: Runs) -> str:
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
    title = "### unseen: which expert serves the tasks that none is trained on"
    if not runs.scale.sweep:
        return f"{title}: this scale has no validation sets"
    on_validation = ways(runs)
    chosen = best_way(on_validation)
    claims = (Claim(chosen, "mote"), Claim(chosen, "mote", "STS")) if chosen != "mote" else ()
    table = Table("Unseen tasks", tuple(dict.fromkeys(("em", "ic", "mote", chosen))), "mote", claims=claims)
    kept = _kept("unseen", table, runs.scores(table.variants), runs, validation=on_validation)
    return "\n\n".join([title, ways_table(on_validation), "On the test splits:", kept])


def _best(runs: Runs) -> str:
    title = "### best: the best recipe with experts, and the best dense ones"
    if not runs.scale.sweep:
        return f"{title}: this scale has no validation sets"
    steps = {base: improve(runs, base) for base in BASES}
    names = {base: best_of(of_base)["name"] for base, of_base in steps.items()}
    scores = runs.scores([START, *(part for name in names.values() for part in parts_of(name))])
    scores = scores.joined(names[SEPARATE], parts_of(names[SEPARATE]))
    claims = tuple(Claim(names["mote"], name) for base, name in names.items() if base != "mote")
    claims += tuple(Claim(names["mote"], other, "Retrieval") for other in (names["ic"], START))
    table = Table("The best of each", (START, *names.values()), names["ic"], claims=claims)
    kept = _kept("best", table, scores, runs, validation=steps)
    return "\n\n".join([title, steps_table(steps), "On the test splits:", kept])


def _heading(scale: str, runs: Runs) -> str:
    limits = "; ".join(f"{', '.join(sets)}: {limit or 'all'}" for sets, limit in runs.scale.limits.items())
    return (
        f"## Scale {scale}\n\nFrom {Path(runs.source).name}; seeds {', '.join(map(str, runs.scale.seeds))}; "
        f"{', '.join([*runs.scale.changes, *runs.changes]) or 'recipes unchanged'}. Test rows or queries of each "
        f"dataset: {limits}; embedded in {runs.scale.dtype or 'the dtype of the weights'}."
    )


if __name__ == "__main__":
    main()
