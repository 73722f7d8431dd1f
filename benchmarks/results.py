"""Rewrite the tables in README and on the pages of results, and README's chart, from the stored scores.

    python -m benchmarks.results            # rewrites them
    python -m benchmarks.results --check    # only compares: exits with 1 and names the tables that differ

A page has a table between `<!-- table: NAME -->` and `<!-- end of table -->`. The scores in docs/results are stored as
the benchmarks write them: `scores.json` of `benchmarks.NAME` as NAME.json, `SCALE/NAME.json` of `benchmarks.paper`
under that name, and the scores of its models in `SCALE/runs/test` (or, without their settings, in SCALE/scores.json).
Every table that can be made of these must be on a page; one of a scale that is on no page is added to results/SCALE.md:

- the stored tables, and the paper's;
- SCALE/claims, the paper's claims in short, and SCALE/goal, question 4 of the plan in short;
- SCALE/validation, the scores on validation sets of a scale that repeats the choices of another;
- SCALE/figures4to7, of the models in `SCALE/runs/test`, or in the trials at the best rate of the sweep;
- SCALE/models, all models in `SCALE/runs/test`; those with other data than the scale's have a table by the name of the
  data;
- `readme`, a summary of the table `README_TABLE`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import cot, decoders, mining, task_loras
from benchmarks.paper.best import goal_report, labels_report, validation_tables
from benchmarks.paper.beyond import validation_table
from benchmarks.paper.claims import TABLES, Claim, Table
from benchmarks.paper.experiments import SCALES, START, TASKS, ablations, base_of
from benchmarks.paper.figures import TITLES, ablation_table, analysis_tables
from benchmarks.paper.improvements import DATA, SEPARATE, parts_of
from benchmarks.paper.kept import Hashes, means_of, read_hashes, read_scores, score_files
from benchmarks.paper.readme import draw_gains, drawn_gains, gains_of, readme_table
from benchmarks.paper.reports import NAMES
from benchmarks.paper.runs import FoundScores, Scores, best_rate, gathered, with_seeds_of_starts
from benchmarks.paper.tables import (
    claims_of,
    means_table,
    models_table,
    paper_of,
    report,
    summary_of,
    sweep_table,
    table_of,
)
from benchmarks.paper.unseen import ways_table

DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- end of table -->"
README_TABLE = Path("small_mote.json")  # the scores that README shows
CHART = Path("images/gains.png")


def _scores(kept: Any) -> Scores:
    seeds = {name: tuple(of_name) for name, of_name in kept.get("seeds", {}).items()}
    return Scores(kept["every"], kept["types"], seeds)


def _sweep(kept: Any) -> dict[str, dict[float, float]]:
    return {name: {float(rate): score for rate, score in of_rates.items()} for name, of_rates in kept.items()}


def _paper_table(name: str, table: Table, scores: Scores, validation: Any = None) -> str:
    """Format a table with claims; only the paper's scores and the claims if the columns cannot be compared."""
    if not _comparable(table.variants, scores):
        return f"{paper_of(table)}\n\n{claims_of(table, scores)}"
    before = [VALIDATION[name](validation)] if validation is not None else []
    if name == "best":
        before.append(labels_report(table, scores))
    return "\n\n".join([*before, report(table, scores)])


def _comparable(names: Iterable[str], scores: Scores) -> bool:
    """Return whether variants have scores with a seed in common."""
    names = [*names]
    return scores.every.keys() >= {*names} and bool(scores.common_seeds(*names))


def _measurable(table: Table, scores: Scores) -> Table:
    """Leave out claims about variants that cannot be compared."""

    def variants(claim: Claim) -> list[str]:
        return [name for name in (claim.better, claim.other, claim.relative_to) if name is not None]

    return replace(table, claims=tuple(one for one in table.claims if _comparable(variants(one), scores)))


def _small_mote(kept: Any) -> str:
    """Format the table of `scripts.train_small_mote`, also split by whether labels of a dataset are trained on."""
    scores, learned = _scores(kept), set(kept["trained_on"])
    kinds = {name: "labels trained on" if name in learned else "others" for name in scores.types}
    table = _table(kept["table"])
    split = replace(table, types=("labels trained on", "others"), claims=())
    return f"{report(table, scores)}\n\n{table_of(split, replace(scores, types=kinds))}"


def _table(given: Any) -> Table:
    claims = tuple(Claim(**claim) for claim in given["claims"])
    return Table(**{**given, "variants": tuple(given["variants"]), "claims": claims})


BENCHMARKS: dict[str, Callable[[Any], str]] = {
    "cot": cot.report,
    "decoders": lambda kept: decoders.report(_scores(kept)),
    "mining": lambda kept: mining.report(_scores(kept)),
    "small_mote": _small_mote,
    "task_loras": lambda kept: task_loras.report(_sweep(kept["validation"]), _scores(kept)),
}
"""Benchmark → function that formats its scores."""

PAPER: dict[str, Callable[[Any], str]] = {
    "sweep": lambda kept: sweep_table(_sweep(kept)),
    "figure1": analysis_tables,
    "figure3": analysis_tables,
}
"""Stored output of `benchmarks.paper` that is not a table with claims → function that formats it."""

VALIDATION: dict[str, Callable[[Any], str]] = {
    "beyond": validation_table,
    "unseen": ways_table,
    "best": validation_tables,
}
"""Table of `benchmarks.paper` → function that formats its scores on validation texts."""


def known_tables(results: Path) -> dict[str, str]:
    """Format all stored scores: name of the table → Markdown."""
    tables = {path.stem: BENCHMARKS[path.stem](_read(path)) for path in sorted(results.glob("*.json"))}
    for scale in SCALES:
        tables |= {f"{scale}/{name}": text for name, text in _tables_of_scale(results / scale).items()}
    if (results / README_TABLE).is_file():
        tables["readme"] = readme_table(_scores(_read(results / README_TABLE)))
    return tables


def _tables_of_scale(folder: Path) -> dict[str, str]:
    kept = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    models = _models(folder / "runs" / "test")
    scores = _scores(kept.pop("scores")) if "scores" in kept else _gathered(models, folder / "runs" / "test")
    of_paper = {name: _measurable(table, scores) for name, table in TABLES.items()}
    of_paper = {name: table for name, table in of_paper.items() if table.claims}
    tables = {name: _paper_table(name, table, scores) for name, table in of_paper.items()}
    validation = folder / "runs" / "validation-models"
    if SCALES[folder.name].repeats and validation.is_dir():
        tables["validation"] = means_table({one.stem: means_of(read_scores(one)) for one in score_files(validation)})
    of_one_task = _ablations(folder)
    if of_one_task.every:
        tables["figures4to7"] = ablation_table(of_one_task)
    for name, one in kept.items():
        if name in PAPER:
            tables[name] = PAPER[name](one)
            continue
        table = _table(one["table"])
        tables[name] = _paper_table(name, table, scores, one.get("validation"))
        if name == "best":
            tables["goal"] = goal_report(table, scores)
    if of_paper:
        tables["claims"] = summary_of(of_paper, scores)
    for name, data in ("models", set()), *((data, {data}) for data in DATA):
        of_data = {one for one in models if DATA.keys() & {*one.split("+")} == data}
        if of_data:
            tables[name] = models_table({one: models[one] for one in models if one in of_data or one == START})
    return tables


def _ablations(folder: Path) -> Scores:
    """Gather the scores of Figures 4 to 7: of trials, if the scale or the one that chooses for it has a sweep."""
    sweep = folder.with_name(SCALES[folder.name].chosen_by or folder.name) / "sweep.json"
    trials = f"-trials-{best_rate(_sweep(_read(sweep))):g}" if sweep.is_file() else ""
    models = _models(folder / "runs" / f"test{trials}")
    names = (name for task in TASKS for name in ablations(task))
    return gathered({name: models[name] for name in names if name in models})


def _models(folder: Path) -> FoundScores:
    """Read the stored scores of models, sorted: the start, then by base and length.

    Three separate models, with the seeds that all of them have, are one variant.
    """
    found: FoundScores = {}
    for path in sorted(folder.glob("*-seed*.json")):
        name, _, seed = path.stem.rpartition("-seed")
        found.setdefault(name, {})[int(seed)] = read_scores(path)
    first = f"sem-{TASKS[0]}"
    for whole in [SEPARATE + name.removeprefix(first) for name in found if base_of(name) == first]:
        parts = [found.get(part, {}) for part in parts_of(whole)]
        if seeds := sorted(set.intersection(*map(set, parts))):
            found[whole] = {seed: {kind: one for part in parts for kind, one in part[seed].items()} for seed in seeds}
            found = {name: of_seeds for name, of_seeds in found.items() if name not in parts_of(whole)}

    def place(name: str) -> tuple[bool, str, int]:
        base, *improvements = name.split("+")
        return base != START, base, len(improvements)

    return {name: found[name] for name in sorted(found, key=place)}


def _gathered(models: FoundScores, folder: Path) -> Scores:
    """Gather the scores of models in a folder; what they start from has the seeds of those that start from it."""

    def hashes_of(name: str, seed: int) -> Hashes:
        return read_hashes(folder / f"{parts_of(name)[0]}-seed{seed}.json")

    return gathered(with_seeds_of_starts(models, hashes_of))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def rewrite(page: str, tables: Mapping[str, str]) -> tuple[str, dict[str, bool]]:
    """Rewrite the tables of a page.

    Returns:
        The page, and a mapping: name of each table → whether it differed.

    Raises:
        ValueError: If a table is unknown or has no end.
    """
    before, *rest = re.split(r"<!-- table: (\S+) -->", page)
    parts = [before]
    found: dict[str, bool] = {}
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        if name not in tables:
            raise ValueError(f"There are no kept scores for table {name!r}; known: {', '.join(tables)}")
        old, end, after = text.partition(END)
        if not end:
            raise ValueError(f"Table {name!r} has no {END}")
        new = f"\n\n{tables[name]}\n\n"
        found[name] = found.get(name, False) or old != new
        parts.append(f"<!-- table: {name} -->{new}{END}{after}")
    return "".join(parts), found


def rewrite_pages(docs: Path, *, check: bool = False) -> tuple[list[str], list[str]]:
    """Rewrite the tables of all pages, and README's chart, or only compare them.

    Returns:
        Names of the tables (and the chart) that differed, and names of the tables that are on no page.
    """
    tables = known_tables(docs / "results")
    if not check:
        _add_sections(docs, tables)
    found: dict[str, bool] = {}
    for path, page in _pages(docs).items():
        new, of_page = rewrite(page, tables)
        found |= {name: found.get(name, False) or differs for name, differs in of_page.items()}
        if new != page and not check:
            path.write_text(new, encoding="utf-8")
    differing = [name for name, differs in found.items() if differs]
    if "readme" in tables:
        gains = gains_of(_scores(_read(docs / "results" / README_TABLE)))
        if drawn_gains(docs / CHART) != gains:
            differing.append(str(CHART))
            if not check:
                draw_gains(gains, docs / CHART)
    return differing, [name for name in tables if name not in found]


def _pages(docs: Path) -> dict[Path, str]:
    paths = (docs.parent / "README.md", docs / "results.md", *sorted((docs / "results").glob("*.md")))
    return {path: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _add_sections(docs: Path, tables: Mapping[str, str]) -> None:
    """Add each table that is on no page to the page of its scale; create the page if needed."""
    known = "".join(_pages(docs).values())
    for scale, name in product(SCALES, ("claims", "goal", *NAMES, "validation", "models", *DATA)):
        marker = f"<!-- table: {scale}/{name} -->"
        if f"{scale}/{name}" not in tables or marker in known:
            continue
        if name in TABLES:
            title = TABLES[name].title
        else:
            title = TITLES.get(name) or _table(_read(docs / "results" / scale / f"{name}.json")["table"]).title
        page = docs / "results" / f"{scale}.md"
        before = page.read_text(encoding="utf-8") if page.is_file() else f"# The paper's tables at scale {scale}\n"
        page.write_text(f"{before}\n## {name}: {title}\n\n{marker}\n{END}\n", encoding="utf-8")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages (default: %(default)s)")
    given = parser.parse_args()
    differing, missing = rewrite_pages(given.docs, check=given.check)
    if differing:
        print(f"{'different from the kept scores' if given.check else 'rewritten'}: {', '.join(differing)}")
    if missing:
        print(f"on no page: {', '.join(missing)}")
    sys.exit(1 if missing or (given.check and differing) else 0)


if __name__ == "__main__":
    main()
