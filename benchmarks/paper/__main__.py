"""Reproduce the tables and figures of the MoTE paper.

    python -m benchmarks.paper all --scale smoke --out RUNS                                  # minutes, no downloads
    python -m benchmarks.paper table2 --scale small --data DATA --out RUNS [--source MODEL]  # hours on a CPU
    python -m benchmarks.paper all --scale full --data DATA --out RUNS                       # one GPU, all data
    python -m benchmarks.paper score --variants tlr mote+homogeneous --scale medium --data DATA --out RUNS

Existing models and scores are reused, and an interrupted command resumes when it is run again. Several commands can
share RUNS: each model is trained by one of them. RUNS/SCALE gets `NAME.md` for each table or figure, the scores of each
model under `runs`, `NAME.json` with what else `benchmarks.results` needs, the plots, and, after `all`, `results.md`.
`score` trains and scores single variants, with the improvements that their names list.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.paper.experiments import SCALES
from benchmarks.paper.reports import NAMES, SCORED_ON, make, score
from benchmarks.paper.runs import Runs
from mote.reporting import console_logging

SCORE = "score"


def parse() -> argparse.Namespace:
    """Parse the command line; `data` and `source` default to the scale's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all", SCORE])
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help=f"for `{SCORE}`: what to score")
    parser.add_argument("--on", choices=SCORED_ON, default="tests", help=f"for `{SCORE}` (default: %(default)s)")
    parser.add_argument("--trials", action="store_true", help=f"for `{SCORE}`: train on part of the pairs")
    parser.add_argument("--scale", choices=list(SCALES), required=True)
    parser.add_argument("--source", help="dense checkpoint that all variants start from (default: the scale's)")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help="seeds of the variants that are trained with several, e.g. those to train on this machine; for `score`: "
        "seeds on the test sets",
    )
    parser.add_argument("--data", help="data folder (default: the scale's, if it has one)")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and scores")
    parser.add_argument(
        "--kept",
        type=Path,
        help="folder with SCALE/runs, stored scores of single models; commands that share it must share --out, too",
    )
    parser.add_argument("--teacher", default=Runs.teacher, help="model to distill, which also mines negatives")
    parser.add_argument(
        "--only-stored", action="store_true", help="for `best`: leave out full runs without stored scores"
    )
    parser.add_argument("--pretrained", type=Path, help="folder of benchmarks.cot, with models pre-trained by CoT-MAE")
    arguments = parser.parse_intermixed_args()
    scale = SCALES[arguments.scale]
    arguments.data = arguments.data or scale.data
    arguments.source = arguments.source or scale.source
    scored = arguments.name == SCORE
    refused = {
        f"--scale {arguments.scale} needs --data": arguments.data is None,
        f"{SCORE} needs --variants, which no other table or figure takes": scored != bool(arguments.variants),
        f"--trials and --on are for {SCORE}": not scored and (arguments.trials or arguments.on != "tests"),
        "--only-stored is for best": arguments.only_stored and arguments.name not in ("best", "all"),
        f"scale {arguments.scale} has no trials, as its learning rate is given": arguments.trials and not scale.sweep,
        "--on validation has one seed: leave out --seeds": arguments.on == "validation" and arguments.seeds,
    }
    for message in (message for message, wrong in refused.items() if wrong):
        parser.error(message)
    return arguments


def main() -> None:
    """Run from the command line."""
    arguments = parse()
    console_logging()
    scale = SCALES[arguments.scale]
    if arguments.seeds:
        scale = replace(scale, seeds=tuple(arguments.seeds))
    out = arguments.out / arguments.scale
    out.mkdir(parents=True, exist_ok=True)
    runs = Runs(
        scale,
        arguments.source,
        arguments.data,
        out,
        tuple(arguments.changes),
        _say,
        arguments.teacher,
        arguments.pretrained,
        kept=arguments.kept and arguments.kept / arguments.scale,
        only_stored=arguments.only_stored,
    )
    if arguments.name == SCORE:
        chosen = runs.trials if arguments.trials else runs
        _say(f"\n{score(arguments.variants, arguments.on, arguments.seeds, chosen)}")
        return
    parts = []
    for name in NAMES if arguments.name == "all" else (arguments.name,):
        begin = time.monotonic()
        part = make(name, runs)
        (out / f"{name}.md").write_text(part + "\n", encoding="utf-8")
        parts.append(part)
        _say(f"\n{part}\n\n{name}: {time.monotonic() - begin:.0f} s")
    if arguments.name == "all":
        (out / "results.md").write_text("\n\n".join([_heading(arguments.scale, runs), *parts]) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


def _heading(scale: str, runs: Runs) -> str:
    limits = "; ".join(f"{', '.join(sets)}: {limit or 'all'}" for sets, limit in runs.scale.limits.items())
    return (
        f"## Scale {scale}\n\nFrom {Path(runs.source).name}; seeds {', '.join(map(str, runs.scale.seeds))}; "
        f"{', '.join([*runs.scale.changes, *runs.changes]) or 'recipes unchanged'}. Test rows or queries of each "
        f"dataset: {limits}; embedded in {runs.scale.dtype or 'the dtype of the weights'}."
    )


if __name__ == "__main__":
    main()
