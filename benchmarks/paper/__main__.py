"""The tables and figures of the MoTE paper, made anew.

    python benchmarks/paper all --scale smoke --out RUNS                                       # minutes, no downloads
    python benchmarks/paper table2 --scale small --data DATA --out RUNS [--source MODEL]       # hours on a CPU
    python benchmarks/paper all --scale full --data DATA --out RUNS                            # one GPU, whole data

What is missing is trained and scored, what is there is used again, and the same command goes on after it was broken
off. Several commands may share RUNS: a model is trained by one of them. Written to RUNS/SCALE: `NAME.md` for each table
or figure, `NAME.json` with the scores of each table, the pictures, and, by `all`, `results.md`.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from beyond import INTERPOLATED, TRAINED, validation_scores, validation_table
from claims import RATES, TABLES, Claim, Table
from experiments import SCALES, TASKS, ablations
from figures import ablation_table, draw_ablations
from runs import START, Runs, Scores
from tables import claims_of, table_of

import mote

NAMES = (*TABLES, "figure1", "figure3", "figures4to7", "rates", "beyond")


def main() -> None:
    """Make one of them, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="settings of every run, over the scale's")
    parser.add_argument("--scale", choices=list(SCALES), required=True)
    parser.add_argument("--source", help="the dense checkpoint that all start from (default: the scale's)")
    parser.add_argument("--data", help="folder of the data (default: the scale's, if it has one)")
    parser.add_argument("--out", type=Path, required=True, help="where models and scores are kept")
    arguments = parser.parse_intermixed_args()
    scale = SCALES[arguments.scale]
    data = arguments.data or scale.data
    if data is None:
        parser.error(f"--scale {arguments.scale} needs --data: the scale has no data of its own")
    out = arguments.out / arguments.scale
    runs = Runs(scale, arguments.source or scale.source, data, out, tuple(arguments.changes), _say)
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
        "figure1": _figure1,
        "figure3": _figure3,
        "figures4to7": _figures4to7,
        "rates": _rates,
        "beyond": _beyond,
    }
    return makers[name](runs)


def _table(name: str, table: Table, runs: Runs) -> str:
    models_of_tasks = [f"sem-{task}" for task in TASKS]
    names = [part for name in table.variants for part in (models_of_tasks if name == "sem" else [name])]
    scores = runs.scores(names)
    if "sem" in table.variants:
        scores = scores.joined("sem", models_of_tasks)
    _keep(name, scores, runs)
    return "\n\n".join([f"### {name}: {table.title}", table_of(table, scores), claims_of(table, scores)])


def _keep(name: str, scores: Scores, runs: Runs) -> None:
    (runs.out / f"{name}.json").write_text(json.dumps(asdict(scores), indent=1) + "\n", encoding="utf-8")


def _similarity(name: str, title: str, variants: tuple[str, ...], runs: Runs) -> str:
    models = {variant: str(runs.model(variant, runs.scale.seeds[0])) for variant in variants}
    mote.analyze(models, out=runs.out / name, data=runs.data, start=runs.source, report=runs.report)
    analysis = (runs.out / name / "analysis.md").read_text(encoding="utf-8")
    below = re.sub(r"^#", "####", analysis.partition("\n")[2].strip(), flags=re.MULTILINE)
    below = below.replace("](", f"]({name}/")  # its pictures
    return f"### {name}: {title}\n\n{below}"


def _figure1(runs: Runs) -> str:
    return _similarity("figure1", "similarity between the tasks of the instruction-conditioned model", ("ic",), runs)


def _figure3(runs: Runs) -> str:
    title = "similarity between tasks of MoTE and of the dense model, at one learning rate and at another"
    others = ("mote-high-rate", "ic-high-rate") if _several_rates(runs) else ()
    return _similarity("figure3", title, ("mote", "ic", *others), runs)


def _figures4to7(runs: Runs) -> str:
    scores = runs.scores(name for task in TASKS for name in ablations(task))
    draw_ablations(scores, runs.scores([START]), runs.out / "figures4to7.png")
    title = "batches and temperature of each task"
    return f"### figures4to7: {title}\n\n{ablation_table(scores)}\n\n![{title}](figures4to7.png)"


def _several_rates(runs: Runs) -> bool:
    return len(set(runs.scale.learning_rates.values())) > 1


def _rates(runs: Runs) -> str:
    if not _several_rates(runs):
        return "### rates: at this scale there is one learning rate"
    return _table("rates", RATES, runs)


def _beyond(runs: Runs) -> str:
    on_validation = {name: validation_scores(runs, name) for name in INTERPOLATED}
    chosen = max(on_validation, key=lambda name: on_validation[name]["validation_mean"])
    on_validation |= {name: validation_scores(runs, name) for name in ("mote-average", *TRAINED)}
    others = tuple(dict.fromkeys((chosen, *TRAINED)))
    claims = tuple(Claim(name, "mote") for name in others if name != "mote")
    table = Table("Beyond the paper", tuple(dict.fromkeys(("ic", "mote", *others))), "mote", claims=claims)
    scores = runs.scores(table.variants)
    _keep("beyond", scores, runs)
    lines = [
        "### beyond: experts moved towards their mean, one expert for two tasks, learning rates of experts",
        validation_table(on_validation),
        f"Of the interpolations, {chosen} is best on validation texts. On the test parts:",
        table_of(table, scores),
        claims_of(table, scores),
    ]
    return "\n\n".join(lines)


def _heading(scale: str, runs: Runs) -> str:
    limits = "; ".join(f"{', '.join(sets)}: {limit or 'all'}" for sets, limit in runs.scale.limits.items())
    return (
        f"## Scale {scale}\n\nFrom {Path(runs.source).name}; seeds {', '.join(map(str, runs.scale.seeds))}; "
        f"{', '.join([*runs.scale.changes, *runs.changes]) or 'the recipes as they are'}. Test rows or queries of each "
        f"set: {limits}; embedded in {runs.scale.dtype or 'the dtype of the weights'}."
    )


if __name__ == "__main__":
    main()
