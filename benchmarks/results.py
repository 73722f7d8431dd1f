"""Rewrite the tables in README and on the pages of results, and README's chart, from the stored scores.

    python -m benchmarks.results            # rewrites them
    python -m benchmarks.results --check    # only compares: exits with 1 and names the tables that differ

A page has a table between `<!-- table: NAME -->` and `<!-- end of table -->`. The scores in docs/results are stored as
the benchmarks write them: `scores.json` of `benchmarks.NAME` as NAME.json, `SCALE/NAME.json` of `benchmarks.paper`
under that name. Every stored table must be on a page, as must SCALE/claims, the paper's claims in short, SCALE/models,
the scores of all models in `SCALE/runs/test`, and `readme`, a summary of the table `README_TABLE`. A table of a scale
that is on no page is added to results/SCALE.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import cot, decoders, mining, task_loras
from benchmarks.paper.best import best_report, validation_tables
from benchmarks.paper.beyond import validation_table
from benchmarks.paper.claims import TABLES, Claim, Table
from benchmarks.paper.experiments import SCALES, START, TASKS
from benchmarks.paper.figures import TITLES, ablation_table, analysis_tables
from benchmarks.paper.improvements import SEPARATE, parts_of
from benchmarks.paper.kept import ScoresOfTypes
from benchmarks.paper.readme import draw_gains, drawn_gains, gains_of, readme_table
from benchmarks.paper.reports import NAMES
from benchmarks.paper.runs import Scores
from benchmarks.paper.tables import claims_of, models_table, paper_of, report, summary_of, sweep_table, table_of
from benchmarks.paper.unseen import ways_table

DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- end of table -->"
README_TABLE = Path("small_mote.json")  # the scores that README shows
CHART = Path("images/gains.png")


def _scores(kept: Any) -> Scores:
    return Scores(kept["every"], kept["types"])


def _sweep(kept: Any) -> dict[str, dict[float, float]]:
    return {name: {float(rate): score for rate, score in of_rates.items()} for name, of_rates in kept.items()}


def _paper_table(name: str, kept: Any) -> str:
    table, scores = _table(name, kept), _scores(kept)
    if missing := set(table.variants) - scores.every.keys():  # scores not stored: only claims without them
        claims = tuple(one for one in table.claims if not {one.better, one.other} & missing)
        return f"{paper_of(table)}\n\n{claims_of(replace(table, claims=claims), scores)}"
    before = [VALIDATION[name](kept["validation"])] if "validation" in kept else []
    if name == "best":
        before.append(best_report(table, scores))
    return "\n\n".join([*before, report(table, scores)])


def _small_mote(kept: Any) -> str:
    """Format the table of `scripts.train_small_mote`, also split by whether a dataset has rows in the training data."""
    scores, learned = _scores(kept), set(kept["trained_on"])
    kinds = {name: "trained on" if name in learned else "not trained on" for name in scores.types}
    split = replace(_table("small_mote", kept), types=("trained on", "not trained on"), claims=())
    return f"{_paper_table('small_mote', kept)}\n\n{table_of(split, Scores(scores.every, kinds))}"


def _table(name: str, kept: Any) -> Table:
    if name in TABLES:
        return TABLES[name]
    given = kept["table"]
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
    "figures4to7": lambda kept: ablation_table(_scores(kept)),
}
"""Output of `benchmarks.paper` that is not a table with claims → function that formats it."""

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
        kept = {path.stem: _read(path) for path in sorted((results / scale).glob("*.json"))}
        for name, one in kept.items():
            tables[f"{scale}/{name}"] = PAPER[name](one) if name in PAPER else _paper_table(name, one)
        if of_paper := {name: (table, _scores(kept[name])) for name, table in TABLES.items() if name in kept}:
            tables[f"{scale}/claims"] = summary_of(of_paper)
        if models := _models(results / scale / "runs" / "test"):
            tables[f"{scale}/models"] = models_table(models)
    if (results / README_TABLE).is_file():
        tables["readme"] = readme_table(_scores(_read(results / README_TABLE)))
    return tables


def _models(folder: Path) -> dict[str, dict[int, ScoresOfTypes]]:
    """Read the stored scores of models: variant → seed → scores, sorted: the start, then by base and length.

    Three separate models, if all have scores, are one variant.
    """
    found: dict[str, dict[int, ScoresOfTypes]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        name, _, seed = path.stem.rpartition("-seed")
        found.setdefault(name, {})[int(seed)] = _read(path)["scores"]
    first = f"sem-{TASKS[0]}"
    for whole in [SEPARATE + name.removeprefix(first) for name in found if name.startswith(first)]:
        parts = [found.get(part, {}) for part in parts_of(whole)]
        if all(part.keys() == parts[0].keys() for part in parts):
            found[whole] = {
                seed: {kind: one for part in parts for kind, one in part[seed].items()} for seed in parts[0]
            }
            found = {name: of_seeds for name, of_seeds in found.items() if name not in parts_of(whole)}

    def place(name: str) -> tuple[bool, str, int]:
        base, *improvements = name.split("+")
        return base != START, base, len(improvements)

    return {name: found[name] for name in sorted(found, key=place)}


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
    parts, found = [before], {}
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
    for scale, name in product(SCALES, ("claims", *NAMES, "models")):
        marker = f"<!-- table: {scale}/{name} -->"
        if f"{scale}/{name}" not in tables or marker in known:
            continue
        title = TITLES.get(name) or _table(name, _read(docs / "results" / scale / f"{name}.json")).title
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
